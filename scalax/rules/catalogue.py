r"""Ready tables of regexes and specs for parameters of well-known models, and layouts of activations.

A table is a tuple of rows ``(regex, PartitionSpec)`` over the axes ``'fsdp'``, ``'tp'`` and ``'expert'``;
`rule` makes a rule of it. The first row whose regex is found in the leaf path counts. Tables are data:
add your own rows in front, ``rule((my_row, *LLAMA))``.

==============  ====================================================================================
table           the parameter names of
==============  ====================================================================================
`LLAMA`         Hugging Face (``self_attn/q_proj``), EasyLM (``attention/wq``), MaxText (``mlp/wi_0``),
                and bare ones (``attention/query``, ``mlp/up``)
`GEMMA`         those, and Google DeepMind's gemma (``attn/q_einsum/w``)
`MIXTRAL`       those of LLaMA, and experts (``experts/0/w1``, ``experts/w1``, ``MoeBlock_0/wi_0``)
`GPT`           GPT-J, GPT-Neo, GPT-NeoX, and GPT-2 of ordinary linear layers
`GPT2`          Hugging Face's GPT-2, whose matrices are transposed
`VIT`           Hugging Face, Google's vision_transformer and big_vision, eqxvision
`T5`            Hugging Face, and T5X
`SPLIT_HEADS`   rows to put in front where heads are a dimension: (embed, heads, head_dim), as in
                ``flax.linen.MultiHeadDotProductAttention`` and MaxText
==============  ====================================================================================

**Where the layout comes from.** Tensor parallelism is Megatron-LM's (Shoeybi et al., arXiv:1909.08053,
section 3): the first matrix of a pair (query, key, value; gate, up) is split along its output, with its
bias, the second (attention output; down) along its input, and its bias is replicated; embeddings and the
output layer are split along the vocabulary. Experts have an axis of their own, and routers are not
split over experts, as in GShard (Lepikhin et al., arXiv:2006.16668, section 3) and Switch Transformers
(Fedus et al., arXiv:2101.03961, section 5). FSDP takes the other dimension of each matrix (ZeRO, stage
3, Rajbhandari et al., arXiv:1910.02054). Norms and single vectors are replicated.

**The last key determines the order of the dimensions.** ``kernel`` is (in, out), as in flax, and so is
an array that is a matrix itself (``mlp/up``). ``weight`` is (out, in), as in equinox and PyTorch.
Both get the same layout. A ``value`` after that is the box or variable of flax around an
array, and changes nothing.

**A spec has one entry for each dimension of the array.** Arrays of another rank are an error: a spec for
(8192, 1024) would otherwise shard the layers of (80, 8192, 1024). `rule` takes the place of the stacked
layers, and ``rule(...).stacked(1)`` is for trees that are stacked throughout. The layers come first.
``PartitionSpec()`` replicates arrays of any rank.

**What may not divide**: vocabularies that are not padded (GPT-2's 50257; Megatron pads them), and heads
that are a dimension, where there are fewer of them than tp has devices. Pad them, or pass ``on_indivisible``.
Heads that share a dimension are then cut, and so are the components of fused matrices (``c_attn``, ``qkv``,
``gate_up_proj``), which do not end where the shards do: XLA moves data to split them.

**Activations.** Where `scalax.sharding.MeshShardingHelper.sjit` partitions a function along its batch, a
table is all that FSDP and tensor parallelism take. What is left needs names,
`with_sharding_annotation(x, name)`, and a layout: a mapping from names to specs over the axes ``'batch'``,
``'tp'`` and ``'expert'``, of which `activations` makes ``annotation_shardings``. They fit all tables, and
are joined as ``{**first, **second}``.

===================  ===============================================================================
layout               what it is for
===================  ===============================================================================
`SEQUENCE_PARALLEL`  the residual between the blocks, and what is saved of it, split by position over tp
`EXPERT_PARALLEL`    the tokens travel to the experts of `MIXTRAL`, and not the experts to the tokens
`TENSOR_PARALLEL`    every activation, for functions that are not partitioned so
===================  ===============================================================================

==================  ======================================  ===============================================
name                value                                   dimensions
==================  ======================================  ===============================================
``'residual'``      before the first block, after each      batch, sequence, width
``'block_input'``   the normalized residual                 batch, sequence, width
``'query'``         queries, and what attention returns     batch, sequence, heads, head_dim
``'key_value'``     keys and values                         batch, sequence, heads, head_dim
``'hidden'``        the hidden layer                        batch, sequence, hidden
``'logits'``        the logits of the vocabulary            batch, sequence, vocabulary
``'taken'``         the tokens that each expert takes       experts, batch, capacity, width
``'arrived'``       the same value, named once more         experts, batch, capacity, width
``'out'``           what the experts make of them           experts, batch, capacity, width
``'returned'``      the same value, named once more         experts, batch, capacity, width
==================  ======================================  ===============================================

**What has no table.** Trees that name their dimensions need none, see `LogicalAxisShardingRule`: haliax
(Levanter), MaxText and T5X, also where their layers are stacked in the second dimension
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
"""Names of activations, and the spec of each."""

Axis = str | tuple[str, ...] | None
"""What an axis of a table is on the mesh: one axis, several, or none."""


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
    """The rule of a table. It is strict: a leaf that no row matches is an error.

    Args:
        table: one of this module, or rows of your own over the axes fsdp, tp and expert.
        fsdp: the mesh axis (or axes, or None) that stands for ``'fsdp'`` in the table.
        tp: the same for ``'tp'``.
        expert: the same for ``'expert'``, which only `MIXTRAL` has; None where the mesh has no such axis.
        stacked: a regex for the paths of layers that are stacked in the first dimension, such as
            ``'layers/'``; by default none are.
        stage: the mesh axis over which the layers of these stacks are sharded, as in a pipeline
            (`scalax.sharding.Pipeline`); None if each device has all layers.
        on_indivisible: what to do where a dimension does not divide, as in `TreePathShardingRule`.

    Raises:
        RuleError: an invalid argument, or a row that is not a pair of a regex and a spec, or that names
            another axis.

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
    axes = _checked('catalogue.rule', fsdp=fsdp, tp=tp, expert=expert)
    one = ExactRankRule(*_rows(table, axes), on_indivisible=on_indivisible)
    _checked('catalogue.rule', stage=stage)
    if stage is not None and not stacked:
        raise RuleError(
            f'catalogue.rule: the layers over stage={stage!r} are stacked, and stacked= has to find them: '
            "stacked='layers/'"
        )
    if not stacked:
        return one
    checked_regex('catalogue.rule, stacked', stacked)
    layers = one.stacked(1) if stage is None else PartitionSpec(stage) & one.stacked(1)
    return TreePathShardingRule((stacked, layers), (_REST, one))


