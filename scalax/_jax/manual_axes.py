"""Variables and equations that are manual along mesh axes: local shards, and collectives between devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from scalax._jax.equations import CALLS, ClosedJaxpr, Literal, is_jaxpr, open_jaxpr, shape_of
from scalax._jax.rewriting import JIT_OPERAND_PARAMS, JIT_RESULT_PARAMS
from scalax._jax.tracing import memory_space, trace_context


def is_backward(equation: Any) -> bool:
    """Returns whether an equation belongs to a backward pass. Relies on what `name_stack` relies on."""
    return 'transpose(' in str(equation.source_info.name_stack)


def in_scope(equation: Any, name: str) -> Any:
    """Returns an equation with one more scope, the innermost one.

    Relies on `extend` of *name_stack*, on `replace` of *source_info*, and on what `name_stack` of `equations`
    relies on.
    """
    info = equation.source_info
    return equation.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def is_noop_reshard(reshard: Any) -> bool:
    """Returns whether a `reshard` does nothing: it has no Explicit axes, as for constants that JAX derives.

    Relies on *dst_sharding*.
    """
    mesh = reshard.params['dst_sharding'].mesh
    return mesh.empty or AxisType.Explicit not in mesh.axis_types


def params_with_jaxprs(equation: Any, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the parameters of an equation that hold jaxprs, also in tuples, with changed jaxprs.

    Relies on the class of a named tuple taking its fields.
    """

    def change_value(value: Any) -> Any:
        if is_jaxpr(value):
            return change(value)
        if isinstance(value, tuple):
            parts = [change_value(part) for part in value]
            return type(value)(*parts) if hasattr(value, '_fields') else tuple(parts)
        return value

    params = {name: change_value(value) for name, value in equation.params.items()}
    return {name: value for name, value in params.items() if value is not equation.params[name]}


@functools.cache
def callbacks_nest() -> bool:
    """Returns whether JAX lowers callbacks to Python in a ``jax.shard_map`` inside of another one.

    In some versions only the axes of the inner one count as manual there, and callbacks need all axes.
    Relies on `lower` raising NotImplementedError or TypeError then.
    """
    mesh = AbstractMesh((2, 2, 2), ('a', 'b', 'c'), axis_types=(AxisType.Auto,) * 3)
    scalar, replicated = jax.ShapeDtypeStruct((), 'float32'), PartitionSpec()

    def call(x: Any) -> Any:
        jax.debug.callback(lambda x: None, x)
        return jax.pure_callback(lambda x: x, scalar, x)

    def nest(x: Any) -> Any:
        return jax.shard_map(
            call, in_specs=replicated, out_specs=replicated, axis_names={'c'}, check_vma=False
        )(x)

    outer = jax.shard_map(
        nest, mesh=mesh, in_specs=replicated, out_specs=replicated, axis_names={'a', 'b'}, check_vma=False
    )
    try:
        with jax.sharding.use_abstract_mesh(mesh):  # instead of another ambient mesh
            jax.jit(outer).trace(scalar).lower(lowering_platforms=('cpu',))
    except (NotImplementedError, TypeError):
        return False
    return True


