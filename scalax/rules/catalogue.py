r"""Tables of regexes and specs for the parameters of well-known models, and layouts of activations.

A table is a tuple of rows ``(regex, PartitionSpec)`` over the axes ``'fsdp'``, ``'tp'`` and ``'expert'``;
`rule` converts it to a rule. The first row whose regex is found in the leaf path applies. Tables are data:
add your own rows in front, ``rule((my_row, *LLAMA))``.

==============  ====================================================================================
table           parameter names
==============  ====================================================================================
`LLAMA`         Hugging Face (``self_attn/q_proj``), EasyLM (``attention/wq``), MaxText (``mlp/wi_0``),
                and bare ones (``attention/query``, ``mlp/up``)
`GEMMA`         the names of `LLAMA`, and of Google DeepMind's gemma (``attn/q_einsum/w``)
`MIXTRAL`       the names of `LLAMA`, and experts (``experts/0/w1``, ``experts/w1``,
                ``MoeBlock_0/wi_0``)
`GPT`           GPT-J, GPT-Neo, GPT-NeoX, and GPT-2 with ordinary linear layers
`GPT2`          Hugging Face's GPT-2, whose matrices are transposed
`VIT`           Hugging Face, Google's vision_transformer and big_vision, eqxvision
`T5`            Hugging Face, and T5X
`SPLIT_HEADS`   rows to put in front if heads are a dimension: (embed, heads, head_dim), as in
                ``flax.linen.MultiHeadDotProductAttention`` and MaxText
==============  ====================================================================================

**Sources of the layout.** Tensor parallelism is Megatron-LM's (Shoeybi et al., arXiv:1909.08053, section 3).
The first matrix of a pair (query, key, value; gate, up) is sharded along its output, and so is its bias; the
second (attention output; down) is sharded along its input, and its bias is replicated. Embeddings and the
output layer are sharded along the vocabulary. Experts have an axis of their own, and routers are not sharded
over it, as in GShard (Lepikhin et al., arXiv:2006.16668, section 3) and Switch Transformers (Fedus et al.,
arXiv:2101.03961, section 5). FSDP shards the other dimension of each matrix (ZeRO, stage 3, Rajbhandari et
al., arXiv:1910.02054). Norms and single vectors are replicated.

**The last key determines the order of the dimensions.** ``kernel`` is (in, out), as in flax, and so is
an array that is a matrix itself (``mlp/up``). ``weight`` is (out, in), as in equinox and PyTorch. Both get
the same layout. A ``value`` after that, which flax's boxes and variables add, has no effect.

**A spec has one entry for each dimension of the array.** Arrays of another rank are an error: a spec for
(8192, 1024) would otherwise shard the layers of (80, 8192, 1024). If the layers are stacked in the first
dimension, pass their paths to `rule` (``stacked``), or call ``rule(...).stacked(1)`` if all of the tree is
stacked. ``PartitionSpec()`` replicates arrays of any rank.

**Dimensions that may not be divisible** are vocabularies that are not padded (GPT-2's 50257; Megatron pads
them), and head dimensions with fewer heads than tp has devices. Pad them, or pass ``on_indivisible``. If
heads share a dimension, a shard may end inside a head. Shards also do not align with the components of
fused matrices (``c_attn``, ``qkv``, ``gate_up_proj``), so XLA moves data to split them.

**Activations.** If `scalax.sharding.MeshShardingHelper.sjit` partitions a function along its batch, FSDP and
tensor parallelism need only a table. Other layouts need names, `with_sharding_annotation(x, name)`, and a
layout: a mapping from names to specs over the axes ``'batch'``, ``'tp'`` and ``'expert'``, which
`activations` converts to ``annotation_shardings``. They work with all tables, and combine as
``{**first, **second}``.

===================  ===============================================================================
layout               use
===================  ===============================================================================
`SEQUENCE_PARALLEL`  shards the residual between the blocks, and its saved copies, by position over tp
`EXPERT_PARALLEL`    moves the tokens to the experts of `MIXTRAL`, instead of gathering the experts
`TENSOR_PARALLEL`    shards every activation, for functions that are not partitioned along their batch
===================  ===============================================================================

==================  ======================================  ===============================================
name                value                                   dimensions
==================  ======================================  ===============================================
``'residual'``      before the first block, after each      batch, sequence, width
``'block_input'``   the normalized residual                 batch, sequence, width
``'query'``         queries, and the output of attention    batch, sequence, heads, head_dim
``'key_value'``     keys and values                         batch, sequence, heads, head_dim
``'hidden'``        the hidden layer                        batch, sequence, hidden
``'logits'``        the logits of the vocabulary            batch, sequence, vocabulary
``'taken'``         the tokens for each expert              experts, batch, capacity, width
``'arrived'``       the same value, named a second time     experts, batch, capacity, width
``'out'``           the outputs of the experts              experts, batch, capacity, width
``'returned'``      the same value, named a second time     experts, batch, capacity, width
==================  ======================================  ===============================================

**Models without a table.** Trees that name their dimensions need none, see `LogicalAxisShardingRule`: haliax
(Levanter), MaxText and T5X, even if their layers are stacked in the second dimension
(``param_scan_axis=1``). Layers without names (``layers/0/weight`` of ``equinox.nn.MLP``) need rows of your
own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import canonical_entry, entries, entry_axes, spec_axes
from scalax._core.pytree.paths import NamedTree
from scalax.errors import Problem, RuleError
from scalax.rules._answer import REPLICATED, Answer, AxisSizes, Decision
from scalax.rules._indivisible import OnIndivisible
from scalax.rules._rule import ShardingRule
from scalax.rules._tree_path import TreePathShardingRule, checked_pair, checked_regex

__all__ = [
    'EXPERT_PARALLEL',
    'GEMMA',
    'GPT',
    'GPT2',
    'LLAMA',
    'MIXTRAL',
    'SEQUENCE_PARALLEL',
    'SPLIT_HEADS',
    'T5',
    'TENSOR_PARALLEL',
    'VIT',
    'ActivationSpecs',
    'Axis',
    'ExactRankRule',
    'Table',
    'activations',
    'rule',
]

Table = tuple[tuple[str, PartitionSpec], ...]
"""Rows of (regex on the leaf path, spec with one entry for each dimension)."""

ActivationSpecs = Mapping[str, PartitionSpec]
"""Name of an activation -> its spec."""

Axis = str | tuple[str, ...] | None
"""The mesh axes that an axis of a table stands for: one axis, several, or none."""


def rule(
    table: Sequence[tuple[str, PartitionSpec]],
    *,
    fsdp: Axis = 'fsdp',
    tp: Axis = 'tp',
    expert: Axis = 'expert',
    stacked: str = '',
    stage: Axis = None,
    on_indivisible: OnIndivisible = 'error',
) -> TreePathShardingRule:
    """Returns the rule of a table. It is strict: a leaf that no row matches is an error.

    Args:
        table: a table of this module, or your own rows over the axes fsdp, tp and expert.
        fsdp: the mesh axis (or axes, or None) for ``'fsdp'`` in the table.
        tp: the same for ``'tp'``.
        expert: the same for ``'expert'``, which only `MIXTRAL` has; None if the mesh has no such axis.
        stacked: a regex for the paths of layers that are stacked in the first dimension, such as
            ``'layers/'``; by default none are.
        stage: the mesh axis that shards the stacked layers, as in a pipeline (`scalax.sharding.Pipeline`);
            None if each device has all layers.
        on_indivisible: what to do if a dimension is not divisible, as in `TreePathShardingRule`.

    Raises:
        RuleError: an argument is invalid, or a row is not a pair of a regex and a spec, or names another
            axis.

    Example:
        >>> import numpy as np
        >>> layer = {'mlp': {'up_proj': {'kernel': np.zeros((8, 32))}}, 'norm': {'weight': np.zeros(8)}}
        >>> rule(LLAMA, fsdp='data').apply({'layers': [layer]})
        {'layers': [{'mlp': {'up_proj': {'kernel': P('data', 'tp')}}, 'norm': {'weight': P(None,)}}]}

        With 80 layers in one array:

        >>> stack = {'layers': {'up_proj': {'kernel': np.zeros((80, 8, 32))}}}
        >>> rule(LLAMA, stacked='layers/').apply(stack)
        {'layers': {'up_proj': {'kernel': P(None, 'fsdp', 'tp')}}}
        >>> rule(LLAMA, stacked='layers/', stage='stage').apply(stack)
        {'layers': {'up_proj': {'kernel': P('stage', 'fsdp', 'tp')}}}
    """
    axes = _checked_axes('catalogue.rule', fsdp=fsdp, tp=tp, expert=expert)
    layer_rule = ExactRankRule(*_rows(table, axes), on_indivisible=on_indivisible)
    _checked_axes('catalogue.rule', stage=stage)
    if stage is not None and not stacked:
        raise RuleError(
            f'catalogue.rule: stage={stage!r} shards stacked layers, so pass a regex that finds them, '
            "such as stacked='layers/'"
        )
    if not stacked:
        return layer_rule
    checked_regex('catalogue.rule, stacked', stacked)
    stack_rule = layer_rule.stacked(1)
    if stage is not None:
        stack_rule = PartitionSpec(stage) & stack_rule
    return TreePathShardingRule((stacked, stack_rule), (_REST, layer_rule))


def activations(
    layout: ActivationSpecs, *, batch: Axis = 'fsdp', tp: Axis = 'tp', expert: Axis = 'expert'
) -> dict[str, PartitionSpec]:
    """Returns the ``annotation_shardings`` of a layout.

    Args:
        layout: a layout of this module, or your own names and specs over the axes batch, tp and expert.
        batch: the mesh axis (or axes, or None) that shards the batch dimension, without the axis of experts.
        tp: the same for ``'tp'``.
        expert: the same for ``'expert'``, which only `EXPERT_PARALLEL` has; it shards the batch, too.

    Raises:
        RuleError: an argument is invalid, or the layout is not a dict of specs, or has another axis.

    Example:
        >>> activations(SEQUENCE_PARALLEL, batch=('data', 'fsdp'))
        {'residual': P(('data', 'fsdp'), 'tp'), 'block_input': P(('data', 'fsdp'),)}
    """
    axes = _checked_axes('catalogue.activations', batch=batch, tp=tp, expert=expert)
    if not isinstance(layout, Mapping) or {*map(type, layout.values())} - {PartitionSpec}:
        raise RuleError(
            'catalogue.activations: a layout is a dict of names and PartitionSpecs, such as '
            f'catalogue.SEQUENCE_PARALLEL, got {layout!r}'
        )
    return {
        name: _on_mesh_axes(spec, axes, f'catalogue.activations, {name!r}') for name, spec in layout.items()
    }


class ExactRankRule(TreePathShardingRule):
    """A `TreePathShardingRule` whose specs must have one entry for each dimension of the array.

    Arrays of another rank are an error, so that the stack dimension of layers is not sharded by accident.
    ``PartitionSpec()``, rules and None are for arrays of any rank.

    Args:
        *rules: as in `TreePathShardingRule`.
        strict: as in `TreePathShardingRule`.
        on_indivisible: as in `TreePathShardingRule`.

    Example:
        >>> import numpy as np
        >>> exact = ExactRankRule(('kernel', PartitionSpec('fsdp', None)), ('bias', PartitionSpec()))
        >>> exact.apply({'kernel': np.zeros((8, 8)), 'bias': np.zeros(8)})
        {'bias': P(), 'kernel': P('fsdp', None)}
        >>> exact.stacked(1).apply({'kernel': np.zeros((80, 8, 8))})
        {'kernel': P(None, 'fsdp')}
    """

    # `rule` has no parameter `strict`, so the hint cannot suggest it.
    _unmatched_hint: ClassVar[str] = (
        'add a row for these leaves to the table, or replicate unmatched leaves: '
        'catalogue.rule(table) | PartitionSpec().'
    )

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        """Returns the answers of `TreePathShardingRule`, with a problem for each array of the wrong rank."""
        answers = super().answers(tree, axis_sizes)
        ranks = list(map(functools.cache(self._expected_rank), answers))
        for index, (answer, expected) in enumerate(zip(answers, ranks, strict=True)):
            rank = len(tree.shapes[index])
            if isinstance(answer, Decision) and expected not in (0, rank):
                stack = ' without its stack of layers' if tree.num_stacked_dims(index) else ''
                answers[index] = Problem(
                    'rank',
                    tree.describe(index),
                    f'the spec is for arrays of rank {expected}, but this array has rank {rank}{stack}',
                    str(answer.spec),
                    answer.origin,
                    _RANK_HINT,
                )
        return answers

    def _expected_rank(self, answer: Answer) -> int:
        """Returns the rank that a decision of this rule is for, or 0 for any rank."""
        # Decisions about arrays of one element have no clauses. Decisions of nested rules are not checked.
        if not isinstance(answer, Decision) or answer.spec is None or not answer.clauses:
            return 0
        value = self.rules[answer.clauses[0][1]][1]
        return 0 if isinstance(value, ShardingRule) else len(entries(answer.spec))


_RANK_HINT = (
    "for stacked layers, call catalogue.rule(table, stacked='layers/') with a regex that finds them, or "
    'rule.stacked(1) if the entire tree is stacked; for a dimension of heads, put catalogue.SPLIT_HEADS in '
    'front; otherwise add a row of your own.'
)


def _checked_axes(where: str, **axes: Axis) -> dict[str, Axis]:
    """Returns axis of a table -> its mesh axes, and raises RuleError if a value is not a mesh axis."""
    for argument, value in axes.items():
        if not all(isinstance(name, str) and name for name in entry_axes(value)):
            raise RuleError(f'{where}: {argument} is a mesh axis, a tuple of them or None, got {value!r}')
    return axes


def _rows(table: Any, axes: Mapping[str, Axis]) -> list[Any]:
    """Returns the rows of a table with mesh axes in their specs."""
    if not isinstance(table, list | tuple):
        raise RuleError(
            'catalogue.rule: the table is a tuple of rows (regex, PartitionSpec), such as catalogue.LLAMA, '
            f'got {table!r}'
        )
    rows = []
    for index, row in enumerate(table):
        where = f'catalogue.rule, row {index} of the table'
        regex, value = checked_pair(where, row)
        rows.append((regex, _on_mesh_axes(value, axes, where) if isinstance(value, PartitionSpec) else value))
    return rows


def _on_mesh_axes(spec: PartitionSpec, axes: Mapping[str, Axis], where: str) -> PartitionSpec:
    """Replaces the axes of a table by mesh axes in a spec."""
    for axis in spec_axes(spec):
        if axis not in axes:
            raise RuleError(
                f'{where}: {spec} names {axis!r}; the axes of a table are {", ".join(axes)}, and the '
                'arguments with these names map them to mesh axes'
            )
    mesh_axes = [
        [name for axis in entry_axes(entry) for name in entry_axes(axes[axis])] for entry in entries(spec)
    ]
    return PartitionSpec(*map(canonical_entry, mesh_axes))


# --- The tables ----------------------------------------------------------------------------------

_COLUMN = PartitionSpec('fsdp', 'tp')  # (in, out) of a column-parallel layer
_ROW = PartitionSpec('tp', 'fsdp')  # (in, out) of a row-parallel layer; (vocabulary, features)
_VECTOR = PartitionSpec(None)

_REST = ''  # matches every path
_BEGIN = '(^|/)'
_END = '(/value)?$'  # flax's boxes and variables hold their arrays as `value`

# Attention: Hugging Face's; equinox's MultiheadAttention; flax's. A last key `value` is flax's box of any
# array, except in `attention/value`.
_QKV = '[qkv]_proj|(query|key|value)_proj|query|key|value(?=/)|(self_)?(attention|attn)/value'
_OUT = 'o_proj|out|out_proj|output_proj'


def _named(names: str) -> str:
    """Returns the regex of leaves whose path ends with one of these names."""
    return f'{_BEGIN}({names}){_END}'


def _matrices(names: str, spec: PartitionSpec) -> Table:
    """Returns the rows of matrices with these names; *spec* is for (in, out), after any expert dimension."""
    *first, inputs, outputs = spec
    return (
        (f'{_BEGIN}({names})(/kernel)?{_END}', spec),
        (f'{_BEGIN}({names})/weight{_END}', PartitionSpec(*first, outputs, inputs)),
    )


def _pairs(first: str, second: str) -> Table:
    """Returns the rows of Megatron's pairs: column-parallel matrices, then row-parallel ones."""
    return (
        *_matrices(first, _COLUMN),
        *_matrices(second, _ROW),
        (_named(f'({first})/bias'), PartitionSpec('tp')),
        # Replicated, because it is added after the sum over tp.
        (_named(f'({second})/bias'), _VECTOR),
    )


