"""Where the rows of a batch are in the results of each primitive."""

import gc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from scalax._follow.follow import CHOICES
from scalax._jax.equations import WITH_JAXPRS
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dims import RULES
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.following import constraints, following, like, result_dims

X, W = like(16, 24), like(24, 24)
KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 16))
INDICES = like(16, 3, dtype=jnp.int32)
IMAGES, KERNEL = like(16, 12, 12, 3), like(3, 3, 3, 8)


def conv(x, k):
    return lax.conv_general_dilated(x, k, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))


def of(fun, *args, rows=0):
    """A function of one argument with rows and of others without."""
    return fun, args, [rows, *[None] * (len(args) - 1)]


CASES = {
    # name: (function, arguments, dimensions of their rows), those of the results
    'elementwise': (of(lambda x: jnp.exp(x) * 2 + 1, X), [0]),
    'elementwise with other operands': (of(lambda x, w: x + w[:16], X, W), [0]),
    'compare and select': (of(lambda x: jnp.where(x > 0, x, 0.0), X), [0]),
    'clamp': (of(lambda x: jnp.clip(x, 0, 1), X), [0]),
    'cast': (of(lambda x: x.astype(jnp.bfloat16), X), [0]),
    'bits of the same size': (of(lambda x: lax.bitcast_convert_type(x, jnp.int32), X), [0]),
    'smaller bits': (of(lambda x: lax.bitcast_convert_type(x, jnp.int16), X), [0]),
    'larger bits': (
        of(lambda x: lax.bitcast_convert_type(x, jnp.int32), like(16, 8, 2, dtype=jnp.int16)),
        [0],
    ),
    'broadcast': (of(lambda x: jnp.broadcast_to(x[None], (5, 16, 24)), X), [1]),
    'a dimension more': (of(lambda x: x[:, None, :], X), [0]),
    'squeeze': (of(lambda x: x.squeeze(1), like(16, 1, 4)), [0]),
    'transpose': (of(lambda x: x.T, X), [1]),
    'merge, rows first': (of(lambda x: x.reshape(-1), X), [0]),
    'merge, rows last': (of(lambda x: x.reshape(-1), X, rows=1), [0]),
    'split, the first part divides': (of(lambda x: x.reshape(8, 2, 24), X), [0]),
    'split, the second part divides': (of(lambda x: x.reshape(2, 8, 24), X), [1]),
    'split, no part divides': (of(lambda x: x.reshape(4, 4, 24), X), [None]),
    'merge and split again': (of(lambda x: jnp.tanh(x.reshape(-1)).reshape(16, 4, 6), X), [0]),
    'reshape of other dimensions': (of(lambda x: x.reshape(16, 4, 6), X), [0]),
    'reshape, dimensions of one': (of(lambda x: x.reshape(1, 16, 1, 24), X), [1]),
    'reshape of nothing': (of(lambda x: x.reshape(0, 3), like(16, 0)), [None]),
    'dot, free on the left': (of(lambda x, w: x @ w, X, W), [0]),
    'dot, free on the right': (of(lambda x, w: w @ x.T, X, W), [1]),
    'dot, batch': (of(lambda x, y: jnp.einsum('bij,bjk->bik', x, y), like(16, 3, 4), like(16, 4, 5)), [0]),
    'dot, contracted': (of(lambda x, y: x.T @ y, X, X), [None]),
    'batch x batch': ((lambda x, y: x @ y.T, (X, X), [0, 0]), [0]),
    'sum over others': (of(lambda x: x.sum(1), X), [0]),
    'sum over rows': (of(lambda x: x.sum(0), X), [None]),
    'max, keepdims': (of(lambda x: x.max(1, keepdims=True), X), [0]),
    'argmax': (of(lambda x: x.argmax(1), X), [0]),
    'logsumexp': (of(lambda x: jax.nn.logsumexp(x, axis=1), X), [0]),
    'reduce with any function': (
        of(lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: jnp.sin(a) + b, (1,)), X),
        [0],
    ),
    'cumsum': (of(lambda x: jnp.cumsum(x, 1), X), [0]),
    'cumsum over rows': (of(lambda x: jnp.cumsum(x, 0), X), [0]),
    'sort of others': (of(lambda x: jnp.sort(x, 1), X), [0]),
    'sort of rows': (of(lambda x: jnp.sort(x, 0), X), [0]),
    'argsort': (of(lambda x: jnp.argsort(x, 1), X), [0]),
    'sort of several': (of(lambda x, y: lax.sort((x, y), num_keys=1), X, X), [0, 0]),
    'top_k': (of(lambda x: lax.top_k(x, 3), X), [0, 0]),
    'top_k over rows': (of(lambda x: lax.top_k(x.T, 3), X), [None, None]),
    'pad': (of(lambda x: jnp.pad(x, ((0, 0), (1, 1))), X), [0]),
    'slice of others': (of(lambda x: x[:, 1:5], X), [0]),
    'slice of rows that divides': (of(lambda x: x[:8], X), [0]),
    'slice of rows that does not': (of(lambda x: x[:5], X), [None]),
    'one row': (of(lambda x: x[3], X), [None]),
    'one column': (of(lambda x: x[:, 3], X), [0]),
    'dynamic slice': (of(lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, 1), X, like(dtype=jnp.int32)), [0]),
    'dynamic update': (
        of(
            lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 1), X, like(16, 2), like(dtype=jnp.int32)
        ),
        [0],
    ),
    'rows written into a cache': (
        (
            lambda c, u: lax.dynamic_update_slice_in_dim(c, u, 3, 1),
            (like(16, 32, 4), like(16, 1, 4)),
            [None, 0],
        ),
        [0],
    ),
    'concatenate': (of(lambda x, y: jnp.concatenate([x, y], 1), X, X), [0]),
    'stack before': (of(lambda x, y: jnp.stack([x, y]), X, X), [1]),
    'stack behind': (of(lambda x, y: jnp.stack([x, y], -1), X, X), [0]),
    'unstack': (of(lambda x: jnp.unstack(x, axis=1), like(16, 2)), [0, 0]),
    'split in parts': (of(lambda x: jnp.split(x, 2, axis=1), X), [0, 0]),
    'reverse': (of(lambda x: x[:, ::-1], X), [0]),
    'lookup': (of(lambda i, table: table[i], INDICES, W), [0]),
    'lookup from rows': (of(lambda x, i: x[:, i], X, like(5, dtype=jnp.int32)), [0]),
    'take along': (of(lambda x, i: jnp.take_along_axis(x, i, 1), X, INDICES), [0]),
    'lookup of rows': (of(lambda x, i: x[i], X, like(5, dtype=jnp.int32)), [None]),
    'scatter into rows': (of(lambda x: x.at[:, 2].set(0.0), X), [0]),
    'scatter of rows': (
        of(lambda x, t, i: t.at[i].add(x), X, W, like(16, dtype=jnp.int32)),
        [0],
    ),
    'scatter that subtracts': (of(lambda x: x.at[:, 2].subtract(1.0), X), [0]),
    'scatter, batched': (of(jax.vmap(lambda x, i: x.at[i].add(1.0)), X, INDICES), [0]),
    'convolution': (of(conv, IMAGES, KERNEL), [0]),
    'pooling': (
        of(lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID'), IMAGES),
        [0],
    ),
    'gradient of pooling': (
        of(
            jax.grad(
                lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID').sum()
            ),
            IMAGES,
        ),
        [0],
    ),
    'fft': (of(lambda x: jnp.fft.fft(x).real, X), [0]),
    'fft over rows': (of(lambda x: jnp.fft.fft(x, axis=0).real, X), [None]),
    'eigh': (of(jnp.linalg.eigh, like(16, 4, 4)), [0, 0]),
    'cholesky': (of(jnp.linalg.cholesky, like(16, 4, 4)), [0]),
    'triangular solve': (
        of(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), like(16, 4, 4), like(16, 4, 2)),
        [0],
    ),
    'a stack that ends before the rows': (of(jnp.linalg.cholesky, like(3, 16, 16), rows=1), [None]),
    'random bits': (of(jax.vmap(lambda k: jax.random.bits(k, (3,))), KEYS), [0]),
    'split keys': (of(jax.vmap(lambda k: jax.random.split(k, 3)), KEYS), [0]),
    'folded keys': (of(jax.vmap(jax.random.fold_in), KEYS, like(16, dtype=jnp.uint32)), [0]),
    'key data and back': (of(lambda k: jax.random.wrap_key_data(jax.random.key_data(k)), KEYS), [0]),
    'dropout': (of(lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), X), [0]),
    'barrier': (of(lambda x, y: lax.optimization_barrier((x, y)), X, X), [0, None]),
    'jit': (of(lambda x, w: jax.jit(jnp.matmul)(x, w), X, W), [0]),
    'checkpoint': (of(lambda x, w: jax.checkpoint(jnp.matmul)(x, w), X, W), [0]),
    'custom_jvp': (of(lambda x: jax.nn.relu(x), X), [0]),
    'cond': (of(lambda x, w: lax.cond(w[0, 0] > 0, lambda: x @ w, lambda: x), X, W), [0]),
    'cond, rows in one branch': (
        of(lambda x, w: lax.cond(w[0, 0] > 0, lambda: x @ w, lambda: jnp.zeros((16, 24))), X, W),
        [0],
    ),
    'scan': (of(lambda x, w: lax.scan(lambda c, _: (c @ w, c.sum(1)), x, None, length=3), X, W), [0, 1]),
    'scan that runs backwards': (
        of(lambda x, w: lax.scan(lambda c, _: (c @ w, c), x, None, 3, reverse=True, unroll=3), X, W),
        [0, 1],
    ),
    'scan over the rows': (of(lambda x: lax.scan(lambda c, r: (c, r * 2), 0.0, x), X), [None, None]),
    'scan over time': (of(lambda x: lax.scan(lambda c, r: (c, r * 2), 0.0, x.T), X), [None, 1]),
    'a carry that begins as zeros': (
        of(lambda x: lax.scan(lambda c, r: (c + r, None), jnp.zeros(16), x.T)[0], X),
        [0],
    ),
    'a carry whose rows are lost': (
        of(lambda x, w: lax.scan(lambda c, _: (w[:16], None), x, None, length=2)[0], X, W),
        [None],
    ),
    'while': (of(lambda x, w: lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ w, x), X, W), [0]),
    'a primitive without a rule': (
        of(lambda x: lax.reduce_precision(lax.rng_uniform(x[0, 0], 1.0, (16,)), 5, 5), X),
        [None],
    ),
    'no equations': (of(lambda x, w: (w, x, x), X, W), [None, 0, 0]),
    'results without rows': (of(lambda x: (jnp.ones(8), 1.0, x.shape[0]), X), [None, None, None]),
}


