"""Jaxprs and equations that are made of others: with other operands, jaxprs or parameters.

New equations are taken from JAX, since the parameters of primitives are not public: it traces a function of
one operation, and the equation gets other variables.
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

_HELD = {**CALLS, 'scan': 'jaxpr', 'while': 'body_jaxpr', 'cond': 'branches', 'shard_map': 'jaxpr'}
# The parameters of `jit` that have an entry for each operand, and for each result.
_OF_OPERANDS = ('in_shardings', 'in_layouts', 'donated_invars')
_OF_RESULTS = ('out_shardings', 'out_layouts')


def replace_jaxpr(jaxpr: Any, **changes: Any) -> Any:
    """The jaxpr with other equations or results, as open or as closed as it was.

    Relies on `replace` of jaxprs, which checks nothing and computes their effects.
    """
    inner = open_jaxpr(jaxpr)
    new = inner.replace(**changes)
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


def extract_subjaxpr(jaxpr: Any, arguments: Sequence[Any], results: Sequence[Any]) -> ClosedJaxpr:
    """The part of a closed jaxpr that computes some of its variables of others.

    Relies on `replace` of jaxprs, and on `debug_info` being a named tuple.
    """
    inner = open_jaxpr(jaxpr)
    needed, equations = {*map(id, results)}, []
    given = {*map(id, arguments)}
    for equation in reversed(inner.eqns):
        own = {*map(id, equation.outvars)}
        if not needed.isdisjoint(own) and given.isdisjoint(own):
            equations.append(equation)
            needed.update(map(id, equation.invars))
    names = inner.debug_info._replace(arg_names=None, result_paths=None)
    new = inner.replace(eqns=equations[::-1], invars=[*arguments], outvars=[*results], debug_info=names)
    return ClosedJaxpr(new, getattr(jaxpr, 'consts', ()))


def inline_and_sink_constants(jaxpr: Any, computing: Container[str], around: str | None = None) -> Any:
    """The jaxpr, with what `jit` calls and what is computed before loops where it is used.

    The equations of a function stand in place of its call, but for calls that say where operands or results
    are. Of the values that loops and other calls take, they compute themselves what is computed of nothing.
    Relies on `replace` of equations, on ``Var(aval)``, and on `CALLS`.

    Args:
        jaxpr: the jaxpr, open or closed.
        computing: the names of the primitives that may compute something of nothing.
        around: only jaxprs inside that hold an equation of this primitive are flattened. Others keep their
            calls, by which the lines of equations are known.
    """
    return _flattened(jaxpr, computing, around, {}, {})


def _flattened(
    jaxpr: Any,
    computing: Container[str],
    around: str | None,
    taken: Mapping[int, Any],
    outside: Mapping[int, Any],
) -> Any:
    """The same of a jaxpr whose arguments *taken* are values that these equations *outside* compute."""
    equations: list[Any] = []
    copies: dict[int, Any] = {}
    constants: dict[int, Any] = {}

    def compute(atom: Any) -> Any:
        if id(atom) in outside and id(atom) not in copies:
            equation = outside[id(atom)]
            equation = equation.replace(invars=[*map(compute, equation.invars)])
            equations.append(_with_new_results(equation, copies))
        return copies.get(id(atom), atom)

    names = {var: compute(atom) for var, atom in taken.items()}
    equations += _inlined(open_jaxpr(jaxpr).eqns, _says_nothing, names)
    for i, equation in enumerate(equations):
        name, operands = primitive_name(equation), equation.invars
        if name in computing and all(isinstance(x, Literal) or id(x) in constants for x in operands):
            constants.update(dict.fromkeys(map(id, equation.outvars), equation))
        if name == 'scan' or name in CALLS:
            [body] = _held(equation)
            if around is not None and not _holds(body, around):
                continue
            given = operands[: loop_of(equation).num_consts] if name == 'scan' else operands
            pairs = zip(given, open_jaxpr(body).invars, strict=False)
            inner = {id(var): x for x, var in pairs if id(x) in constants}
            equations[i] = with_jaxprs(equation, _flattened(body, computing, around, inner, constants))
    return replace_jaxpr(jaxpr, eqns=equations, outvars=_current(open_jaxpr(jaxpr).outvars, names))


def _holds(jaxpr: Any, primitive: str) -> bool:
    return any(primitive_name(each) == primitive for each in with_inner_equations(open_jaxpr(jaxpr).eqns))


def inline_calls(jaxpr: Any, is_inlined: Callable[[Any], bool]) -> Any:
    """The jaxpr with their equations in place of some calls, also inside of these.

    Relies on ``Var(aval)``, and on `replace` of equations and of jaxprs.
    """
    names: dict[int, Any] = {}
    equations = [*_inlined(open_jaxpr(jaxpr).eqns, is_inlined, names)]
    return replace_jaxpr(jaxpr, eqns=equations, outvars=_current(open_jaxpr(jaxpr).outvars, names))


def _inlined(
    equations: Sequence[Any],
    is_inlined: Callable[[Any], bool],
    names: dict[int, Any],
    is_inside: bool = False,
) -> Iterator[Any]:
    """Equations, those of calls in their place. *names* gets what stands for variables, by their ids."""
    for equation in equations:
        equation = equation.replace(invars=_current(equation.invars, names))
        inner = open_jaxpr(call_jaxpr(equation)) if primitive_name(equation) in CALLS else None
        if inner is not None and not inner.constvars and is_inlined(equation):
            names.update(zip(map(id, inner.invars), equation.invars, strict=True))
            yield from _inlined(inner.eqns, is_inlined, names, is_inside=True)
            names.update(zip(map(id, equation.outvars), _current(inner.outvars, names), strict=True))
        else:  # what is inside may be called again
            yield _with_new_results(equation, names) if is_inside else equation


def _current(atoms: Sequence[Any], names: Mapping[int, Any]) -> list[Any]:
    return [names.get(id(x), x) for x in atoms]


def _with_new_results(equation: Any, names: dict[int, Any]) -> Any:
    results = [var if isinstance(var, DropVar) else Var(var.aval) for var in equation.outvars]
    names.update(zip(map(id, equation.outvars), results, strict=True))
    return equation.replace(outvars=results)


def _says_nothing(call: Any) -> bool:
    """Whether a call is a `jit` that says of no operand and no result where it is."""
    return primitive_name(call) == 'jit' and not any(sharding_params(call))


def with_operands(equation: Any, operands: Sequence[Any]) -> Any:
    """The equation with other operands. Relies on `replace` of equations."""
    return equation.replace(invars=[*operands])


def substitute_vars(jaxpr: Any, variables: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The jaxpr with new variables wherever these are read, which it still computes; and the new ones.

    Relies on ``Var(aval)``, and on `replace` of equations and of jaxprs.
    """
    new = [Var(each.aval) for each in variables]
    names = dict(zip(map(id, variables), new, strict=True))
    equations = [each.replace(invars=_current(each.invars, names)) for each in open_jaxpr(jaxpr).eqns]
    return replace_jaxpr(jaxpr, eqns=equations, outvars=_current(open_jaxpr(jaxpr).outvars, names)), new


