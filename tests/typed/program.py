"""A user's program that passes ``mypy --strict`` and runs (tests/test_types.py)."""

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from scalax import microbatch
from scalax.axes import fsdp, named_jit
from scalax.checkpoint import Checkpointer
from scalax.custom_op import FactorContext, sharded_op
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PartitionSpec,
    Prefetch,
    SjitFunction,
    TreePathShardingRule,
    with_sharding_constraint,
)


class Batch(NamedTuple):
    tokens: jax.Array
    targets: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    params: dict[str, jax.Array]
    step: jax.Array


helper = MeshShardingHelper([-1, 2], ['fsdp', 'tp'], on_indivisible='replicate')
rules = TreePathShardingRule(('kernel', PartitionSpec('fsdp', 'tp')), strict=False) | FSDPShardingRule()


def init() -> State:
    return State({'kernel': jnp.zeros((64, 64))}, jnp.zeros((), jnp.int32))


def train_step(state: State, batch: Batch, rate: float = 0.1) -> tuple[State, jax.Array]:
    hidden = with_sharding_constraint(batch.tokens @ state.params['kernel'], PartitionSpec('fsdp'))
    loss = ((hidden - batch.targets) ** 2).mean()
    return State({name: x - rate for name, x in state.params.items()}, state.step + 1), loss


step = helper.sjit(train_step, in_shardings=(rules, PartitionSpec('fsdp')), donate_argnums=0)


@helper.sjit
def evaluate(state: State, batch: Batch) -> jax.Array:
    return train_step(state, batch)[1]


@helper.sjit(
    in_shardings={'state': rules, 'batch': PartitionSpec('fsdp')},
    out_shardings=(rules, PartitionSpec()),
    static_argnames='rate',
    on_mismatch='reshard',
    annotation_shardings={'hidden': PartitionSpec('fsdp')},
    compiler_options={'xla_embed_ir_in_executable': True},
)
def other_step(state: State, batch: Batch, rate: float = 0.1) -> tuple[State, jax.Array]:
    return train_step(state, batch, rate)


class Model:
    @helper.sjit(static_argnums=0)
    def apply(self, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
        return x * scale


@helper.shard_map(in_specs=PartitionSpec('fsdp'), out_specs=PartitionSpec('fsdp'))
def normalized(x: jax.Array) -> jax.Array:
    total: jax.Array = jax.lax.psum(x.sum(), 'fsdp')
    return x / total


@named_jit(axis_resources={'batch': 'fsdp'}, mesh=helper, keep_unused=True)
def named(x: jax.Array, scale: int = 2) -> jax.Array:
    return x * scale


@fsdp({'embed': 'fsdp'}, {'batch': 'fsdp'}, mesh=helper, donate_args=(False,))
def stored(x: jax.Array) -> jax.Array:
    return x + 1


by_call = fsdp(train_step, parameter_mapping=rules, compute_mapping={'batch': 'fsdp'}, mesh=helper)


@sharded_op('b c -> b', reduction_factors=('c',))
def sums(ctx: FactorContext, x: jax.Array) -> jax.Array:
    total: jax.Array = ctx.psum(x.sum(axis=-1), 'c')
    return total


@dataclass
class Trainer:
    step: SjitFunction[[State, Batch], jax.Array]


def batches() -> Iterator[Batch]:
    for _ in range(2):
        yield Batch(jnp.zeros((8, 64)), jnp.zeros((8, 64)))


def train(directory: str) -> float:
    state = helper.sjit(init, out_shardings=rules)()
    with Checkpointer(directory, keep=2) as checkpointer:
        if checkpointer.latest_step() is not None:
            state = checkpointer.restore(helper, rules, like=init)
            state = checkpointer.restore(helper, rules, like=state)
        with helper.prefetch(batches(), 0, 'fsdp', local_batch='addressable') as loader:
            for number, batch in enumerate(loader):
                state, loss = step(state, batch)
                state, loss = other_step(state, batch, rate=0.2)
                checkpointer.save(number, state)
    first: Prefetch[Batch] = helper.prefetch(batches(), 0, 'fsdp')
    compiled: SjitFunction[[State, Batch], jax.Array] = evaluate
    lowered = compiled.lower(state, batch).compile()
    assert lowered is not None
    loss += evaluate(state, next(first)) + Trainer(evaluate).step(state, batch)
    loss += Model().apply(batch.tokens, scale=2.0).sum()
    loss += normalized(batch.tokens).sum() + named(batch.tokens, 3).sum() + sums(batch.tokens).sum()
    loss += stored(batch.tokens).sum() + by_call(state, batch)[1]
    grads = microbatch(jax.grad(lambda w: (w**2).sum()), 2, batch=0)(batch.tokens)
    loss += grads.sum()
    loss += microbatch(lambda state, batch: evaluate(state, batch), 2)(state, batch)
    return float(loss)


placed = helper.shard(init(), rules)
print(train(tempfile.mkdtemp()), placed.step, helper.gather(placed).params['kernel'].shape)
print(helper.explain(placed, rules), helper.plan(step, placed, next(batches()), quick=True))
print(helper.abstract(init(), rules), helper.visualize(placed))
mesh_only = functools.partial(helper.shard, rules=None)
