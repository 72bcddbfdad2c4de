"""Shardings of arguments and outputs, on Auto axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from scalax.sharding import PartitionSpec as P
from tests.support.jit_cases import HELPER, M, X, case, on, traced

PLACES = {'x': on('x'), 'y': on('y'), 'both': on(('x', 'y')), 'replicated': on(), 'two': on('x', 'y')}
ARRIVALS = {
    'numpy': lambda sharding: M,
    'uncommitted': lambda sharding: jnp.asarray(M),
    'placed': lambda sharding: jax.device_put(M, sharding),
    'struct': lambda sharding: M,
}


@case(variants=PLACES)
def asked(jit, sharding):
    f = jit(lambda x: (traced(), x * 2)[1], in_shardings=sharding, out_shardings=sharding)
    return f(M), f(M)


@case(variants=PLACES)
def asked_of_the_output(jit, sharding):
    f = jit(lambda x: {'a': x, 'b': (x + 1, None)}, out_shardings=sharding)
    return f(M), f(jax.device_put(M, sharding))


@case(variants=PLACES)
def of_what_comes(jit, sharding):
    f = jit(lambda x: (traced(), x * 2)[1])
    return f(jax.device_put(M, sharding)), f(jax.device_put(M, sharding))


@case(variants=ARRIVALS)
def arrives(jit, arrival):
    f = jit(lambda x: x * 2, in_shardings=on('x'))
    return f(arrival(on('x'))), f(arrival(on('x')))


@case(meant={'traces': 'number of traces'})
def arrives_in_turn(jit):
    f = jit(lambda x: (traced(), x * 2)[1], in_shardings=on('x'))
    return [f(arrival(on('x'))) for arrival in ARRIVALS.values()]


@case(meant={'error': 'error classes'}, raises=True)
def arrives_elsewhere(jit):
    return jit(lambda x: x, in_shardings=on('x'))(jax.device_put(X, on('y')))


@case
def arrives_equivalent(jit):
    f = jit(lambda x: x * 2, in_shardings=on('x'))
    return f(jax.device_put(M, on('x', None)))


@case(meant={'error': 'error classes'}, raises=True)
def arrives_on_one_device(jit):
    return jit(lambda x: x * 2, in_shardings=on('x'))(jax.device_put(X, jax.devices()[1]))


@case
def arrives_on_one_device_replicated(jit):
    return jit(lambda x: x * 2, in_shardings=on())(jax.device_put(X, jax.devices()[0]))


@case(raises=True)
def arrives_on_one_device_and_nothing_is_asked(jit):
    placed, single = jax.device_put(X, on('x')), jax.device_put(X, jax.devices()[0])
    return jit(lambda a, b: a + b)(placed, single)


@case
def mixed_devices_uncommitted(jit):
    return jit(lambda a, b, c: a + b + c)(jax.device_put(X, on('x')), jnp.asarray(X), X)


@case
def prefix(jit):
    f = jit(lambda t, x: (t, x), in_shardings=(on('x'), on()), out_shardings=(on('x'), on()))
    return f({'a': X, 'b': [M]}, X)


@case
def tree(jit):
    f = jit(lambda t: t, in_shardings=({'a': on('x'), 'b': None},), out_shardings={'a': on('y'), 'b': None})
    return f({'a': X, 'b': M})


@case
def none_in_a_tuple(jit):
    f = jit(lambda a, b: (a, b), in_shardings=(None, on('x')), out_shardings=(on('y'), None))
    return f(X, M)


@case(
    variants={
        'tree': ({'a': on('x')},),
        'too many': (on('x'), on('x')),
        'none': (),
    },
    meant={'error': 'error classes'},
    raises=True,
)
def prefix_that_does_not_fit(jit, shardings):
    return jit(lambda x: x, in_shardings=shardings)(X)


@case
def list_of_shardings(jit):
    return jit(lambda x: x * 2, in_shardings=[on('x')])(X)


@case(meant={'error': 'error classes'}, raises=True)
def outputs_that_do_not_fit(jit):
    return jit(lambda x: (x, x), out_shardings=(on('x'),))(X)


@case(
    meant={'error': 'error classes'},
    variants={'argument': 'in_shardings', 'output': 'out_shardings'},
    raises=True,
)
def does_not_divide(jit, which):
    return jit(lambda x: x + 1, **{which: on('x')})(X[:3])


@case(
    meant={'error': 'error classes'},
    variants={'argument': 'in_shardings', 'output': 'out_shardings'},
    raises=True,
)
def rank_too_high(jit, which):
    return jit(lambda x: x + 1, **{which: on(None, 'x')})(X)


@case(
    variants={'string': 'x', 'number': 3, 'mesh': HELPER.mesh}, meant={'error': 'error classes'}, raises=True
)
def no_sharding(jit, thing):
    return jit(lambda x: x, in_shardings=(thing,))(X)


@case
def scalars_and_empty(jit):
    f = jit(lambda a, b, c: (a, b, c), in_shardings=(on(), on('x'), on()), out_shardings=on())
    return f(1.0, np.zeros((0, 3), np.float32), np.zeros(()))


@case
def unused_argument(jit):
    return jit(lambda a, b: b, in_shardings=(on('x'), on('y')))(X, M)


@case
def output_without_arguments(jit):
    return jit(lambda: jnp.zeros((8, 4)), out_shardings=on('x'))()


@case
def output_that_is_an_argument(jit):
    return jit(lambda x: (x, x), in_shardings=on('x'), out_shardings=(on('y'), on('x')))(X)


@case(meant={'error': 'shardings on another mesh'})
def single_device(jit):
    sharding = SingleDeviceSharding(jax.devices()[2])
    return jit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding)(X)


@case
def device_number(jit):
    return jit(lambda x: x + 1, device=jax.devices()[2])(X)


@case(meant={'error': 'shardings on another mesh'})
def another_mesh(jit):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ('a', 'b'))
    sharding = NamedSharding(mesh, P('b'))
    return jit(lambda x: x * 2, in_shardings=sharding)(X)


@case
def bare_specs_under_set_mesh(jit):
    with jax.set_mesh(HELPER.mesh):
        return jit(lambda x: x * 2, in_shardings=P('x'), out_shardings=P('y'))(X)


@case(meant={'error': 'accepted inputs'}, raises=True)
def bare_specs_alone(jit):
    return jit(lambda x: x * 2, in_shardings=P('x'), out_shardings=P('y'))(X)


@case
def constraint_inside(jit):
    f = jit(lambda x: jax.lax.with_sharding_constraint(x * 2, on('x', 'y')))
    return f(M), jax.vmap(f)(np.stack([M, M])).shape, jax.grad(lambda x: f(x).sum())(M)


@case
def constraint_with_a_spec(jit):
    with jax.set_mesh(HELPER.mesh):
        return jit(lambda x: jax.lax.with_sharding_constraint(x * 2, P('x', 'y')))(M)


@case(raises=True, meant={'error': 'accepted inputs'})
def constraint_with_a_spec_alone(jit):
    return jit(lambda x: jax.lax.with_sharding_constraint(x * 2, P('x', 'y')))(M)


@case
def shard_map_inside(jit):
    body = jax.shard_map(lambda x: jax.lax.psum(x, 'x'), mesh=HELPER.mesh, in_specs=P('x'), out_specs=P())
    return jit(body)(X), jit(lambda x: body(x) * 2)(jax.device_put(X, on('x')))


@case
def shard_map_around(jit):
    inner = jit(lambda x: x * jax.lax.axis_index('x'))
    return jax.jit(jax.shard_map(inner, mesh=HELPER.mesh, in_specs=P('x'), out_specs=P('x')))(X)


@case
def memory_kind(jit):
    host = NamedSharding(HELPER.mesh, P('x'), memory_kind='pinned_host')
    return jit(lambda x: jax.device_put(x, host))(jax.device_put(X, on('x'))).sharding.memory_kind


@case(since=(0, 12))
def output_in_host_memory(jit):
    host = NamedSharding(HELPER.mesh, P('x'), memory_kind='pinned_host')
    return jit(lambda x: x, out_shardings=host)(X).sharding.memory_kind


@case
def device_put_inside(jit):
    return jit(lambda x: jax.device_put(x, on('x')) * 2)(X)


@case
def gradient_follows(jit):
    f = jit(lambda w: jnp.sum(w**2), in_shardings=on('x'))
    return jax.grad(f)(jax.device_put(X, on('x')))


@case
def keys_sharded(jit):
    keys = jax.random.split(jax.random.key(0), 8)
    f = jit(lambda k: k, in_shardings=on('x'), out_shardings=on('x'))
    return f(keys), f(jax.device_put(keys, on('x')))
