"""Effects: callbacks, prints, refs, tokens, hijax types."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from tests.support.jit_cases import X, case, error_of, on, traced


@case
def debug_print(jit):
    compiled = jit(lambda x: (jax.debug.print('x is {x}', x=x), x + 1)[1])
    return compiled(1.0), compiled(2.0)


@case
def debug_print_ordered(jit):
    def f(x):
        jax.debug.print('first {}', x, ordered=True)
        jax.debug.print('second {}', x, ordered=True)
        return x

    compiled = jit(f)
    return compiled(1), compiled(2)


@case
def debug_callback(jit):
    seen = []
    out = jit(lambda x: (jax.debug.callback(lambda v: seen.append(float(v)), x), x)[1])(2.0)
    jax.effects_barrier()
    return out, seen


@case
def pure_callback(jit):
    def double(x):
        return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return jit(double)(X), jax.vmap(jit(functools.partial(vectorised, double=None)))(X)


def vectorised(x, double):
    return jax.pure_callback(
        lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method='expand_dims'
    )


@case(variants={'ordered': True, 'unordered': False})
def io_callbacks(jit, ordered):
    seen = []

    def note(v):
        seen.append(float(v))
        return np.float32(len(seen))

    def f(x):
        first = io_callback(note, jax.ShapeDtypeStruct((), 'float32'), x, ordered=ordered)
        return first + io_callback(note, jax.ShapeDtypeStruct((), 'float32'), x + first, ordered=ordered)

    compiled = jit(f)
    outs = [compiled(1.0), compiled(2.0)] if ordered else [compiled(1.0).shape]
    jax.effects_barrier()
    return outs, len(seen)


@case
def io_callback_result_unused(jit):
    seen = []
    compiled = jit(lambda x: (io_callback(lambda v: seen.append(1), None, x), x)[1])
    compiled(1.0)
    jax.effects_barrier()
    return seen


@case
def callback_that_raises(jit):
    def fails(_):
        raise ZeroDivisionError('in the callback')

    compiled = jit(lambda x: jax.pure_callback(fails, jax.ShapeDtypeStruct((), 'float32'), x))
    return error_of(lambda: jax.block_until_ready(compiled(1.0)))


@case
def callback_in_a_scan(jit):
    seen = []

    def body(carry, x):
        io_callback(lambda v: seen.append(int(v)), None, x, ordered=True)
        return carry + x, carry

    out = jit(lambda: jax.lax.scan(body, 0, jnp.arange(3)))()
    jax.effects_barrier()
    return out, seen


@case
def callback_of_a_compiled_function(jit):
    inner = jax.jit(lambda x: (jax.debug.print('inner {}', x), x)[1])
    return jit(lambda x: inner(x) + inner(x + 1))(1.0)


@case
def callback_closes_over_a_counter(jit):
    count = [0]

    def add(v):
        count[0] += 1
        return np.float32(v) + count[0]

    compiled = jit(lambda x: io_callback(add, jax.ShapeDtypeStruct((), 'float32'), x, ordered=True))
    return compiled(0.0), compiled(0.0), count


@case
def ref_as_an_argument(jit):
    def bump(ref):
        traced()
        ref[...] += 1.0
        ref[0] += 1

    ref = jax.new_ref(jnp.zeros(3))
    compiled = jit(bump)
    compiled(ref)
    compiled(ref)
    return ref[...]


@case
def ref_in_a_tree(jit):
    refs = {'a': jax.new_ref(jnp.zeros(3)), 'b': jax.new_ref(jnp.ones(()))}

    def swap(refs, x):
        refs['a'][1] = refs['b'][...] + x
        return refs['a'][...]

    return jit(swap)(refs, 2.0), refs['a'][...]


@case
def ref_closed_over(jit):
    ref = jax.new_ref(jnp.zeros(3))

    def bump(x):
        ref[...] += x

    compiled = jit(bump)
    compiled(1.0)
    compiled(2.0)
    return ref[...]


@case(since=(0, 12))
def ref_made_inside(jit):
    def f(x):
        ref = jax.new_ref(x)
        ref[0] = 9.0
        return jax.freeze(ref)

    return jit(f)(X), jax.grad(jit(lambda x: f(x).sum()))(X)


@case(raises=True)
def ref_returned(jit):
    return jit(lambda x: jax.new_ref(x))(X)


@case(raises=True)
def ref_argument_returned(jit):
    return jit(lambda ref: ref)(jax.new_ref(jnp.zeros(3)))


@case(raises=True)
def ref_twice(jit):
    ref = jax.new_ref(jnp.zeros(3))
    return jit(lambda a, b: a[...] + b[...])(ref, ref)


@case(raises=True)
def ref_closed_over_and_passed(jit):
    ref = jax.new_ref(jnp.zeros(3))
    return jit(lambda a: a[...] + ref[...])(ref)


@case(since=(0, 12))
def ref_view(jit):
    ref = jax.new_ref(jnp.arange(6.0).reshape(2, 3))

    def bump(row):
        row[...] = row[...] + 1

    jit(bump)(ref.at[1])
    return ref[...]


@case
def ref_sharded(jit):
    ref = jax.new_ref(jax.device_put(X, on('x')))
    out = jit(lambda ref: (ref[...] * 2, ref.set(ref[...] + 1) if hasattr(ref, 'set') else None)[0])(ref)
    return out, ref[...]


@case
def ref_in_a_scan(jit):
    def total(xs):
        ref = jax.new_ref(jnp.zeros(()))

        def body(_, x):
            ref[...] += x
            return (), ref[...]

        return jax.lax.scan(body, (), xs)[1]

    return jit(total)(X)


@case
def ref_under_jax_jit(jit):
    ref = jax.new_ref(jnp.zeros(3))
    inner = jit(lambda ref: ref.__setitem__(0, 5.0))
    jax.jit(lambda ref: inner(ref))(ref)
    return ref[...]


@case
def ref_and_disable_jit(jit):
    ref = jax.new_ref(jnp.zeros(3))
    with jax.disable_jit():
        jit(lambda ref: ref.__setitem__(0, 5.0))(ref)
    return ref[...]


@case
def ref_lowered(jit):
    ref = jax.new_ref(jnp.zeros(3))
    compiled = jit(lambda ref: ref.__setitem__(0, 5.0)).lower(ref).compile()
    compiled(ref)
    return ref[...]


@case
def ref_static(jit):
    return jit(lambda ref: 1, static_argnums=0)(jax.new_ref(jnp.zeros(3)))


@case
def token_in_and_out(jit):
    token = jax.lax.create_token()
    return type(jit(lambda t, x: (x, t))(token, X)[1]).__name__


@case
def token_made_inside(jit):
    return type(jit(lambda x: (x, jax.lax.create_token()))(X)[1]).__name__


@dataclasses.dataclass(frozen=True)
class Halves:
    """A value that the compiler sees as two arrays."""

    low: jax.Array
    high: jax.Array


@functools.cache
def registered_halves():
    """Returns the type of `Halves`, registered once."""
    from jax.experimental import hijax

    @dataclasses.dataclass(frozen=True)
    class HalvesType(hijax.HiType):
        size: int

        def lo_ty(self):
            return [hijax.ShapedArray((self.size,), jnp.dtype('float32'))] * 2

        def lower_val(self, value):
            return [value.low, value.high]

        def raise_val(self, low, high):
            return Halves(low, high)

    hijax.register_hitype(Halves, lambda value: HalvesType(value.low.shape[0]))
    return Halves


@case(since=(0, 11))
def hijax_type_there_and_back(jit):
    halves = registered_halves()(jnp.asarray(X), jnp.asarray(2 * X))
    out = jit(lambda h: h)(halves)
    return out.low, out.high


@case(since=(0, 11))
def hijax_type_beside_arrays(jit):
    halves = registered_halves()(jnp.asarray(X), jnp.asarray(2 * X))
    compiled = jit(lambda h, x: (traced(), h, x + 1)[1:])
    compiled(halves, X)
    out, x = compiled(halves, X)
    return out.low, x


@case
def host_effects_only(jit):
    seen = []
    compiled = jit(lambda x: (seen.append('traced'), x)[1])
    compiled(1), compiled(2), compiled(1.0)
    return seen


@case
def leak_of_effects_into_grad(jit):
    f = jit(lambda x: (jax.debug.print('value {}', x), x**2)[1])
    return jax.grad(f)(3.0)


@case
def checkify(jit):
    from jax.experimental import checkify

    def f(x):
        checkify.check(x > 0, 'must be positive')
        return jnp.log(x)

    error, out = jit(checkify.checkify(f))(-1.0)
    return str(error.get()).splitlines()[0], out


@case
def checkify_around(jit):
    from jax.experimental import checkify

    inner = jit(lambda x: (checkify.check(x > 0, 'must be positive'), x)[1])
    error, out = checkify.checkify(inner)(-1.0)
    return str(error.get()).splitlines()[0], out
