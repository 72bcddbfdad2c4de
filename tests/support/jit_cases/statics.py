"""Static arguments: how they are selected, and which values are equal."""

from __future__ import annotations

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.jit_cases import M, X, case, error_of, traced


def make_repeated():
    """Returns a function whose second and third arguments cannot be traced."""

    def repeated(x, n, how='sum', *rest, scale=1):
        traced((n, how, scale))
        return getattr(jnp, how)(jnp.stack([x] * n) * scale, axis=0)

    return repeated


@case(
    variants={
        'number': {'static_argnums': 1},
        'tuple': {'static_argnums': (1, 2)},
        'negative': {'static_argnums': (1, -1)},
        'unsorted': {'static_argnums': (2, 1)},
        'twice': {'static_argnums': (1, 1)},
        'list': {'static_argnums': [1, 2]},
        'numpy': {'static_argnums': np.int64(1)},
        'range': {'static_argnums': range(1, 3)},
        'name': {'static_argnames': 'n'},
        'names': {'static_argnames': ('n', 'how')},
        'list of names': {'static_argnames': ['n', 'how']},
        'both': {'static_argnums': 1, 'static_argnames': 'how'},
        'none': {'static_argnums': (), 'static_argnames': ()},
        'set of names': {'static_argnames': {'n', 'how'}},
        'number and name of one': {'static_argnums': 1, 'static_argnames': 'n'},
    }
)
def named(jit, options):
    def repeated(x, n, how='sum'):
        traced(n if isinstance(n, int) else 'array')
        return x * n

    compiled = jit(repeated, **options)
    return compiled(X, 2), compiled(X, 3), compiled(X, 2)


@case(
    variants={
        'out of range': {'static_argnums': 7},
        'negative out of range': {'static_argnums': -7},
        'unknown name': {'static_argnames': 'm'},
        'donated too': {'static_argnums': 1, 'donate_argnums': 1},
        'donated too by name': {'static_argnames': 'n', 'donate_argnames': 'n'},
        'donated out of range': {'donate_argnums': 9},
        'donated unknown': {'donate_argnames': 'q'},
    },
    meant={'error': 'error classes'},
    raises=True,
)
def cannot_be_named(jit, options):
    def repeated(x, n):
        return x * n

    return jit(repeated, **options)(X, 2)


@case(
    variants={
        'no number': {'static_argnums': 'n'},
        'float': {'static_argnums': 1.5},
        'no name': {'static_argnames': 1},
    },
    raises=True,
)
def of_other_types(jit, options):
    return jit(lambda x, n: x * n, **options)(X, 2)


@case(meant={'error': 'accepted inputs'}, raises=True)
def by_keyword(jit):
    compiled = jit(make_repeated(), static_argnums=(1, 2), static_argnames='scale')
    return compiled(X, 2, 'sum', scale=3), compiled(X, n=2, how='max'), compiled(n=2, x=X)


@case(meant={'traces': 'number of traces'})
def default_static(jit):
    compiled = jit(make_repeated(), static_argnames=('n', 'how'))
    return compiled(X, 2), compiled(X, 2, 'sum'), compiled(X, 2, how='sum'), compiled(X, n=2)


@case
def extra_position(jit):
    compiled = jit(lambda x, *rest: (traced(rest[0]), x * rest[0] + rest[1])[1], static_argnums=1)
    return compiled(X, 2, X), compiled(X, 3, X), compiled(X, 2, X)


@case
def extra_keyword(jit):
    compiled = jit(lambda x, **named: [x] * named['n'], static_argnames='n')
    return compiled(X, n=2), compiled(X, n=3, other=X)


@case
def last_of_varargs(jit):
    return jit(lambda *args: (*args[:-1], args[-1] == 'sum'), static_argnums=-1)(X, M, 'sum')


@case(
    variants={
        'bool, int, float': (1, True, 1.0, 1, True, 1.0),
        'zeros': (0, False, 0.0, -0.0),
        'numpy and python': (np.int64(1), 1, np.int32(1)),
        'nan': (float('nan'), float('nan')),
        'tuples': ((1,), (True,), (1, 2), (1,)),
        'strings': ('a', 'b', 'a', b'a'),
        'none': (None, 0, None),
        'ellipsis': (Ellipsis, NotImplemented, Ellipsis),
        'dtypes': (np.float32, jnp.float32, np.dtype('float32'), 'float32'),
        'frozen sets': (frozenset({1}), frozenset({1}), frozenset({2})),
        'functions': (abs, max, abs),
        'types': (int, float, int),
        'complex': (1j, complex(0, 1), 1),
        'large': (10**30, 10**30, 10**31),
        'ranges': (range(3), range(0, 3, 1), range(4)),
    }
)
def values(jit, values):
    def f(x, n):
        traced(type(n).__name__)
        return x

    compiled = jit(f, static_argnums=1)
    for n in values:
        compiled(X, n)
    return compiled(X, values[0])


@case
def same_nan(jit):
    compiled = jit(lambda x, n: (traced(), x)[1], static_argnums=1)
    nan = float('nan')
    return compiled(X, nan), compiled(X, nan)


