r"""Which spec does each parameter of a well-known model get? Ready tables of regexes and specs.

A table is a tuple of rows ``(regex, PartitionSpec)`` over the axes ``'fsdp'``, ``'tp'`` and ``'expert'``;
`rule` makes a rule of it. The first row whose regex is found in the leaf path counts. Tables are data:
add your own rows in front, ``rule((my_row, *LLAMA))``.

==============  ====================================================================================
table           names
==============  ====================================================================================
`LLAMA`         Hugging Face (``self_attn/q_proj/kernel``), EasyLM (``attention/wq/kernel``), MaxText
                (``mlp/wi_0/kernel``), bare (``attention/query``, ``mlp/up``)
`GEMMA`         those, and Google DeepMind's (``attn/q_einsum/w``)
`MIXTRAL`       those of LLaMA, and experts (``experts/0/w1/kernel``, ``experts/w1``, ``MoeBlock_0/wi_0``)
`GPT`           GPT-J, GPT-Neo, GPT-NeoX, and GPT-2 with weights of (in, out)
`GPT2`          Hugging Face's FlaxGPT2, which keeps its weights as (out, in)
`VIT`           Hugging Face's FlaxViT, Google's vision_transformer and big_vision
`T5`            Hugging Face's FlaxT5, and T5X
`SPLIT_HEADS`   rows to put in front where heads are a dimension: (embed, heads, head_dim), as in
                ``flax.linen.MultiHeadDotProductAttention`` and MaxText
==============  ====================================================================================

**Where the layout comes from.** Tensor parallelism is Megatron-LM's (Shoeybi et al., arXiv:1909.08053,
section 3): the first matrix of a pair (query, key, value; gate, up) is split along its output, with its
bias, the second (attention output; down) along its input, and its bias is whole; embeddings and the
output layer are split along the vocabulary. Experts lie along an axis of their own, and routers are not
split over experts, as in GShard (Lepikhin et al., arXiv:2006.16668, section 3) and Switch Transformers
(Fedus et al., arXiv:2101.03961, section 5). FSDP takes the other dimension of each matrix (ZeRO, stage
3, Rajbhandari et al., arXiv:1910.02054). Norms and single vectors are replicated.

**Weights are (in, out)**, the convention of flax's ``kernel``. PyTorch's ``weight`` is (out, in), and has
no row here, except that of norms.

**A spec has one entry for each dimension of the array.** Arrays of another rank are an error: a spec for
(8192, 1024) would otherwise shard the layers of (80, 8192, 1024). `rule` takes the place of the stacked
layers, and ``rule(...).stacked(1)`` is for trees that are stacked throughout. The layers come first (in
MaxText: ``param_scan_axis=0``). ``PartitionSpec()`` replicates arrays of any rank.

**What may not divide**: vocabularies that are not padded (GPT-2's 50257; Megatron pads them), and heads
where the model has fewer of them than tp has devices. Pad them, or pass ``on_indivisible``. In fused
matrices (``c_attn``, ``qkv``, ``gate_up_proj``) the parts do not end where the shards do, so that XLA
moves data to split them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import NamedSharding, PartitionSpec

from scalax._paths import NamedTree
from scalax._spec import OnIndivisible, entries, entry_axes
from scalax.errors import Problem, RuleError
from scalax.rules._base import REPLICATED, AxisSizes, Said
from scalax.rules._tree_path import TreePathShardingRule

__all__ = [
    'GEMMA',
    'GPT',
    'GPT2',
    'LLAMA',
    'MIXTRAL',
    'SPLIT_HEADS',
    'T5',
    'VIT',
    'Axis',
    'ExactRankRule',
    'Table',
    'rule',
]

Table = tuple[tuple[str, PartitionSpec], ...]
"""Rows of (regex on the leaf path, spec with one entry for each dimension)."""

Axis = str | tuple[str, ...] | None
"""What an axis of a table is on the mesh: one axis, several, or none."""


def rule(
    table: Sequence[tuple[str, PartitionSpec]],
    *,
    fsdp: Axis = 'fsdp',
    tp: Axis = 'tp',
    expert: Axis = 'expert',
    stacked: str = '',
    on_indivisible: OnIndivisible = 'error',
) -> TreePathShardingRule:
    """The rule of a table. It is strict: a leaf that no row matches is an error.

    Args:
        table: one of this module, or rows of your own over the axes fsdp, tp and expert.
        fsdp: the mesh axis (or axes, or None) that stands for ``'fsdp'`` in the table.
        tp: the same for ``'tp'``.
        expert: the same for ``'expert'``, which only `MIXTRAL` has.
        stacked: a regex for the paths of layers that are stacked in the first dimension, such as
            ``'layers/'``; by default none are. That dimension is never sharded.
        on_indivisible: what to do where a dimension does not divide, as in `TreePathShardingRule`.

    Raises:
        RuleError: a row names another axis, or is no pair of a regex and a spec.

    Example:
        >>> import numpy as np
        >>> layer = {'mlp': {'up_proj': {'kernel': np.zeros((8, 32))}}, 'norm': {'weight': np.zeros(8)}}
        >>> rule(LLAMA, fsdp='data').apply({'layers': [layer]})
        {'layers': [{'mlp': {'up_proj': {'kernel': P('data', 'tp')}}, 'norm': {'weight': P()}}]}

        With 80 layers in one array:

        >>> stack = {'layers': {'up_proj': {'kernel': np.zeros((80, 8, 32))}}}
        >>> rule(LLAMA, stacked='layers/').apply(stack)
        {'layers': {'up_proj': {'kernel': P(None, 'fsdp', 'tp')}}}
    """
    axes = {'fsdp': fsdp, 'tp': tp, 'expert': expert}
    rows = [
        (row[0], _renamed(row[1], axes))
        if isinstance(row, tuple | list) and len(row) == 2 and isinstance(row[1], PartitionSpec)
        else row
        for row in table
    ]
    one = ExactRankRule(*rows, on_indivisible=on_indivisible)
    if not stacked:
        return one
    return TreePathShardingRule((stacked, one.stacked(1)), ('', one))


def _renamed(spec: PartitionSpec, axes: Mapping[str, Axis]) -> PartitionSpec:
    """The spec over the axes of the mesh."""
    renamed: list[Axis] = []
    for entry in entries(spec):
        names: list[str] = []
        for name in entry_axes(entry):
            if name not in axes:
                raise RuleError(
                    f'{spec} in a table: the axes of a table are {", ".join(map(repr, axes))}, got {name!r}'
                )
            names += entry_axes(axes[name])
        renamed.append(tuple(names) if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*renamed)


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

    def __repr__(self) -> str:
        return 'ExactRankRule' + super().__repr__().removeprefix('TreePathShardingRule')

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""
        said = super().answers(tree, axis_sizes)
        # One answer serves all leaves of a clause, so that its rank is worked out once.
        ranks = {id(answer): self._rank(answer) for answer in {id(one): one for one in said}.values()}
        for index, (answer, shape) in enumerate(zip(said, tree.shapes, strict=True)):
            if ranks[id(answer)] not in (None, len(shape)):
                said[index] = self._other_rank(tree, index, answer, len(shape))
        return said

    def _rank(self, said: Said) -> int | None:
        """The rank that the answer is for; None for any."""
        # Problems have no clauses, nor have the answers about arrays of one element.
        clauses = getattr(said, 'clauses', ())
        if not clauses or clauses[0][0] is not self:
            return None
        value = self.rules[clauses[0][1]][1]
        spec = value.spec if isinstance(value, NamedSharding) else value
        return len(entries(spec)) or None if isinstance(spec, PartitionSpec) else None

    def _other_rank(self, tree: NamedTree, index: int, said: Said, rank: int) -> Problem:
        return Problem(
            'rank',
            tree.describe(index),
            f'the spec is for {self._rank(said)} dimensions, and the array has {rank}',
            spec=str(getattr(said, 'spec', '')),
            rule=str(getattr(said, 'origin', '')),
            hint="stacked layers take rule.stacked(1), or catalogue.rule(table, stacked='layers/'); heads "
            'that are a dimension take catalogue.SPLIT_HEADS in front; others a row of your own.',
        )


# --- The tables ----------------------------------------------------------------------------------

_COLUMN = PartitionSpec('fsdp', 'tp')  # (in, out) of a column-parallel layer
_ROW = PartitionSpec('tp', 'fsdp')  # (in, out) of a row-parallel layer; (vocabulary, features)


def _weights(names: str) -> str:
    """The regex of matrices by these names, themselves arrays or modules with a kernel."""
    return rf'(^|/)({names})(/kernel)?$'


def _biases(names: str) -> str:
    return rf'(^|/)({names})/bias$'


def _pairs(first: str, second: str) -> Table:
    """Megatron's pair: the first matrices are column-parallel, the second ones row-parallel."""
    return (
        (_weights(first), _COLUMN),
        (_weights(second), _ROW),
        (_biases(first), PartitionSpec('tp')),
        # Added after the sum over tp, hence whole.
        (_biases(second), REPLICATED),
    )


