"""The sharding strategies, in one table; a strategy is a few lines of it.

A strategy answers four questions, and nothing else in this example changes with the answers:

- *Where?* `mesh`: the mesh axes and how many devices are along each; -1 takes what is left.
- *What does a device keep of the train state?* `state`: a rule from leaf paths and shapes to specs.
  It sees the whole state, and an optimizer moment's path ends like its parameter's
  (`params/layers/up`, `opt_state/1/0/mu/layers/up`), so one line of a table places all three.
- *Which examples of a batch does a device get?* `data_axes`: the axes over which the batch is split.
- *How are activations sharded?* Along the batch: scalax partitions the step. Only exceptions are
  listed. `activations`: specs for names that `model.py` gives to values (it also lists
  their dimensions), and `gradients`: a rule for the gradients before the update.

Each of them runs in pipeline stages too (`in_stages`): one more mesh axis, over which the layers are sharded.

In a spec, `None` leaves a dimension unsharded; so are dimensions after the last one mentioned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from scalax.sharding import FSDPShardingRule, PartitionSpec, Pipeline, ShardingRule, TreePathShardingRule

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to lay a training run out over devices."""

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
        """The annotations of a training step: the model's and its own."""
        gradients = {} if self.gradients is None else {'gradients': self.gradients}
        return {**self.activations, **gradients}


DATA_PARALLEL = Strategy(
    name='dp',
    doc='data parallelism: every device has the entire state and its part of the batch',
    mesh={'dp': -1},
    data_axes=('dp',),
    state=P(),
)

# The parameters stay replicated, so the forward pass is that of data parallelism. Each device updates
# its part of them, with its part of Adam's two moments, and then all share what they updated.
ZERO1 = Strategy(
    name='zero1',
    doc='ZeRO-1: data parallelism with the optimizer moments split over the devices',
    mesh={'dp': -1},
    data_axes=('dp',),
    state=TreePathShardingRule(
        (r'opt_state/.*(mu|nu)/', FSDPShardingRule('dp', min_fsdp_size=0)),
        (r'.*', P()),
    ),
)

# Asking for split gradients turns their all-reduce into a reduce-scatter: half the traffic, and no
# device ever keeps all of them.
ZERO2 = Strategy(
    name='zero2',
    doc='ZeRO-2: ZeRO-1 with the gradients split over the devices as well',
    mesh={'dp': -1},
    data_axes=('dp',),
    state=ZERO1.state,
    gradients=FSDPShardingRule('dp', min_fsdp_size=0),
)

# The rule splits the largest dimension that divides. Small leaves, here the norms, are not worth a
# collective. The weights of a layer are gathered where they are used and dropped after.
FSDP = Strategy(
    name='fsdp',
    doc='FSDP (ZeRO-3): parameters, moments and gradients all split, and gathered layer by layer',
    mesh={'fsdp': -1},
    data_axes=('fsdp',),
    state=FSDPShardingRule('fsdp', min_fsdp_size=1024),
)

# Tensor parallelism splits what a layer computes: some heads and some hidden units a device. A
# projection into them is split by columns, the projection back by rows, and what a block adds to the
# residual is summed over tp. FSDP splits each weight's other dimension. The embeddings are split by width
# over tp; so is what is looked up in them, and with it the residual between the blocks. The first dimension
# of everything under layers/ is the stack of layers that the model scans over: never split. `embed$` also
# matches `unembed`; where 256 words do not divide, as over 3 hosts, they are split by width alone. Scalars
# (the step, the counts) are replicated without a line of their own.
FSDP_TP = Strategy(
    name='fsdp_tp',
    doc='FSDP x tensor parallelism: heads and hidden units split over tp, everything else as FSDP',
    mesh={'fsdp': -1, 'tp': 2},
    data_axes=('fsdp',),
    state=TreePathShardingRule(
        (r'layers/(query|key|value|gate|up)$', P(None, 'fsdp', 'tp')),
        (r'layers/(output|down)$', P(None, 'tp', 'fsdp')),
        (r'embed$', TreePathShardingRule(('.*', P('fsdp', 'tp')), on_indivisible='replicate')),
        (r'norm$', P()),
    ),
)

# The residual split by position instead (arXiv:2205.05198). The compiler does not choose that, so it takes
# names: of the residual, and of what the blocks begin with, which is gathered. The embeddings are split by
# words over tp, and the vectors looked up in it are replicated.
FSDP_TP_SP = dataclasses.replace(
    FSDP_TP,
    name='fsdp_tp_sp',
    doc='FSDP x tensor x sequence parallelism: the residual stream split by position over tp',
    state=TreePathShardingRule((r'\bembed$', P('tp', 'fsdp')), (r'.*', FSDP_TP.state)),
    activations={'residual': P('fsdp', 'tp'), 'block_input': P('fsdp')},
)

STRATEGIES = {
    strategy.name: strategy for strategy in (DATA_PARALLEL, ZERO1, ZERO2, FSDP, FSDP_TP, FSDP_TP_SP)
}


def in_stages(strategy: Strategy, stages: int, microbatches: int) -> Strategy:
    """A strategy as a pipeline: each stage has its part of the layers, and runs the strategy on it.

    The first dimension of everything under layers/ is the stack of layers; the strategy places the others.
    Outside of the layers the devices of all stages see rows of their own.
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