def activations(
    layout: ActivationSpecs, *, batch: Axis = 'fsdp', tp: Axis = 'tp', expert: Axis = 'expert'
) -> dict[str, PartitionSpec]:
    """The ``annotation_shardings`` of a layout.

    Args:
        layout: one of this module, or names and specs of your own over the axes batch, tp and expert.
        batch: the mesh axis (or axes, or None) that shards the batch dimension, without that of experts.
        tp: the same for ``'tp'``.
        expert: the same for ``'expert'``, which only `EXPERT_PARALLEL` has; it shards the batch, too.

    Raises:
        RuleError: an invalid argument, or a layout that is no dict of specs or that has another axis.

    Example:
        >>> activations(SEQUENCE_PARALLEL, batch=('data', 'fsdp'))
        {'residual': P(('data', 'fsdp'), 'tp'), 'block_input': P(('data', 'fsdp'),)}
    """
    axes = _checked('catalogue.activations', batch=batch, tp=tp, expert=expert)
    if not isinstance(layout, Mapping) or {*map(type, layout.values())} - {PartitionSpec}:
        raise RuleError(
            'catalogue.activations: a layout is a dict of names and PartitionSpecs, such as '
            f'catalogue.SEQUENCE_PARALLEL, got {layout!r}'
        )
    return {name: _renamed(spec, axes, f'catalogue.activations, {name!r}') for name, spec in layout.items()}


