"""Errors of functions and of tracing, and the state after them."""

from __future__ import annotations

import asyncio
import functools
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.jit_cases import M, X, case, error_of, on, traced


class Boom(Exception):
    """An error of a user's function."""


def message(function, *args, **kwargs):
    """Returns the class and the words of the error that a call raises."""
    with pytest.raises(BaseException) as caught:
        function(*args, **kwargs)
    return caught.type.__name__, str(caught.value).splitlines()[0]


CALLERS = {
    'call': lambda f: f(X),
    'keyword': lambda f: f(x=X),
    'grad': lambda f: jax.grad(f)(X),
    'vmap': lambda f: jax.vmap(f)(X),
    'jit': lambda f: jax.jit(f)(X),
    'scan': lambda f: jax.lax.scan(lambda c, x: (f(c), x), 0.0, X),
    'lower': lambda f: f.lower(X),
    'trace': lambda f: f.trace(X),
    'eval_shape': lambda f: jax.eval_shape(f, X),
    'make_jaxpr': lambda f: jax.make_jaxpr(f)(X),
    'twice': lambda f: (error_of(f, X), f(X)),
}


@case(variants=CALLERS)
def of_the_function(jit, call):
    def fails(x):
        traced()
        raise Boom(f'of {jnp.shape(x)}')

    return message(call, jit(fails))


@case(
    variants={
        kind.__name__: kind
        for kind in (
            ValueError,
            TypeError,
            RuntimeError,
            KeyError,
            StopIteration,
            AssertionError,
            AttributeError,
        )
    }
)
def of_python(jit, kind):
    def fails(x):
        traced()
        raise kind('mine')

    compiled = jit(fails)
    return message(compiled, X), message(compiled, X)


@case(variants={kind.__name__: kind for kind in (KeyboardInterrupt, SystemExit, GeneratorExit)})
def that_are_no_exceptions(jit, kind):
    def fails(x):
        traced()
        raise kind('mine')

    return message(jit(fails), X)


@case(
    variants={
        'deleted': 'Array has been deleted',
        'donated': 'buffer donated',
        'incompatible': 'incompatible devices',
    }
)
def with_words_of_jax(jit, words):
    def fails(x):
        traced()
        raise RuntimeError(words)

    return message(jit(fails), jnp.asarray(X))


@case
def with_a_cause(jit):
    def fails(x):
        try:
            raise KeyError('inner')
        except KeyError as error:
            raise Boom('outer') from error

    with pytest.raises(Boom) as caught:
        jit(fails)(X)
    return type(caught.value.__cause__).__name__, caught.value.__suppress_context__


@case
def group(jit):
    def fails(x):
        raise ExceptionGroup('several', [Boom('a'), ValueError('b')])

    with pytest.raises(ExceptionGroup) as caught:
        jit(fails)(X)
    return [type(error).__name__ for error in caught.value.exceptions]


@case
def traceback_ends_in_the_function(jit):
    def fails(x):
        return deeper(x)

    def deeper(x):
        raise Boom('here')

    with pytest.raises(Boom) as caught:
        jit(fails)(X)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    return names[-2:], names.count('deeper')


@case
def notes_are_kept(jit):
    def fails(x):
        error = Boom('noted')
        error.add_note('look here')
        raise error

    with pytest.raises(Boom) as caught:
        jit(fails)(X)
    return caught.value.__notes__[0]


@case
def works_after_an_error(jit):
    bad = [True]

    def f(x):
        traced()
        if bad[0]:
            raise Boom('once')
        return x + 1

    compiled = jit(f)
    first = error_of(compiled, X)
    bad[0] = False
    return first, compiled(X), compiled(X)


@case
def one_shape_fails(jit):
    def f(x):
        traced()
        if x.ndim == 2:
            raise Boom('no matrices')
        return x + 1

    compiled = jit(f)
    return compiled(X), error_of(compiled, M), compiled(X), error_of(compiled, M)


CONCRETE = {
    'if': lambda x: 1 if x.sum() > 0 else 2,
    'while': lambda x: [None for _ in iter(lambda: bool(x[0]), False)],
    'float': lambda x: float(x[0]),
    'int': lambda x: int(x[0]),
    'index': lambda x: [1, 2, 3][x[0].astype(int)],
    'range': lambda x: range(x[0].astype(int)),
    'numpy': lambda x: np.sin(x),
    'np.asarray': lambda x: np.asarray(x),
    'boolean mask': lambda x: x[x > 0],
    'shape': lambda x: jnp.zeros(x[0].astype(int)),
    'nonzero': lambda x: jnp.nonzero(x),
    'item': lambda x: x[0].item(),
    'tolist': lambda x: x.tolist(),
    'format': lambda x: f'{x[0]:.2f}',
    'hash': lambda x: hash(x),
    'dict key': lambda x: {x: 1},
    'assign': lambda x: x.__setitem__(0, 1),
    'assert': lambda x: [].index(x) if (x == x).all() else None,
    'attribute': lambda x: x.no_such_thing,
    'block': lambda x: x.block_until_ready(),
    'sharding': lambda x: x.sharding.mesh,
    'devices': lambda x: x.devices(),
    'is_deleted': lambda x: x.is_deleted(),
    'iterate a scalar': lambda x: list(x[0]),
    'shapes': lambda x: x + jnp.ones(3),
    'dot': lambda x: x @ jnp.ones(3),
    'unpack': lambda x: [a for a, b in [x]],
    'string': lambda x: x + 'a',
    'unbound axis': lambda x: jax.lax.psum(x, 'nowhere'),
}


