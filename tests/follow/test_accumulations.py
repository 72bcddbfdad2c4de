"""Sums of a loop that each round takes apart are taken apart behind it."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax._follow.accumulations import with_sums_behind_loops
from scalax._jax.equations import opened
from scalax._jax.rewriting import run
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.following import equations

GATES = 'ifgo'
RULE = FSDPShardingRule(min_fsdp_size=1)


def concatenated(w, part):
    return jnp.concatenate([w[part + gate] for gate in GATES], -1)


def stacked(w, part):
    size = w[part + 'i'].shape[0]
    return jnp.stack([w[part + gate] for gate in GATES], 1).reshape(size, -1)


def scaled(w, part):
    return jnp.concatenate([w[part + gate] * (1 + w[part + 'i'][:1] ** 2) for gate in GATES], -1)


def step(combined, reverse=False):
    """The gradient of a cell that combines its weights in each round."""

    def cell(w, state, x):
        h, c = state
        gates = x @ combined(w, 'x') + h @ combined(w, 'h')
        i, f, g, o = jnp.split(gates, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    def loss(w, x):
        zeros = jnp.zeros((len(x), x.shape[-1]), x.dtype)
        (h, _), _ = lax.scan(lambda s, x: cell(w, s, x), (zeros, zeros), x.swapaxes(0, 1), reverse=reverse)
        return jnp.mean(h**2)

    return jax.grad(loss)


def arguments(size=8, rows=16, length=6, dtype='float32'):
    random = np.random.default_rng(0)
    names = [part + gate for part in 'xh' for gate in GATES]
    w = {name: random.uniform(-0.5, 0.5, (size, size)).astype(dtype) for name in names}
    return w, random.uniform(-1, 1, (rows, length, size)).astype(dtype)


def equations_of_last_loop(jaxpr):
    *_, loop = [each for each in equations(jaxpr) if each.primitive.name == 'scan']
    return len(opened(loop.params['jaxpr']).eqns)


@pytest.mark.parametrize('combined', [concatenated, stacked])
@pytest.mark.parametrize('reverse', [False, True])
def test_the_same_sums(combined, reverse):
    args = arguments()
    jaxpr = jax.make_jaxpr(step(combined, reverse))(*args)
    changed = with_sums_behind_loops(jaxpr)
    assert equations_of_last_loop(changed) < equations_of_last_loop(jaxpr)
    leaves = jax.tree.leaves(args)
    with jax.default_matmul_precision('highest'):
        found, expected = (run(each, leaves) for each in (changed, jaxpr))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_on_devices():
    helper = MeshShardingHelper([8], ['fsdp'])
    args = arguments()
    for combined in (concatenated, stacked, scaled):
        fun = step(combined)
        with jax.default_matmul_precision('highest'):
            found = helper.sjit(fun, in_shardings=(RULE, P('fsdp')), out_shardings=RULE)(*args)
            expected = jax.jit(fun)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


def kept(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args)
    assert with_sums_behind_loops(jaxpr) is jaxpr


def test_other_loops_are_left_alone():
    w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
    start = jnp.zeros((4, 4))
    # Nothing is taken apart; the sum is read; it grows otherwise; what is added is not linear in products.
    kept(lambda: lax.scan(lambda c, _: (c + x @ w, None), x, None, length=3)[0])
    kept(lambda: lax.scan(lambda c, _: (c + (c @ w)[:, :8] * 2, None), x, None, length=3)[0])
    kept(lambda: lax.scan(lambda c, y: (c * 2 + (y @ w)[:, :4], None), start, x[None])[0])
    kept(lambda: lax.scan(lambda c, y: (c + jnp.tanh(y @ w)[:, :4], None), start, x[None])[0])
    # Each round gives the sum so far.
    kept(lambda: lax.scan(lambda c, y: ((t := c + (y @ w)[:, :8] * 3), t), x, x[None]))
    # A part alone: the whole sum would be more.
    kept(lambda: lax.scan(lambda c, y: (c + (y @ w)[:, :4], None), start, x[None])[0])

    def printed(c, y):
        jax.debug.print('{}', y[0, 0])
        both = y @ w
        return (c[0] + both[:, :4], c[1] + both[:, 4:]), None

    kept(lambda: lax.scan(printed, (start, start), x[None])[0])


def test_sums_are_added_up_in_the_dtype_of_the_loop():
    """A product in bfloat16 that is cast before it is added is not added up in bfloat16."""
    w, x = jnp.ones((8, 8), 'bfloat16'), jnp.ones((5, 4, 8), 'bfloat16')
    start = jnp.zeros((4, 4))

    def both(c, y):
        z = y @ w
        return (c[0] + z[:, :4].astype('float32'), c[1] + z[:, 4:].astype('float32')), None

    def cast(c, y):
        z = (y @ w).astype('float32')
        return (c[0] + z[:, :4], c[1] + z[:, 4:]), None

    kept(lambda: lax.scan(both, (start, start), x)[0])
    changed = with_sums_behind_loops(jax.make_jaxpr(lambda: lax.scan(cast, (start, start), x)[0])())
    [loop] = [each for each in equations(changed) if each.primitive.name == 'scan']
    assert [var.aval.dtype for var in loop.outvars] == [jnp.float32]


@pytest.mark.skipif(not importlib.util.find_spec('libtpu'), reason='compiles for TPUs')
@pytest.mark.parametrize('combined', [concatenated, stacked])
def test_the_compiler_for_tpus_adds_them_up_once(combined):
    helper = MeshShardingHelper.from_topology('v5p:2x2x2', [-1], ['fsdp'])
    args = arguments(size=128, rows=64, length=16)
    plan = helper.plan(
        helper.sjit(step(combined), in_shardings=(RULE, P('fsdp')), out_shardings=RULE), *args, quick=True
    )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(args[0]))
    assert sum(row.count * row.bytes for row in plan.collectives) < 3 * size


@pytest.mark.parametrize('dtype', ['int32', 'uint32'])
def test_integers_are_divided_in_each_round(dtype):
    """A sum of what is left of a division is not what is left of the sum."""

    def fun(x):
        return lax.scan(lambda c, r: (c + lax.div(lax.dot(r.T, r), jnp.array(3, dtype)), None), 0 * x[0], x)[
            0
        ]

    x = np.random.default_rng(0).integers(0, 9, (5, 4, 4)).astype(dtype)
    np.testing.assert_array_equal(run(with_sums_behind_loops(jax.make_jaxpr(fun)(x)), [x])[0], fun(x))


def test_what_is_divided_so_that_its_sum_does_not_overflow():
    """A mean of gradients over rounds, in half precision: their sum has no place in it."""

    def fun(x):
        return lax.scan(lambda c, r: (c + lax.dot(r.T, r) / len(x), None), 0 * x[0], x)[0]

    x = np.full((16, 4, 4), 50, 'float16')  # 10,000 in each round
    np.testing.assert_array_equal(run(with_sums_behind_loops(jax.make_jaxpr(fun)(x)), [x])[0], fun(x))


def test_a_call_that_gives_both_what_changes_and_what_does_not():
    """It cannot run behind the loop, where there is no row of a round."""
    w, x = jnp.ones((8, 8)), jnp.arange(96.0).reshape(3, 4, 8)

    def fun(c, y):
        row, scale = jax.jit(lambda y: (y * 2, jnp.cos(w[0, 0])))(y)
        both = row @ w
        return (c[0] + both[:, :4] * scale, c[1] + both[:, 4:] * scale), None

    start = jnp.zeros((4, 4))
    kept(lambda: lax.scan(fun, (start, start), x)[0])