def with_results(equation: Any, results: Sequence[Any]) -> Any:
    """The equation with other variables for its results. Relies on `replace` of equations."""
    return equation.replace(outvars=[*results])


# The parameters that hold sizes: those of the result, or of the first operand.
_SIZES_OF_RESULT = {'reshape': 'new_sizes', 'broadcast_in_dim': 'shape'}
_SIZES_OF_OPERAND = {'slice': 'limit_indices', 'dynamic_slice': 'slice_sizes', 'gather': 'slice_sizes'}


def resized_params(equation: Any, operand: int | None, result: int, size: int) -> dict[str, Any]:
    """The parameters of an equation that change where a dimension has another size.

    Relies on `_SIZES_OF_RESULT` and `_SIZES_OF_OPERAND` being all of those of primitives of arrays. A
    `gather` takes elements one by one along dimensions that its indices have too.

    Args:
        equation: the equation.
        operand: the dimension of the first operand; None if that operand does not have it.
        result: the dimension of the result.
        size: the other size.
    """
    for names, dim in ((_SIZES_OF_RESULT, result), (_SIZES_OF_OPERAND, operand)):
        name = names.get(equation.primitive.name)
        if name is None or dim is None:
            continue
        sizes = equation.params[name]
        if name != 'slice_sizes' or sizes[dim] == shape_of(equation.invars[0])[dim]:
            return {name: (*sizes[:dim], size, *sizes[dim + 1 :])}
    return {}


def with_jaxprs(equation: Any, *jaxprs: Any) -> Any:
    """A call, a loop or a `cond` with another jaxpr, or other branches, of the same types.

    The equation itself if it has these.

    Relies on the parameters that `equations` reads, and on no other one depending on these jaxprs.
    """
    if all(map(operator.is_, jaxprs, _held(equation))):
        return equation
    name = _HELD[equation.primitive.name]
    return equation.replace(params={**equation.params, name: jaxprs if name == 'branches' else jaxprs[0]})