_NORMS: Table = ((r'(^|/)((?i:\w*norm\w*)|ln_\w+)/(scale|weight|kernel|bias)$', REPLICATED),)

SPLIT_HEADS: Table = (
    (r'(^|/)(query|key|value|[qkv]_proj)/kernel$', PartitionSpec('fsdp', 'tp', None)),
    (r'(^|/)(query|key|value|[qkv]_proj)/bias$', PartitionSpec('tp', None)),
    (r'(^|/)(out|o_proj)/kernel$', PartitionSpec('tp', None, 'fsdp')),
)
"""Attention whose heads are a dimension: heads over tp, as in Megatron-LM. To be put in front of a table."""

LLAMA: Table = (
    (r'(^|/)(embed_tokens|wte|token_embedder|embed)/embedding$', _ROW),
    (r'(^|/)(lm_head|logits_dense)/kernel$', _COLUMN),
    *_pairs(
        r'[qkv]_proj|qkv_proj|w[qkv]|wqkv|query|key|value|qkv|(gate|up|gate_up)_proj|w[13]|wi_[01]|gate|up',
        r'o_proj|wo|out|down_proj|w2|down',
    ),
    *_NORMS,
)
"""LLaMA and decoders that name their parameters alike (Mistral, Qwen): Megatron-LM's pairs."""