def _embeddings(names: str) -> Table:
    """Returns the row of embeddings (vocabulary, features): ``embedding`` in flax, ``weight`` in equinox."""
    return ((_named(f'({names})/(embedding|weight)'), _ROW),)


# Of rank one, so that a matrix with "norm" in its name is an error instead of being replicated.
_NORMS: Table = ((_named(r'((?i:\w*norm\w*)|ln_\w+|\w+_ln)/(scale|weight|kernel|bias)'), _VECTOR),)

SPLIT_HEADS: Table = (
    (_named(f'({_QKV})/kernel'), PartitionSpec('fsdp', 'tp', None)),
    (_named(f'({_QKV})/bias'), PartitionSpec('tp', None)),
    (_named(f'({_OUT})/kernel'), PartitionSpec('tp', None, 'fsdp')),
)
"""Attention with a dimension for heads: heads over tp, as in Megatron-LM. Put these rows in front of a table.

Use them only for such models: in other models they would match stacked layers if `stacked` is missing.
"""

LLAMA: Table = (
    *_embeddings('embed_tokens|wte|token_embedder|embed'),
    *_matrices('lm_head|logits_dense', _COLUMN),
    *_pairs(
        f'{_QKV}|qkv_proj|w[qkv]|wqkv|qkv|(gate|up|gate_up)_proj|w[13]|wi_[01]|gate|up',
        f'{_OUT}|wo|down_proj|w2|down',
    ),
    *_NORMS,
)
"""LLaMA and decoders with the same parameter names (Mistral, Qwen): Megatron-LM's pairs.

Names: ``modeling_flax_llama.py`` of huggingface/transformers 4, ``models/llama`` of young-geng/EasyLM,
``layers/attentions.py`` and ``layers/linears.py`` of AI-Hypercomputer/maxtext.
"""

