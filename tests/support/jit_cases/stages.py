"""Ahead-of-time compilation: trace, lower, compile, attributes of stages, and export."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import export

from tests.support.jit_cases import M, X, case, error_of, on, traced

STRUCT = jax.ShapeDtypeStruct((8,), jnp.float32)


def infos(tree):
    """Returns a stage's information about arguments and outputs in a comparable form."""
    return jax.tree.map(lambda info: (info.shape, str(info.dtype), getattr(info, 'donated', None)), tree)


def make_f():
    """Returns a function with defaults and keywords."""

    def f(a, b=2.0, *, c=None):
        traced()
        return {'sum': a + b, 'c': c}

    return f


@case
def lower_and_compile(jit):
    compiled = jit(make_f()).lower(X, X).compile()
    return compiled(X, X), compiled(jnp.asarray(X), 2 * X)


@case(
    variants={
        'struct': ((STRUCT,), {}),
        'struct and number': ((STRUCT, 3.0), {}),
        'keyword': ((STRUCT,), {'b': STRUCT}),
        'keyword only': ((STRUCT,), {'c': STRUCT}),
        'tree': (((STRUCT, {'a': X}),), {'b': 1}),
    },
)
def stages_say(jit, call):
    args, kwargs = call

    def f(a, b=2.0, *, c=None):
        return jax.tree.map(lambda leaf: leaf * b, a), c

    compiled = jit(f)
    traced_, lowered = compiled.trace(*args, **kwargs), compiled.lower(*args, **kwargs)
    executable = lowered.compile()
    return [
        (infos(stage.args_info), infos(stage.out_info), stage.in_tree, stage.out_tree)
        if stage is not traced_
        else (infos(stage.args_info), infos(stage.out_info), stage.out_tree)
        for stage in (traced_, lowered, executable)
    ]


@case(meant={'shardings': 'active mesh'})
def traced_says(jit):
    stage = jit(make_f()).trace(X, 1.0)
    return str(stage.jaxpr), stage.fun_name, stage.jaxpr.in_avals, stage.jaxpr.out_avals


@case
def text(jit):
    lowered = jit(make_f()).lower(X, 1.0)
    return lowered.as_text(), 'f32[8]' in lowered.compile().as_text()


@case
def analysis(jit):
    lowered = jit(lambda a: a @ a.T).lower(M)
    compiled = lowered.compile()
    return (
        lowered.cost_analysis()['flops'],
        compiled.cost_analysis()['flops'],
        str(compiled.memory_analysis())[:40],
    )


@case
def shardings_of_the_executable(jit):
    compiled = jit(lambda a: a * 2, in_shardings=on('x'), out_shardings=on('x')).lower(STRUCT).compile()
    return [str(s) for s in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))]


@case
def executable_with_keywords(jit):
    compiled = jit(make_f()).lower(X, b=1.0).compile()
    return compiled(X, b=2.0), error_of(compiled, X), error_of(compiled, X, c=1.0)


@case(raises=True)
def executable_with_keyword_by_position(jit):
    compiled = jit(make_f()).lower(X, b=1.0).compile()
    return compiled(X, 2.0)


@case
def executable_with_a_default(jit):
    compiled = jit(make_f()).lower(X).compile()
    return compiled(X), error_of(compiled, X, 5.0)


@case
def executable_with_statics(jit):
    compiled = jit(lambda a, n: a * n, static_argnums=1).lower(X, 3).compile()
    return compiled(X)


@case(raises=True)
def executable_given_statics(jit):
    compiled = jit(lambda a, n: a * n, static_argnums=1).lower(X, 3).compile()
    return compiled(X, 3)


@case
def executable_with_static_names(jit):
    compiled = jit(lambda a, n=2: a * n, static_argnames='n').lower(X, n=3).compile()
    return compiled(X)


@case(
    variants={
        'shape': (M,),
        'dtype': (X.astype('i4'),),
        'tree': ([X],),
        'weak': (1.0,),
        'too many': (X, X),
        'none': (),
        'no array': ('a',),
    },
    raises=True,
)
def executable_with_other_arguments(jit, args):
    return jit(lambda a: a + 1).lower(X).compile()(*args)


@case
def executable_elsewhere(jit):
    compiled = jit(lambda a: a * 2, in_shardings=on('x')).lower(STRUCT).compile()
    return compiled(X), error_of(compiled, jax.device_put(X, on('y')))


@case
def executable_under_transformations(jit):
    compiled = jit(lambda a: a * 2).lower(STRUCT).compile()
    return error_of(jax.vmap(compiled), M), error_of(jax.jit(compiled), X), error_of(jax.grad(compiled), X)


@case
def lower_traces_once(jit):
    f = jit(make_f())
    f.lower(X), f.lower(X).compile()(X), f(X), f.trace(X), f.eval_shape(X)
    return len(jax.make_jaxpr(f)(X).eqns)


@case
def lower_with_type(jit):
    return jit(lambda a: a + 1).lower(jax.typeof(jnp.asarray(X))).compile()(X)