def _held(equation: Any) -> Sequence[Any]:
    held = equation.params[_HELD[equation.primitive.name]]
    return held if isinstance(held, tuple) else [held]


class Rewriter:
    """Jaxprs with other equations, also in calls, loops and branches.

    Args:
        change: gives an equation in place of one, or the same; None if only subclasses change jaxprs.
    """

    def __init__(self, change: Callable[[Any], Any] | None = None) -> None:
        self._change = change
        self._known: dict[Any, Any] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        """The jaxpr, open or closed, with other equations; the same one if none changes."""
        if jaxpr not in self._known:
            before = open_jaxpr(jaxpr).eqns
            after = [*map(self._equation, before)]
            same = all(map(operator.is_, after, before))
            self._known[jaxpr] = jaxpr if same else replace_jaxpr(jaxpr, eqns=after)
        return self._known[jaxpr]

    def _equation(self, equation: Any) -> Any:
        if equation.params and primitive_name(equation) in WITH_JAXPRS:
            equation = with_jaxprs(equation, *map(self.jaxpr, _held(equation)))
        return equation if self._change is None else self._change(equation)


def with_source_of(jaxpr: Any, equation: Any) -> Any:
    """The jaxpr whose equations have the line and the scopes of another equation.

    Relies on `replace` of equations taking *source_info*.
    """
    return Rewriter(lambda each: each.replace(source_info=equation.source_info)).jaxpr(jaxpr)


def without_prevent_cse(equation: Any) -> Any:
    """A call whose operands the compiler may see through. Relies on what `prevents_cse` relies on."""
    said = prevents_cse(equation)
    if not any(said):
        return equation
    none = False if isinstance(equation.params['prevent_cse'], bool) else (False,) * len(said)
    return equation.replace(params={**equation.params, 'prevent_cse': none})


def make_constraint(var: Any, sharding: NamedSharding, like: Any, context: Any) -> Any:
    """An equation that constrains a variable; its result is a new variable.

    Relies on ``Var(aval)``, and on the parameters of a constraint depending on its sharding, its rank and
    JAX's trace context only.

    Args:
        var: the variable.
        sharding: its sharding.
        like: the equation whose line it gets.
        context: the `trace_context`, which is asked for once for many.
    """
    template = _constraint(sharding, context)
    return template.replace(invars=[var], outvars=[Var(var.aval)], source_info=like.source_info)


@functools.lru_cache(maxsize=1024)
def _constraint(sharding: NamedSharding, context: Any) -> Any:
    """A constraint as JAX makes it, on an array of one element in each block."""
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
    """The equation that a function of one operation makes of the operands of another equation, or of others.

    Relies on what `trace_added_equation` relies on.

    Args:
        function: the function; its results have the types of those of the other equation.
        like: the other equation, whose results and line it gets.
        operands: other operands.
        results: other results.
    """
    given = like.invars if operands is None else [*operands]
    outputs = like.outvars if results is None else [*results]
    return trace_added_equation(function, like, given).replace(outvars=outputs)


def trace_added_equation(function: Callable[..., Any], like: Any, operands: Sequence[Any]) -> Any:
    """The equation that a function of one operation makes of these operands, with results of its own.

    Relies on ``jax.make_jaxpr`` giving one equation for it. Its operands may be in another order: a loop
    takes what it closes over in the order in which a round does.

    Args:
        function: the function.
        like: the equation whose line it gets.
        operands: the operands.
    """
    shapes = [jax.ShapeDtypeStruct(shape_of(atom), atom.aval.dtype) for atom in operands]
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(*shapes))
    [found], names = jaxpr.eqns, dict(zip(map(id, jaxpr.invars), operands, strict=True))
    return found.replace(invars=[names.get(id(x), x) for x in found.invars], source_info=like.source_info)


def trace_equation_if_supported(*given: Any) -> Any:
    """Returns `trace_equation`, or None if ``jax.vmap`` has no rule for a primitive of the function.

    Relies on ``jax.vmap`` raising a NotImplementedError then.
    """
    try:
        return trace_equation(*given)
    except NotImplementedError:
        return None


def rebind(equation: Any, *operands: Any, **changed: Any) -> Any:
    """What an equation gives for other operands, in a trace, wherever its results were said to be.

    Some of its parameters may be changed.

    Relies on `bind` taking its parameters, and on *out_sharding* being None where nothing is said.
    """
    free = {'out_sharding': None} if 'out_sharding' in equation.params else {}
    return equation.primitive.bind(*operands, **equation.params | free | changed)


