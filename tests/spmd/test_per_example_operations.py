"""Programs of independent examples: no example moves, and values and gradients match one device.

Many programs are compiled together; the collectives of each follow from its own jaxpr.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import FSDP, HSDP, P, assert_equal, partitioned, state_spec, with_gradients

pytestmark = pytest.mark.medium

EXAMPLES, WIDTH, HIDDEN, LAYERS, TIME = 16, 8, 24, 3, 3
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape) / 3


W = {
    'square': normal(WIDTH, WIDTH),
    'gate': normal(WIDTH, HIDDEN),
    'up': normal(WIDTH, HIDDEN),
    'down': normal(HIDDEN, WIDTH),
    'layers': normal(LAYERS, WIDTH, WIDTH),
    'table': normal(EXAMPLES, WIDTH),
}
X = normal(EXAMPLES, TIME, WIDTH) * 4


def of_square(fun):
    """A program of a matrix and of vectors."""
    return lambda w, x: fun(w['square'], x[:, 0])


def of_layers(fun):
    """A program of a stack of matrices and of vectors."""
    return lambda w, x: fun(w['layers'], x[:, 0])


def layers(w, row):
    return jnp.tanh(jnp.tanh(row @ w) @ w.T)


def branched(w, row):
    return lax.cond(row[0] > 0, lambda r: layers(w, r), lambda r: r, row)


def mapped(fun):
    """A loop over examples."""
    return of_square(lambda w, x: lax.map(functools.partial(fun, w), x))


def carried_examples(w, x):
    """Loops over examples inside another loop, whose carry contains the examples."""
    by_value = lax.fori_loop(0, 2, lambda _, x: lax.map(lambda row: layers(w, row), x), x)
    return by_value + lax.fori_loop(0, 2, lambda _, x: lax.map(lambda i: x[i] @ w, jnp.arange(EXAMPLES)), x)


def carried_keys(w, x):
    def add(carry, _):
        keys, x = carry
        noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,), x.dtype))(keys)
        return (jax.vmap(lambda key: jax.random.split(key)[0])(keys), x + noise @ w), None

    return lax.scan(add, (jax.random.split(jax.random.key(0), EXAMPLES), x), None, length=2)[0][1]


def unused(w, x):
    lax.scan(lambda c, _: (c @ w, c), x, None, length=2)
    lax.cond(w[0, 0] > 0, lambda: x @ w, lambda: x)
    return x


LOOPS = {
    'a loop in a loop': mapped(lambda w, row: lax.fori_loop(0, 3, lambda _, r: jnp.tanh(r @ w), row)),
    'one loop after another': of_square(
        lambda w, x: lax.map(lambda row: row @ w, lax.map(lambda row: layers(w, row), x))
    ),
    'a loop that carries examples': of_square(carried_examples),
    'a loop that carries keys': of_square(carried_keys),
    'an unused loop': of_square(unused),
    'a branch': mapped(branched),
    'a root': mapped(lambda w, r: lax.cond(r[0] > 0, lambda r: jnp.sqrt(r[0]) * (r @ w), jnp.sin, r)),
    'a switch': mapped(
        lambda w, r: lax.switch(jnp.argmax(r[:3]), [lambda r: r @ w, jnp.sin, lambda r: 1 / (2 + r)], r)
    ),
    'a branch in another': mapped(
        lambda w, r: lax.cond(r[0] > 0, lambda r: branched(w, r[::-1]), jnp.sin, r)
    ),
    'branches in a loop': mapped(
        lambda w, r: lax.fori_loop(
            0, 3, lambda i, c: lax.cond(r[i] > 0, lambda c: jnp.tanh(c @ w), lambda c: c * 2, c), r
        )
    ),
    'branches without operands': mapped(lambda w, r: lax.cond(r[0] > 0, lambda: 1.0, lambda: 2.0) * (r @ w)),
}


def recurrent(weight):
    """A recurrent cell whose weight is computed from a matrix."""

    def run(w, x):
        w = weight(w['square'])
        start = jnp.zeros((EXAMPLES, WIDTH), x.dtype)
        return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), start, x.swapaxes(0, 1))[0]

    return run


WEIGHTS = {
    'cast': recurrent(lambda w: w.astype('bfloat16').astype(w.dtype)),
    'product': recurrent(lambda w: jnp.tanh(w) @ w),
    'loop': recurrent(lambda w: lax.fori_loop(0, 2, lambda _, c: c @ w, w)),
    'branch': recurrent(lambda w: lax.cond(w[0, 0] > 0, lambda: w, lambda: 2 * w)),
    'a scan over weights': of_layers(lambda w, x: lax.scan(lambda c, w: (c @ w, None), x, w)[0]),
    'a scan back': of_layers(lambda w, x: lax.scan(lambda c, w: (c @ w, None), x, w, reverse=True)[0]),
    'weights one by one': of_layers(lambda w, x: x @ w[0] @ w[1] @ w[2]),
    'weights by index': of_layers(
        lambda w, x: lax.fori_loop(
            0, LAYERS, lambda i, c: c @ lax.dynamic_index_in_dim(w, i, keepdims=False), x
        )
    ),
    'transposed, in another dtype': of_layers(
        lambda w, x: lax.scan(lambda c, w: (c @ w.T.astype(x.dtype), None), x, w.astype('float32'))[0]
    ),
    'scaled': of_layers(lambda w, x: lax.scan(lambda c, w: (c @ (w * w[:1]), None), x, w)[0]),
    'remat of a loop': of_layers(
        lambda w, x: jax.checkpoint(lambda w: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0])(w)
    ),
    'a loop for each example': of_layers(
        lambda w, x: jax.vmap(lambda row: lax.scan(lambda c, w: (c @ w, None), row, w)[0])(x)
    ),
    'branches of weights': of_layers(
        lambda w, x: lax.cond(w[0, 0, 0] > 0, lambda: x @ w[0], lambda: x @ w[1])
    ),
}


def feed_forward(w, x):
    return (jax.nn.silu(x @ w['gate']) * (x @ w['up'])) @ w['down']


def between(fun):
    """Applies a function to the hidden features of a block."""
    return lambda w, x: fun(x[:, 0] @ w['up']) @ w['down']


def head(w, x):
    labels = jnp.arange(EXAMPLES) * 3 % EXAMPLES
    logits = jnp.tanh(w['table'][labels] + x[:, 0]) @ w['table'].T
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1)


def behind_no_rounds(w, x):
    return feed_forward(w, lax.scan(lambda c, _: (feed_forward(w, c), None), x, None, length=0)[0])


def constant_stack(w, x):
    zeros = lax.scan(lambda c, _: (c, jnp.zeros(HIDDEN)), 0, None, length=EXAMPLES)[1]
    return jnp.tanh(x[:, 0] @ w['up'] + zeros) @ w['down']


BLOCKS = {
    'a head': head,
    'a jit': lambda w, x: jax.jit(feed_forward)(w, x),
    'remat': lambda w, x: jax.checkpoint(feed_forward)(w, x),
    'a branch of a weight': lambda w, x: lax.cond(
        w['square'][0, 0] > 0, feed_forward, lambda w, x: 2 * feed_forward(w, x), w, x
    ),
    'vmap': lambda w, x: jax.vmap(lambda row: feed_forward(w, row))(x),
    'examples and time': lambda w, x: feed_forward(w, x.reshape(-1, WIDTH)).reshape(x.shape),
    'merged and split': between(lambda y: jnp.tanh(y.reshape(-1, HIDDEN // 4, 4)).reshape(-1, HIDDEN)),
    'no iterations': behind_no_rounds,
    'a stack of constants': constant_stack,
    'sums before': between(lambda y: jnp.cumsum(y, 1)),
    'parts': between(lambda y: jnp.concatenate([y[:, HIDDEN // 2 :], y[:, : HIDDEN // 2]], 1)),
    'sorted': between(lambda y: jnp.sort(y, 1)),
    'transformed': between(lambda y: jnp.fft.fft(y, axis=1).real),
}
GROUPS = {'loops': LOOPS, 'weights': WEIGHTS, 'blocks': BLOCKS}


# The number of weight gathers and gradient reductions of some programs and their gradients.
# Stacked layers are gathered layer by layer, in both passes.
COUNTS = {
    **dict.fromkeys(LOOPS, (1, 1)),
    'a loop that carries examples': (2, 1),  # for its loops, and for their gradients
    'an unused loop': (0, 0),
    'cast': (1, 1),
    'branch': (1, 1),
    **dict.fromkeys(
        ('a scan over weights', 'a scan back', 'weights by index', 'a loop for each example'), (6, 3)
    ),
    'weights one by one': (5, 3),  # the backward pass starts with the last one
    'transposed, in another dtype': (6, 3),
    'remat of a loop': (9, 3),
    'branches of weights': (4, 2),
    'a head': (1, 1),
    'a jit': (6, 3),
    'remat': (6, 3),
    'vmap': (5, 3),
    'examples and time': (5, 3),
    'no iterations': (3, 3),
    **dict.fromkeys(
        ('merged and split', 'a stack of constants', 'sums before', 'parts', 'sorted', 'transformed'), (3, 2)
    ),
}


@pytest.mark.parametrize('group', GROUPS)
def test_no_example_moves(group):
    """Nothing is compiled."""
    specs = [*[state_spec(leaf.shape) for leaf in jax.tree.leaves(W)], P('fsdp'), None]
    reasons, counts = {}, {}
    for name, fun in GROUPS[group].items():
        with jax.enable_x64(True):
            step, _ = partitioned(with_gradients(fun), W, X, result_specs=specs)
        reasons[name] = [row.reason for row in step.collective_rows if row.what == 'examples']
        kinds = collections.Counter[str]()
        for row in step.collective_rows:
            kinds[row.kind] += row.count
        counts[name] = kinds['all_gather'], kinds['reduce_scatter']
    assert reasons == {name: [] for name in reasons}
    counted = counts.keys() & COUNTS.keys()
    assert {name: counts[name] for name in counted} == {name: COUNTS[name] for name in counted}


@pytest.mark.parametrize('group', GROUPS)
@pytest.mark.parametrize('mesh', [FSDP, pytest.param(HSDP, marks=pytest.mark.slow)], ids=['fsdp', 'hsdp'])
def test_values_match_one_device(group, mesh):
    def run_all(w, x):
        return [with_gradients(fun)(w, x) for fun in GROUPS[group].values()]

    with jax.enable_x64(True):
        _, run = partitioned(run_all, W, X, mesh)
        assert_equal(run(), jax.jit(run_all)(W, X), 1e-9)


GAMMA = {
    'gamma': jax.random.gamma,
    'loggamma': jax.random.loggamma,
    'beta': lambda key, a: jax.random.beta(key, a, 2 * a),
    'dirichlet': jax.random.dirichlet,
    't': lambda key, a: jax.random.t(key, a, a.shape),
}


@pytest.mark.parametrize('mesh, names', [(FSDP, [*GAMMA]), (HSDP, ['gamma'])], ids=['FSDP', 'HSDP'])
def test_draws_of_gamma_distributions_are_those_of_one_device(mesh, names):
    def draw(w, x):
        return [GAMMA[name](jax.random.key(0), 1 + jnp.abs(x)) for name in names]

    step, run = partitioned(draw, W, X, mesh)
    assert not step.collectives
    for actual, expected in zip(run(), jax.jit(draw)(W, X), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_the_gradient_of_draws_of_a_gamma_distribution():
    def draw(w, x):
        return jax.random.gamma(jax.random.key(0), 1 + jnp.abs(x @ w['square']))

    step, run = partitioned(with_gradients(draw), W, X)
    assert not [row for row in step.collective_rows if row.what == 'examples']
    assert_equal(run(), jax.jit(with_gradients(draw))(W, X))


def test_draws_of_a_gamma_distribution_beside_another_axis():
    def draw(w, x):
        return jax.random.gamma(jax.random.key(0), 1 + jnp.abs(x))

    step, run = partitioned(draw, W, X, {'fsdp': 4, 'tp': 2})
    assert len(step.collectives) == 1
    np.testing.assert_array_equal(run()[0], jax.jit(draw)(W, X))
