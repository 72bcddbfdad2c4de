"""Rewriting of jaxprs and equations: with other operands, inner jaxprs or parameters.

The parameters of primitives are not public. So JAX creates new equations: it traces a function of one
operation, and the equation gets other variables.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun
from jax.sharding import NamedSharding

from scalax._jax.equations import (
    CALLS,
    WITH_JAXPRS,
    DropVar,
    Literal,
    call_jaxpr,
    loop_of,
    open_jaxpr,
    prevents_cse,
    shape_of,
    sharding_params,
    with_inner_equations,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.tracing import trace_context

_JAXPR_PARAMS = {**CALLS, 'scan': 'jaxpr', 'while': 'body_jaxpr', 'cond': 'branches', 'shard_map': 'jaxpr'}
# The parameters of `jit` with an entry for each operand, and for each result.
JIT_OPERAND_PARAMS = ('in_shardings', 'in_layouts', 'donated_invars')
JIT_RESULT_PARAMS = ('out_shardings', 'out_layouts')


def replace_jaxpr(jaxpr: Any, **changes: Any) -> Any:
    """Returns an open or closed jaxpr with other equations or results.

    Relies on `replace` of jaxprs, which checks nothing and computes their effects.
    """
    inner = open_jaxpr(jaxpr)
    new = inner.replace(**changes)
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


def extract_subjaxpr(jaxpr: Any, arguments: Sequence[Any], results: Sequence[Any]) -> ClosedJaxpr:
    """Returns the part of a jaxpr that computes some of its variables from others, as a closed jaxpr.

    Relies on `replace` of jaxprs, and on `debug_info` being a named tuple.

    Args:
        jaxpr: the jaxpr.
        arguments: the variables that are the arguments of the part.
        results: the variables that are the results of the part.
    """
    inner = open_jaxpr(jaxpr)
    needed, equations = {*map(id, results)}, []
    argument_ids = {*map(id, arguments)}
    for equation in reversed(inner.eqns):
        outvar_ids = {*map(id, equation.outvars)}
        if not needed.isdisjoint(outvar_ids) and argument_ids.isdisjoint(outvar_ids):
            equations.append(equation)
            needed.update(map(id, equation.invars))
    names = inner.debug_info._replace(arg_names=None, result_paths=None)
    new = inner.replace(eqns=equations[::-1], invars=[*arguments], outvars=[*results], debug_info=names)
    return ClosedJaxpr(new, getattr(jaxpr, 'consts', ()))


def inline_and_sink_constants(jaxpr: Any, constant_ops: Container[str], containing: str | None = None) -> Any:
    """Returns a jaxpr with its `jit` calls inlined, and constants computed where loops and calls use them.

    Calls that specify shardings are not inlined. Relies on `replace` of equations, on ``Var(aval)``, and on
    `CALLS`.

    Args:
        jaxpr: the jaxpr, open or closed.
        constant_ops: the names of the primitives that may compute constants from literals.
        containing: only inner jaxprs that contain an equation of this primitive are changed. The others keep
            their calls, from which the source lines of equations are found.
    """
    return _inline_and_sink(jaxpr, constant_ops, containing, {}, {})


def _inline_and_sink(
    jaxpr: Any,
    constant_ops: Container[str],
    containing: str | None,
    constant_arguments: Mapping[int, Any],
    outer_constants: Mapping[int, Any],
) -> Any:
    """Implements `inline_and_sink_constants`.

    Args:
        jaxpr: the jaxpr.
        constant_ops: as there.
        containing: as there.
        constant_arguments: the id of an argument of the jaxpr -> the outer variable that it is called with, a
            constant.
        outer_constants: the id of an outer constant -> its equation.
    """
    equations: list[Any] = []
    copies: dict[int, Any] = {}
    constants: dict[int, Any] = {}

    def copy_constant(atom: Any) -> Any:
        if id(atom) in outer_constants and id(atom) not in copies:
            equation = outer_constants[id(atom)]
            equation = equation.replace(invars=[*map(copy_constant, equation.invars)])
            equations.append(_with_new_results(equation, copies))
        return copies.get(id(atom), atom)

    substitution = {var: copy_constant(atom) for var, atom in constant_arguments.items()}
    equations += _inline_equations(open_jaxpr(jaxpr).eqns, _is_plain_jit, substitution)
    for i, equation in enumerate(equations):
        name, operands = primitive_name(equation), equation.invars
        if name in constant_ops and all(isinstance(x, Literal) or id(x) in constants for x in operands):
            constants.update(dict.fromkeys(map(id, equation.outvars), equation))
        if name == 'scan' or name in CALLS:
            [body] = _jaxprs_of(equation)
            if containing is not None and not _contains(body, containing):
                continue
            consts = operands[: loop_of(equation).num_consts] if name == 'scan' else operands
            pairs = zip(consts, open_jaxpr(body).invars, strict=False)
            inner_arguments = {id(var): x for x, var in pairs if id(x) in constants}
            body = _inline_and_sink(body, constant_ops, containing, inner_arguments, constants)
            equations[i] = with_jaxprs(equation, body)
    outvars = _substitute(open_jaxpr(jaxpr).outvars, substitution)
    return replace_jaxpr(jaxpr, eqns=equations, outvars=outvars)


def _contains(jaxpr: Any, primitive: str) -> bool:
    return any(primitive_name(eqn) == primitive for eqn in with_inner_equations(open_jaxpr(jaxpr).eqns))


def inline_calls(jaxpr: Any, is_inlined: Callable[[Any], bool]) -> Any:
    """Returns a jaxpr with some calls inlined, also nested ones.

    Relies on ``Var(aval)``, and on `replace` of equations and of jaxprs.

    Args:
        jaxpr: the jaxpr.
        is_inlined: returns whether to inline a call.
    """
    substitution: dict[int, Any] = {}
    equations = [*_inline_equations(open_jaxpr(jaxpr).eqns, is_inlined, substitution)]
    outvars = _substitute(open_jaxpr(jaxpr).outvars, substitution)
    return replace_jaxpr(jaxpr, eqns=equations, outvars=outvars)


def _inline_equations(
    equations: Sequence[Any],
    is_inlined: Callable[[Any], bool],
    substitution: dict[int, Any],
    in_call: bool = False,
) -> Iterator[Any]:
    """Yields equations with some calls inlined.

    Args:
        equations: the equations.
        is_inlined: returns whether to inline a call.
        substitution: the id of a variable -> the variable or literal that replaces it; extended here.
        in_call: whether the equations are those of an inlined call.
    """
    for equation in equations:
        equation = equation.replace(invars=_substitute(equation.invars, substitution))
        inner = open_jaxpr(call_jaxpr(equation)) if primitive_name(equation) in CALLS else None
        if inner is not None and not inner.constvars and is_inlined(equation):
            substitution.update(zip(map(id, inner.invars), equation.invars, strict=True))
            yield from _inline_equations(inner.eqns, is_inlined, substitution, in_call=True)
            results = _substitute(inner.outvars, substitution)
            substitution.update(zip(map(id, equation.outvars), results, strict=True))
        else:  # the same jaxpr may be called again, so its inlined equations need new results
            yield _with_new_results(equation, substitution) if in_call else equation


def _substitute(atoms: Sequence[Any], substitution: Mapping[int, Any]) -> list[Any]:
    return [substitution.get(id(x), x) for x in atoms]


def _with_new_results(equation: Any, substitution: dict[int, Any]) -> Any:
    new_equation = with_new_results(equation)
    substitution.update(zip(map(id, equation.outvars), new_equation.outvars, strict=True))
    return new_equation


def _is_plain_jit(call: Any) -> bool:
    """Returns whether a call is a `jit` without shardings of operands or results."""
    return primitive_name(call) == 'jit' and not any(sharding_params(call))


def with_operands(equation: Any, operands: Sequence[Any]) -> Any:
    """Returns an equation with other operands. Relies on `replace` of equations."""
    return equation.replace(invars=[*operands])


def substitute_vars(jaxpr: Any, variables: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns a jaxpr that reads new variables in place of some others, and the new variables.

    The jaxpr still computes the old variables. Relies on ``Var(aval)``, and on `replace` of equations and of
    jaxprs.
    """
    new_vars = [Var(var.aval) for var in variables]
    substitution = dict(zip(map(id, variables), new_vars, strict=True))
    inner = open_jaxpr(jaxpr)
    equations = [eqn.replace(invars=_substitute(eqn.invars, substitution)) for eqn in inner.eqns]
    outvars = _substitute(inner.outvars, substitution)
    return replace_jaxpr(jaxpr, eqns=equations, outvars=outvars), new_vars


