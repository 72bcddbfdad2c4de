"""Callables: the kinds of objects that can be compiled, and the attributes of the result."""

from __future__ import annotations

import functools
import inspect
import operator

import jax
import jax.numpy as jnp

from tests.support.jit_cases import M, X, case, error_of, traced
from tests.support.jit_cases.calls import make_weighed


@case(
    variants={
        'lambda': lambda x: x + 1,
        'numpy function': jnp.sin,
        'ufunc': jnp.add.reduce,
        'operator': operator.neg,
    }
)
def what_is_compiled(jit, function):
    return jit(function)(X)


@case(variants={'builtin': max, 'type': tuple})
def builtins(jit, function):
    return jit(function)((X,))


@case(meant={'traces': 'number of traces'})
def partial_by_position(jit):
    def f(a, b, c=3.0):
        traced()
        return a + 2 * b + c

    compiled = jit(functools.partial(f, 1.0))
    return compiled(X), compiled(b=X), compiled(X, c=1.0)


@case
def partial_by_keyword(jit):
    def f(a, b, c=3.0):
        return a + 2 * b + c

    compiled = jit(functools.partial(f, b=2.0))
    return compiled(X), compiled(X, b=5.0), compiled(X, c=1.0), error_of(compiled, X, 1.0)


@case
def partial_of_partial(jit):
    return jit(functools.partial(functools.partial(make_weighed(), 1.0), b=2.0))(c=X)


@case
def partial_of_a_compiled_one(jit):
    compiled = jit(lambda a, b: (traced(), a - b)[1])
    return functools.partial(compiled, 1.0)(X), functools.partial(compiled, b=1.0)(X)


class Model:
    """A class with methods to compile."""

    factor = 3.0

    def __init__(self, factor=2.0):
        self.factor = factor

    def scaled(self, x, by=1.0):
        traced()
        return x * self.factor * by

    def __call__(self, x, by=1.0):
        traced()
        return x * self.factor + by

    @classmethod
    def of_class(cls, x):
        return x * cls.factor

    @staticmethod
    def of_nothing(x):
        return x + 1


@case
def bound_method(jit):
    model = Model()
    compiled = jit(model.scaled)
    return compiled(X), compiled(X, by=2.0), jit(Model(4.0).scaled)(X)


@case(meant={'traces': 'number of traces'})
def method_decorated(jit):
    class Decorated:
        factor = 2.0

        @functools.partial(jit, static_argnums=0)
        def scaled(self, x):
            traced()
            return x * self.factor

    first, second = Decorated(), Decorated()
    second.factor = 5.0
    return first.scaled(X), second.scaled(X), first.scaled(x=X), Decorated.scaled(first, X)


@case(meant={'traces': 'number of traces'})
def method_with_a_static_name(jit):
    class Decorated:
        @functools.partial(jit, static_argnames=('self', 'n'))
        def repeated(self, x, n=2):
            traced(n)
            return [x] * n

    model = Decorated()
    return model.repeated(X), model.repeated(X, n=3), model.repeated(X, 3)


@case(meant={'error': 'error classes'}, raises=True)
def self_that_is_no_tree(jit):
    class Decorated:
        @jit
        def scaled(self, x):
            return x

    return Decorated().scaled(X)


@case
def classmethod_and_staticmethod(jit):
    return jit(Model.of_class)(X), jit(Model.of_nothing)(X), jit(Model().of_class)(X)


@case
def classmethod_over_it(jit):
    class Decorated:
        factor = 2.0

        @classmethod
        @functools.partial(jit, static_argnums=0)
        def of_class(cls, x):
            return x * cls.factor

        @staticmethod
        @jit
        def of_nothing(x):
            return x + 1

    class Other(Decorated):
        factor = 5.0

    return Decorated.of_class(X), Other.of_class(X), Other().of_nothing(X)


@case
def property_over_it(jit):
    class Decorated:
        @property
        @functools.partial(jit, static_argnums=0)
        def value(self):
            return jnp.ones(3)

    return Decorated().value


@case
def callable_object(jit):
    compiled = jit(Model())
    return compiled(X), compiled(X, by=2.0)


@case(meant={'error': 'accepted inputs'}, raises=True)
def callable_object_that_cannot_be_hashed(jit):
    class Unhashable(Model):
        __hash__ = None  # as Python does for classes with __eq__

        def __eq__(self, other):
            return False

    return jit(Unhashable())(X)


