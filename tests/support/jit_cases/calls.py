"""Call conventions: positional and keyword arguments, defaults, and types that can be compiled."""

from __future__ import annotations

import jax.numpy as jnp

from tests.support.jit_cases import X, case, error_of, traced


def make_weighed():
    """Returns a function whose result distinguishes all its arguments."""

    def weighed(a, b=2.0, *rest, c=3.0, **named):
        traced()
        total = a + 10 * b + 100 * c
        for i, value in enumerate(rest):
            total = total + 1000 * (i + 1) * value
        for name in sorted(named):
            total = total + len(name) * 1e5 * named[name]
        return total

    return weighed


CALLS = {
    'positional': ((X, 1.0), {}),
    'keyword': ((X,), {'b': 4.0}),
    'all keywords': ((), {'b': X, 'a': 1.0}),
    'default': ((X,), {}),
    'rest': ((X, 1.0, 2.0, X), {}),
    'keyword only': ((X,), {'c': 5.0}),
    'named': ((X,), {'zz': 1.0, 'z': X}),
    'everything': ((X, 1.0, X), {'c': 2.0, 'zz': 1.0}),
    'numpy scalars': ((X[1], X[2]), {'c': X[3]}),
}


@case(variants=CALLS)
def sorted_into_parameters(jit, call):
    args, kwargs = call
    compiled = jit(make_weighed())
    return [compiled(*args, **kwargs) for _ in range(2)]


@case(
    variants={
        'too many': ((1, 2, 3), {}),
        'none': ((), {}),
        'unknown keyword': ((1, 2), {'c': 3}),
        'twice': ((1, 2), {'a': 3}),
        'missing': ((1,), {}),
    },
    raises=True,
)
def does_not_fit(jit, call):
    args, kwargs = call
    return jit(lambda a, b: a + b)(*args, **kwargs)


@case
def keyword_order(jit):
    compiled = jit(lambda **named: (traced(), list(named.values()))[1])
    return compiled(a=1, b=X), compiled(b=X, a=1)


@case
def keyword_order_seen_by_the_function(jit):
    compiled = jit(lambda **named: [traced(list(named)), *named.values()][1:])
    return compiled(b=1, a=X), compiled(a=1, b=X)


@case(meant={'traces': 'number of traces'})
def position_then_keyword(jit):
    @jit
    def add(a, b):
        traced()
        return a - b

    return add(X, 1), add(X, b=1), add(a=X, b=1), add(b=1, a=X)


@case
def positional_only(jit):
    def add(a, b, /, c):
        return a + 2 * b + 3 * c

    compiled = jit(add)
    return compiled(X, 1, 2), compiled(X, 1, c=2), error_of(compiled, X, b=1, c=2)


@case(meant={'error': 'accepted inputs'}, raises=True)
def positional_only_name_among_keywords(jit):
    return jit(lambda a, /, **named: a + 2 * named['a'])(X, a=1.0)


@case
def keyword_only_by_position(jit):
    def scale(a, *, by):
        return a * by

    compiled = jit(scale)
    return compiled(X, by=3), error_of(compiled, X, 3), error_of(compiled, X)


@case
def default_that_is_no_array(jit):
    def pick(a, how='sum', table={'sum': jnp.sum}):  # noqa: B006 - the case is a default that is not an array
        return table[how](a)

    return jit(pick)(X)


@case
def default_that_is_none(jit):
    def maybe(a, b=None):
        return a if b is None else a + b

    compiled = jit(maybe)
    return compiled(X), compiled(X, None), compiled(X, 1.0)


@case(meant={'traces': 'number of traces'})
def default_given_and_left_out(jit):
    compiled = jit(lambda a, b=1.0: (traced(), a + b)[1])
    return compiled(X), compiled(X, 1.0), compiled(X, b=1.0)[:2], compiled(X)


@case
def default_is_mutable(jit):
    memory = [1.0]

    def add(a, b=memory):
        return a + b[0]

    compiled = jit(add)
    first = compiled(X)
    memory[0] = 5.0
    return first, compiled(X)


@case
def no_arguments(jit):
    compiled = jit(lambda: (traced(), jnp.arange(3))[1])
    return compiled(), compiled(), error_of(compiled, 1)


@case
def nothing_returned(jit):
    return jit(lambda x: traced())(X)


@case
def many_arguments(jit):
    return jit(lambda *args: sum(args))(*range(200))


@case
def number_of_rest_changes(jit):
    compiled = jit(lambda *args: (traced(len(args)), sum(args))[1])
    return compiled(1), compiled(1, 2), compiled(1), compiled()