def constants_of(jaxpr: Any) -> list[tuple[Any, Any]]:
    """The variables of the constants of a jaxpr, and their values.

    Relies on *constvars* and *consts* being in one order.
    """
    return [*zip(open_jaxpr(jaxpr).constvars, getattr(jaxpr, 'consts', ()), strict=True)]


def lift_captured_tracers(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A closed jaxpr whose constants of an outer trace are its last inputs; and these constants.

    Relies on `debug_info` being a named tuple.
    """
    inner, pairs = open_jaxpr(jaxpr), constants_of(jaxpr)
    captured = [pair for pair in pairs if isinstance(pair[1], jax.core.Tracer)]
    if not captured:
        return jaxpr, []
    kept = [pair for pair in pairs if not isinstance(pair[1], jax.core.Tracer)]
    names = inner.debug_info.arg_names  # None where JAX does not know them
    new = inner.replace(
        constvars=[var for var, _ in kept],
        invars=[*inner.invars, *[var for var, _ in captured]],
        debug_info=inner.debug_info._replace(arg_names=names and (*names, *[''] * len(captured))),
    )
    return ClosedJaxpr(new, [value for _, value in kept]), [value for _, value in captured]


def eval_jaxpr(jaxpr: Any, operands: Sequence[Any], consts: Sequence[Any] | None = None) -> list[Any]:
    """The results of a closed jaxpr, computed equation by equation, also with other constants.

    Relies on `jaxpr_as_fun`, and on `replace` of a closed jaxpr taking *consts*.
    """
    return jaxpr_as_fun(jaxpr if consts is None else jaxpr.replace(consts=consts))(*operands)


def eval_equation(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation, as it is, for other operands of the same types.

    Relies on ``Var(aval)``, on `replace` of equations and of jaxprs, and on `jaxpr_as_fun`.
    """
    given = [Var(atom.aval) for atom in equation.invars]
    results = [Var(atom.aval) for atom in equation.outvars]
    one = equation.replace(invars=given, outvars=results)
    jaxpr = _nothing().replace(eqns=[one], invars=given, outvars=results)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*operands)


def eval_on_ambient_mesh(equation: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Returns the results of an equation for operands of other types, on the ambient mesh, with its line.

    Some of its parameters may be changed. Relies on what `eval_equation` relies on, on no types being
    checked, on *ctx* being what JAX's trace context was, and on *sharding* and *out_sharding* being None
    where nothing is specified.
    """
    unsaid = dict.fromkeys({'sharding', 'out_sharding'} & equation.params.keys())
    params = {**equation.params, **unsaid, **changed}
    return eval_equation(equation.replace(params=params, ctx=_context(trace_context())), operands)


@functools.lru_cache(maxsize=64)
def _context(context: Any) -> Any:
    """The context of equations that are traced now."""
    return open_jaxpr(jax.make_jaxpr(jax.lax.neg)(0.0)).eqns[0].ctx


@functools.cache
def _nothing() -> Any:
    """A jaxpr that computes nothing, whose arguments have no names."""
    jaxpr = open_jaxpr(jax.make_jaxpr(lambda: ())())
    return jaxpr.replace(debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None))


def bind_as_jit(jaxpr: Any, operands: Sequence[Any], name: str) -> Sequence[Any]:
    """The results of a closed jaxpr, bound in a trace as one equation of `jit`.

    It says of no operand and result how it is sharded, donated or laid out. Relies on `_OF_OPERANDS` and
    `_OF_RESULTS` being all the parameters of `jit` that have an entry for each of these.
    """
    call, params = _call_of(jaxpr, len(operands), name)
    return call.primitive.bind(*operands, **params)


def replace_by_jit(equation: Any, jaxpr: Any, operands: Sequence[Any]) -> Any:
    """The `jit` of a closed jaxpr in place of an equation of the same results.

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
    """A call as JAX makes it, and the parameters of that of a closed jaxpr of so many operands."""
    call = _call(trace_context())
    params = {**call.params, 'jaxpr': jaxpr, 'name': name}
    for names, each in ((_OF_OPERANDS, count), (_OF_RESULTS, len(open_jaxpr(jaxpr).outvars))):
        params |= {name: params[name] * each for name in names}
    return call, params


@functools.lru_cache(maxsize=64)
def _call(context: Any) -> Any:
    """An equation that calls a jitted function of one operand and one result, as JAX makes it."""
    [equation] = open_jaxpr(jax.make_jaxpr(jax.jit(lambda x: x))(0.0)).eqns
    return equation