@case(meant={'error': 'accepted inputs'}, raises=True)
def callable_with_slots(jit):
    class Slotted:
        __slots__ = ()

        def __call__(self, x):
            return x + 1

    return jit(Slotted())(X)


@case(meant={'error': 'accepted inputs'}, raises=True)
def a_staticmethod(jit):
    return jit(staticmethod(lambda x: x + 1))(X)


@case
def a_class(jit):
    class Pair(tuple):
        def __new__(cls, x):
            return x + 1

    return jit(Pair)(X)


@case
def wrapped(jit):
    def f(a, b=2.0):
        return a * b

    @functools.wraps(f)
    def g(*args, **kwargs):
        traced()
        return f(*args, **kwargs) + 1

    compiled = jit(g)
    return compiled(X), compiled(X, 3.0), compiled(X, b=3.0), compiled(a=X)


@case
def wrapped_with_static_name(jit):
    def f(a, n):
        return [a] * n

    @functools.wraps(f)
    def g(*args, **kwargs):
        return f(*args, **kwargs)

    compiled = jit(g, static_argnames='n')
    return compiled(X, n=2)


@case
def wrapped_with_static_number(jit):
    def f(a, n):
        return [a] * n

    @functools.wraps(f)
    def g(*args, **kwargs):
        return f(*args, **kwargs)

    return jit(g, static_argnums=1)(X, 2)


@case
def signature_that_lies(jit):
    def f(*args, **kwargs):
        return args[0] + len(args) + len(kwargs)

    f.__signature__ = None
    return jit(f)(X, 1, b=2)


@case(variants={'number': 3, 'string': 'f'}, meant={'error': 'error classes'}, raises=True)
def not_a_function(jit, thing):
    return jit(thing)


@case(meant={'error': 'accepted inputs'}, raises=True)
def no_function_yet(jit):
    return jit(None)(lambda x: x + 1)(X)


@case(raises=True)
def coroutine_function(jit):
    def f(x):
        async def inner():
            return x

        coroutine = inner()
        coroutine.close()
        return coroutine

    return jit(f)(X)


@case
def decorator_with_options(jit):
    @jit(static_argnums=1)
    def f(x, n):
        return x * n

    return f(X, 2)


@case
def looks(jit):
    def documented(x: float, *, y: int = 2) -> float:
        """What it does."""
        return x

    compiled = jit(documented)
    return [
        getattr(compiled, name) for name in ('__name__', '__qualname__', '__doc__', '__module__')
    ], compiled.__wrapped__ is documented


@case
def signature(jit):
    return str(inspect.signature(jit(make_weighed())))


@case
def names_of_private_parameters(jit):
    def f(_scalax_state, _scalax_hot, row, self):
        return _scalax_state + 2 * _scalax_hot + 3 * row + 4 * self

    return jit(f)(X, 1, 2, self=3)


@case
def closure_over_arrays(jit):
    held = jnp.asarray(X)
    compiled = jit(lambda x: (traced(), x + held)[1])
    return compiled(X), compiled(X)


@case
def closure_that_changes(jit):
    held = {'n': 1.0}
    compiled = jit(lambda x: x + held['n'])
    first = compiled(X)
    held['n'] = 9.0
    return first, compiled(X)


@case
def recursive(jit):
    @functools.partial(jit, static_argnums=1)
    def power(x, n):
        traced(n)
        return x if n == 1 else x * power(x, n - 1)

    return power(X, 4)


@case
def argument_unused(jit):
    return jit(lambda a, b: a)(X, M), jit(lambda a: 3)(X)


@case
def output_is_the_argument(jit):
    x = jnp.asarray(X)
    out = jit(lambda a: (a, a))(x)
    return out, out[0] is x, out[0] is out[1]


@case
def output_is_a_constant(jit):
    return jit(lambda: (1, 2.0, True, X, None, 1j))()


@case
def jax_jit_of_it(jit):
    compiled = jax.jit(jit(make_weighed()))
    return compiled(X, 1.0), compiled(X, b=1.0, c=2.0)


@case
def it_of_jax_jit(jit):
    compiled = jit(jax.jit(make_weighed()))
    return compiled(X, 1.0), compiled(X, b=1.0, c=2.0)


@case
def it_of_itself(jit):
    compiled = jit(jit(jit(make_weighed())))
    return compiled(X, 1.0), compiled(X, 1.0)