@case(
    variants={'list': [1], 'dict': {'a': 1}, 'array': X, 'jax array': np.float32, 'set': {1}},
    meant={'error': 'error classes'},
    raises=True,
)
def unhashable(jit, value):
    value = jnp.asarray(X) if value is np.float32 else value
    return jit(lambda x, n: x, static_argnums=1)(X, value)


@case(meant={'error': 'error classes'}, raises=True)
def unhashable_by_keyword(jit):
    return jit(lambda x, n: x, static_argnames='n')(X, n=[1])


@case(meant={'error': 'error classes'}, raises=True)
def unhashable_default_is_given(jit):
    def f(x, n=[1, 2]):  # noqa: B006 - a default that cannot be hashed is the case
        return x * n[0]

    compiled = jit(f, static_argnums=1)
    return compiled(X), compiled(X, [1, 2])


@case
def unhashable_default_is_left_out(jit):
    def f(x, n=[1, 2]):  # noqa: B006 - a default that cannot be hashed is the case
        return x * n[0]

    return jit(f, static_argnames='n')(X)


class Counted:
    """A value with equality that counts the calls of the caches."""

    def __init__(self, n):
        self.n = n

    def __hash__(self):
        return hash(self.n)

    def __eq__(self, other):
        return isinstance(other, Counted) and self.n == other.n


@case
def equal_objects(jit):
    compiled = jit(lambda x, c: (traced(c.n), x * c.n)[1], static_argnums=1)
    return compiled(X, Counted(2)), compiled(X, Counted(2)), compiled(X, Counted(3))


@case
def mutated_object(jit):
    compiled = jit(lambda x, c: (traced(c.n), x * c.n)[1], static_argnums=1)
    held = Counted(2)
    first = compiled(X, held)
    held.n = 5
    return first, compiled(X, held), compiled(X, Counted(2))


@case
def mutated_object_with_the_same_hash(jit):
    class Box:
        n = 1

    box = Box()
    compiled = jit(lambda x, c: (traced(c.n), x * c.n)[1], static_argnums=1)
    first = compiled(X, box)
    box.n = 5
    return first, compiled(X, box)


@case(meant={'error': 'comparison of static values'})
def equality_that_is_no_bool(jit):
    class Odd:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            return np.array([True, False])

    compiled = jit(lambda x, c: x, static_argnums=1)
    return compiled(X, Odd()), error_of(compiled, X, Odd())


@case(meant={'error': 'error classes'}, raises=True)
def hash_that_raises(jit):
    class Odd:
        def __hash__(self):
            raise TypeError('not today')

    return jit(lambda x, c: x, static_argnums=1)(X, Odd())


class Colour(enum.Enum):
    """A value that can only be static."""

    RED = 1
    BLUE = 2


@case
def enum_member(jit):
    compiled = jit(lambda x, c: (traced(c.name), x * c.value)[1], static_argnums=1)
    return compiled(X, Colour.RED), compiled(X, Colour.BLUE), compiled(X, Colour.RED)


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration like those of training scripts."""

    width: int = 2
    name: str = 'a'


@case(meant={'traces': 'number of traces'})
def frozen_dataclass(jit):
    compiled = jit(lambda x, c: (traced(c), x * c.width)[1], static_argnames='c')
    return compiled(X, Config()), compiled(X, c=Config()), compiled(X, Config(3)), compiled(X, c=Config(3))


@case
def static_partial(jit):
    compiled = jit(lambda f, x: (traced(), f(x))[1], static_argnums=0)
    return compiled(jnp.sin, X), compiled(functools.partial(jnp.add, 1.0), X), compiled(jnp.sin, X)


@case
def static_compiled_function(jit):
    inner = jit(lambda x: x + 1)
    return jit(lambda f, x: f(x), static_argnums=0)(inner, X)


@case
def function_as_a_static_loss(jit):
    return jit(lambda loss, x: jax.grad(loss)(x), static_argnames='loss')(loss=lambda x: jnp.sum(x**2), x=X)


@case(meant={'traces': 'number of traces'})
def all_static(jit):
    compiled = jit(lambda n, m: (traced(), jnp.arange(n * m))[1], static_argnums=(0, 1))
    return compiled(2, 3), compiled(2, m=3), compiled(3, 2)


@case
def static_shape(jit):
    compiled = jit(lambda shape, fill: jnp.full(shape, fill), static_argnums=0)
    return compiled((2, 3), 1.0), compiled((), 2), error_of(compiled, 3.5, 2)


@case(meant={'error': 'error classes'}, raises=True)
def static_tracer(jit):
    inner = jit(lambda x, n: x * n, static_argnums=1)
    return jax.jit(lambda x: inner(x, x))(X)


@case
def many_values(jit):
    compiled = jit(lambda x, n: (traced(), x + n)[1], static_argnums=1)
    return [compiled(X, n) for n in (*range(8), *range(8))]


@case
def static_and_shapes(jit):
    compiled = jit(lambda x, n: (traced(), x * n)[1], static_argnums=1)
    return [compiled(x, n) for n in (1, 2) for x in (X, M, X)]