class ManualEquations:
    """Creates equations that are manual along mesh axes.

    JAX traces a function of one operation in a ``jax.shard_map`` over abstract axes, and the equation gets
    other variables.

    Args:
        mesh: the ambient mesh, with Auto axes.
        auto: the axes that stay Auto.

    Attributes:
        auto: the axes that stay Auto.
        widens_bfloat16_sums: whether sums of bfloat16 over devices have to be in float32. XLA for CPUs aborts
            when it compiles them if there are Auto axes. It would sum in float32 anyway.
        blank: an equation without a source line.
    """

    def __init__(self, mesh: AbstractMesh, auto: Collection[str] = ()) -> None:
        self.auto = frozenset(auto)
        device = mesh.abstract_device
        self.widens_bfloat16_sums = bool(auto) and device is not None and device.device_kind == 'cpu'
        manual = frozenset([axis for axis in mesh.axis_names if axis not in auto])
        self._size, self._mesh = mesh.size, mesh
        self._trace = mesh, manual, trace_context()
        neg, self._barrier, self._jit = _traced(_common_operations, ((), 'float32'), trace=self._trace)
        self._ctx, self.blank = neg.ctx, neg
        self._types: dict[Any, Any] = {}
        # A cache by the ids of types, which hash faster than dtypes do. The values keep the types alive.
        self._local_types: dict[tuple[int, Any], tuple[Any, Any]] = {}
        types = [AxisType.Manual if axis in manual else AxisType.Auto for axis in mesh.axis_names]
        self._inside = mesh.update(axis_types=(*types,))

    def along_all_axes(self) -> ManualEquations:
        """Returns `ManualEquations` along all axes, as in a `shard_map` over the Auto axes."""
        return ManualEquations(self._mesh)

    def var(self, atom: Any, shape: tuple[int, ...]) -> Any:
        """Returns a new variable with a value's type but another shape, manual along the axes.

        A type that is not an array stays as it is. Relies on ``Var(aval)``. The type of an array does not
        list the axes along which it varies.
        """
        return Var(self._type(atom.aval, shape))

    def literal(self, atom: Any) -> Any:
        """Returns a literal whose type is manual along the axes. Relies on ``Literal(val, aval)``."""
        return Literal(atom.val, self._type(atom.aval, shape_of(atom)))

    def _type(self, aval: Any, shape: tuple[int, ...]) -> Any:
        if (cached := self._local_types.get((id(aval), shape))) is not None:
            return cached[1]
        if not isinstance(aval, jax.core.ShapedArray):
            return aval
        key = tuple(shape), aval.dtype, aval.weak_type, memory_space(aval)
        if key not in self._types:
            sharding = NamedSharding(self._inside, PartitionSpec(*[None] * len(shape)))
            self._types[key] = jax.core.ShapedArray(
                *key[:3], sharding=sharding, memory_space=memory_space(aval)
            )
        self._local_types[id(aval), key[0]] = aval, self._types[key]
        return self._types[key]

    def equation(self, function: Callable[..., Any], key: Any, like: Any, operands: Sequence[Any]) -> Any:
        """Returns an equation of a function of one operation, with new results.

        Args:
            function: the function.
            key: a cache key: functions with equal keys compute the same.
            like: the equation whose source line it gets.
            operands: the operands.
        """
        types = tuple([(shape_of(atom), atom.aval.dtype) for atom in operands])
        [template] = _cached(_KeyedFunction(function, key), types, self._trace)
        results = [Var(var.aval) for var in template.outvars]
        return template.replace(invars=[*operands], outvars=results, source_info=like.source_info)

    def collective(self, function: Callable[..., Any], key: Any, like: Any, operand: Any, result: Any) -> Any:
        """Returns an equation of one operand whose parameters do not depend on shapes, such as a collective.

        Args:
            function: the function of one operation.
            key: a cache key of the function.
            like: the equation whose source line it gets.
            operand: the operand.
            result: the result.
        """
        shape = (self._size,) * len(shape_of(operand))
        types = ((shape, operand.aval.dtype),)
        [template] = _cached(_KeyedFunction(function, key), types, self._trace)
        return self.from_template(template, like, operand, result)

    def collective_templates(
        self, functions: Sequence[Callable[..., Any]], rank: int, key: Any
    ) -> Sequence[Any]:
        """Returns equations of one operand whose parameters do not depend on its type, such as collectives.

        Tracing several functions at once takes hardly longer than tracing one.

        Args:
            functions: functions of one operation, all different.
            rank: the smallest rank of an operand that all functions support.
            key: a cache key of the functions.
        """
        types = (((self._size,) * rank, 'float32'),)
        return _cached(
            _KeyedFunction(lambda x: [function(x) for function in functions], key), types, self._trace
        )

    def from_template(self, template: Any, like: Any, operand: Any, result: Any) -> Any:
        """Returns an equation of `collective` or `collective_templates` with another operand.

        Args:
            template: the equation.
            like: the equation whose source line it gets.
            operand: the operand.
            result: the result.
        """
        return template.replace(invars=[operand], outvars=[result], source_info=like.source_info)

    def barrier(self, like: Any, operands: Sequence[Any]) -> Any:
        """Returns an optimization barrier, with new results.

        Relies on the barrier having no parameters, for any number of operands.

        Args:
            like: the equation whose source line it gets.
            operands: the operands.
        """
        results = [self.var(operand, shape_of(operand)) for operand in operands]
        return self._barrier.replace(invars=[*operands], outvars=results, source_info=like.source_info)

    def localize(self, equation: Any, operands: Sequence[Any], results: Sequence[Any], **params: Any) -> Any:
        """Returns an equation with local operands and results, without the sharding of its results.

        Relies on *ctx* being JAX's trace context, on *sharding* and *out_sharding* being None if they are
        unspecified, and on `replace` of equations.

        Args:
            equation: the equation.
            operands: its operands.
            results: its results.
            **params: the parameters that change.
        """
        before = equation.params
        if params or not (before.get('sharding') is before.get('out_sharding') is None):
            params = {**before, **_unspecified_shardings(equation), **params}
        else:  # most equations keep their parameters
            params = before
        return equation.replace(invars=[*operands], outvars=[*results], params=params, ctx=self._ctx)

    def constraint(self, spec: PartitionSpec, like: Any, operand: Any) -> Any:
        """Returns a sharding constraint along Auto axes.

        Args:
            spec: the spec.
            like: the equation whose source line it gets.
            operand: the value.
        """
        function = functools.partial(jax.lax.with_sharding_constraint, shardings=spec)
        return self.collective(function, ('constraint', spec), like, operand, Var(operand.aval))

    def localize_jaxpr(self, jaxpr: Any) -> Any:
        """Returns a jaxpr, such as a kernel's, with equations that are manual along the axes."""
        inner, atoms = open_jaxpr(jaxpr), dict[int, Any]()

        def localize_atoms(old_atoms: Sequence[Any]) -> list[Any]:
            return [
                self.literal(x)
                if isinstance(x, Literal)
                else atoms.setdefault(id(x), self.var(x, shape_of(x)))
                for x in old_atoms
            ]

        eqns = [
            equation.replace(
                invars=localize_atoms(equation.invars),
                outvars=localize_atoms(equation.outvars),
                ctx=self._ctx,
                params={
                    **equation.params,
                    **_unspecified_shardings(equation),
                    **params_with_jaxprs(equation, self.localize_jaxpr),
                },
            )
            for equation in inner.eqns
        ]
        return rebuild_jaxpr(
            jaxpr,
            localize_atoms(inner.invars),
            eqns,
            localize_atoms(inner.outvars),
            localize_atoms(inner.constvars),
        )

    def call(self, equation: Any, jaxpr: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """Returns a call with another jaxpr, without shardings of its operands and results.

        Relies on the parameters that `rewriting.bind_as_jit` relies on.
        """
        is_jit = equation.primitive.name == 'jit'
        params = self._jit_params(len(operands), len(results)) if is_jit else {}
        return self.localize(equation, operands, results, **params, **{CALLS[equation.primitive.name]: jaxpr})

    def _jit_params(self, num_operands: int, num_results: int) -> dict[str, Any]:
        """Returns the parameters of a `jit` that depend on the numbers of its operands and results."""
        template = self._jit.params
        operand_params = {name: template[name] * num_operands for name in JIT_OPERAND_PARAMS}
        return operand_params | {name: template[name] * num_results for name in JIT_RESULT_PARAMS}

    def jit_call(self, like: Any, jaxpr: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """Returns a `jit` of a jaxpr, closed or without constants, to replace an equation."""
        closed = ClosedJaxpr(jaxpr, ()) if open_jaxpr(jaxpr) is jaxpr else jaxpr
        params = {**self._jit.params, 'jaxpr': closed, 'name': like.primitive.name}
        return self._jit.replace(
            invars=[*operands],
            outvars=[*results],
            params=params | self._jit_params(len(operands), len(results)),
            effects=jaxpr.effects,
            source_info=like.source_info,
        )

    def call_function_into(
        self, function: Callable[..., Any], like: Any, operands: Sequence[Any], results: Sequence[Any]
    ) -> Any:
        """Returns a call of a function of several operations, with given results.

        Args:
            function: the function; it returns a list.
            like: the equation whose source line it gets.
            operands: the operands.
            results: the results.
        """
        unique = [atom for i, atom in enumerate(operands) if not any(atom is x for x in operands[:i])]
        indices = [next(j for j, x in enumerate(unique) if x is atom) for atom in operands]

        def call_with_unique(*values: Any) -> Any:
            return function(*[values[j] for j in indices])

        types = [(shape_of(atom), atom.aval.dtype) for atom in unique]
        [call] = _traced(jax.jit(call_with_unique, keep_unused=True), *types, trace=self._trace)
        return call.replace(invars=unique, outvars=[*results], source_info=like.source_info)

    def nested_shard_map(
        self,
        equation: Any,
        jaxpr: Any,
        specs: tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]],
        axes: Collection[str],
        operands: Sequence[Any],
        results: Sequence[Any],
    ) -> Any:
        """Returns a nested `shard_map`, which is manual along more axes.

        Relies on *mesh*, *in_specs*, *out_specs*, *check_vma*, and *newly_manual_axes* or *manual_axes*.

        Args:
            equation: the `shard_map` that it replaces.
            jaxpr: its jaxpr.
            specs: the specs of its operands, and of its results, along the new manual axes.
            axes: the new manual axes.
            operands: its operands.
            results: its results.
        """
        [name] = {'newly_manual_axes', 'manual_axes'} & equation.params.keys()
        params = {'mesh': self._inside, 'jaxpr': jaxpr, 'check_vma': False, name: frozenset(axes)}
        in_specs, out_specs = map(tuple, specs)
        return self.localize(equation, operands, results, in_specs=in_specs, out_specs=out_specs, **params)

    def scalar_var(self, dtype: Any) -> Any:
        """Returns a new variable of a scalar. Relies on what `var` relies on."""
        return Var(self.blank.outvars[0].aval.update(dtype=jnp.dtype(dtype), weak_type=False))

    def call_function(self, function: Callable[..., Any], like: Any, operands: Sequence[Any]) -> Any:
        """Returns a call of a function of several operations, with new results.

        Args:
            function: the function; it returns a list.
            like: the equation whose source line it gets.
            operands: the operands, all different.
        """
        types = [(shape_of(atom), atom.aval.dtype) for atom in operands]
        [call] = _traced(jax.jit(function), *types, trace=self._trace)
        assert len({*map(id, call.invars)}) == len(operands)
        return call.replace(invars=[*operands], source_info=like.source_info)


