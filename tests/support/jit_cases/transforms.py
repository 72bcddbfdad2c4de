"""Transformations of a compiled function, and inside one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.jit_cases import M, X, case, on, traced

V = np.linspace(0.5, 2, 3, dtype=np.float32)


def make_loss():
    """Returns a function with a scalar output that counts its traces."""

    def loss(w, x=V, *, scale=1.0):
        traced()
        return jnp.sum(jnp.sin(w) * x) * scale

    return loss


OF = {
    'grad': jax.grad,
    'value_and_grad': jax.value_and_grad,
    'grad of both': lambda f: jax.grad(f, argnums=(0, 1)),
    'jacfwd': jax.jacfwd,
    'jacrev': jax.jacrev,
    'hessian': jax.hessian,
    'grad of grad': lambda f: jax.grad(lambda w, x: jax.grad(f)(w, x).sum()),
    'jit': jax.jit,
    'jit of grad': lambda f: jax.jit(jax.grad(f)),
    'grad of jit of grad': lambda f: jax.grad(jax.jit(lambda w, x: jax.grad(f)(w, x).sum())),
    'checkpoint': jax.checkpoint,
    'grad of checkpoint': lambda f: jax.grad(jax.checkpoint(f)),
    'jvp': lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    'vjp': lambda f: lambda w, x: jax.vjp(f, w, x)[1](2.0),
    'linearize': lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    'linear_transpose': lambda f: lambda w, x: jax.linear_transpose(lambda x: f(w, x), x)(1.0),
    'vmap': lambda f: lambda w, x: jax.vmap(f, in_axes=(0, None))(jnp.stack([w, 2 * w]), x),
    'vmap of both': lambda f: (
        lambda w, x: jax.vmap(f, in_axes=(0, 1))(jnp.stack([w, w]), jnp.stack([x, x], 1))
    ),
    'vmap of grad': lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, w]), x),
    'vmap twice': lambda f: lambda w, x: jax.vmap(jax.vmap(f, (None, 0)), (0, None))(np.eye(3), np.eye(3)),
    'named axis': lambda f: (
        lambda w, x: jax.vmap(lambda w: jax.lax.psum(f(w, x), 'i'), axis_name='i')(np.eye(3))
    ),
    'map': lambda f: lambda w, x: jax.lax.map(lambda x: f(w, x), np.eye(3)),
    'eval_shape': lambda f: lambda w, x: jax.eval_shape(f, w, x),
    'make_jaxpr': lambda f: lambda w, x: [str(aval) for aval in jax.make_jaxpr(f)(w, x).out_avals],
    'closure_convert': lambda f: lambda w, x: jax.closure_convert(f, w, x)[0](w, x),
    'named_call': jax.named_call,
    'named_scope': lambda f: jax.named_scope('here')(f),
    'annotate': jax.profiler.annotate_function,
    'partial': functools.partial,
    'ensure_compile_time_eval': lambda f: lambda w, x: jax.jit(lambda: evaluated_now(f, w, x))(),
    'value_and_grad aux': lambda f: jax.value_and_grad(lambda w, x: (f(w, x), {'w': w}), has_aux=True),
}


def evaluated_now(f, w, x):
    with jax.ensure_compile_time_eval():
        return f(w, x)


@case(variants=OF)
def of(jit, transformed):
    f = transformed(jit(make_loss()))
    return f(V, 2 * V), f(V, 3 * V)


@case(variants={name: OF[name] for name in ('grad', 'vmap', 'hessian', 'jvp', 'checkpoint', 'vjp', 'jit')})
def inside(jit, transformed):
    f = jit(transformed(make_loss()))
    return f(V, 2 * V), f(V, 3 * V)


@case(variants={'grad': jax.grad, 'jit': jax.jit, 'vmap': lambda f: jax.vmap(f)})
def with_keywords(jit, transformed):
    w = np.stack([V, V]) if 'lambda' in transformed.__name__ else V
    return transformed(jit(lambda w, scale: jnp.sum(w) * jnp.sum(scale)))(w, scale=w)


@case
def grad_with_integers(jit):
    f = jit(lambda w, n: jnp.sum(w * n))
    return jax.grad(f, allow_int=True)(V, 2), jax.grad(f, argnums=1, allow_int=True)(V, 2)


@case
def grad_is_traced_once(jit):
    f = jit(make_loss())
    g = jax.grad(f)
    return g(V), g(2 * V), f(V), g(V)


@case
def grad_of_tree(jit):
    f = jit(lambda tree: jnp.sum(tree['a']) * tree['b'][0])
    return jax.grad(f)({'a': V, 'b': (2.0,)})


@case(raises=True)
def grad_not_scalar(jit):
    return jax.grad(jit(lambda x: x))(V)


@case
def grad_of_static(jit):
    f = jit(lambda w, n: jnp.sum(w**n), static_argnums=1)
    return jax.grad(f)(V, 3), jax.grad(jax.grad(lambda w: f(w, 3).sum()))(2.0)


def make_custom_vjp():
    """Returns a function with a custom gradient that differs from the true one."""

    @jax.custom_vjp
    def f(x):
        return x**2

    f.defvjp(lambda x: (f(x), x), lambda x, g: (100 * x * g,))
    return f


@case
def custom_vjp(jit):
    f = jit(make_custom_vjp())
    return f(3.0), jax.grad(f)(3.0), jit(jax.grad(make_custom_vjp()))(3.0), jax.vmap(jax.grad(f))(V)


@case
def custom_vjp_of_it(jit):
    inner = jit(lambda x: (traced(), x**2)[1])
    f = jax.custom_vjp(inner)
    f.defvjp(lambda x: (inner(x), x), jit(lambda x, g: (100 * x * g,)))
    return f(3.0), jax.grad(f)(3.0), jax.jit(jax.grad(f))(3.0)


@case
def custom_jvp(jit):
    @jax.custom_jvp
    def f(x):
        return x**2

    @f.defjvp
    def tangent(primals, tangents):
        return f(*primals), 100 * primals[0] * tangents[0]

    g = jit(f)
    return g(3.0), jax.grad(g)(3.0), jax.jvp(g, (3.0,), (1.0,)), jax.hessian(g)(3.0)


@case
def custom_jvp_of_it(jit):
    f = jax.custom_jvp(jit(lambda x: x**2))
    f.defjvps(jit(lambda t, ans, x: 100 * t))
    return f(3.0), jax.grad(f)(3.0), jit(jax.grad(f))(3.0)


@case
def custom_gradient(jit):
    f = jax.custom_gradient(jit(lambda x: (x**2, lambda g: (g * 7,))))
    return error_free(f)


def error_free(f):
    try:
        return jax.grad(f)(3.0)
    except Exception as error:
        return type(error)


@case
def custom_batching(jit):
    @jax.custom_batching.custom_vmap
    def f(x):
        return x + 1

    @f.def_vmap
    def rule(axis_size, in_batched, x):
        return x + 100, in_batched[0]

    return jit(f)(V), jax.vmap(jit(f))(V), jit(jax.vmap(f))(V)


@case
def custom_batching_of_it(jit):
    f = jax.custom_batching.custom_vmap(jit(lambda x: x + 1))
    f.def_vmap(lambda axis_size, in_batched, x: (jit(lambda x: x + 100)(x), in_batched[0]))
    return f(V), jax.vmap(f)(V)


@case(variants={'x': 'x', 'both': ('x', 'y')})
def vmap_with_mesh_axes(jit, axes):
    f = jit(lambda row: jax.lax.with_sharding_constraint(row * 2, on()))
    return jax.jit(jax.vmap(f, spmd_axis_name=axes))(M), jax.vmap(f, spmd_axis_name=axes)(M)


@case
def vmap_of_shardings(jit):
    f = jit(lambda row: row * 2, in_shardings=on(), out_shardings=on())
    return jax.vmap(f)(M), jax.jit(jax.vmap(f))(M)


@case(
    variants={
        'none': None,
        'dots': jax.checkpoint_policies.dots_saveable,
        'all': jax.checkpoint_policies.everything_saveable,
    }
)
def remat_policies(jit, policy):
    f = jax.checkpoint(jit(lambda w, x: jnp.sum(jnp.tanh(x @ w))), policy=policy)
    return jax.grad(f)(M[:4], M), jit(jax.grad(f))(M[:4], M)


@case
def remat_static(jit):
    f = jax.checkpoint(jit(lambda x, n: x**n, static_argnums=1), static_argnums=1)
    return jax.grad(f)(2.0, 3)


@case
def scan_around(jit):
    step = jit(lambda carry, x: (traced(), (carry + x, carry * x))[1])
    return jax.lax.scan(step, 0.0, X), jax.lax.scan(step, 0.0, X)


@case
def scan_inside(jit):
    f = jit(lambda c, xs: jax.lax.scan(lambda c, x: (traced(), (c + x, c))[1], c, xs, unroll=2))
    return f(0.0, X), f(1.0, X)


@case
def while_around(jit):
    return jax.lax.while_loop(jit(lambda c: c < 10), jit(lambda c: (traced(), c + 1)[1]), 0)


@case
def while_inside(jit):
    return jit(lambda n: jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0, 1.0)))(4)


@case
def cond_around(jit):
    up, down = jit(lambda x: (traced('up'), x + 1)[1]), jit(lambda x: (traced('down'), x - 1)[1])
    return jax.lax.cond(True, up, down, V), jax.lax.cond(False, up, down, V), jax.lax.switch(1, [up, down], V)


@case
def cond_inside(jit):
    f = jit(lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x))
    return f(True, V), f(False, V), jax.vmap(f)(np.array([True, False]), V[:2])


@case
def fori_and_map(jit):
    body = jit(lambda i, c: c + i)
    return jax.lax.fori_loop(0, 4, body, 0), jax.lax.map(jit(lambda x: x + 1), X, batch_size=3)


@case
def associative_scan_and_reduce(jit):
    add = jit(lambda a, b: a + b)
    return (
        jax.lax.associative_scan(add, X),
        jax.lax.reduce(X, np.float32(0), add, (0,)),
        functools.reduce(add, X[:3]),
    )


@case(meant={'traces': 'traces of inner functions'})
def nested(jit):
    inner = jit(lambda x, n: (traced(n), x * n)[1], static_argnums=1)
    outer = jit(lambda x: (traced('outer'), inner(x, 2) + inner(x, 3) + inner(x, 2))[1])
    return outer(V), outer(V), inner(V, 2)


@case(variants={'inline': {'inline': True}, 'not': {'inline': False}, 'unused': {'keep_unused': True}})
def nested_with(jit, options):
    inner = jit(lambda x, y: x + 1, **options)
    outer = jax.jit(lambda x: inner(x, x) * 2)
    return outer(V), inner(V, V)


@case
def inline_leaves_no_call(jit):
    inner = jit(lambda x: x + 1, inline=True)
    return [eqn.primitive.name for eqn in jax.make_jaxpr(lambda x: inner(x) * 2)(1.0).eqns]


@case
def name_in_the_jaxpr(jit):
    def my_name(x):
        return x + 1

    return [eqn.params['name'] for eqn in jax.make_jaxpr(jit(my_name))(1.0).eqns]


@case(meant={'shardings': 'active mesh'})
def constants_lifted(jit):
    held = jnp.asarray(X)
    inner = jit(lambda x: x + held)
    return jax.make_jaxpr(inner)(X).out_avals, jax.grad(lambda x: inner(x).sum())(X)


@case
def closure_over_an_outer_tracer(jit):
    def outer(x):
        return jit(lambda y: (traced(), x * y)[1])(2.0)

    return jax.grad(outer)(3.0), jax.vmap(outer)(V), jax.jit(outer)(V), jax.jvp(outer, (1.0,), (1.0,))


@case
def closure_over_an_outer_tracer_in_a_scan(jit):
    def body(carry, x):
        return jit(lambda y: y + x)(carry), x

    return jax.lax.scan(body, 0.0, X)


@case
def forward_over_reverse_in_it(jit):
    def hvp(v):
        return jax.jvp(jax.grad(lambda w: jnp.sum(w**3)), (V,), (v,))[1]

    return jit(hvp)(V)


@case(meant={'traces': 'traces of inner functions'})
def inner_functions_share_traces(jit):
    shared = jax.jit(lambda x: (traced('shared'), x + 1)[1])
    first, second = jit(lambda x: shared(x) * 2), jit(lambda x: shared(x) * 3)
    return first(V), second(V), shared(V)


@case
def compiled_again(jit):
    def f(x):
        traced()
        return x + 1

    return [jit(f)(V) for _ in range(3)]