GEMMA: Table = (
    (_named('input_embedding'), _ROW),
    (_named('q_einsum/w'), PartitionSpec('tp', 'fsdp', None)),  # (heads, embed, head_dim)
    (_named('q?kv_einsum/w'), PartitionSpec(None, 'tp', 'fsdp', None)),  # (2 or 3, heads, embed, head_dim)
    (_named('attn_vec_einsum/w'), PartitionSpec('tp', None, 'fsdp')),  # (heads, head_dim, embed)
    (_named('gating_einsum(/w)?'), PartitionSpec(None, 'tp', 'fsdp')),  # (2, hidden, embed)
    (_named('linear(/w)?'), _ROW),  # (hidden, embed)
    *LLAMA,
)
"""Gemma, with the names of Hugging Face and others (see `LLAMA`) and of Google DeepMind's library.

In that library (``gm/nn/_modules.py`` of google-deepmind/gemma), ``gating_einsum`` is (2, hidden, embed) for
Gemma 2 9B and 27B and for Gemma 3 (``transpose_gating_einsum=True``). The other models have (2, embed,
hidden) and need your own row, ``('gating_einsum', PartitionSpec(None, 'fsdp', 'tp'))``. Image encoders have
no rows.
"""

_EXPERTS = r'(experts|MoeBlock_\d+)'

