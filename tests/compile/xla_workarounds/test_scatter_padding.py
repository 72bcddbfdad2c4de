"""Scatters whose updates XLA would shard unevenly give the results of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._compile.xla_workarounds.rewrite import apply_workarounds
from scalax.sharding import FSDPShardingRule, MeshShardingHelper

ROWS = np.random.default_rng(0).normal(size=(8, 16, 6)).astype('float32')
PLACES = np.random.default_rng(1).integers(0, 16, (8, 16)).astype('int32')
ZEROS, ONES = jnp.zeros((16, 6)), jnp.ones((16, 6))


def of_each_row(rows, places):
    return jax.vmap(lambda rows, places: ZEROS.at[places].add(rows))(rows[:, :-1], places[:, :-1])


def in_a_loop(rows, places):
    def step(total, pair):
        return total.at[pair[1][1:]].add(jnp.sin(pair[0][1:])), None

    return lax.scan(step, ZEROS, (rows, places))[0]


def next_tokens(rows, tokens):
    def loss(table):
        logits = table[tokens[:, :-1]] @ table.T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))

    return jax.value_and_grad(loss)(rows[0])


def in_a_checkpoint(rows, tokens):
    def layer(table):
        return jnp.tanh(table[tokens[:, :-1]])

    return jax.grad(lambda table: jnp.sum(jnp.cos(jax.checkpoint(layer)(table))))(rows[0])


def padded(x):
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0))[: x.ndim], constant_values=1)


def largest_of_none(rows, places):
    return jnp.full((16, 6), -jnp.inf).at[places[:, :-1]].max(rows[:, :-1])


PROGRAMS = {
    'all but the last': lambda rows, places: ZEROS.at[places[:, :-1]].add(rows[:, :-1]),
    'subtracted': lambda rows, places: ZEROS.at[places[:, :-1]].subtract(rows[:, :-1]),
    'all but the first rows': lambda rows, places: ZEROS.at[places[1:]].add(rows[1:]),
    'at most three': lambda rows, places: ZEROS.at[places[:, :3]].add(rows[:, :3]),
    'every sixth': lambda rows, places: ZEROS.at[places[:, ::6]].add(rows[:, ::6]),
    'one more': lambda rows, places: ZEROS.at[padded(places)].add(padded(rows)),
    'numbered': lambda rows, places: (
        jnp.zeros((7, 16, 6)).at[jnp.arange(7)[:, None], places[:-1]].add(rows[:-1])
    ),
    'in two dimensions': lambda rows, places: jnp.zeros((16, 16)).at[places[:, :-1], places[:, 1:]].add(1.0),
    'products': lambda rows, places: ONES.at[places[:, :-1]].multiply(rows[:, :-1]),
    'maxima': largest_of_none,
    'sorted': lambda rows, places: jax.ops.segment_sum(
        rows[0, :-1], jnp.sort(places[0, :-1]), 16, indices_are_sorted=True
    ),
    'unique': lambda rows, places: ZEROS.at[jnp.argsort(places[0])[1:]].add(rows[0, 1:], unique_indices=True),
    'per row': of_each_row,
    'in a loop': in_a_loop,
    'in a checkpoint': in_a_checkpoint,
    'next tokens': next_tokens,
}  # fmt: skip


def assert_close(actual, expected):
    for leaf, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, right, rtol=1e-4, atol=1e-5)


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('name', PROGRAMS)
@pytest.mark.parametrize('is_partitioned', [True, False])
def test_values_match_one_device(name, is_partitioned):
    helper = MeshShardingHelper([2, 2, 2], ['fsdp', 'sp', 'tp'])
    options = {} if is_partitioned else {'batch_argnums': ()}
    expected = jax.jit(PROGRAMS[name])(ROWS, PLACES)
    for spec in (P('fsdp', 'sp'), P(None, ('fsdp', 'sp')), P('tp')):
        assert_close(
            helper.sjit(PROGRAMS[name], in_shardings=(spec, spec), **options)(ROWS, PLACES), expected
        )


@pytest.mark.medium
@pytest.mark.parametrize('size', [6, 9, 11, 13])
@pytest.mark.parametrize('sizes', [(4, 2), (2, 4)])
def test_bincounts_of_any_length(size, sizes):
    helper, groups = MeshShardingHelper([*sizes], ['x', 'y']), PLACES[0]
    actual = helper.sjit(lambda groups: jnp.bincount(groups[:size], length=16), in_shardings=(P('x'),))(
        groups
    )
    np.testing.assert_array_equal(actual, np.bincount(groups[:size], minlength=16))


def test_a_constraint_that_splits_unevenly():
    helper = MeshShardingHelper([2, 2, 2], ['fsdp', 'sp', 'tp'])
    sharding = NamedSharding(helper.mesh, P(None, 'sp'))

    def summed(rows, places):
        rows, places = lax.with_sharding_constraint((rows, places), sharding)
        return ZEROS.at[places].add(jnp.cos(rows))

    rows, places = ROWS[:, :-1], PLACES[:, :-1]
    expected = jax.jit(lambda rows, places: ZEROS.at[places].add(jnp.cos(rows)))(rows, places)
    assert_close(helper.sjit(summed, in_shardings=(P(), P()))(rows, places), expected)


def test_a_step_with_rules_has_the_right_gradient():
    helper = MeshShardingHelper([2, 2, 2], ['fsdp', 'sp', 'tp'])
    rule = FSDPShardingRule('fsdp', min_fsdp_size=1)

    def step(table, tokens):
        return jax.grad(lambda table: jnp.sum(jnp.sin(table[tokens[:, :-1]])))(table)

    table = ROWS[0]
    run = helper.sjit(step, in_shardings=(rule, P('fsdp', 'sp')), out_shardings=rule)
    assert run.explain_propagation(table, PLACES).axes == ('fsdp', 'sp')
    assert_close(run(table, PLACES), jax.jit(step)(table, PLACES))


def needs_workaround(program, *args, sizes=(2, 2, 2)):
    jaxpr = jax.make_jaxpr(program)(*args)
    mesh = MeshShardingHelper([*sizes], ['fsdp', 'sp', 'tp']).mesh
    return apply_workarounds(jaxpr, mesh, ['fsdp'], name='f') is not jaxpr


FIFTEEN = {
    'as an argument': lambda rows, more: rows,
    'sliced': lambda rows, more: more[1:],
    'sliced at an index': lambda rows, more: lax.dynamic_slice(more, (1, 0), (15, 6)),
    'split': lambda rows, more: lax.split(more, (1, 15))[1],
    'written into more rows': lambda rows, more: (lax.dynamic_update_slice(more, rows, (1, 0)), rows)[1],
    'joined with more': lambda rows, more: lax.concatenate([rows[:9], rows[9:]], 0),
    'padded': lambda rows, more: (lax.pad(rows, jnp.float32(0), ((0, 1, 0), (0, 0, 0))), rows)[1],
    'windows': lambda rows, more: lax.reduce_window(more, 0.0, lax.add, (2, 1), (1, 1), 'valid'),
}


@pytest.mark.parametrize('name', FIFTEEN)
def test_resized_dimensions_may_be_sharded_unevenly(name):
    """All values but the arguments, and values that only have their dimensions."""

    def program(rows, more, places):
        return ZEROS.at[places].add(FIFTEEN[name](rows, more))

    actual = needs_workaround(program, ROWS[0, 1:], ROWS[0], PLACES[0, 1:])
    assert actual is (name != 'as an argument')


@pytest.mark.parametrize(
    ('program', 'sizes'),
    [
        (lambda rows, places: ZEROS.at[places[:, :8]].add(rows[:, 8:]), (2, 2, 2)),  # divisible by 8
        (lambda rows, places: ZEROS.at[places[0, :12]].add(rows[0, :12]), (8, 1, 1)),  # all have parts
        (lambda rows, places: ZEROS.at[places[0, :12]].set(rows[0, :12]), (2, 2, 2)),  # nothing is summed
        (lambda rows, places: ZEROS[:, :5].at[places].add(rows[..., :5]), (2, 2, 2)),  # of entire rows
    ],
)  # fmt: skip
def test_evenly_sharded_scatters_are_unchanged(program, sizes):
    assert not needs_workaround(program, ROWS, PLACES, sizes=sizes)


def test_an_indivisible_batch_keeps_its_sharding():
    mesh = MeshShardingHelper([4, 2], ['fsdp', 'tp']).mesh

    def step(table, tokens):
        return jax.grad(lambda table: jnp.sum(jnp.sin(table[tokens[:, :-1]])))(table)

    jaxpr = jax.make_jaxpr(step)(ROWS[0], np.zeros((12, 9), 'int32'))
    assert apply_workarounds(jaxpr, mesh, ['fsdp'], name='f') is jaxpr