GEMMA: Table = (
    (r'(^|/)input_embedding$', _ROW),
    (r'(^|/)q_einsum/w$', PartitionSpec('tp', 'fsdp', None)),  # (heads, embed, head_dim)
    (r'(^|/)kv_einsum/w$', PartitionSpec(None, 'tp', 'fsdp', None)),  # (2, heads, embed, head_dim)
    (r'(^|/)attn_vec_einsum/w$', PartitionSpec('tp', None, 'fsdp')),  # (heads, head_dim, embed)
    (r'(^|/)gating_einsum(/w)?$', PartitionSpec(None, 'tp', 'fsdp')),  # (2, hidden, embed)
    (r'(^|/)linear(/w)?$', _ROW),  # (hidden, embed)
    *LLAMA,
)
"""Gemma, by the names of Hugging Face and others (see `LLAMA`) and those of Google DeepMind's library.

There ``gating_einsum`` is (2, hidden, embed), as in Gemma 2 9B and 27B and in Gemma 3
(``transpose_gating_einsum=True``); the older models have (2, embed, hidden), which take a row of your own,
``('gating_einsum', PartitionSpec(None, 'fsdp', 'tp'))``.
"""

_EXPERTS = r'(experts|MoeBlock_\d+)'

MIXTRAL: Table = (
    # Split over neither tp nor expert: every device routes its own tokens.
    (r'(^|/)(block_sparse_moe|MoeBlock_\d+|moe)/(gate|router)/kernel$', PartitionSpec('fsdp', None)),
    # One expert an array: no dimension of experts, so that their axis helps fsdp.
    (r'(^|/)experts/\d+/(w[13]|gate_proj|up_proj)(/kernel)?$', PartitionSpec(('expert', 'fsdp'), 'tp')),
    (r'(^|/)experts/\d+/(w2|down_proj)(/kernel)?$', PartitionSpec('tp', ('expert', 'fsdp'))),
    # All experts of a layer in one array: (experts, in, out).
    (
        rf'(^|/){_EXPERTS}/(w[13]|wi_[01]|gate_proj|up_proj|gate|up)(/kernel)?$',
        PartitionSpec('expert', 'fsdp', 'tp'),
    ),
    (rf'(^|/){_EXPERTS}/(w2|wo|down_proj|down)(/kernel)?$', PartitionSpec('expert', 'tp', 'fsdp')),
    *LLAMA,
)
"""Mixtral: experts over their own axis, as in GShard and Switch Transformers, and the rest as in `LLAMA`."""