class ExactRankRule(TreePathShardingRule):
    """A `TreePathShardingRule` whose specs are for arrays of exactly as many dimensions as they have entries.

    Arrays of another rank are an error, so that layers that were stacked are not sharded by accident.
    ``PartitionSpec()``, rules and None are for arrays of any rank.

    Args:
        *rules: as in `TreePathShardingRule`.
        strict: as there.
        on_indivisible: as there.

    Example:
        >>> import numpy as np
        >>> exact = ExactRankRule(('kernel', PartitionSpec('fsdp', None)), ('bias', PartitionSpec()))
        >>> exact.apply({'kernel': np.zeros((8, 8)), 'bias': np.zeros(8)})
        {'bias': P(), 'kernel': P('fsdp', None)}
        >>> exact.stacked(1).apply({'kernel': np.zeros((80, 8, 8))})
        {'kernel': P(None, 'fsdp')}
    """

    # Those who call `rule` have no `strict`.
    _unmatched_hint: ClassVar[str] = (
        'add a row for these leaves to the table, or replicate what no row matches: '
        'catalogue.rule(table) | PartitionSpec().'
    )

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        """As in `TreePathShardingRule`, and a problem for each array of another rank than its row is for."""
        answers = super().answers(tree, axis_sizes)
        ranks = list(map(functools.cache(self._rank), answers))
        for index, (answer, expected) in enumerate(zip(answers, ranks, strict=True)):
            rank = len(tree.shapes[index])
            if isinstance(answer, Decision) and expected not in (0, rank):
                stack = ' without its stack of layers' if tree.num_stacked_dims(index) else ''
                answers[index] = Problem(
                    'rank',
                    tree.describe(index),
                    f'the spec is for an array of rank {expected}, and this one is of rank {rank}{stack}',
                    str(answer.spec),
                    answer.origin,
                    _OTHER_RANK,
                )
        return answers

    def _rank(self, answer: Answer) -> int:
        """The rank that a decision of this rule is for; 0 for any."""
        # Decisions about arrays of one element have no clauses; those of other rules are not checked.
        if not isinstance(answer, Decision) or answer.spec is None or not answer.clauses:
            return 0
        value = self.rules[answer.clauses[0][1]][1]
        return 0 if isinstance(value, ShardingRule) else len(entries(answer.spec))


_OTHER_RANK = (
    "stacked layers, and no others, take rule.stacked(1), or catalogue.rule(table, stacked='layers/') with a "
    'regex that finds them; heads that are a dimension take catalogue.SPLIT_HEADS in front; others a row of '
    'your own.'
)


def _checked(where: str, **axes: Axis) -> dict[str, Axis]:
    """The axes of a table, and what each is on the mesh."""
    for argument, value in axes.items():
        if not all(isinstance(name, str) and name for name in entry_axes(value)):
            raise RuleError(f'{where}: {argument} is a mesh axis, a tuple of them or None, got {value!r}')
    return axes


def _rows(table: Any, axes: Mapping[str, Axis]) -> list[Any]:
    """The rows of a table over the axes of the mesh."""
    if not isinstance(table, list | tuple):
        raise RuleError(
            'catalogue.rule: the table is a tuple of rows (regex, PartitionSpec), such as catalogue.LLAMA, '
            f'got {table!r}'
        )
    rows = []
    for number, row in enumerate(table):
        where = f'catalogue.rule, row {number} of the table'
        regex, value = checked_pair(where, row)
        rows.append((regex, _renamed(value, axes, where) if isinstance(value, PartitionSpec) else value))
    return rows


