"""JAX settings around a call, and caches."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.jit_cases import HELPER, M, X, case, error_of, on, traced

SETTINGS = {
    'precision': lambda: jax.default_matmul_precision('float32'),
    'precision bfloat16': lambda: jax.default_matmul_precision('bfloat16'),
    'x64': lambda: jax.enable_x64(True),
    'device': lambda: jax.default_device(jax.devices()[3]),
    'disable_jit': lambda: jax.disable_jit(),
    'not disable_jit': lambda: jax.disable_jit(False),
    'debug_nans': lambda: jax.debug_nans(True),
    'prng': lambda: jax.default_prng_impl('rbg'),
    'partitionable': lambda: jax.threefry_partitionable(False),
    'custom_prng': lambda: jax.enable_custom_prng(True),
    'promotion': lambda: jax.numpy_dtype_promotion('strict'),
    'rank': lambda: jax.numpy_rank_promotion('raise'),
    'leaks': lambda: jax.checking_leaks(),
    'mesh': lambda: jax.set_mesh(HELPER.mesh),
    'named_scope': lambda: jax.named_scope('inside'),
    'annotation': lambda: jax.profiler.TraceAnnotation('inside'),
    'step annotation': lambda: jax.profiler.StepTraceAnnotation('inside', step_num=1),
    'checks': lambda: jax.enable_checks(True),
    'compile time': lambda: jax.ensure_compile_time_eval(),
    'f16 reductions': lambda: jax.allow_f16_reductions(False),
}


@case(variants=SETTINGS)
def around_a_call(jit, setting):
    f = jit(lambda x: (traced(), jnp.sum(x @ x.T, axis=0) * 1.5)[1])
    outs = [f(M)]
    with setting():
        outs += [f(M), f(M)]
    return *outs, f(M)


@case(
    variants={name: SETTINGS[name] for name in ('precision', 'x64', 'device', 'disable_jit', 'prng', 'mesh')}
)
def around_the_making(jit, setting):
    with setting():
        f = jit(lambda x: (traced(), x @ x.T)[1])
        inside = f(M)
    return inside, f(M)


@case
def disable_jit_shows_values(jit):
    seen = []
    f = jit(lambda x, n=2: seen.append(isinstance(x, jax.core.Tracer)) or x * n)
    with jax.disable_jit():
        return f(X), f(X, n=3), seen


@case
def disable_jit_and_structure(jit):
    f = jit(lambda x, flag, **named: (x, named) if flag else x, static_argnames='flag')
    with jax.disable_jit():
        return f(X, True, b=M), f(X, flag=False), error_of(f, X)


@case
def disable_jit_and_shardings(jit):
    f = jit(lambda x: x * 2, in_shardings=on('x'), out_shardings=on('x'))
    with jax.disable_jit():
        return f(X)


@case(variants={'host to device': 'host_to_device', 'device to device': 'device_to_device', 'all': ''})
def transfer_guard(jit, kind):
    guard = getattr(jax, f'transfer_guard_{kind}' if kind else 'transfer_guard')
    f = jit(lambda x: x + 1)
    x = jnp.asarray(X)
    f(x), f(X)
    with guard('disallow'):
        return f(x), error_of(f, X), error_of(f, 1.0)


@case
def transfer_guard_and_shardings(jit):
    f = jit(lambda x: x + 1, in_shardings=on('x'))
    x = jax.device_put(X, on('x'))
    f(x)
    with jax.transfer_guard('disallow'):
        return f(x), error_of(f, X)


@case
def transfer_guard_explicit(jit):
    f = jit(lambda x: x + 1)
    f(X)
    with jax.transfer_guard('disallow_explicit'):
        return error_of(f, X)


@case
def logs_compiles(jit):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger('jax')
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with jax.log_compiles():

            def some_name(x):
                return x + 1

            f = jit(some_name)
            f(1.0), f(1.0)
    finally:
        logger.removeHandler(handler)
        logger.propagate = before[0]
    return sum('Compiling' in m and 'some_name' in m for m in messages)


@case
def profiler_sees_the_name(jit):
    def some_name(x):
        return x + 1

    return 'jit_some_name' in jit(some_name).lower(X).as_text()


@case
def default_device_and_committed(jit):
    x = jax.device_put(X, jax.devices()[2])
    f = jit(lambda x: (traced(), x + 1)[1])
    with jax.default_device(jax.devices()[3]):
        return f(x), f(X), f(jnp.asarray(X)), jit(lambda: jnp.ones(2))()


@case
def committed_elsewhere_in_turn(jit):
    f = jit(lambda x: (traced(), x + 1)[1])
    return [f(jax.device_put(X, jax.devices()[i])) for i in (0, 1, 2, 1)]


@case(raises=True)
def committed_to_two_devices(jit):
    a, b = (jax.device_put(X, jax.devices()[i]) for i in (0, 1))
    return jit(lambda a, b: a + b)(a, b)


@case
def committed_and_not(jit):
    a = jax.device_put(X, jax.devices()[1])
    return jit(lambda a, b: a + b)(a, jnp.asarray(X)), jit(lambda a, b: a + b)(a, X)


@case
def same_signature_again(jit):
    f = jit(lambda x: (traced(), x + 1)[1])
    return [f(x) for x in (X, X.copy(), jnp.asarray(X), np.asarray(X), jnp.asarray(X))]


@case
def clear_cache(jit):
    f = jit(lambda x: (traced(), x + 1)[1])
    f(X), f(X)
    f.clear_cache()
    return f(X), f(X)


@case
def clear_caches(jit):
    f = jit(lambda x: (traced(), x + 1)[1])
    f(X)
    jax.clear_caches()
    return f(X), f(X)


@case
def many_signatures(jit):
    f = jit(lambda x: (traced(), x + 1)[1])
    for _ in range(2):
        for n in range(12):
            f(np.ones(n, np.float32))
    return f(X)


@case
def one_object_per_wrapping(jit):
    def f(x):
        return x + 1

    first, second = jit(f), jit(f)
    return first is second, first == second, len({first, second, first})


@case
def threads(jit):
    f = jit(lambda x, n: x * n, static_argnums=1)
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda i: f(X[: 1 + i % 3], i % 2), range(32)))


@case
def threads_with_settings(jit):
    f = jit(lambda x: x * 1.5)

    def call(i):
        with jax.enable_x64(i % 2 == 0):
            return f(np.arange(3))

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(call, range(8)))


@case
def other_thread_only(jit):
    f, outs = jit(lambda x: (traced(), x + 1)[1]), []
    f(X)
    thread = threading.Thread(target=lambda: outs.append(f(X)))
    thread.start()
    thread.join(200)
    return outs


@case
def set_mesh_elsewhere(jit):
    f = jit(lambda x: (traced(), x * 2)[1])
    first = f(X)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ('a', 'b'))):
        return first, f(X)