@pytest.mark.medium
@pytest.mark.parametrize('name', CASES)
def test_where_the_rows_are(name):
    (fun, args, dims), expected = CASES[name]
    followed = following(fun, args, dims)
    assert result_dims(followed) == expected
    for trail, var in zip(followed.trails, followed.jaxpr.jaxpr.outvars, strict=True):
        assert not trail or len(trail) == len(var.aval.shape)


def test_choices_are_primitives_with_rules():
    assert set(RULES) >= CHOICES


def test_primitives_of_jax_are_known_as_such():
    """Each that JAX has made when it is imported, and that a table names."""
    others = {'eval_jaxpr'} if jax.__version_info__ < (0, 11) else set()  # which no jaxpr has there
    unknown = {
        each.name
        for each in gc.get_objects()
        if isinstance(each, Primitive)
        and each.name in TABLED
        and each not in OTHERS
        and primitive_name(SimpleNamespace(primitive=each)) != each.name
    }
    assert unknown <= others


def other(name):
    """A primitive of another library, named like one of JAX, that takes the first of its operands."""
    primitive = Primitive(name)
    OTHERS.append(primitive)
    primitive.def_impl(lambda *operands: operands[0])
    primitive.def_abstract_eval(lambda *operands: operands[0])
    mlir.register_lowering(primitive, lambda context, *operands: [operands[0]])
    return primitive


