"""What models are written with: idioms of JAX have the values of one device, and so have their gradients.

The trail goes through some of them, and is lost in others. Either way values are those of plain jax.jit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

RULE = FSDPShardingRule(min_fsdp_size=1)
MESHES = {
    'rows': (MeshShardingHelper([8], ['fsdp']), P('fsdp')),
    'rows and columns': (MeshShardingHelper([4, 2], ['fsdp', 'tp']), P('fsdp', 'tp')),
}
W = np.random.default_rng(1).normal(size=(16, 16)).astype('float32') / 4
X = np.random.default_rng(0).normal(size=(32, 16)).astype('float32')

# Of the weights and the rows.
IDIOMS = {
    'map': lambda w, x: lax.map(lambda r: jnp.tanh(r @ w), x),
    'map batch': lambda w, x: lax.map(lambda r: jnp.tanh(r @ w), x, batch_size=8),
    'map batch odd': lambda w, x: lax.map(lambda r: jnp.tanh(r @ w), x, batch_size=5),
    'assoc': lambda w, x: lax.associative_scan(jnp.add, x @ w, axis=1),
    'assoc rows': lambda w, x: lax.associative_scan(jnp.add, x @ w, axis=0),
    'vmap while': lambda w, x: jax.vmap(
        lambda r: lax.while_loop(lambda c: (c**2).sum() < 9, lambda c: c * 1.5 + 0.1, r)
    )(x @ w),
    'vmap cond': lambda w, x: jax.vmap(lambda r: lax.cond(r[0] > 0, lambda: r @ w, lambda: r))(x),
    'switch': lambda w, x: lax.switch((x[0, 0] > 0).astype(int), [lambda: x @ w, lambda: x, lambda: 2 * x]),
    'fori': lambda w, x: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w).at[i].add(1.0), x),
    'fori rows': lambda w, x: lax.fori_loop(0, 32, lambda i, c: c.at[i].set(jnp.tanh(c[i] @ w)), x),
    'dynslice': lambda w, x: lax.dynamic_slice(x @ w, (3, 2), (8, 4)),
    'dynupdate': lambda w, x: lax.dynamic_update_slice(x @ w, x[:8, :4], (5, 2)),
    'cache': lambda w, x: lax.scan(
        lambda c, t: (lax.dynamic_update_slice(c, (x @ w)[:, None], (0, t, 0)), c.sum((1, 2))),
        jnp.zeros((32, 4, 16)),
        jnp.arange(4),
    ),
    'linsolve': lambda w, x: jnp.linalg.solve(w.T @ w + jnp.eye(16), x.T).T,
    'cho': lambda w, x: jax.vmap(lambda r: jnp.linalg.cholesky(jnp.outer(r, r) + 2 * jnp.eye(16)))(x).sum(
        (1, 2)
    ),
    'svd': lambda w, x: jnp.linalg.svd(x.reshape(32, 4, 4), compute_uv=False),
    'inv': lambda w, x: jnp.linalg.inv(x.reshape(32, 4, 4) + 4 * jnp.eye(4)),
    'fft': lambda w, x: jnp.abs(jnp.fft.rfft(x @ w)),
    'fft rows': lambda w, x: jnp.abs(jnp.fft.fft(x @ w, axis=0)),
    'resize': lambda w, x: jax.image.resize(x.reshape(32, 4, 4, 1), (32, 8, 8, 1), 'bilinear'),
    'pool': lambda w, x: lax.reduce_window(
        x.reshape(32, 4, 4, 1), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID'
    ),
    'pool rows': lambda w, x: lax.reduce_window(x @ w, 0.0, lax.add, (2, 1), (1, 1), 'SAME'),
    'convT': lambda w, x: lax.conv_transpose(x.reshape(32, 4, 4, 1), w[:3, :3, None, None], (2, 2), 'SAME'),
    'conv group': lambda w, x: lax.conv_general_dilated(
        x.reshape(32, 2, 2, 4).transpose(0, 3, 1, 2),
        w[:4, :4].reshape(4, 1, 2, 2),
        (1, 1),
        'SAME',
        feature_group_count=4,
    ),
    'conv bgroup': lambda w, x: lax.conv_general_dilated(
        x.reshape(32, 4, 2, 2), w[:8, :16].reshape(8, 4, 2, 2), (1, 1), 'SAME', batch_group_count=2
    ),
    'conv rows as space': lambda w, x: lax.conv(x.T[None], w[:, :, None], (1,), 'SAME')[0].T,
    'segment': lambda w, x: jax.ops.segment_sum(x @ w, jnp.arange(32) // 3, 12),
    'segment max': lambda w, x: jax.ops.segment_max(x @ w, jnp.arange(32) % 5, 5),
    'onehot': lambda w, x: jax.nn.one_hot(jnp.argmax(x @ w, -1), 16) @ w,
    'topk': lambda w, x: lax.top_k(x @ w, 3),
    'topk rows': lambda w, x: lax.top_k((x @ w).T, 3),
    'sort rows': lambda w, x: jnp.sort(x @ w, 0),
    'sort multi': lambda w, x: lax.sort((jnp.round(x), x @ w), dimension=1, num_keys=1, is_stable=True),
    'sort multi rows': lambda w, x: lax.sort((jnp.round(x), x @ w), dimension=0, num_keys=1, is_stable=True),
    'search': lambda w, x: jnp.searchsorted(jnp.sort(w[0]), x @ w),
    'interp': lambda w, x: jnp.interp(x @ w, jnp.linspace(-2, 2, 16), w[0]),
    'roll': lambda w, x: jnp.roll(x @ w, 3, 0) + jnp.roll(x @ w, 2, 1),
    'pad': lambda w, x: jnp.pad(x @ w, ((2, 6), (0, 0))),
    'negpad': lambda w, x: lax.pad(x @ w, 0.0, ((-2, -6, 0), (1, 0, 1))),
    'repeat': lambda w, x: jnp.repeat(x @ w, 2, 0),
    'repeat2': lambda w, x: jnp.repeat(x @ w, jnp.arange(32) % 3, axis=0, total_repeat_length=40),
    'tile': lambda w, x: jnp.tile(x @ w, (2, 3)),
    'split': lambda w, x: jnp.split(x @ w, 4, 0) + jnp.split(x @ w, [3, 7], 1),
    'concat': lambda w, x: jnp.concatenate([x @ w, w, x[:8]], 0),
    'concat batches': lambda w, x: jnp.concatenate([x @ w, x], 0),
    'stack': lambda w, x: jnp.stack([x @ w, x], 1).reshape(64, 16),
    'flip': lambda w, x: (x @ w)[::-1, ::2],
    'einsum': lambda w, x: jnp.einsum('bi,ij,cj->bc', x, w, x),
    'einsum2': lambda w, x: jnp.einsum('bi,bj->bij', x @ w, x).sum(1),
    'outer': lambda w, x: jnp.einsum('bi,bj->ij', x @ w, x),
    'gather rows': lambda w, x: (x @ w)[jnp.argsort(x[:, 0])],
    'gather batched': lambda w, x: jnp.take_along_axis(x @ w, jnp.argsort(x, 1), 1),
    'gather fill': lambda w, x: (x @ w).at[jnp.arange(40)].get(mode='fill', fill_value=7.0),
    'gather point': lambda w, x: (x @ w)[jnp.arange(32), jnp.arange(32) % 16],
    'embed': lambda w, x: w[jnp.clip(jnp.abs(x * 4).astype(int), 0, 15)],
    'embed 1': lambda w, x: w[jnp.clip(jnp.abs(x[:, 0] * 4).astype(int), 0, 15)],
    'scatter point': lambda w, x: (x @ w).at[jnp.arange(32), jnp.arange(32) % 16].set(9.0),
    'scatter rows': lambda w, x: jnp.zeros((10, 16)).at[jnp.arange(32) % 10].add(x @ w),
    'scatter weights': lambda w, x: w.at[jnp.arange(16)].add((x @ w)[:16]),
    'scatter max': lambda w, x: jnp.full((10, 16), -9.0).at[jnp.arange(32) % 10].max(x @ w),
    'hist': lambda w, x: jnp.histogram(x @ w, bins=8)[0],
    'bincount': lambda w, x: jnp.bincount(jnp.abs(x @ w * 3).astype(int).ravel(), length=20),
    'cumprod rows': lambda w, x: jnp.cumsum(x @ w, 0),
    'cumlogsumexp': lambda w, x: lax.cumlogsumexp(x @ w, 1),
    'complex': lambda w, x: jnp.real((x + 1j * x) @ (w + 0j)),
    'argmax': lambda w, x: (jnp.argmax(x @ w, 0), jnp.argmin(x @ w, 1)),
    'reduce multi': lambda w, x: lax.reduce(
        (x @ w, x), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)
    ),
    'batchnorm': lambda w, x: (x @ w - (x @ w).mean(0)) / jnp.std(x @ w, 0),
    'layernorm': lambda w, x: jax.nn.standardize(x @ w),
    'logsumexp': lambda w, x: jax.nn.logsumexp(x @ w, axis=(0, 1)),
    'median': lambda w, x: jnp.median(x @ w, axis=1),
    'quantile': lambda w, x: jnp.quantile(x @ w, 0.3, axis=0),
    'unique': lambda w, x: jnp.unique(jnp.round(x @ w), size=40, fill_value=99),
    'nonzero': lambda w, x: jnp.nonzero(x @ w > 0, size=300, fill_value=0),
    'where': lambda w, x: jnp.where(x[:, :1] > 0, x @ w, w[:1]),
    'triu': lambda w, x: jnp.triu(x.reshape(2, 16, 16) @ w),
    'meshgrid': lambda w, x: jnp.meshgrid(x[:, 0], w[0])[0],
    'diag': lambda w, x: jax.vmap(jnp.diag)(x @ w).sum(1),
    'diagonal': lambda w, x: jnp.diagonal((x @ w)[:16]),
    'bf16': lambda w, x: x.astype('bfloat16').astype('float32'),
    'bitcast': lambda w, x: lax.bitcast_convert_type(x, jnp.int32) & 255,
    'bitcast8': lambda w, x: lax.bitcast_convert_type(x, jnp.uint8),
    'reshape mix': lambda w, x: (x @ w).reshape(16, 32).T.reshape(8, 64),
    'reshape odd': lambda w, x: (x @ w).reshape(-1)[:500].reshape(25, 20),
    'reshape heads': lambda w, x: jnp.moveaxis((x @ w).reshape(4, 8, 4, 4), 2, 1).reshape(16, 32),
    'ragged': lambda w, x: lax.ragged_dot(x, jnp.stack([w, 2 * w, 3 * w]), jnp.array([10, 2, 20])),
    'attention': lambda w, x: jax.nn.dot_product_attention(
        *(jnp.tanh(x @ w * i).reshape(4, 8, 2, 8) for i in (1, 2, 3)), is_causal=True
    ),
    'opt barrier': lambda w, x: lax.optimization_barrier((x @ w, w))[0],
    'custom_root': lambda w, x: lax.custom_root(
        lambda y: y**3 - jnp.tanh(x @ w),
        x * 0 + 1,
        lambda f, y: lax.fori_loop(0, 5, lambda _, y: y - 0.1 * f(y), y),
        lambda g, y: y / g(jnp.ones_like(y)),
    ),
    'lin solve': lambda w, x: lax.custom_linear_solve(
        lambda y: 2 * y, x @ w, lambda _, b: b / 2, symmetric=True
    ),
    'scan rev': lambda w, x: lax.scan(
        lambda c, r: (jnp.tanh(c @ w + r), c), jnp.zeros((4, 16)), x.reshape(8, 4, 16), reverse=True
    ),
    'scan unroll': lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c @ w), c), x, None, length=5, unroll=2),
    'scan split': lambda w, x: lax.scan(
        lambda c, r: (c + r.sum(0), jnp.tanh(r @ w)), jnp.zeros(16), x.reshape(4, 8, 16)
    ),
    'scan of scans': lambda w, x: lax.scan(
        lambda c, _: (lax.scan(lambda d, r: (jnp.tanh(d @ w + r), d), c[0], c)[1], None), x, None, length=2
    )[0],
    'scan swap': lambda w, x: lax.scan(
        lambda c, _: ((c[1] @ w, c[0]), None), (x, jnp.zeros_like(x)), None, length=3
    )[0],
    'scan transpose': lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c.T), None), x[:16] @ w, None, length=3)[
        0
    ],
    'while cond on rows': lambda w, x: lax.while_loop(
        lambda c: jnp.abs(c).sum() < 1e3, lambda c: 1.3 * c + c @ w, x
    ),
    'clip grads': lambda w, x: jax.tree.map(
        lambda g: g / jnp.maximum(1.0, jnp.linalg.norm(g)), jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
    ),
    'per-example grads': lambda w, x: jax.vmap(jax.grad(lambda w, r: jnp.tanh(r @ w).sum()), (None, 0))(w, x),
    'hessian': lambda w, x: jax.hessian(lambda r: jnp.tanh(r @ w).sum())(x[0]),
    'jacrev': lambda w, x: jax.jacrev(lambda w: jnp.tanh(x @ w).sum(0))(w).sum((0, 1)),
    'jvp': lambda w, x: jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (x,)),
    'dropout': lambda w, x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x @ w, 0),
    'gamma': lambda w, x: jax.random.gamma(jax.random.key(1), jnp.abs(x) + 0.1),
    'categorical': lambda w, x: jax.random.categorical(jax.random.key(1), x @ w),
    'shuffle': lambda w, x: jax.random.permutation(jax.random.key(1), x @ w),
    'weight from batch': lambda w, x: x @ (x.T @ x) @ w,
    'two axes sum': lambda w, x: (x @ w).sum(0)[None] + x,
    'x to scalar': lambda w, x: (x @ w).sum(),
    'int': lambda w, x: jnp.round(x * 8).astype('int32') @ jnp.round(w * 8).astype('int32'),
    'out unused': lambda w, x: w * 2,
    'identity': lambda w, x: (x, w, x[0], 3.0),
    'key rows': lambda w, x: (
        jax.vmap(lambda k: jax.random.normal(k, (4,)))(jax.random.split(jax.random.key(2), 32))[:, :1] * x
    ),
}
# What gives integers only.
WITHOUT_GRADIENT = {
    'categorical',
    'search',
    'hist',
    'bincount',
    'argmax',
    'unique',
    'nonzero',
    'bitcast',
    'bitcast8',
    'int',
}


def total(fun):
    """A sum over the floating-point results of a function, each with a weight of its own."""

    def scalar(w, x):
        floats = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(fun(w, x))) if leaf.dtype == jnp.float32]
        return sum((leaf * jnp.linspace(0.5, 1, leaf.size).reshape(leaf.shape)).sum() for leaf in floats)

    return scalar


def assert_equal(found, expected):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype == np.float32:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1, np.abs(b).max(initial=0)))
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize('name', IDIOMS)
def test_values_and_gradients(name):
    fun = IDIOMS[name]
    gradient = jax.grad(total(fun), argnums=(0, 1), allow_int=True)
    for each in [fun] if name in WITHOUT_GRADIENT else [fun, gradient]:
        try:
            expected = jax.jit(each)(W, X)
        except ValueError as error:  # no reverse mode through such a loop
            assert 'Reverse-mode' in str(error)
            continue
        for helper, spec in MESHES.values():
            step = helper.sjit(each, in_shardings=(RULE, spec), out_shardings=P())
            assert_equal(step(W, X), expected)