@case
def trace_with_type(jit):
    return str(jit(lambda a: a + 1).trace(jax.typeof(jnp.asarray(X))).jaxpr)


@case
def lower_what_does_not_fit(jit):
    return error_of(jit(make_f()).lower), error_of(jit(make_f()).lower, X, 1, 2)


@case(meant={'error': 'error classes'}, raises=True)
def lower_no_array(jit):
    return jit(make_f()).lower('a')


@case(raises=True)
def lower_raises(jit):
    def fails(x):
        raise ZeroDivisionError('mine')

    return jit(fails).lower(X)


@case
def lower_for_platforms(jit):
    lowered = jit(lambda a: a + 1).trace(STRUCT).lower(lowering_platforms=('tpu', 'cpu'))
    return 'stablehlo' in lowered.as_text()


@case(raises=True)
def unknown_compiler_options(jit):
    return jit(lambda a: a + 1, compiler_options={'xla_no_such_option': True})(X)


@case
def compiler_options(jit):
    options = {'xla_cpu_enable_fast_math': True}
    compiled = jit(lambda a: a + 1, compiler_options=options)
    return compiled(X), jit(lambda a: a + 1).lower(X).compile(compiler_options=options)(X)


@case
def eval_shape(jit):
    f = jit(lambda a, b=1.0: {'x': a * b, 'y': (a.sum(), None)})
    return f.eval_shape(X), jax.eval_shape(f, STRUCT), f.eval_shape(STRUCT, b=2)


@case
def eval_shape_with_statics(jit):
    f = jit(lambda a, n: [a] * n, static_argnums=1)
    return f.eval_shape(X, 2), f.eval_shape(STRUCT, 3)


@case
def make_jaxpr(jit):
    f = jit(make_f())
    return str(jax.make_jaxpr(lambda x: f(x) | f(x, 3.0))(X)), str(f.trace(X).jaxpr)


@case
def stages_of_what_jax_made_of_it(jit):
    f = jit(lambda x: jnp.sum(x**2))
    return (
        jax.jit(jax.grad(f)).lower(X).compile()(X),
        jax.eval_shape(jax.vmap(f), M),
        [aval.shape for aval in jax.make_jaxpr(jax.grad(f))(X).out_avals],
        jax.jit(jax.value_and_grad(f)).trace(X).out_info[1].shape,
    )


@case
def lower_donates(jit):
    f = jit(lambda x: x + 1, donate_argnums=0)
    return 'jax.buffer_donor' in f.lower(X).as_text() or 'tf.aliasing_output' in f.lower(X).as_text()


@case
def export_and_call(jit):
    exported = export.export(jit(lambda a: a * 2))(STRUCT)
    return exported.call(X), exported.in_avals, exported.fun_name, exported.nr_devices


@case(
    variants={
        'default': ((STRUCT,), {}),
        'position': ((STRUCT, STRUCT), {}),
        'keyword': ((STRUCT,), {'b': STRUCT}),
        'keyword only': ((STRUCT,), {'c': STRUCT}),
    },
)
def export_with(jit, call):
    args, kwargs = call
    exported = export.export(jit(make_f()))(*args, **kwargs)
    return exported.call(*[X for _ in args], **dict.fromkeys(kwargs, X)), exported.in_tree


@case
def export_and_serialize(jit):
    exported = export.export(jit(lambda a: {'x': a * 2}))(STRUCT)
    again = export.deserialize(exported.serialize())
    return again.call(X), again.in_tree, again.out_tree


@case
def export_a_gradient(jit):
    exported = export.export(jit(lambda a: jnp.sum(a**2)))(STRUCT)
    again = export.deserialize(exported.serialize(vjp_order=1))
    return jax.grad(again.call)(jax.device_put(X, on()))


@case
def export_the_gradient(jit):
    return export.export(jax.jit(jax.grad(jit(lambda a: jnp.sum(a**3)))))(STRUCT).call(X)


@case
def export_polymorphic(jit):
    shape = jax.ShapeDtypeStruct(export.symbolic_shape('n, 4'), jnp.float32)
    exported = export.export(jit(lambda a: a.sum(0) * a.shape[0]))(shape)
    return exported.call(M), exported.call(M[:3]), str(exported.in_avals)


@case
def export_sharded(jit):
    f = jit(lambda a: a * 2, in_shardings=on('x'), out_shardings=on('x'))
    exported = export.export(f)(STRUCT)
    return exported.nr_devices, exported.call(jax.device_put(X, on('x')))


@case
def export_other_platform(jit):
    return export.export(jit(lambda a: a + 1), platforms=('tpu',))(STRUCT).platforms


@case
def export_static(jit):
    f = jit(lambda a, n: a * n, static_argnums=1)
    return export.export(f)(STRUCT, 3).call(X)


@case
def export_called_in_it(jit):
    exported = export.export(jit(lambda a: a * 2))(STRUCT)
    return jit(lambda a: exported.call(a) + 1)(X)


@case(raises=True)
def export_wants_a_compiled_one(jit):
    return export.export(jax.tree_util.Partial(jit(lambda a: a * 2)))(STRUCT)