MIXTRAL: Table = (
    # Routers are not sharded over tp and expert, because every device routes its own tokens.
    *_matrices(r'(block_sparse_moe|MoeBlock_\d+|moe|mlp)/(gate|router)', PartitionSpec('fsdp', None)),
    # With one array for each expert there is no expert dimension, so the expert axis is used with fsdp.
    *_matrices(r'experts/\d+/(w[13]|gate_proj|up_proj)', PartitionSpec(('expert', 'fsdp'), 'tp')),
    *_matrices(r'experts/\d+/(w2|down_proj)', PartitionSpec('tp', ('expert', 'fsdp'))),
    # All experts of a layer in one array: (experts, in, out).
    *_matrices(
        f'{_EXPERTS}/(w[13]|wi_[01]|gate_proj|up_proj|gate|up)', PartitionSpec('expert', 'fsdp', 'tp')
    ),
    *_matrices(f'{_EXPERTS}/(w2|wo|down_proj|down)', PartitionSpec('expert', 'tp', 'fsdp')),
    *LLAMA,
)
"""Mixtral: experts over their own axis, as in GShard and Switch Transformers, and otherwise as in `LLAMA`.

Names: ``models/mixtral`` of huggingface/transformers 4, ``layers/moe.py`` of AI-Hypercomputer/maxtext.
"""