def with_results(equation: Any, results: Sequence[Any]) -> Any:
    """Returns an equation with other variables for its results. Relies on `replace` of equations."""
    return equation.replace(outvars=[*results])


def with_new_results(equation: Any) -> Any:
    """Returns an equation with new variables for its results. Relies on `replace` and on ``Var(aval)``."""
    return with_results(equation, [x if isinstance(x, DropVar) else Var(x.aval) for x in equation.outvars])


# The parameters for sizes of the result, and for sizes of the first operand.
_RESULT_SIZE_PARAMS = {'reshape': 'new_sizes', 'broadcast_in_dim': 'shape', 'iota': 'shape'}
_OPERAND_SIZE_PARAMS = {'slice': 'limit_indices', 'dynamic_slice': 'slice_sizes', 'gather': 'slice_sizes'}
OPS_WITH_SIZES = _RESULT_SIZE_PARAMS.keys() | _OPERAND_SIZE_PARAMS.keys() | {'conv_general_dilated'}


def resized_params(
    equation: Any, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Returns the parameters of an equation that differ for other shapes, such as those of local shards.

    Relies on `_RESULT_SIZE_PARAMS` and `_OPERAND_SIZE_PARAMS` being complete for primitives of arrays. A
    `gather` takes single elements along dimensions that its indices also have. The groups of a convolution
    are sharded with the features, or the examples, of its first operand.

    Args:
        equation: the equation.
        operands: the shapes of its operands.
        results: the shapes of its results.
    """
    name = equation.primitive.name
    if name in _RESULT_SIZE_PARAMS:
        return {_RESULT_SIZE_PARAMS[name]: tuple(results[0])}
    if name == 'conv_general_dilated':
        return _conv_groups(equation, operands[0])
    if name in _OPERAND_SIZE_PARAMS:
        param = _OPERAND_SIZE_PARAMS[name]
        sizes = zip(equation.params[param], shape_of(equation.invars[0]), operands[0], strict=True)
        return {param: tuple([new if size == full else size for size, full, new in sizes])}
    return {}


def _conv_groups(equation: Any, images: Sequence[int]) -> dict[str, int]:
    """Returns the numbers of groups of a convolution of local images that differ from the global ones."""
    batch_dim, feature_dim = equation.params['dimension_numbers'].lhs_spec[:2]
    groups = {}
    for param, dim in (('feature_group_count', feature_dim), ('batch_group_count', batch_dim)):
        count, size = equation.params[param], shape_of(equation.invars[0])[dim]
        if count > 1 and images[dim] != size:
            groups[param] = count * images[dim] // size
    return groups


def with_jaxprs(equation: Any, *jaxprs: Any) -> Any:
    """Returns a call, a loop or a `cond` with another jaxpr, or other branches, of the same types.

    Returns the equation itself if it has these jaxprs already.

    Relies on the parameters that `equations` reads, and on no other one depending on these jaxprs.
    """
    if all(map(operator.is_, jaxprs, _jaxprs_of(equation))):
        return equation
    name = _JAXPR_PARAMS[equation.primitive.name]
    return equation.replace(params={**equation.params, name: jaxprs if name == 'branches' else jaxprs[0]})


def _has_jaxprs(equation: Any) -> bool:
    return bool(equation.params) and primitive_name(equation) in WITH_JAXPRS


def _jaxprs_of(equation: Any) -> Sequence[Any]:
    param = equation.params[_JAXPR_PARAMS[equation.primitive.name]]
    return param if isinstance(param, tuple) else [param]


class Rewriter:
    """Replaces equations of jaxprs, also in calls, loops and branches.

    Args:
        change: returns the replacement of an equation, or the equation itself. None if a subclass overrides
            `jaxpr`.
    """

    def __init__(self, change: Callable[[Any], Any] | None = None) -> None:
        self._change = change
        self._rewritten: dict[Any, Any] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        """Returns a jaxpr, open or closed, with replaced equations; the same jaxpr if none changes."""
        if jaxpr not in self._rewritten:
            eqns = open_jaxpr(jaxpr).eqns
            new_eqns = [self._equation(x) if self._change or _has_jaxprs(x) else x for x in eqns]
            is_same = all(map(operator.is_, new_eqns, eqns))
            self._rewritten[jaxpr] = jaxpr if is_same else replace_jaxpr(jaxpr, eqns=new_eqns)
        return self._rewritten[jaxpr]

    def _equation(self, equation: Any) -> Any:
        if _has_jaxprs(equation):
            equation = with_jaxprs(equation, *map(self.jaxpr, _jaxprs_of(equation)))
        return equation if self._change is None else self._change(equation)


def with_source_of(jaxpr: Any, equation: Any) -> Any:
    """Returns a jaxpr whose equations have the source line and the scopes of another equation.

    Relies on `replace` of equations taking *source_info*.
    """
    return Rewriter(lambda eqn: eqn.replace(source_info=equation.source_info)).jaxpr(jaxpr)


def with_inner_lines(equation: Any) -> Any:
    """Returns an equation with a jaxpr whose equations get its source line, and keep their scopes.

    Relies on `replace` of *source_info*, and on `traceback` being its source line.
    """
    traceback = equation.source_info.traceback
    rewriter = Rewriter(lambda eqn: eqn.replace(source_info=eqn.source_info.replace(traceback=traceback)))
    return with_jaxprs(equation, *map(rewriter.jaxpr, _jaxprs_of(equation)))


def without_prevent_cse(equation: Any) -> Any:
    """Returns a call that does not prevent CSE of its operands. Relies on what `prevents_cse` relies on."""
    flags = prevents_cse(equation)
    if not any(flags):
        return equation
    no_flags = False if isinstance(equation.params['prevent_cse'], bool) else (False,) * len(flags)
    return equation.replace(params={**equation.params, 'prevent_cse': no_flags})


def make_constraint(var: Any, sharding: NamedSharding, like: Any, context: Any) -> Any:
    """Returns an equation that constrains the sharding of a variable; its result is a new variable.

    Relies on ``Var(aval)``, and on the parameters of a constraint depending on its sharding, its rank and
    JAX's trace context only.

    Args:
        var: the variable.
        sharding: its sharding.
        like: the equation whose source line it gets.
        context: the `trace_context`.
    """
    template = _constraint(sharding, context)
    return template.replace(invars=[var], outvars=[Var(var.aval)], source_info=like.source_info)


@functools.lru_cache(maxsize=1024)
def _constraint(sharding: NamedSharding, context: Any) -> Any:
    """Returns a constraint as JAX creates it, on an array with one element on each device."""
    sizes, shape = sharding.mesh.shape, []
    for entry in sharding.spec:
        axes = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        shape.append(math.prod(sizes[axis] for axis in axes))

    def constrained(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, sharding)

    [equation] = jax.jit(constrained).trace(jax.ShapeDtypeStruct(tuple(shape), 'float32')).jaxpr.eqns
    return equation


def trace_equation(
    function: Callable[..., Any],
    like: Any,
    operands: Sequence[Any] | None = None,
    results: Sequence[Any] | None = None,
) -> Any:
    """Returns an equation of a function of one operation, to replace another equation.

    Relies on what `trace_added_equation` relies on.

    Args:
        function: the function; its results have the types of the other equation's results.
        like: the other equation, whose source line it gets.
        operands: the operands; by default those of the other equation.
        results: the results; by default those of the other equation.
    """
    invars = like.invars if operands is None else [*operands]
    outvars = like.outvars if results is None else [*results]
    return trace_added_equation(function, like, invars).replace(outvars=outvars)


def trace_added_equation(function: Callable[..., Any], like: Any, operands: Sequence[Any]) -> Any:
    """Returns an equation of a function of one operation, with new results.

    Relies on ``jax.make_jaxpr`` returning one equation for it. The operands of the equation may be in another
    order: a loop takes its constants in the order in which its body uses them.

    Args:
        function: the function.
        like: the equation whose source line it gets.
        operands: the operands.
    """
    shapes = [jax.ShapeDtypeStruct(shape_of(atom), atom.aval.dtype) for atom in operands]
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(*shapes))
    [equation], substitution = jaxpr.eqns, dict(zip(map(id, jaxpr.invars), operands, strict=True))
    invars = _substitute(equation.invars, substitution)
    return equation.replace(invars=invars, source_info=like.source_info)


def trace_equation_if_supported(*args: Any) -> Any:
    """Returns `trace_equation`, or None if ``jax.vmap`` has no rule for a primitive of the function.

    Relies on ``jax.vmap`` raising a NotImplementedError then.
    """
    try:
        return trace_equation(*args)
    except NotImplementedError:
        return None


def rebind(equation: Any, *operands: Any, **params: Any) -> Any:
    """Binds the primitive of an equation to other operands, in a trace, without the sharding of its results.

    Relies on `bind` taking the parameters, and on *out_sharding* being None if it is unspecified.

    Args:
        equation: the equation.
        *operands: the operands.
        **params: the parameters that change.
    """
    unspecified = {'out_sharding': None} if 'out_sharding' in equation.params else {}
    return equation.primitive.bind(*operands, **equation.params | unspecified | params)


def constants_of(jaxpr: Any) -> list[tuple[Any, Any]]:
    """Returns the variables of a jaxpr's constants, and their values.

    Relies on *constvars* and *consts* being in one order.
    """
    return [*zip(open_jaxpr(jaxpr).constvars, getattr(jaxpr, 'consts', ()), strict=True)]


def lift_captured_tracers(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns a closed jaxpr with the captured tracers of an outer trace as last arguments, and the tracers.

    Relies on `debug_info` being a named tuple.
    """
    inner, pairs = open_jaxpr(jaxpr), constants_of(jaxpr)
    captured = [pair for pair in pairs if isinstance(pair[1], jax.core.Tracer)]
    if not captured:
        return jaxpr, []
    concrete = [pair for pair in pairs if not isinstance(pair[1], jax.core.Tracer)]
    names = inner.debug_info.arg_names  # None if JAX has none
    new = inner.replace(
        constvars=[var for var, _ in concrete],
        invars=[*inner.invars, *[var for var, _ in captured]],
        debug_info=inner.debug_info._replace(arg_names=names and (*names, *[''] * len(captured))),
    )
    return ClosedJaxpr(new, [value for _, value in concrete]), [value for _, value in captured]


def eval_jaxpr(jaxpr: Any, operands: Sequence[Any], consts: Sequence[Any] | None = None) -> list[Any]:
    """Evaluates a closed jaxpr equation by equation, also with other constants.

    Relies on `jaxpr_as_fun`, and on `replace` of a closed jaxpr taking *consts*.
    """
    return jaxpr_as_fun(jaxpr if consts is None else jaxpr.replace(consts=consts))(*operands)


def eval_equation(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation for other operands of the same types.

    Relies on ``Var(aval)``, on `replace` of equations and of jaxprs, and on `jaxpr_as_fun`.
    """
    invars = [Var(atom.aval) for atom in equation.invars]
    outvars = [Var(atom.aval) for atom in equation.outvars]
    equation = equation.replace(invars=invars, outvars=outvars)
    jaxpr = _empty_jaxpr().replace(eqns=[equation], invars=invars, outvars=outvars)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*operands)


def eval_on_ambient_mesh(equation: Any, operands: Sequence[Any], **params: Any) -> list[Any]:
    """Evaluates an equation for operands of other types, on the ambient mesh.

    Relies on what `eval_equation` relies on, on JAX not checking types, on *ctx* being JAX's trace context,
    and on *sharding* and *out_sharding* being None if they are unspecified.

    Args:
        equation: the equation.
        operands: the operands.
        **params: the parameters that change.
    """
    unspecified = dict.fromkeys({'sharding', 'out_sharding'} & equation.params.keys())
    params = {**equation.params, **unspecified, **params}
    return eval_equation(equation.replace(params=params, ctx=_context(trace_context())), operands)


@functools.lru_cache(maxsize=64)
def _context(context: Any) -> Any:
    """Returns the *ctx* of equations that are traced in the current trace context."""
    return open_jaxpr(jax.make_jaxpr(jax.lax.neg)(0.0)).eqns[0].ctx


@functools.cache
def _empty_jaxpr() -> Any:
    """Returns a jaxpr without equations."""
    jaxpr = open_jaxpr(jax.make_jaxpr(lambda: ())())
    return jaxpr.replace(debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None))


def bind_as_jit(jaxpr: Any, operands: Sequence[Any], name: str) -> Sequence[Any]:
    """Binds a closed jaxpr in a trace, as one `jit` equation, and returns its results.

    Their shardings, layouts and donation are unspecified. Relies on `JIT_OPERAND_PARAMS` and
    `JIT_RESULT_PARAMS` being all parameters of `jit` with an entry for each operand or result.
    """
    call, params = _call_of(jaxpr, len(operands), name)
    return call.primitive.bind(*operands, **params)


def replace_by_jit(equation: Any, jaxpr: Any, operands: Sequence[Any]) -> Any:
    """Returns a `jit` equation of a closed jaxpr, to replace an equation with the same results.

    Relies on what `bind_as_jit` relies on.
    """
    call, params = _call_of(jaxpr, len(operands), equation.primitive.name)
    return call.replace(
        invars=[*operands],
        outvars=equation.outvars,
        params=params,
        effects=jaxpr.effects,
        source_info=equation.source_info,
    )


def _call_of(jaxpr: Any, count: int, name: str) -> tuple[Any, dict[str, Any]]:
    """Returns a `jit` equation as JAX creates it, and its parameters for a closed jaxpr."""
    call = _call(trace_context())
    params = {**call.params, 'jaxpr': jaxpr, 'name': name}
    for names, length in ((JIT_OPERAND_PARAMS, count), (JIT_RESULT_PARAMS, len(open_jaxpr(jaxpr).outvars))):
        params |= {name: params[name] * length for name in names}
    return call, params


@functools.lru_cache(maxsize=64)
def _call(context: Any) -> Any:
    """Returns a `jit` equation of one operand and one result, as JAX creates it."""
    [equation] = open_jaxpr(jax.make_jaxpr(jax.jit(lambda x: x))(0.0)).eqns
    return equation
