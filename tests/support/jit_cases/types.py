"""Types of arrays and scalars: dtypes, weak types, keys, x64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.jit_cases import X, case, error_of, traced

DTYPES = {
    name: jnp.dtype(name)
    for name in [
        *('bool', 'int4', 'uint4', 'int8', 'uint8', 'int16', 'uint16', 'int32', 'uint32'),
        *('float8_e4m3fn', 'float8_e5m2', 'bfloat16', 'float16', 'float32', 'complex64'),
    ]
}
WIDE = {name: np.dtype(name) for name in ('int64', 'uint64', 'float64', 'complex128')}
SCALARS = {
    'bool': True,
    'int': 3,
    'negative': -3,
    'float': 1.5,
    'complex': 1j,
    'inf': float('inf'),
    'nan': float('nan'),
    'np.bool_': np.bool_(True),
    'np.int8': np.int8(3),
    'np.int64': np.int64(3),
    'np.float16': np.float16(1.5),
    'np.float64': np.float64(1.5),
    'np.complex128': np.complex128(1j),
    'bfloat16': jnp.bfloat16(1.5),
    'zero rank': np.array(2),
    'zero rank jax': np.array(2.0, np.float32),
}


@case(variants=DTYPES)
def dtype_of_an_array(jit, dtype):
    x = jnp.arange(4).astype(dtype)
    return jit(lambda x: (traced(x.dtype), x, jnp.zeros_like(x), x == x)[1:])(x)


@case(variants=WIDE)
def dtype_of_wide_numpy(jit, dtype):
    return jit(lambda x: (traced(x.dtype), x + 1)[1])(np.arange(4, dtype=dtype))


@case(variants=WIDE)
def dtype_of_wide_numpy_with_x64(jit, dtype):
    with jax.enable_x64(True):
        return jit(lambda x: (traced(x.dtype), x + 1)[1])(np.arange(4, dtype=dtype))


@case(variants=SCALARS)
def scalar(jit, value):
    compiled = jit(lambda x, s: (traced((s.dtype, s.weak_type)), s, x * s, s + 1)[1:])
    return compiled(X, value), compiled(X, jnp.asarray(value))


@case(variants={'bool': True, 'int': 3, 'float': 1.5, 'complex': 1j})
def scalar_is_weak(jit, value):
    x = jnp.ones(2, jnp.bfloat16)
    return jit(lambda x, s: x * s)(x, value), jit(lambda x: x * value)(x), jit(lambda: value)()


@case
def weak_and_strong_in_turn(jit):
    compiled = jit(lambda x: (traced(x.weak_type), x + 1)[1])
    return [compiled(x) for x in (1.0, np.float32(1), jnp.float32(1), 2.0, jnp.asarray(1.0))]


@case
def weak_output(jit):
    return jit(lambda x: (x + 1, x.astype(float), jnp.asarray(2.0), 2.0))(1)


@case
def weak_output_as_an_argument(jit):
    compiled = jit(lambda x: (traced(x.weak_type), x * 2)[1])
    return compiled(compiled(compiled(1.0)))


@case
def shapes_in_turn(jit):
    compiled = jit(lambda x: (traced(x.shape), x.sum())[1])
    return [compiled(np.ones(shape, np.float32)) for shape in ((), (1,), (2, 3), (1,), (0, 3), ())]


@case
def dtypes_in_turn(jit):
    compiled = jit(lambda x: (traced(x.dtype), x + x)[1])
    return [compiled(X.astype(dtype)) for dtype in ('f4', 'i4', 'f2', 'f4', 'i1', 'i4')]


@case(variants={'int': 2**40, 'negative': -(2**40), 'huge': 2**80}, raises=True)
def integer_too_large(jit, value):
    return jit(lambda x: x)(value)


@case(raises=True)
def integer_too_large_with_x64(jit):
    with jax.enable_x64(True):
        return jit(lambda x: x)(2**63)


@case(variants={'int': 2**40, 'float': 1e300})
def large_with_x64(jit, value):
    with jax.enable_x64(True):
        return jit(lambda x: x)(value)


@case
def x64_in_turn(jit):
    compiled = jit(lambda x: (traced(x.dtype), x * 1.5)[1])
    data = np.arange(4)
    outs = [compiled(data)]
    with jax.enable_x64(True):
        outs.append(compiled(data))
    return *outs, compiled(data)


@case
def x64_inside(jit):
    def f(x):
        with jax.enable_x64(True):
            return x.astype('float64').sum()

    return jit(f)(X)


@case
def x64_array_outside(jit):
    with jax.enable_x64(True):
        x = jnp.arange(4.0)
    return jit(lambda x: (traced(x.dtype), x + 1)[1])(x)


@case
def x64_scalars(jit):
    compiled = jit(lambda x, s: (traced((x.dtype, s.dtype, s.weak_type)), x * s)[1])
    with jax.enable_x64(True):
        return compiled(1, 2.0), compiled(X, 2.0), compiled(np.float64(1), 2)


@case
def key(jit):
    return jit(lambda k: (jax.random.split(k), jax.random.normal(k, (2,))))(jax.random.key(0))


@case(variants={name: name for name in ('threefry2x32', 'rbg', 'unsafe_rbg')})
def key_of(jit, impl):
    k = jax.random.key(0, impl=impl)
    compiled = jit(lambda k: (traced(k.dtype), jax.random.split(k), jax.random.bits(k, (2,)))[1:])
    return compiled(k), compiled(jax.random.split(k)[0])


@case
def key_made_inside(jit):
    return jit(lambda seed: jax.random.key(seed))(3), jit(lambda seed: jax.random.PRNGKey(seed))(3)


@case
def key_default_implementation(jit):
    compiled = jit(lambda seed: (traced(), jax.random.bits(jax.random.key(seed), (2,)))[1])
    first = compiled(0)
    with jax.default_prng_impl('rbg'):
        second = compiled(0)
    return first, second, compiled(0)


@case
def key_partitionable(jit):
    compiled = jit(lambda k: (traced(), jax.random.normal(k, (4,)))[1])
    k = jax.random.key(1)
    with jax.threefry_partitionable(False):
        first = compiled(k)
    return first, compiled(k)


@case
def keys_batched(jit):
    return jit(jax.vmap(lambda k: jax.random.uniform(k)))(jax.random.split(jax.random.key(0), 4))


@case
def legacy_key(jit):
    return jit(jax.random.normal)(jax.random.PRNGKey(0))


@case(variants={'standard': 'standard', 'strict': 'strict'})
def promotion(jit, rule):
    compiled = jit(lambda a, b: (traced(), a + b)[1])
    a, b = jnp.ones(2, jnp.int8), jnp.ones(2, jnp.float32)
    first = compiled(a, b)
    with jax.numpy_dtype_promotion(rule):
        return first, error_of(compiled, a, b)


@case
def float0(jit):
    _, vjp = jax.vjp(lambda x: x * 2.0, 3)
    return jit(lambda tree: jax.tree.structure(tree).num_leaves)(vjp(1.0))


class Boxed:
    """An object that converts itself to an array."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return jnp.asarray(self.value)