GPT: Table = (
    *_embeddings('wte|wpe|embed_in'),
    *_matrices('lm_head|embed_out', _COLUMN),
    (_named('lm_head/bias'), PartitionSpec('tp')),
    *_pairs(
        f'c_attn|qkv|query_key_value|{_QKV}|c_fc|fc_in|fc1|dense_h_to_4h|up',
        f'c_proj|{_OUT}|attention/dense|fc_out|fc2|dense_4h_to_h|down',
    ),
    *_NORMS,
)
"""GPT decoders: Megatron-LM's pairs. Position embeddings are sharded as word embeddings are.

Names: ``models/gptj``, ``gpt_neo``, ``gpt_neox`` and ``gpt2`` of huggingface/transformers 4.
"""

GPT2: Table = (
    (_named('(c_attn|q_attn|c_fc)/kernel|c_proj/weight'), _ROW),
    (_named('(c_attn|q_attn|c_fc)/weight|c_proj/kernel'), _COLUMN),
    *GPT,
)
"""Hugging Face's GPT-2: Megatron-LM's pairs, for transposed matrices.

Its ``FlaxConv1D`` stores ``kernel`` as (out, in); the ``Conv1D`` of PyTorch stores ``weight`` as (in, out).
"""

_PATCHES = 'patch_embeddings/projection|patch_embed/proj|embedding'
_HEADS = 'classifier|head|fc|pooler/dense|pre_logits'