@jax.jit
def _identity(x: Any) -> Any:
    return x


def _common_operations(x: Any) -> list[Any]:
    """A function of common operations whose parameters do not depend on their operands."""
    return [jax.lax.neg(x), jax.lax.optimization_barrier(x), _identity(x)]


def _unspecified_shardings(equation: Any) -> dict[str, None]:
    """Returns the parameters of an equation that leave the sharding of its results unspecified."""
    return {name: None for name in ('sharding', 'out_sharding') if equation.params.get(name) is not None}


def scan_counts(num_consts: int, num_carry: int, num_xs: int, num_ys: int) -> dict[str, Any]:
    """Returns the parameters of a `scan` that depend only on the numbers of its operands and results.

    Relies on all other parameters being in `_SCAN_OPTIONS`.
    """
    return {**_scan_counts(num_consts, num_carry, num_xs, num_ys)}


_SCAN_OPTIONS = frozenset(('jaxpr', 'length', 'reverse', 'unroll', '_split_transpose'))


@functools.lru_cache(maxsize=1024)
def _scan_counts(num_consts: int, num_carry: int, num_xs: int, num_ys: int) -> dict[str, Any]:
    def run(consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> Any:
        def step(carry: Sequence[Any], elements: Sequence[Any]) -> Any:
            total = sum([*consts, *elements], jnp.float32(1.0))
            return [x + total for x in carry], [total * i for i in range(2, 2 + num_ys)]

        return jax.lax.scan(step, init, xs, 2)

    scalar, stack = jax.ShapeDtypeStruct((), 'float32'), jax.ShapeDtypeStruct((2,), 'float32')
    jaxpr = open_jaxpr(jax.make_jaxpr(run)([scalar] * num_consts, [scalar] * num_carry, [stack] * num_xs))
    [equation] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'scan']
    return {name: value for name, value in equation.params.items() if name not in _SCAN_OPTIONS}


