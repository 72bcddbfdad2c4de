"""A table of sharding strategies, each of a few lines.

A strategy answers four questions, and nothing else in this example depends on the answers:

- *Which mesh?* `mesh`: the mesh axes and their sizes. -1 uses all remaining devices.
- *How is the train state sharded?* `state`: a rule from leaf paths and shapes to specs. The path of an
  optimizer moment ends like the path of its parameter (`params/layers/up`, `opt_state/1/0/mu/layers/up`), so
  one line of the rule applies to all three.
- *Which examples of a batch does a device get?* `data_axes`: the axes over which the batch is sharded.
- *How are activations sharded?* Along the batch, because scalax partitions the step. Only exceptions are
  listed: `activations` has specs for names that `model.py` gives to values (it also lists their dimensions),
  and `gradients` is a rule for the gradients before the update.

Each strategy also runs as a pipeline (`in_stages`), with one more mesh axis, over which the layers are
sharded.

In a spec, `None` leaves a dimension unsharded, as are dimensions after the last entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from scalax.sharding import FSDPShardingRule, PartitionSpec, Pipeline, ShardingRule, TreePathShardingRule

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The sharding of a training run."""

    name: str
    doc: str
    mesh: Mapping[str, int]
    data_axes: tuple[str, ...]
    state: ShardingRule | PartitionSpec
    activations: Mapping[str, PartitionSpec] = dataclasses.field(default_factory=dict)
    gradients: ShardingRule | None = None
    pipeline: Pipeline | None = None

    @property
    def batch(self) -> PartitionSpec:
        """The spec of a batch of tokens [B, S + 1]."""
        return P(self.data_axes)

    @property
    def train_annotations(self) -> dict[str, ShardingRule | PartitionSpec]:
        """The annotations of a training step: of the activations and of the gradients."""
        gradients = {} if self.gradients is None else {'gradients': self.gradients}
        return {**self.activations, **gradients}


DATA_PARALLEL = Strategy(
    name='dp',
    doc='data parallelism: every device has the entire state and its shard of the batch',
    mesh={'dp': -1},
    data_axes=('dp',),
    state=P(),
)

# The parameters stay replicated, so the forward pass is the same as in data parallelism. Each device updates
# its shard of the parameters, with its shard of Adam's two moments, and the results are all-gathered.
ZERO1 = Strategy(
    name='zero1',
    doc='ZeRO-1: data parallelism with the optimizer moments sharded over the devices',
    mesh={'dp': -1},
    data_axes=('dp',),
    state=TreePathShardingRule(
        (r'opt_state/.*(mu|nu)/', FSDPShardingRule('dp', min_fsdp_size=0)),
        (r'.*', P()),
    ),
)

# Sharding the gradients turns their all-reduce into a reduce-scatter, with half the traffic, and no device
# holds all gradients.
ZERO2 = Strategy(
    name='zero2',
    doc='ZeRO-2: ZeRO-1 with the gradients sharded over the devices as well',
    mesh={'dp': -1},
    data_axes=('dp',),
    state=ZERO1.state,
    gradients=FSDPShardingRule('dp', min_fsdp_size=0),
)

# The rule shards the largest divisible dimension. Small leaves, here the norms, are not worth a collective.
# The weights of a layer are gathered where they are used, and freed afterwards.
FSDP = Strategy(
    name='fsdp',
    doc='FSDP (ZeRO-3): parameters, moments and gradients sharded, and gathered layer by layer',
    mesh={'fsdp': -1},
    data_axes=('fsdp',),
    state=FSDPShardingRule('fsdp', min_fsdp_size=1024),
)

# Tensor parallelism shards heads and hidden units. Projections to heads or hidden units are sharded by output
# features, the projections back by input features, and the outputs of blocks are summed over tp. FSDP shards
# the other dimension of each weight. The embeddings are sharded by width over tp, and with them the embedded
# tokens and the residual between the blocks. The first dimension of all leaves under layers/ is the stack of
# layers that the model scans over, and is never sharded. `embed$` also matches `unembed`. If 256 words are
# not divisible, for example by 3 hosts, embeddings are sharded by width only. Scalars (the step, the counts)
# are replicated without an entry.
FSDP_TP = Strategy(
    name='fsdp_tp',
    doc='FSDP x tensor parallelism: heads and hidden units sharded over tp, everything else as FSDP',
    mesh={'fsdp': -1, 'tp': 2},
    data_axes=('fsdp',),
    state=TreePathShardingRule(
        (r'layers/(query|key|value|gate|up)$', P(None, 'fsdp', 'tp')),
        (r'layers/(output|down)$', P(None, 'tp', 'fsdp')),
        (r'embed$', TreePathShardingRule(('.*', P('fsdp', 'tp')), on_indivisible='replicate')),
        (r'norm$', P()),
    ),
)

# The residual is sharded by position instead (arXiv:2205.05198). The compiler does not choose this, so it
# needs annotations of the residual, and of the inputs of blocks, which are gathered. The embeddings are
# sharded by words over tp, and the embedded tokens are replicated over it.
FSDP_TP_SP = dataclasses.replace(
    FSDP_TP,
    name='fsdp_tp_sp',
    doc='FSDP x tensor x sequence parallelism: the residual stream sharded by position over tp',
    state=TreePathShardingRule((r'\bembed$', P('tp', 'fsdp')), (r'.*', FSDP_TP.state)),
    activations={'residual': P('fsdp', 'tp'), 'block_input': P('fsdp')},
)

STRATEGIES = {
    strategy.name: strategy for strategy in (DATA_PARALLEL, ZERO1, ZERO2, FSDP, FSDP_TP, FSDP_TP_SP)
}


def in_stages(strategy: Strategy, stages: int, microbatches: int) -> Strategy:
    """Returns a strategy as a pipeline, whose stages each hold some layers and shard them by the strategy.

    The first dimension of all leaves under layers/ is the stack of layers; the strategy shards the others.
    Outside of the layers, the batch is also sharded over the stages.
    """
    layers = TreePathShardingRule((r'\blayers/', P('stage')), (r'.*', P()))
    data_axes = ('stage', *strategy.data_axes)
    return dataclasses.replace(
        strategy,
        doc=f'{strategy.doc}; in {stages} pipeline stages',
        mesh={'stage': stages, **strategy.mesh},
        data_axes=data_axes,
        state=layers & strategy.state,
        activations={name: P(data_axes, *spec[1:]) for name, spec in strategy.activations.items()},
        gradients=None if strategy.gradients is None else layers & strategy.gradients,
        pipeline=Pipeline('stage', microbatches),
    )
