"""Donation: which arrays are deleted, and when."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.support.jit_cases import M, X, case, error_of, on, traced


def gone(*arrays):
    """Returns which arrays are deleted."""
    return [array.is_deleted() for array in arrays]


def fresh(values=X, *spec):
    """Returns a new array: uncommitted, or sharded."""
    return jax.device_put(values, on(*spec)) if spec else jnp.array(values)


@case(
    variants={
        'number': {'donate_argnums': 0},
        'numbers': {'donate_argnums': (0,)},
        'name': {'donate_argnames': 'a'},
        'names': {'donate_argnames': ['a']},
        'none': {'donate_argnums': ()},
        'twice': {'donate_argnums': (0, 0)},
    }
)
def named(jit, options):
    a, b = fresh(), fresh(2 * X)
    out = jit(lambda a, b: (a + b, a - b), **options)(a, b)
    return out, gone(a, b)


@case(since=(0, 12))  # earlier versions of jax.jit cannot resolve it, and donate nothing
def negative_number(jit):
    a, b = fresh(), fresh(2 * X)
    out = jit(lambda a, b: a + b, donate_argnums=-2)(a, b)
    return out, gone(a, b)


@case(meant={'values': 'argument names beside numbers'})
def number_and_another_name(jit):
    a, b = fresh(), fresh(2 * X)
    out = jit(lambda a, b: (a + b, a - b), donate_argnums=0, donate_argnames='b')(a, b)
    return out, gone(a, b)


@case
def by_keyword(jit):
    a, b = fresh(), fresh(2 * X)
    out = jit(lambda a, b: a + b, donate_argnames='b')(a, b=b)
    return out, gone(a, b)


@case
def number_by_keyword(jit):
    a, b = fresh(), fresh(2 * X)
    out = jit(lambda a, b: a + b, donate_argnums=1)(a, b=b)
    return out, gone(a, b)


@case
def name_by_position(jit):
    a, b = fresh(), fresh(2 * X)
    out = jit(lambda a, b: a + b, donate_argnames='b')(a, b)
    return out, gone(a, b)


@case
def keyword_only(jit):
    a, b = fresh(), fresh(2 * X)
    out = jit(lambda a, *, b: a + b, donate_argnames='b')(a, b=b)
    return out, gone(a, b)


@case
def extra_keyword(jit):
    a, b = fresh(), fresh(2 * X)
    out = jit(lambda a, **named: a + named['b'], donate_argnames='b')(a, b=b)
    return out, gone(a, b)


@case
def extra_position(jit):
    a, b, c = fresh(), fresh(2 * X), fresh(3 * X)
    out = jit(lambda *args: (args[0] + args[1], args[2]), donate_argnums=(1,))(a, b, c)
    return out, gone(a, b, c)


@case
def tree(jit):
    state = {'w': fresh(), 'b': [fresh(M), None]}
    out = jit(lambda s, x: jax.tree.map(lambda leaf: leaf + x, s), donate_argnums=0)(state, 1.0)
    return out, gone(state['w'], state['b'][0])


@case
def used_again(jit):
    a = fresh()
    compiled = jit(lambda a: a + 1, donate_argnums=0)
    compiled(a)
    return error_of(jnp.sum, a)


@case(meant={'error': 'error classes'}, raises=True)
def donated_again(jit):
    a = fresh()
    compiled = jit(lambda a: a + 1, donate_argnums=0)
    compiled(a)
    return compiled(a)


@case(meant={'error': 'error classes'}, raises=True)
def donated_before_elsewhere(jit):
    a = fresh()
    jax.jit(lambda a: a + 1, donate_argnums=0)(a)
    return jit(lambda a, b: a + b)(1.0, b=a)


@case(meant={'error': 'error classes'}, raises=True)
def deleted_by_hand(jit):
    a = fresh()
    compiled = jit(lambda a: a + 1)
    compiled(a)
    a.delete()
    return compiled(a)


@case(meant={'error': 'error classes'}, raises=True)
def one_array_twice(jit):
    a = fresh()
    return jit(lambda a, b: (a + 1, b + 2), donate_argnums=(0, 1))(a, a)


@case(meant={'error': 'error classes'}, raises=True)
def one_array_donated_and_kept(jit):
    a = fresh()
    return jit(lambda a, b: (a + 1, b + 2), donate_argnums=0)(a, a)


@case
def unusable_shape(jit):
    a = fresh()
    out = jit(lambda a: jnp.sum(a), donate_argnums=0)(a)
    return out, gone(a)


@case
def unusable_dtype(jit):
    a = fresh()
    out = jit(lambda a: a.astype(jnp.int8), donate_argnums=0)(a)
    return out, gone(a)


@case
def unused(jit):
    a = fresh()
    out = jit(lambda a, b: b + 1, donate_argnums=0)(a, 1.0)
    return out, gone(a)


@case
def unused_and_kept(jit):
    a = fresh()
    out = jit(lambda a, b: b + 1, donate_argnums=0, keep_unused=True)(a, fresh(2 * X))
    return out, gone(a)


@case
def returned_as_it_is(jit):
    a = fresh()
    out = jit(lambda a: a, donate_argnums=0)(a)
    return out, gone(a)


@case
def numpy_data(jit):
    data = X.copy()
    out = jit(lambda a: a + 1, donate_argnums=0)(data)
    return out, data


@case
def python_number(jit):
    return jit(lambda a: a + 1, donate_argnums=0)(1.0)


@case
def sharded(jit):
    a = fresh(X, 'x')
    out = jit(lambda a: a + 1, donate_argnums=0, in_shardings=on('x'), out_shardings=on('x'))(a)
    return out, gone(a)


@case
def sharded_as_it_comes(jit):
    a = fresh(M, 'x', 'y')
    out = jit(lambda a: a + 1, donate_argnums=0)(a)
    return out, gone(a)


@case
def sharded_elsewhere(jit):
    a = fresh(X, 'x')
    out = jit(lambda a: a + 1, donate_argnums=0, out_shardings=on('y'))(a)
    return out, gone(a)


@case
def three_steps(jit):
    step = jit(lambda s, x: (traced(), jax.tree.map(lambda leaf: leaf * x, s))[1], donate_argnums=0)
    state, old = {'w': fresh(X, 'x')}, []
    for _ in range(3):
        old.append(state['w'])
        state = step(state, 2.0)
    return state, gone(*old)


@case
def error_in_the_function(jit):
    a = fresh()

    def fails(a):
        raise ZeroDivisionError

    return error_of(jit(fails, donate_argnums=0), a), gone(a)


@case
def error_in_the_call(jit):
    a = fresh()
    return error_of(jit(lambda a, b: a, donate_argnums=0), a), gone(a)


@case
def inside_of_a_jit(jit):
    a = fresh()
    out = jax.jit(jit(lambda a: a + 1, donate_argnums=0))(a)
    return out, gone(a)


@case
def under_grad(jit):
    a = fresh()
    out = jax.grad(jit(lambda a: jnp.sum(a**2), donate_argnums=0))(a)
    return out, gone(a)


@case
def under_disable_jit(jit):
    a = fresh()
    with jax.disable_jit():
        out = jit(lambda a: a + 1, donate_argnums=0)(a)
    return out, gone(a)


@case
def compiled_ahead(jit):
    a = fresh()
    compiled = jit(lambda a: a + 1, donate_argnums=0).lower(a).compile()
    before = gone(a)
    return compiled(a), before, gone(a)


@case
def reported_by_args_info(jit):
    lowered = jit(lambda a, b: a + b, donate_argnums=0).lower(X, X)
    return [info.donated for info in jax.tree.leaves(lowered.args_info)]


@case
def key(jit):
    k = jax.random.key(0)
    out = jit(lambda k: jax.random.fold_in(k, 1), donate_argnums=0)(k)
    return out, k.is_deleted()


@case
def empty_array(jit):
    a = jnp.zeros((0, 3))
    out = jit(lambda a: a + 1, donate_argnums=0)(a)
    return out, gone(a)


@case
def aliased_output(jit):
    a = fresh()
    first, second = jit(lambda a: (a + 1, a + 1), donate_argnums=0)(a)
    first.delete()
    return second, gone(a)