OTHERS = []
TABLED = sorted({*RULES, *WITH_JAXPRS, 'pallas_call'})


@pytest.mark.medium
@pytest.mark.parametrize('name', TABLED)
def test_primitives_of_others_with_names_of_jax_lose_the_rows(name):
    def fun(x, w):
        return other(name).bind(x @ w, w) @ w

    followed = following(fun, (X, W), [0, None])
    assert result_dims(followed) == [None]
    assert [(each.equation.primitive.name, each.aval.shape) for each in followed.lost] == [(name, (16, 24))]
    assert [each.spec for each in followed.kept] == [P('fsdp', None)]


def test_primitives_of_others_run():
    helper = MeshShardingHelper([8], ['fsdp'])

    def fun(w, x):
        return other('stack').bind(jnp.tanh(x @ w)) @ w

    w, x = np.eye(16, dtype=np.float32), np.linspace(-1, 1, 1024, dtype=np.float32).reshape(64, 16)
    step = helper.sjit(fun, in_shardings=(P(None, 'fsdp'), P('fsdp')), batch_argnums=1)
    np.testing.assert_allclose(step(w, x), np.tanh(x), rtol=1e-6)
    assert [each.primitive for each in step.followed(w, x).lost] == ['stack']


def test_an_argument_without_rows_changes_nothing():
    followed = following(lambda x, w: jnp.tanh(x @ w), (X, W), [None, None])
    assert not constraints(followed.jaxpr)
    assert not followed.kept