def _renamed(spec: PartitionSpec, axes: Mapping[str, Axis], where: str) -> PartitionSpec:
    """The spec over the axes of the mesh."""
    for axis in spec_axes(spec):
        if axis not in axes:
            raise RuleError(
                f'{where}: {spec} names {axis!r}; the axes of a table are {", ".join(axes)}, and the '
                'arguments of these names say what each is on the mesh'
            )
    names = [
        [name for axis in entry_axes(entry) for name in entry_axes(axes[axis])] for entry in entries(spec)
    ]
    return PartitionSpec(*map(canonical_entry, names))


# --- The tables ----------------------------------------------------------------------------------

_COLUMN = PartitionSpec('fsdp', 'tp')  # (in, out) of a column-parallel layer
_ROW = PartitionSpec('tp', 'fsdp')  # (in, out) of a row-parallel layer; (vocabulary, features)
_VECTOR = PartitionSpec(None)

_REST = ''  # is found in every path
_BEGIN = '(^|/)'
_END = '(/value)?$'  # flax's boxes and variables hold their arrays as `value`

# Attention: Hugging Face's; equinox's MultiheadAttention; flax's. A path that ends with `value` is any boxed
# array, unless it ends with `attention/value`.
_QKV = '[qkv]_proj|(query|key|value)_proj|query|key|value(?=/)|(self_)?(attention|attn)/value'
_OUT = 'o_proj|out|out_proj|output_proj'


def _named(names: str) -> str:
    """The regex of leaves whose path ends with one of these names."""
    return f'{_BEGIN}({names}){_END}'


def _matrices(names: str, spec: PartitionSpec) -> Table:
    """Matrices by these names; the spec is for (in, out), perhaps of several experts."""
    *first, inputs, outputs = spec
    return (
        (f'{_BEGIN}({names})(/kernel)?{_END}', spec),
        (f'{_BEGIN}({names})/weight{_END}', PartitionSpec(*first, outputs, inputs)),
    )


def _pairs(first: str, second: str) -> Table:
    """Megatron's pair: the first matrices are column-parallel, the second ones row-parallel."""
    return (
        *_matrices(first, _COLUMN),
        *_matrices(second, _ROW),
        (_named(f'({first})/bias'), PartitionSpec('tp')),
        # Added after the sum over tp, hence replicated.
        (_named(f'({second})/bias'), _VECTOR),
    )


def _embeddings(names: str) -> Table:
    """(vocabulary, features): ``embedding`` in flax, ``weight`` in equinox."""
    return ((_named(f'({names})/(embedding|weight)'), _ROW),)


# Vectors, so that a matrix with a norm in its name is an error and not replicated.
_NORMS: Table = ((_named(r'((?i:\w*norm\w*)|ln_\w+|\w+_ln)/(scale|weight|kernel|bias)'), _VECTOR),)

SPLIT_HEADS: Table = (
    (_named(f'({_QKV})/kernel'), PartitionSpec('fsdp', 'tp', None)),
    (_named(f'({_QKV})/bias'), PartitionSpec('tp', None)),
    (_named(f'({_OUT})/kernel'), PartitionSpec('tp', None, 'fsdp')),
)
"""Attention whose heads are a dimension: heads over tp, as in Megatron-LM. To be put in front of a table.

Only there: without such heads, these rows would match stacked layers for which `stacked` is missing.
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
"""LLaMA and decoders that name their parameters alike (Mistral, Qwen): Megatron-LM's pairs.

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
"""Gemma, by the names of Hugging Face and others (see `LLAMA`) and those of Google DeepMind's library.

There (``gm/nn/_modules.py`` of google-deepmind/gemma) ``gating_einsum`` is (2, hidden, embed), as in Gemma 2
9B and 27B and in Gemma 3 (``transpose_gating_einsum=True``); the others have (2, embed, hidden), which take a
row of your own, ``('gating_einsum', PartitionSpec(None, 'fsdp', 'tp'))``. Encoders of images have no rows.
"""