@case(meant={'error': 'error classes'}, raises=True)
def jax_array_method_as_an_argument(jit):
    return jit(lambda x: x + 1)(Boxed(X))


@case
def jax_array_method_closed_over(jit):
    boxed = Boxed(X)
    return jit(lambda x: jnp.multiply(x, jnp.asarray(boxed)))(X)


@case(raises=True)
def jax_array_method_as_an_output(jit):
    return jit(lambda x: Boxed(x))(X)


@case
def numpy_subclass(jit):
    class Sub(np.ndarray):
        pass

    return jit(lambda x: x + 1)(X.view(Sub)), jit(lambda x: x + 1)(np.matrix([[1.0, 2.0]]))


@case
def numpy_views(jit):
    compiled = jit(lambda x: (traced(), x + 0)[1])
    return compiled(X[::-1]), compiled(X[::2]), compiled(np.broadcast_to(X[0], 8)), compiled(X.astype('>f4'))


@case
def numpy_changed_after_the_call(jit):
    data = X.copy()
    out = jit(lambda x: x + 1)(data)
    jax.block_until_ready(out)
    data[:] = 0
    return out


@case
def aliased_numpy_is_not_changed(jit):
    data = np.zeros(16, np.float32)
    out = jit(lambda x: x)(data)
    data[:] = 7
    return out.shape, out.dtype
