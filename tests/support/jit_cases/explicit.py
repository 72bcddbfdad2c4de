"""Explicit axes: shardings in the types."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from scalax.sharding import PartitionSpec as P
from tests.support.jit_cases import EXPLICIT, M, X, error_of, traced
from tests.support.jit_cases import case as any_case
from tests.support.jit_cases import on as on_helper

case = functools.partial(any_case, explicit=True)
on = functools.partial(on_helper, helper=EXPLICIT)


def put(values, *spec):
    """Returns a sharded array."""
    return jax.device_put(values, on(*spec))


OPERATIONS = {
    'same': lambda x: x,
    'double': lambda x: x * 2,
    'sum': lambda x: x.sum(0),
    'total': lambda x: x.sum(),
    'transpose': lambda x: x.T,
    'dot': lambda x: jnp.dot(x, x.T, out_sharding=P('x', None)),
    'einsum': lambda x: jnp.einsum('ij,kj->ik', x, x, out_sharding=P(None, 'x')),
    'einsum sharded': lambda x: jnp.einsum('ij,jk->ik', x, jnp.ones((4, 4)), out_sharding=P('x', None)),
    'reshard': lambda x: jax.reshard(x, P(None, 'x')),
    'broadcast': lambda x: x + jnp.ones(4),
    'reshape': lambda x: x.reshape(8, 2, 2),
    'flatten': lambda x: x.reshape(-1),
    'concatenate': lambda x: jnp.concatenate([x, x]),
    'where': lambda x: jnp.where(x > 1, x, 0),
    'cumsum': lambda x: jnp.cumsum(x, axis=1),
    'sort': lambda x: jnp.sort(x, axis=1),
    'softmax': lambda x: jax.nn.softmax(x, axis=1),
    'zeros_like': jnp.zeros_like,
    'take row': lambda x: x[:, 0],
    'scan': lambda x: jax.lax.scan(lambda c, row: (c + row, row), jnp.zeros(8, out_sharding=P('x')), x.T),
    'vmap': lambda x: jax.vmap(lambda row: row * 2)(x),
    'grad': lambda x: jax.grad(lambda x: (x**2).sum())(x),
    'checkpoint': lambda x: jax.grad(lambda x: jax.checkpoint(jnp.sin)(x).sum())(x),
    'typeof': lambda x: jnp.zeros(len(str(jax.typeof(x)))),
    'auto': lambda x: jax.sharding.auto_axes(lambda y: y * 2, out_sharding=P('x'))(x),
}


@case(variants=OPERATIONS)
def operation(jit, function):
    f = jit(lambda x: (traced(jax.typeof(x)), function(x))[1])
    return f(put(M, 'x')), f(put(M, 'x'))


@case(
    variants={
        'dot': lambda x: jnp.dot(x, x.T),
        'mismatch': lambda x: x + jax.reshard(x, P(None, 'x')),
        'constraint': lambda x: jax.lax.with_sharding_constraint(x, P(None, 'x')),
        'unknown axis': lambda x: jax.reshard(x, P('z')),
        'axis twice': lambda x: jax.reshard(x, P('x', 'x')),
        'does not divide': lambda x: jax.reshard(x[:3], P('x')),
    },
    raises=True,
)
def error(jit, function):
    return jit(lambda x: function(x))(put(M, 'x'))


@case
def types_in_turn(jit):
    f = jit(lambda x: (traced(jax.typeof(x)), x * 2)[1])
    return [f(put(M, *spec)) for spec in (('x',), ('y',), (), ('x', 'y'), ('x',))]


@case(meant={'traces': 'number of traces'}, since=(0, 12))
def numpy_and_uncommitted(jit):
    f = jit(lambda x: (traced(jax.typeof(x)), x * 2)[1])
    return f(M), f(jnp.asarray(M)), f(1.0)


@case(meant={'traces': 'number of traces'})
def asked(jit):
    f = jit(lambda x: (traced(jax.typeof(x)), x * 2)[1], in_shardings=P('x'), out_shardings=P('x'))
    return f(M), f(put(M, 'x'))


@case
def asked_of_the_output(jit):
    f = jit(lambda x: x * 2, out_shardings=P('y'))
    return f(put(M, 'x')), f(M)


@case(meant={'error': 'error classes'}, raises=True)
def arrives_elsewhere(jit):
    f = jit(lambda x: x * 2, in_shardings=P('y'))
    return f(put(M, 'x'))


@case
def mixed_arguments(jit):
    return jit(lambda a, b: a * b)(put(M, 'x'), put(M, 'x')), error_of(
        jit(lambda a, b: a * b), put(M, 'x'), put(M, 'y')
    )


@case
def gradients(jit):
    loss = jit(lambda w, x: jnp.einsum('ij,j->i', x, w).sum())
    w, x = put(np.ones(4, np.float32)), put(M, 'x')
    return jax.grad(loss)(w, x), jax.jit(jax.grad(loss, argnums=(0, 1)))(w, x)


@case
def donated(jit):
    x = put(M, 'x')
    out = jit(lambda x: x + 1, donate_argnums=0)(x)
    return out, x.is_deleted()


@case
def vmapped(jit):
    f = jit(lambda row: row * 2)
    return jax.vmap(f)(put(M, 'x')), jax.jit(jax.vmap(f))(put(M, 'x')), jax.vmap(f, 1, 1)(put(M, 'x'))


@case
def scanned(jit):
    step = jit(lambda c, row: (c + row, row))
    return jax.lax.scan(step, jnp.zeros(8, out_sharding=P('x')), put(M.T, None, 'x'))


@case
def made_inside(jit):
    return jit(lambda: jnp.zeros((8, 4), out_sharding=P('x', 'y')))()


@case
def random_inside(jit):
    f = jit(lambda k: jax.random.normal(k, (8, 4), out_sharding=P('x')))
    return f(jax.random.key(0))


@case
def shard_map_inside(jit):
    body = jax.shard_map(lambda x: jax.lax.psum(x, 'x'), in_specs=P('x'), out_specs=P())
    return jit(body)(put(X, 'x'))


@case(raises=True)
def shard_map_mismatch(jit):
    body = jax.shard_map(lambda x: x, in_specs=P('x'), out_specs=P('x'))
    return jit(body)(put(X, 'y'))


@case
def eval_shape(jit):
    f = jit(lambda x: x.sum(0))
    return str(jax.eval_shape(f, put(M, None, 'y'))), str(f.eval_shape(put(M, None, 'y')))


@case
def lowered(jit):
    f = jit(lambda x: x * 2)
    struct = jax.ShapeDtypeStruct(M.shape, M.dtype, sharding=on('x'))
    return f.lower(struct).compile()(put(M, 'x')), str(f.trace(struct).jaxpr)


@case
def nested(jit):
    inner = jit(lambda x: (traced(jax.typeof(x)), x * 2)[1])
    outer = jit(lambda x: inner(x) + inner(x))
    return outer(put(M, 'x')), outer(put(M, 'x'))


@case
def refs(jit):
    ref = jax.new_ref(put(M, 'x'))
    return jit(lambda ref: ref[...] * 2)(ref)