_EXPERTS = r'(experts|MoeBlock_\d+)'

MIXTRAL: Table = (
    # Split over neither tp nor expert: every device routes its own tokens.
    *_matrices(r'(block_sparse_moe|MoeBlock_\d+|moe|mlp)/(gate|router)', PartitionSpec('fsdp', None)),
    # One expert an array: no dimension of experts, so that their axis helps fsdp.
    *_matrices(r'experts/\d+/(w[13]|gate_proj|up_proj)', PartitionSpec(('expert', 'fsdp'), 'tp')),
    *_matrices(r'experts/\d+/(w2|down_proj)', PartitionSpec('tp', ('expert', 'fsdp'))),
    # All experts of a layer in one array: (experts, in, out).
    *_matrices(
        f'{_EXPERTS}/(w[13]|wi_[01]|gate_proj|up_proj|gate|up)', PartitionSpec('expert', 'fsdp', 'tp')
    ),
    *_matrices(f'{_EXPERTS}/(w2|wo|down_proj|down)', PartitionSpec('expert', 'tp', 'fsdp')),
    *LLAMA,
)
"""Mixtral: experts over their own axis, as in GShard and Switch Transformers, and the rest as in `LLAMA`.

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
"""GPT decoders: Megatron-LM's pairs. Tables of positions are sharded as those of words.

Names: ``models/gptj``, ``gpt_neo``, ``gpt_neox`` and ``gpt2`` of huggingface/transformers 4.
"""

GPT2: Table = (
    (_named('(c_attn|q_attn|c_fc)/kernel|c_proj/weight'), _ROW),
    (_named('(c_attn|q_attn|c_fc)/weight|c_proj/kernel'), _COLUMN),
    *GPT,
)
"""Hugging Face's GPT-2: Megatron-LM's pairs, on transposed matrices.

Its ``FlaxConv1D`` keeps ``kernel`` as (out, in), and the ``Conv1D`` of PyTorch keeps ``weight`` as (in, out).
"""

_PATCHES = 'patch_embeddings/projection|patch_embed/proj|embedding'
_HEADS = 'classifier|head|fc|pooler/dense|pre_logits'

VIT: Table = (
    # Patches of (height, width, colours, features): of these only the features are many.
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
"""Vision transformers: Megatron-LM's pairs; patches and positions over fsdp only.

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
"""T5, of Hugging Face and of T5X: Megatron-LM's pairs, and its layout of cross-attention alike.

Names: ``modeling_flax_t5.py`` of huggingface/transformers 4, ``examples`` of google-research/t5x. Where T5X
keeps heads as a dimension (``scalable_t5``), put `SPLIT_HEADS` in front.
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
"""Megatron-LM's tensor parallelism: heads, hidden units and the vocabulary over tp; the residual is not.

Functions that are partitioned along their batch need none of it.
"""

SEQUENCE_PARALLEL: ActivationSpecs = MappingProxyType(
    {'residual': PartitionSpec('batch', 'tp'), 'block_input': PartitionSpec('batch')}
)
"""Megatron-LM's sequence parallelism (Korthikanti et al., arXiv:2205.05198, section 4.2.2).

The sum over tp after a block becomes a reduce-scatter, and an all-gather comes before the next block; both
together move as much. The residual, which each layer saves for the backward pass, takes a fraction of the
memory.
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

The batch is sharded over the axis of the experts too: ``PartitionSpec((*batch, expert))``. The tokens of each
expert are named twice, before and after they travel, and so are the results.
"""

REGEXES = frozenset(
    [_REST, *(row[0] for table in (SPLIT_HEADS, GEMMA, MIXTRAL, GPT2, VIT, T5) for row in table)]
)
"""The regexes of the catalogue itself. In any one model most of them match nothing, which is not an error."""
