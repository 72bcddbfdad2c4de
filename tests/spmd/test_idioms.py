"""Common idioms of JAX models give the values and gradients of one device.

Many small programs form one step, so that they are compiled together.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax._jax.equations import all_equations
from scalax.custom_op import sharded_op
from tests.support.partitioned import FSDP, TP, assert_equal, partitioned

pytestmark = pytest.mark.medium

W = np.random.default_rng(1).normal(size=(16, 16)).astype('float32') / 4
X = np.random.default_rng(0).normal(size=(32, 16)).astype('float32')
EXAMPLES = jnp.arange(32)


def images(x):
    return x.reshape(32, 4, 4, 1)


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID')


def convolved(x, kernel):
    y = lax.conv_general_dilated(
        *(x[None], kernel, (1, 1), 'SAME'),
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        feature_group_count=x.shape[-1],
    )
    return jnp.tanh(y).sum()


def adapted(x, kernel):
    return convolved(x, kernel - 0.1 * jax.grad(convolved, 1)(x, kernel))


def clipped(gradients):
    norms = jnp.sqrt((gradients**2).sum((1, 2, 3, 4), keepdims=True))
    return (gradients / jnp.maximum(1.0, norms)).sum(0)


@jax.custom_batching.custom_vmap
def own_vmap(x):
    return jnp.sort(x, -1)


@own_vmap.def_vmap
def _(size, batched, x):
    return jnp.sort(x, -1), True


@sharded_op('b c, -> b', reduction_factors=('c',))
def scaled_norm(ctx, x, scale):
    return scale * jnp.sqrt(ctx.psum((x * x).sum(-1), 'c'))


def tokens(x, count=16):
    return jnp.clip(jnp.abs(x * 4).astype(int), 0, count - 1)


# Programs of a weight and examples that exchange no examples.
APART = {
    # Loops and branches
    'associative scan': lambda w, x: lax.associative_scan(jnp.add, x @ w, axis=1),
    'branch of each example': lambda w, x: jax.vmap(lambda r: lax.cond(r[0] > 0, lambda: r @ w, lambda: r))(
        x
    ),
    # Matrices and vectors of each example
    'solve': lambda w, x: jnp.linalg.solve(x.reshape(32, 4, 4) + 4 * jnp.eye(4), x[:, :4, None]),
    'solve with a weight': lambda w, x: jnp.linalg.solve(w.T @ w + jnp.eye(16), x.T).T,
    'custom_root': lambda w, x: lax.custom_root(
        lambda y: y**3 - jnp.tanh(x @ w),
        x * 0 + 1,
        lambda f, y: lax.fori_loop(0, 5, lambda _, y: y - 0.1 * f(y), y),
        lambda g, y: y / g(jnp.ones_like(y)),
    ),
    # Kernels of each example: clipped gradients, and gradient steps
    'clipped gradient of each kernel': lambda w, x: clipped(
        jax.vmap(jax.grad(convolved, 1), (0, None))(images(x), w[:3, :3, None, None])
    ),
    'adapted kernel': lambda w, x: jax.vmap(adapted, (0, None))(images(x), w[:3, :3, None, None]),
    # Order
    'interpolation': lambda w, x: jnp.interp(x @ w, jnp.linspace(-2, 2, 16), w[0]),
    # Look-ups and updates
    'element of each example': lambda w, x: (x @ w)[EXAMPLES, EXAMPLES % 16],
    'update of each example': lambda w, x: (x @ w).at[EXAMPLES, EXAMPLES % 16].set(9.0),
    'maxima of segments': lambda w, x: (
        jax.ops.segment_max(x @ w, EXAMPLES % 5, 5),
        jax.ops.segment_min(x @ w, EXAMPLES % 5, 5),
    ),
    # Operations of users
    'sharded op': lambda w, x: scaled_norm(x @ w, 3.0),
}
# More such programs, which other tests cover too.
MORE = {
    'transposed convolution': lambda w, x: lax.conv_transpose(
        images(x), w[:3, :3, None, None], (2, 2), 'SAME'
    ),
    'sort of pairs': lambda w, x: lax.sort((jnp.round(x), x @ w), dimension=1, num_keys=1, is_stable=True),
    'chosen by rank': lambda w, x: jnp.take_along_axis(x @ w, jnp.argsort(x, 1), 1),
    'segment sums': lambda w, x: jnp.zeros((10, 16)).at[EXAMPLES % 10].add(x @ w),
    'rows in groups': lambda w, x: lax.ragged_dot(x, jnp.stack([w, 2 * w, 3 * w]), jnp.array([10, 2, 20])),
    'tile of features': lambda w, x: jnp.tile(x @ w, (1, 3)),
    'special functions': lambda w, x: jax.scipy.special.erfinv(jnp.tanh(x @ w)),
    'clipped gradient': lambda w, x: jax.tree.map(
        lambda g: g / jnp.maximum(1.0, jnp.linalg.norm(g)), jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
    ),
    'gradient of each example': lambda w, x: jax.vmap(
        jax.grad(lambda w, r: jnp.tanh(r @ w).sum()), (None, 0)
    )(w, x),
    'Jacobian of a sum': lambda w, x: jax.jacrev(lambda w: jnp.tanh(x @ w).sum(0))(w).sum((0, 1)),
    'clipped gradient of each depthwise kernel': lambda w, x: clipped(
        jax.vmap(jax.grad(convolved, 1), (0, None))(x.reshape(32, 2, 2, 4), w[:3, :3, None, :4])
    ),
    'tangents': lambda w, x: jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (x,)),
    'complex': lambda w, x: jnp.real((x + 1j * x) @ (w + 0j)),
    'resize': lambda w, x: jax.image.resize(images(x), (32, 8, 8, 1), 'bilinear'),
    'triangles of a weight': lambda w, x: (
        jax.scipy.linalg.solve_triangular(w + 2 * jnp.eye(16), x.T).T,
        lax.linalg.triangular_solve(w + 2 * jnp.eye(16), x, left_side=False),
    ),
}
# Programs with integers for results, or without a gradient.
APART_WITHOUT_GRADIENT = {
    # Devices run different numbers of iterations, so it is not partitioned on a mesh with other axes.
    'loop of each example': lambda w, x: jax.vmap(
        lambda r: lax.while_loop(lambda c: (c**2).sum() < 9, lambda c: c * 1.5 + 0.1, r)
    )(x @ w),
    'custom_vmap': lambda w, x: own_vmap(x @ w) + jax.vmap(own_vmap)(jnp.tanh(x @ w)),
    'search': lambda w, x: jnp.searchsorted(jnp.sort(w[0]), x @ w),
}
WITHOUT_GRADIENT = {
    'integers': lambda w, x: jnp.round(x * 8).astype('int32') @ jnp.round(w * 8).astype('int32'),
    'bits': lambda w, x: (lax.bitcast_convert_type(x, jnp.int32) & 255, lax.bitcast_convert_type(x, 'uint8')),
    'histogram': lambda w, x: jnp.histogram(x @ w, bins=8)[0],
    'counts': lambda w, x: jnp.bincount(tokens(x @ w).ravel(), length=20),
    'draw': lambda w, x: jax.random.categorical(jax.random.key(1), x @ w),
    'loop until all are large': lambda w, x: lax.while_loop(
        lambda c: jnp.abs(c).sum() < 1e3, lambda c: 1.3 * c + c @ w, x
    ),
    'unused': lambda w, x: (w * 2, 3.0),
}
# Programs that mix examples, and the operations that gather or move them.
MIXED = {
    'one example': (lambda w, x: jax.hessian(lambda r: jnp.tanh(r @ w).sum())(x[0]), {'slice'}),
    'weight that an example chooses': (
        lambda w, x: jnp.tanh(x @ lax.cond(x[0, 0] > 0, lambda: w, lambda: 2 * w)),
        {'slice'},
    ),
    'weight that is a sum over examples': (
        lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c @ (x.T @ x @ w) / 32), None), x, None, length=2)[0],
        set(),
    ),
    'scan over examples': (lambda w, x: lax.associative_scan(jnp.add, x @ w, axis=0), {'slice'}),
    'quantile of examples': (lambda w, x: jnp.quantile(x @ w, 0.3, axis=0), {'sort'}),
    'top_k of examples': (lambda w, x: lax.top_k((x @ w).T, 3), {'top_k'}),
    'FFT of examples': (lambda w, x: jnp.abs(jnp.fft.fft(x @ w, axis=0)), {'fft'}),
    'windows of examples': (
        lambda w, x: lax.reduce_window(x @ w, 0.0, lax.add, (2, 1), (1, 1), 'SAME'),
        {'reduce_window_sum'},
    ),
    'convolution in groups of examples': (
        lambda w, x: lax.conv_general_dilated(
            *(x.reshape(32, 4, 2, 2), w[:8, :16].reshape(8, 4, 2, 2), (1, 1), 'SAME'), batch_group_count=2
        ),
        {'conv_general_dilated'},
    ),
    'examples as space': (
        lambda w, x: lax.conv(x.T[None], w[:, :, None], (1,), 'SAME')[0].T,
        {'conv_general_dilated'},
    ),
    'padded': (lambda w, x: jnp.pad(x @ w, ((2, 6), (0, 0))), {'pad'}),
    'tiles': (lambda w, x: jnp.tile(x @ w, (2, 3)), {'tile'}),
    'concatenated examples': (lambda w, x: jnp.concatenate([x @ w, x], 0), {'concatenate'}),
    'permutation': (lambda w, x: jax.random.permutation(jax.random.key(1), x @ w), {'gather'}),
    'matrices of examples': (lambda w, x: jnp.triu(x.reshape(2, 16, 16) @ w), {'reshape'}),
    'examples as time': (
        lambda w, x: lax.scan(
            lambda c, r: (jnp.tanh(c @ w + r), c), jnp.zeros((4, 16)), x.reshape(8, 4, 16), reverse=True
        ),
        {'scan'},
    ),
    'places in a queue': (
        lambda w, x: jnp.zeros((16, 16)).at[jnp.cumsum(x[:, 0] > 0)].set(x @ w, mode='drop'),
        {'cumsum', 'scatter'},
    ),
}


def total(fun, w, x):
    """Returns a weighted sum of the floating-point results of a function, and the results."""
    results = fun(w, x)
    floats = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(results)) if leaf.dtype == jnp.float32]
    weights = [np.linspace(0.5, 1, leaf.size, dtype='f').reshape(leaf.shape) for leaf in floats]
    return sum((leaf * weight).sum() for leaf, weight in zip(floats, weights, strict=True)), results


def together(programs, others=()):
    """Combines the values and gradients of programs, and the values of others, by name."""

    def run(w, x):
        results = {
            name: jax.value_and_grad(functools.partial(total, fun), (0, 1), has_aux=True)(w, x)
            for name, fun in programs.items()
        }
        return results | {name: fun(w, x) for name, fun in dict(others).items()}

    return run


def exchanged(step):
    """Returns the operations for which devices exchange examples, and their lines."""
    return {(row.primitive, row.line) for row in step.collective_rows if row.what == 'examples'}


def check(fun, mesh):
    """Returns the step of a function whose values match one device, by program."""
    with jax.default_matmul_precision('highest'):
        step, run = partitioned(fun, W, X, mesh)
        expected = jax.jit(fun)(W, X)
        results = jax.tree.unflatten(jax.tree.structure(expected), run())
    different = []
    for name, values in expected.items():
        try:
            assert_equal(jax.tree.leaves(results[name]), values, 3e-5)
        except AssertionError as error:
            different.append(f'{name}: {error}')
    assert not different, '\n'.join(different)
    return step


def test_programs_of_independent_examples_exchange_no_examples():
    assert exchanged(check(together(APART, APART_WITHOUT_GRADIENT), FSDP)) == set()


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [FSDP, TP], ids=['fsdp', 'tp'])
def test_more_programs_exchange_no_examples(mesh):
    others = {} if mesh is FSDP else APART
    assert exchanged(check(together(MORE | others, WITHOUT_GRADIENT), mesh)) == set()


def test_programs_that_mix_examples_have_the_values_of_one_device():
    check(together({}, {name: fun for name, (fun, _) in MIXED.items()}), FSDP)


@pytest.mark.parametrize('name', MIXED)
def test_operations_that_mix_examples_are_reported(name):
    fun, operations = MIXED[name]
    step, _ = partitioned(fun, W, X)
    assert {primitive for primitive, _ in exchanged(step)} == operations


def pairs(w, x):
    """The loss of preferred and other answers, which the model takes in one batch, as DPO does."""
    scores = jnp.tanh(jnp.concatenate([x, x + 1]) @ w).sum(1)
    return -jax.nn.log_sigmoid(scores[:32] - scores[32:])


# Programs that move examples, and the rows of their matmuls on each of 8 devices.
REARRANGED = {
    'pairs': (pairs, {8}),
    'two views': (lambda w, x: jnp.split(jnp.concatenate([x, x + 1]) @ w, 2), {8}),
    'halves': (lambda w, x: (x[:16] - x[16:]) @ w, {2}),
    'reversed': (lambda w, x: (x + x[::-1]) @ w, {4}),
    'padded': (lambda w, x: jnp.pad(x, ((8, 0), (0, 0))) @ w, {5}),
    'padded unevenly': (lambda w, x: jnp.pad(x, ((1, 0), (0, 0))) @ w, {33}),
}


def test_rearranged_examples_have_the_values_of_one_device():
    check(together({name: fun for name, (fun, _) in REARRANGED.items()}), FSDP)


@pytest.mark.parametrize('name', REARRANGED)
def test_devices_compute_their_blocks_of_rearranged_examples(name):
    fun, rows = REARRANGED[name]
    step, _ = partitioned(fun, W, X)
    matmuls = [x for x in all_equations(step.jaxpr) if x.primitive.name == 'dot_general']
    assert {x.outvars[0].aval.shape[0] for x in matmuls} == rows