def test_products_are_kept():
    followed = following(lambda x, w: jnp.tanh(x @ w) @ w, (X, W), [0, None])
    assert [kept.spec for kept in followed.kept] == [P('fsdp', None)] * 2
    assert len(constraints(followed.jaxpr)) == 2


def test_an_unknown_primitive_is_told():
    followed = following(
        lambda x: jax.pure_callback(np.asarray, like(16, 24), x) + jnp.fft.fft(x, axis=0).real, (X,), [0]
    )
    assert [lost.equation.primitive.name for lost in followed.lost] == ['pure_callback', 'fft']


def test_rows_that_no_longer_divide_are_told():
    followed = following(lambda x: jnp.tanh(x[:-1]) + 1, (X,), [0])
    assert [lost.equation.primitive.name for lost in followed.lost] == ['slice']


@pytest.mark.parametrize(('repeats', 'expected'), [((1, 3), [0]), ((3, 1), [None]), ((2, 1, 1), [1])])
def test_tiles(repeats, expected):
    assert result_dims(following(lambda x: jnp.tile(x, repeats), (X,), [0])) == expected


@pytest.mark.parametrize(
    ('x', 'w', 'expected'),
    [
        (P('fsdp'), P(None, 'tp'), P('fsdp', P.UNCONSTRAINED, 'tp')),
        # What is split over the axis of the weight is gathered for the product.
        (P('fsdp', 'tp'), P(None, 'tp'), P('fsdp', P.UNCONSTRAINED, 'tp')),
        (P('fsdp', 'tp'), P('tp'), P('fsdp', P.UNCONSTRAINED, None)),
        (P('fsdp', 'tp'), P(), P('fsdp', 'tp', None)),
    ],
)
def test_columns_are_where_the_weight_has_them(x, w, expected):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    step = helper.sjit(
        lambda w, x: jax.lax.with_sharding_constraint(x, NamedSharding(helper.mesh, x_spec)) @ w,
        in_shardings=(w, P('fsdp')),
        batch_argnums=1,
    )
    x_spec = x
    [kept] = step.followed(like(16, 32), like(16, 8, 16)).kept
    assert kept.spec == expected
