"""A compiled function as an object: attributes, copies, lifetimes."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import types
import weakref

import jax
import jax.numpy as jnp

from tests.support.jit_cases import M, X, case, error_of, traced


def module_level(x, y=1.0):
    """A function that can be found by its qualified name."""
    return x + y


@case(variants={'copy': copy.copy, 'deepcopy': copy.deepcopy})
def copied(jit, copier):
    f = jit(lambda x: (traced(), x + 1)[1])
    f(X)
    return copier(f)(X)


@case(meant={'error': 'accepted inputs'}, raises=True)
def pickled(jit):
    f = jit(module_level)
    return pickle.loads(pickle.dumps(f))(X)


@case
def methods(jit):
    f = jit(module_level)
    return [
        callable(getattr(f, name, None))
        for name in ('lower', 'trace', 'eval_shape', 'clear_cache', '__call__')
    ]


@case
def attributes_of_the_function(jit):
    def f(x):
        return x

    f.mark = 3
    return jit(f).mark


@case
def attributes_can_be_set(jit):
    f = jit(lambda x: x)
    f.mark = 5
    return f.mark, f(X)


@case
def what_inspect_says(jit):
    f = jit(module_level)
    return (
        callable(f),
        inspect.unwrap(f) is module_level,
        inspect.getdoc(f),
        inspect.signature(f).parameters.keys(),
        inspect.iscoroutinefunction(f),
    )


@case
def wraps_of_it(jit):
    f = jit(lambda x: x + 1)

    @functools.wraps(f)
    def g(x):
        return f(x) * 2

    return g(X), jit(g)(X), jax.jit(g)(X), jax.grad(lambda x: g(x).sum())(X)


@case
def wraps_of_a_jax_transformation(jit):
    g = jax.jit(jax.vmap(jit(lambda x: x.sum() ** 2)))
    return g.lower(M).compile()(M), g.eval_shape(M), [aval.shape for aval in jax.make_jaxpr(g)(M).out_avals]


@case
def as_a_method(jit):
    class Model:
        def __init__(self, w):
            self.w = w

        forward = functools.partialmethod(jit(lambda self, x: x * self.w, static_argnums=0))

    return Model(2.0).forward(X)


@case
def bound_by_hand(jit):
    f = jit(lambda self, x: self * x)
    return types.MethodType(f, 2.0)(X)


@case
def as_a_class_attribute(jit):
    class Model:
        act = jit(jnp.tanh)
        plain = staticmethod(jit(lambda x: x + 1))

    return error_of(Model().act, X), Model().plain(X), Model.act(X)


def made_with_something_held(jit):
    """Returns a function that was called, and a weak reference to an object that it closes over."""

    class Held:
        pass

    held = Held()
    f = jit(lambda x: (held, x)[1])
    f(X)
    return f, weakref.ref(held)


@case
def frees_what_it_closed_over(jit):
    f, seen = made_with_something_held(jit)
    del f
    gc.collect()
    return seen() is None


@case
def frees_at_once(jit):
    gc.collect()
    gc.disable()
    try:
        f, seen = made_with_something_held(jit)
        del f
        return seen() is None
    finally:
        gc.enable()


@case
def frees_arguments(jit):
    f = jit(lambda x: x + 1)
    x = jnp.array(X)
    seen = weakref.ref(x)
    f(x), f(x)
    del x
    return seen() is None


@case
def frees_outputs(jit):
    f = jit(lambda x: x + 1)
    out = f(X)
    seen = weakref.ref(out)
    del out
    return seen() is None


@case
def weak_reference_to_it(jit):
    f = jit(lambda x: x + 1)
    seen = weakref.ref(f)
    return seen()(X), seen() is f


@case
def in_a_dict_and_a_set(jit):
    f = jit(lambda x: x + 1)
    return {f: 1}[f], f in {f}, f == f


@case
def repr_names_it(jit):
    return 'module_level' in repr(jit(module_level))


@case
def functools_cache_of_it(jit):
    make = functools.cache(lambda n: jit(lambda x: x * n))
    return make(2)(X), make(3)(X), make(2) is make(2)


@case
def singledispatch(jit):
    f = functools.singledispatch(jit(lambda x: x + 1))
    f.register(int, jit(lambda x: x - 1))
    return f(X), f(3)