class _KeyedFunction:
    """A function that equals other functions with its key."""

    def __init__(self, function: Callable[..., Any], key: Any) -> None:
        self.function, self._key = function, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KeyedFunction) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=4096)
def _cached(keyed: _KeyedFunction, types: Any, trace: Any) -> Sequence[Any]:
    return _traced(keyed.function, *types, trace=trace)


def _traced(function: Callable[..., Any], *types: Any, trace: Any) -> Sequence[Any]:
    """Returns the equations of a function, traced in a `shard_map`. Relies on *jaxpr* of `shard_map`."""
    replicated, (mesh, manual, _) = PartitionSpec(), trace
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=replicated, out_specs=replicated, axis_names=manual, check_vma=False
    )
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    [equation] = open_jaxpr(jax.make_jaxpr(mapped)(*structs)).eqns
    return open_jaxpr(equation.params['jaxpr']).eqns


def rebuild_jaxpr(
    jaxpr: Any,
    invars: Sequence[Any],
    eqns: Sequence[Any],
    outvars: Sequence[Any],
    constvars: Sequence[Any] | None = None,
) -> Any:
    """Returns an open or closed jaxpr with the same constants, but other equations and variables.

    Relies on `replace` of jaxprs, which checks nothing and computes effects.
    """
    inner = open_jaxpr(jaxpr)
    names = inner.debug_info._replace(arg_names=None, result_paths=None)
    consts: dict[str, Any] = {} if constvars is None else {'constvars': [*constvars]}
    if consts and hasattr(inner, 'consts'):  # since JAX 0.11
        consts['consts'] = inner.consts
    new = inner.replace(invars=[*invars], eqns=[*eqns], outvars=[*outvars], debug_info=names, **consts)
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=new)
    return new