@case(variants=CONCRETE, raises=True)
def of_a_tracer(jit, function):
    return jit(lambda x: function(x))(X)


@case(raises=True)
def leaked_by_a_side_effect(jit):
    leaked = []
    jit(lambda x: (leaked.append(x), x)[1])(X)
    return leaked[0] + 1


@case(raises=True)
def leaked_into_another(jit):
    leaked = []
    jit(lambda x: (leaked.append(x * 2), x)[1])(X)
    return jit(lambda y: y + leaked[0])(X)


@case(raises=True)
def leaked_by_an_attribute(jit):
    class Model:
        state = None

        def step(self, x):
            self.state = x + 1
            return x

    model = Model()
    jit(model.step)(X)
    return jnp.sum(model.state)


@case(raises=True)
def leak_found(jit):
    held = []

    def f(x):
        held.append(x)
        return x + 1

    with jax.checking_leaks():
        return jit(f)(X)


@case
def no_leak_found(jit):
    with jax.checking_leaks():
        f = jit(lambda x: jnp.sin(x) + 1)
        return f(X), f(X), jax.grad(lambda x: f(x).sum())(X), jax.jit(f)(X)


@case(raises=True)
def nan_found(jit):
    with jax.debug_nans(True):
        return jit(lambda x: (traced(), jnp.log(x))[1])(-1.0)


@case
def nan_found_only_then(jit):
    f = jit(lambda x: (traced(), jnp.log(x))[1])
    with jax.debug_nans(True):
        return f(1.0), error_of(f, -1.0), f(2.0)


@case
def nan_found_with_statics_and_keywords(jit):
    f = jit(lambda x, n, *, b=1.0: jnp.log(x) * n * b, static_argnums=1)
    with jax.debug_nans(True):
        return f(1.0, 2, b=3.0), error_of(f, -1.0, 2, b=3.0)


@case
def nan_found_in_a_gradient(jit):
    f = jit(lambda x: jnp.sqrt(x))
    with jax.debug_nans(True):
        return jax.grad(f)(4.0), error_of(jax.grad(f), -1.0)


@case
def nan_that_only_xla_makes(jit):
    f = jit(lambda x: jnp.where(x > 0, x, 1.0) / x)
    with jax.debug_nans(True):
        return f(X + 1)


@case
def nan_with_donation(jit):
    f = jit(lambda x: jnp.log(x), donate_argnums=0)
    with jax.debug_nans(True):
        return error_of(f, jnp.asarray(-1.0))


@case
def nan_sharded(jit):
    f = jit(lambda x: jnp.log(x), in_shardings=on('x'))
    with jax.debug_nans(True):
        return error_of(f, X - 4), f(X + 1)


@case
def infinity_found(jit):
    f = jit(lambda x: 1 / x)
    with jax.debug_infs(True):
        return f(1.0), error_of(f, 0.0)


@case
def in_asyncio(jit):
    f = jit(lambda x: (traced(), x + 1)[1])

    async def call(i):
        await asyncio.sleep(0)
        return f(float(i))

    async def every():
        return await asyncio.gather(*map(call, range(4)))

    return asyncio.run(every())


@case
def out_of_a_generator(jit):
    f = jit(lambda x: x + 1)

    def numbers():
        for i in range(3):
            yield f(i)

    return list(numbers())


@case
def recursion_without_end(jit):
    @jit
    def f(x):
        return f(x)

    return error_of(f, 1.0)


@case
def no_tracing(jit):
    f = jit(lambda x: x + 1)
    f(1.0)
    with jax.no_tracing():
        return f(1.0), error_of(f, X)


@case
def key_used_twice(jit):
    with jax.debug_key_reuse(True):
        f = jit(lambda k: jax.random.normal(k) + jax.random.normal(k))
        return error_of(f, jax.random.key(0))


@case
def rank_promotion(jit):
    f = jit(lambda a, b: a + b)
    first = f(X, 1.0), f(M, M[0])
    with jax.numpy_rank_promotion('raise'):
        return first, error_of(f, M, M[0])


@case
def wrong_options(jit):
    return [
        error_of(jit, lambda x: x, **{name: value})
        for name, value in {'device': 'nowhere', 'backend': 'nowhere', 'inline': 'perhaps'}.items()
    ]


@case(raises=True, meant={'error': 'error classes'})
def unknown_option(jit):
    return jit(lambda x: x, no_such_option=1)


@case
def partial_of_an_error(jit):
    return message(functools.partial(jit(lambda x: [].index(x)), X))