GPT: Table = (
    (r'(^|/)(wte|wpe|embed_in)/embedding$', _ROW),
    (r'(^|/)(lm_head|embed_out)/kernel$', _COLUMN),
    (r'(^|/)lm_head/bias$', PartitionSpec('tp')),
    *_pairs(
        r'c_attn|qkv|query_key_value|[qkv]_proj|query|key|value|c_fc|fc_in|fc1|dense_h_to_4h|up',
        r'c_proj|out_proj|out|attention/dense|fc_out|fc2|dense_4h_to_h|down',
    ),
    *_NORMS,
)
"""GPT decoders with weights of (in, out): Megatron-LM's pairs. Tables of positions lie as those of words."""

GPT2: Table = (
    (r'(^|/)(c_attn|q_attn|c_fc)/kernel$', PartitionSpec('tp', 'fsdp')),
    (r'(^|/)c_proj/kernel$', PartitionSpec('fsdp', 'tp')),
    *GPT,
)
"""Hugging Face's FlaxGPT2, whose FlaxConv1D keeps kernels as (out, in): Megatron-LM's pairs, transposed."""

VIT: Table = (
    # Patches of (height, width, colours, features): of these only the features are many.
    (r'(^|/)(patch_embeddings/projection|embedding)/kernel$', PartitionSpec(None, None, None, 'fsdp')),
    (r'(^|/)(patch_embeddings/projection|embedding)/bias$', REPLICATED),
    (r'(^|/)(position_embeddings|pos_embedding)$', PartitionSpec(None, None, 'fsdp')),
    (r'(^|/)(cls_token|cls)$', REPLICATED),
    (r'(^|/)(classifier|head|pooler/dense|pre_logits)/kernel$', _COLUMN),
    (r'(^|/)(classifier|head|pooler/dense|pre_logits)/bias$', PartitionSpec('tp')),
    *_pairs(
        r'query|key|value|qkv|intermediate/dense|MlpBlock_\d+/Dense_0|fc1',
        r'output/dense|out|attn/proj|MlpBlock_\d+/Dense_1|fc2',
    ),
    *_NORMS,
)
"""Vision transformers: Megatron-LM's pairs; patches and positions over fsdp only."""

T5: Table = (
    (r'(^|/)(shared|token_embedder)/embedding$', _ROW),
    # (buckets, heads), a few kilobytes.
    (r'(^|/)(relative_attention_bias/embedding|rel_embedding)$', REPLICATED),
    (r'(^|/)(lm_head|logits_dense)/kernel$', _COLUMN),
    (_weights(r'SelfAttention/[qkv]|EncDecAttention/[qkv]|query|key|value|wi|wi_[01]'), _COLUMN),
    (_weights(r'SelfAttention/o|EncDecAttention/o|out|wo'), _ROW),
    *_NORMS,
)
"""T5, of Hugging Face and of T5X: Megatron-LM's pairs, and its layout of cross-attention alike."""