VIT: Table = (
    # (height, width, colours, features): only the features are large enough to shard.
    (_named(f'({_PATCHES})/kernel'), PartitionSpec(None, None, None, 'fsdp')),
    (_named(f'({_PATCHES})/weight'), PartitionSpec('fsdp', None, None, None)),
    (_named(f'({_PATCHES})/bias'), REPLICATED),
    (_named('position_embeddings|pos_embedding'), PartitionSpec(None, None, 'fsdp')),
    (_named('pos_embed'), PartitionSpec(None, 'fsdp')),
    (_named('cls|cls_token|probe'), REPLICATED),
    *_matrices(_HEADS, _COLUMN),
    (_named(f'({_HEADS})/bias'), PartitionSpec('tp')),
    *_pairs(
        rf'{_QKV}|qkv|intermediate/dense|MlpBlock_\d+/Dense_0|fc1',
        rf'output/dense|{_OUT}|attn/proj|MlpBlock_\d+/Dense_1|fc2',
    ),
    *_NORMS,
)
"""Vision transformers: Megatron-LM's pairs; patch and position embeddings over fsdp only.

Names: ``modeling_flax_vit.py`` of huggingface/transformers 4, google-research/vision_transformer,
``models/vit.py`` of google-research/big_vision, ``models/classification/vit.py`` of paganpasta/eqxvision.
"""

