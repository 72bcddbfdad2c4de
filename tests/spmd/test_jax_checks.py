"""JAX's own checks of jaxprs (``jax_enable_checks``) pass for partitioned jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl

from scalax._jax.manual_axes import callbacks_nest
from scalax.sharding import BatchPartitioning, FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

MESHES = {
    'fsdp': (MeshShardingHelper([8], ['fsdp']), P('fsdp')),
    'hsdp and tp': (MeshShardingHelper([2, 2, 2], ['data', 'fsdp', 'tp']), P(('data', 'fsdp'))),
}
W, X = jax.ShapeDtypeStruct((16, 16), 'float32'), jax.ShapeDtypeStruct((16, 16), 'float32')
TABLE = jnp.asarray(np.arange(16.0), 'f')


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def trained(w, x):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    value, gradient = jax.value_and_grad(loss)(w, x)
    return optax.apply_updates(w, optimizer.update(gradient, optimizer.init(w), w)[0]), value


def with_constants(w, x):
    return (x * TABLE) @ w, jnp.where(x > 0, TABLE, 1.0).sum()


def layers(w, x):
    def run(w, x):
        layer = jax.checkpoint(lambda x: jnp.tanh(x @ w) * TABLE)
        return lax.scan(lambda x, _: (layer(x), x.sum()), x, None, 3)[0].mean()

    return jax.value_and_grad(run)(w, x)


def each_example(w, x):
    return lax.map(lambda row: jnp.tanh(row @ w), x)


def microbatches(w, x):
    def add(total, x):
        return total + jax.grad(loss)(w, x), None

    return lax.scan(add, jnp.zeros_like(w), x.reshape(2, 8, 16))[0]


def until(w, x):
    return lax.while_loop(lambda c: c[0].max() > 0.1, lambda c: (jnp.tanh(c[0] @ w) / 2, c[1] + 1), (x, 0))


def branches(w, x):
    return lax.cond(w[0, 0] > 0, lambda x: x @ w, lambda x: x * 2.0, x)


def mixed(w, x):
    return jnp.sort(x, 0) @ w, jnp.concatenate([x, w]), x[::-1]


def looked_up(w, x):
    rows = w[jnp.int32(x[:, 0]) % 16]
    return rows.at[0].add(1.0), w.at[jnp.int32(x[:, 1]) % 16].add(x)


def drawn(w, x):
    key = jax.random.key(0)
    return jax.random.bernoulli(key, 0.5, x.shape) * x @ w, jax.random.split(key, 16)


def kernel(w, x):
    def double(x, out):
        out[...] = jnp.where(pl.program_id(0) == 0, x[...] * 2.0, x[...])

    block = pl.BlockSpec((2, 16), lambda i: (i, 0))
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double, kind, grid=8, in_specs=[block], out_specs=block, interpret=True)(x) @ w


def called_back(w, x):
    y = jnp.tanh(x @ w)
    jax.debug.callback(print, y.max())
    return y


PROGRAMS = [
    *(trained, with_constants, layers, each_example, microbatches, until, branches, mixed),
    *(looked_up, drawn, kernel, called_back),
]


@pytest.mark.medium
@pytest.mark.parametrize('mesh', MESHES)
@pytest.mark.parametrize('fun', PROGRAMS, ids=lambda fun: fun.__name__)
@pytest.mark.sampled(3)
def test_jaxprs_pass(fun, mesh):
    if fun is called_back and 'tp' in mesh and not callbacks_nest():
        pytest.skip('this JAX runs no callbacks there')
    helper, spec = MESHES[mesh]
    options = {'in_shardings': (FSDPShardingRule(min_fsdp_size=1), spec), 'batch_argnums': 1}
    step = helper.sjit(fun, partitioning=BatchPartitioning(), **options)
    with jax.enable_checks(True):
        report = step.explain_propagation(W, X)
    assert report.axes
