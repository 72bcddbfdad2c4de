"""Collectives of plans, compared with a second reader that simulates the program."""

import jax
import jax.numpy as jnp
import pytest

from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P
from tests.support import collective_programs, second_reader
from tests.support.collective_programs import HELPER
from tests.support.leaves import leaf


def train(helper, rules, batch, layers=3, rounds=1, **options):
    """A gradient step of checkpointed stacked layers, optionally in several parts of the batch."""

    def layer(x, w):
        return x + jnp.tanh(x @ w['up']) @ w['down'], None

    def loss(params, x):
        return jnp.square(jax.lax.scan(jax.checkpoint(layer), x, params)[0]).mean()

    def step(params, x):
        if rounds == 1:
            return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x))

        def part(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

        return jax.lax.scan(part, params, x.reshape(rounds, -1, x.shape[-1]))[0]

    fun = helper.sjit(step, in_shardings=(rules, batch), out_shardings=rules, **options)
    return helper, fun, ({'up': leaf(layers, 64, 128), 'down': leaf(layers, 128, 64)}, leaf(64, 64))


def fsdp():
    return train(HELPER, FSDPShardingRule('fsdp', min_fsdp_size=1).stacked(), P('fsdp'))


BOTH = TreePathShardingRule(('up', P(None, 'fsdp', 'tp')), ('down', P(None, 'tp', 'fsdp')))


def fsdp_and_tp():
    return train(HELPER, BOTH, P('fsdp'))


def parts_of_a_batch():
    """A loop over parts, with the loop over layers inside, in both passes."""
    return train(HELPER, BOTH, P('fsdp'), rounds=4)


def bad_shardings():
    """Both weights and the batch are sharded along unfavourable dimensions."""
    bad = TreePathShardingRule(('up', P(None, 'tp', 'fsdp')), ('down', P(None, 'tp', None)))
    # Not partitioned: constraints would split an axis into sub-axes, which the second reader rejects.
    return train(HELPER, bad, P('tp', 'fsdp'), batch_argnums=())


def three_axes():
    helper = MeshShardingHelper([2, 2, 2], ['data', 'fsdp', 'tp'])
    return train(helper, BOTH, P(('data', 'fsdp')))


PROGRAMS = {
    **collective_programs.PROGRAMS,
    **{make.__name__: make for make in (fsdp, fsdp_and_tp, parts_of_a_batch, bad_shardings, three_axes)},
}


def compared(step, **options):
    helper, fun, arguments, *_ = step
    text = second_reader.after_partitioning(fun.lower(*arguments), **options)
    return helper.plan(fun, *arguments, quick=True), second_reader.read(text, dict(helper.mesh.shape))


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('program', PROGRAMS.values(), ids=PROGRAMS)
def test_both_read_the_same(program):
    plan, second = compared(program())
    assert collective_programs.rows(plan) == second
    assert bool(second) == (program is not collective_programs.nothing)


@pytest.mark.medium
def test_a_missed_collective_is_noticed():
    """The comparison can fail: the second reader does not skip unknown instructions."""
    helper, fun, arguments = fsdp_and_tp()
    text = second_reader.after_partitioning(fun.lower(*arguments))
    with pytest.raises(AssertionError, match='all-gather-start'):
        second_reader.read(text.replace(' all-gather(', ' all-gather-start('), dict(helper.mesh.shape))
    fewer = second_reader.read(text, {'fsdp': 2, 'tp': 4})
    assert fewer != collective_programs.rows(helper.plan(fun, *arguments))