T5: Table = (
    *_embeddings('shared|token_embedder'),
    # (buckets, heads), a few kilobytes.
    (_named('relative_attention_bias/(embedding|weight)|rel_embedding'), REPLICATED),
    *_matrices('lm_head|logits_dense', _COLUMN),
    *_matrices(f'(SelfAttention|EncDecAttention)/[qkv]|{_QKV}|wi|wi_[01]', _COLUMN),
    *_matrices(f'(SelfAttention|EncDecAttention)/o|{_OUT}|wo', _ROW),
    *_NORMS,
)
"""T5 of Hugging Face and of T5X: Megatron-LM's pairs, in cross-attention too.

Names: ``modeling_flax_t5.py`` of huggingface/transformers 4, ``examples`` of google-research/t5x. For T5X
models with a dimension for heads (``scalable_t5``), put `SPLIT_HEADS` in front.
"""

# --- The layouts ---------------------------------------------------------------------------------

TENSOR_PARALLEL: ActivationSpecs = MappingProxyType(
    {
        'residual': PartitionSpec('batch'),
        'block_input': PartitionSpec('batch'),
        'query': PartitionSpec('batch', None, 'tp'),
        'key_value': PartitionSpec('batch', None, 'tp'),
        'hidden': PartitionSpec('batch', None, 'tp'),
        'logits': PartitionSpec('batch', None, 'tp'),
    }
)
"""Megatron-LM's tensor parallelism: heads, hidden units and the vocabulary over tp, but not the residual.

Functions that are partitioned along their batch do not need it.
"""

SEQUENCE_PARALLEL: ActivationSpecs = MappingProxyType(
    {'residual': PartitionSpec('batch', 'tp'), 'block_input': PartitionSpec('batch')}
)
"""Megatron-LM's sequence parallelism (Korthikanti et al., arXiv:2205.05198, section 4.2.2).

The all-reduce over tp after a block becomes a reduce-scatter, with an all-gather before the next block; the
two move as many bytes as the all-reduce. The residual, which each layer saves for the backward pass, needs
only a fraction of the memory.
"""

EXPERT_PARALLEL: ActivationSpecs = MappingProxyType(
    {
        'taken': PartitionSpec(None, ('batch', 'expert')),
        'arrived': PartitionSpec('expert', 'batch'),
        'out': PartitionSpec('expert', 'batch'),
        'returned': PartitionSpec(None, ('batch', 'expert')),
    }
)
"""GShard's layout of experts (Lepikhin et al., arXiv:2006.16668, section 3): two all-to-alls in each layer.

The batch is also sharded over the expert axis: ``PartitionSpec((*batch, expert))``. The tokens of each expert
are named twice, before and after the all-to-all, and so are the outputs.
"""

REGEXES = frozenset(
    [_REST, *(row[0] for table in (SPLIT_HEADS, GEMMA, MIXTRAL, GPT2, VIT, T5) for row in table)]
)
"""The regexes of all tables. In any one model most of them match nothing, which is not an error."""
