"""Variables and equations of code that is manual along mesh axes: local shapes, and what devices exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from scalax._jax.equations import CALLS, ClosedJaxpr, Literal, is_jaxpr, open_jaxpr, shape_of
from scalax._jax.tracing import memory_space, trace_context

# The parameters of `jit` that have an entry for each operand, and for each result.
_OF_OPERANDS = ('in_shardings', 'in_layouts', 'donated_invars')
_OF_RESULTS = ('out_shardings', 'out_layouts')


def is_backward(equation: Any) -> bool:
    """Whether an equation is of a backward pass. Relies on what `name_stack` of `equations` relies on."""
    return 'transpose(' in str(equation.source_info.name_stack)


def in_scope(equation: Any, name: str) -> Any:
    """Returns an equation in one more scope, which the names of its operations have behind all others.

    Relies on `extend` of *name_stack*, on `replace` of *source_info*, and on what `name_stack` of `equations`
    relies on.
    """
    info = equation.source_info
    return equation.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def is_noop_reshard(reshard: Any) -> bool:
    """Whether a `reshard` says nothing: it is for no Explicit axes, as those that JAX derives for constants.

    Relies on *dst_sharding*.
    """
    mesh = reshard.params['dst_sharding'].mesh
    return mesh.empty or AxisType.Explicit not in mesh.axis_types


def local_params(
    equation: Any, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Returns the parameters of an equation that change with its shapes.

    Relies on `_SIZES_OF_RESULT` and `_SIZES_OF_OPERAND` being all of those of primitives of arrays.

    Args:
        equation: the equation.
        operands: the local shapes of its operands.
        results: the local shapes of its results.
    """
    name = equation.primitive.name
    if name in _SIZES_OF_RESULT:
        return {_SIZES_OF_RESULT[name]: tuple(results[0])}
    if name in _SIZES_OF_OPERAND:
        parameter, shape, local = _SIZES_OF_OPERAND[name], shape_of(equation.invars[0]), operands[0]
        sizes = equation.params[parameter]
        return {
            parameter: tuple(
                [
                    mine if mine != full and size == full else size
                    for size, full, mine in zip(sizes, shape, local, strict=True)
                ]
            )
        }
    return {}


# The parameters that hold sizes: those of the result, or of the first operand.
_SIZES_OF_RESULT = {'reshape': 'new_sizes', 'broadcast_in_dim': 'shape', 'iota': 'shape'}
_SIZES_OF_OPERAND = {'slice': 'limit_indices', 'dynamic_slice': 'slice_sizes', 'gather': 'slice_sizes'}
OPS_WITH_SIZES = _SIZES_OF_RESULT.keys() | _SIZES_OF_OPERAND.keys()


def params_with_jaxprs(equation: Any, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the parameters of an equation that hold jaxprs, in tuples too, with others in their place.

    Relies on tuples with names being made of their parts.
    """

    def changed(value: Any) -> Any:
        if is_jaxpr(value):
            return change(value)
        if isinstance(value, tuple):
            parts = [changed(part) for part in value]
            return type(value)(*parts) if hasattr(value, '_fields') else tuple(parts)
        return value

    found = {name: changed(value) for name, value in equation.params.items()}
    return {name: value for name, value in found.items() if value is not equation.params[name]}


@functools.cache
def callbacks_nest() -> bool:
    """Whether JAX lowers callbacks to Python in a ``jax.shard_map`` inside of another one.

    In some versions only the axes of the inner one count as manual there, and callbacks need all of them.
    Relies on `lower` raising NotImplementedError or TypeError then.
    """
    mesh = AbstractMesh((2, 2, 2), ('a', 'b', 'c'), axis_types=(AxisType.Auto,) * 3)
    number, whole = jax.ShapeDtypeStruct((), 'float32'), PartitionSpec()

    def call(x: Any) -> Any:
        jax.debug.callback(lambda x: None, x)
        return jax.pure_callback(lambda x: x, number, x)

    def nest(x: Any) -> Any:
        return jax.shard_map(call, in_specs=whole, out_specs=whole, axis_names={'c'}, check_vma=False)(x)

    outer = jax.shard_map(
        nest, mesh=mesh, in_specs=whole, out_specs=whole, axis_names={'a', 'b'}, check_vma=False
    )
    try:
        with jax.sharding.use_abstract_mesh(mesh):  # another mesh may be in force
            jax.jit(outer).trace(number).lower(lowering_platforms=('cpu',))
    except (NotImplementedError, TypeError):
        return False
    return True


class ManualEquations:
    """Makes equations that are manual along axes of a mesh.

    They are taken from JAX, which traces a function of one operation in a ``jax.shard_map`` over abstract
    axes.

    Args:
        mesh: the mesh, in force, of Auto axes.
        auto: the axes that stay Auto inside.

    Attributes:
        auto: these axes.
        adds_wide: whether XLA aborts where it compiles sums of bfloat16 over devices: on CPUs, if there are
            such axes. It would add them in float32 anyway.
        blank: an equation without a line.
    """

    def __init__(self, mesh: AbstractMesh, auto: Collection[str] = ()) -> None:
        self.auto = frozenset(auto)
        device = mesh.abstract_device
        self.adds_wide = bool(auto) and device is not None and device.device_kind == 'cpu'
        manual = frozenset([axis for axis in mesh.axis_names if axis not in auto])
        self._size, self._mesh = mesh.size, mesh
        self._trace = mesh, manual, trace_context()
        neg, self._barrier, self._jit = _traced(_of_each, ((), 'float32'), trace=self._trace)
        self._ctx, self.blank = neg.ctx, neg
        self._types: dict[Any, Any] = {}
        # The same by the ids of types, which are held, and hash faster than dtypes do.
        self._local_types: dict[tuple[int, Any], tuple[Any, Any]] = {}
        types = [AxisType.Manual if axis in manual else AxisType.Auto for axis in mesh.axis_names]
        self._inside = mesh.update(axis_types=(*types,))

    def along_all_axes(self) -> ManualEquations:
        """Returns what makes equations that are manual along all axes, as in a `shard_map` over the rest."""
        return ManualEquations(self._mesh)

    def var(self, atom: Any, shape: tuple[int, ...]) -> Any:
        """Returns a new variable of the type of another one, of another shape, manual along the axes.

        Relies on ``Var(aval)``. Of an array it does not say along which axes devices have other values.
        The type of what is no array stays as it is.
        """
        return Var(self._type(atom.aval, shape))

    def literal(self, atom: Any) -> Any:
        """Returns a literal whose type is manual along the axes. Relies on ``Literal(val, aval)``."""
        return Literal(atom.val, self._type(atom.aval, shape_of(atom)))

    def _type(self, aval: Any, shape: tuple[int, ...]) -> Any:
        if (known := self._local_types.get((id(aval), shape))) is not None:
            return known[1]
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
        """Returns the equation that a function of one operation makes of operands, with new results.

        Args:
            function: the function.
            key: what the function is known by: functions of one key do the same.
            like: the equation whose line the new one gets.
            operands: the operands.
        """
        types = tuple([(shape_of(atom), atom.aval.dtype) for atom in operands])
        [template] = _cached(_Keyed(function, key), types, self._trace)
        results = [Var(var.aval) for var in template.outvars]
        return template.replace(invars=[*operands], outvars=results, source_info=like.source_info)

    def collective(self, function: Callable[..., Any], key: Any, like: Any, operand: Any, result: Any) -> Any:
        """Returns an equation of one operand whose parameters do not depend on shapes, as of a collective.

        Args:
            function: the function of one operation.
            key: what the function is known by.
            like: the equation whose line the new one gets.
            operand: the operand.
            result: the result.
        """
        shape = (self._size,) * len(shape_of(operand))
        types = ((shape, operand.aval.dtype),)
        [template] = _cached(_Keyed(function, key), types, self._trace)
        return self.from_template(template, like, operand, result)

    def collective_templates(
        self, functions: Sequence[Callable[..., Any]], rank: int, key: Any
    ) -> Sequence[Any]:
        """Returns equations of one operand whose parameters do not depend on its type, as of collectives.

        To trace several functions at once takes hardly longer than to trace one.

        Args:
            functions: functions of one operation, each another one.
            rank: how many dimensions an operand has to have for all of them.
            key: what the functions are known by.
        """
        types = (((self._size,) * rank, 'float32'),)
        return _cached(_Keyed(lambda x: [function(x) for function in functions], key), types, self._trace)

    def from_template(self, template: Any, like: Any, operand: Any, result: Any) -> Any:
        """Returns an equation that `exchange` or `exchanges` gives, for another operand.

        Args:
            template: the equation.
            like: the equation whose line the new one gets.
            operand: the operand.
            result: the result.
        """
        return template.replace(invars=[operand], outvars=[result], source_info=like.source_info)

    def barrier(self, like: Any, operand: Any) -> Any:
        """Returns the equation of an optimization barrier, with a new result.

        Args:
            like: the equation whose line the new one gets.
            operand: the operand.
        """
        return self.from_template(self._barrier, like, operand, self.var(operand, shape_of(operand)))

    def localize(self, equation: Any, operands: Sequence[Any], results: Sequence[Any], **changed: Any) -> Any:
        """Returns an equation of other operands and results, some of whose parameters are changed.

        Relies on *ctx* being what JAX's trace context was, on *sharding* and *out_sharding* being None where
        nothing is said, and on `replace` of equations.
        """
        params = equation.params
        # Most say nothing, and keep their parameters.
        unsaid = _unsaid(equation)
        if changed or unsaid:
            params = {**params, **unsaid, **changed}
        return equation.replace(invars=[*operands], outvars=[*results], params=params, ctx=self._ctx)

    def constraint(self, spec: PartitionSpec, like: Any, operand: Any) -> Any:
        """Returns the equation that constrains a value along Auto axes.

        Args:
            spec: where it is along them, for each of its dimensions.
            like: the equation whose line the new one gets.
            operand: the value.
        """
        function = functools.partial(jax.lax.with_sharding_constraint, shardings=spec)
        return self.collective(function, ('constraint', spec), like, operand, Var(operand.aval))

    def localize_jaxpr(self, jaxpr: Any) -> Any:
        """Returns a jaxpr, such as that of a kernel, whose equations are manual along the axes."""
        inner, atoms = open_jaxpr(jaxpr), dict[int, Any]()

        def renamed(found: Sequence[Any]) -> list[Any]:
            return [
                self.literal(x)
                if isinstance(x, Literal)
                else atoms.setdefault(id(x), self.var(x, shape_of(x)))
                for x in found
            ]

        eqns = [
            equation.replace(
                invars=renamed(equation.invars),
                outvars=renamed(equation.outvars),
                ctx=self._ctx,
                params={
                    **equation.params,
                    **_unsaid(equation),
                    **params_with_jaxprs(equation, self.localize_jaxpr),
                },
            )
            for equation in inner.eqns
        ]
        return rebuild_jaxpr(
            jaxpr, renamed(inner.invars), eqns, renamed(inner.outvars), renamed(inner.constvars)
        )

    def call(self, equation: Any, jaxpr: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """Returns a call of another jaxpr; a `jit` says nothing of shardings.

        Relies on the parameters that `rewriting.run_as_one` relies on.
        """
        params: dict[str, Any] = {}
        if equation.primitive.name == 'jit':
            template = self._jit.params
            for names, count in ((_OF_OPERANDS, len(operands)), (_OF_RESULTS, len(results))):
                params |= {name: template[name] * count for name in names}
        return self.localize(equation, operands, results, **params, **{CALLS[equation.primitive.name]: jaxpr})

    def jit_call(self, like: Any, jaxpr: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """Returns the call, by `jit`, of a jaxpr, closed or without constants, in place of an equation."""
        template = self._jit
        closed = ClosedJaxpr(jaxpr, ()) if open_jaxpr(jaxpr) is jaxpr else jaxpr
        params = {**template.params, 'jaxpr': closed, 'name': like.primitive.name}
        for names, count in ((_OF_OPERANDS, len(operands)), (_OF_RESULTS, len(results))):
            params |= {name: template.params[name] * count for name in names}
        return template.replace(
            invars=[*operands],
            outvars=[*results],
            params=params,
            effects=jaxpr.effects,
            source_info=like.source_info,
        )

    def call_function_into(
        self, function: Callable[..., Any], like: Any, operands: Sequence[Any], results: Sequence[Any]
    ) -> Any:
        """Returns the call of a function of several operations.

        Args:
            function: the function; it returns a list.
            like: the equation whose line the call gets.
            operands: the operands.
            results: the results.
        """
        used = [atom for i, atom in enumerate(operands) if not any(atom is x for x in operands[:i])]
        places = [next(j for j, x in enumerate(used) if x is atom) for atom in operands]

        def of_used(*values: Any) -> Any:
            return function(*[values[j] for j in places])

        types = [(shape_of(atom), atom.aval.dtype) for atom in used]
        [call] = _traced(jax.jit(of_used, keep_unused=True), *types, trace=self._trace)
        return call.replace(invars=used, outvars=[*results], source_info=like.source_info)

    def nested_shard_map(
        self,
        equation: Any,
        jaxpr: Any,
        specs: tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]],
        axes: Collection[str],
        operands: Sequence[Any],
        results: Sequence[Any],
    ) -> Any:
        """Returns a `shard_map` inside, which is manual along more axes.

        Relies on *mesh*, *in_specs*, *out_specs*, *check_vma*, and *newly_manual_axes* or *manual_axes*.

        Args:
            equation: the `shard_map` in whose place it comes.
            jaxpr: the jaxpr that it runs.
            specs: the specs of its operands, and those of its results, along these axes.
            axes: the axes.
            operands: its operands.
            results: its results.
        """
        [name] = {'newly_manual_axes', 'manual_axes'} & equation.params.keys()
        changed = {'mesh': self._inside, 'jaxpr': jaxpr, 'check_vma': False, name: frozenset(axes)}
        inputs, outputs = map(tuple, specs)
        return self.localize(equation, operands, results, in_specs=inputs, out_specs=outputs, **changed)

    def scalar_var(self, dtype: Any) -> Any:
        """Returns a new variable of one element. Relies on what `var` relies on."""
        return Var(self.blank.outvars[0].aval.update(dtype=jnp.dtype(dtype), weak_type=False))

    def call_function(self, function: Callable[..., Any], like: Any, operands: Sequence[Any]) -> Any:
        """Returns the call of a function of several operations, with new results.

        Args:
            function: the function; it returns a list.
            like: the equation whose line the call gets.
            operands: the operands.
        """
        types = [(shape_of(atom), atom.aval.dtype) for atom in operands]
        [call] = _traced(jax.jit(function), *types, trace=self._trace)
        assert len({*map(id, call.invars)}) == len(operands)
        return call.replace(invars=[*operands], source_info=like.source_info)


def _of_each(x: Any) -> list[Any]:
    """The function of an operation of each kind whose parameters are always the same, and that is common."""
    return [jax.lax.neg(x), jax.lax.optimization_barrier(x), jax.jit(lambda x: x)(x)]


def _unsaid(equation: Any) -> dict[str, None]:
    """The parameters of an equation that say how its result is sharded, as those that say nothing."""
    return {name: None for name in ('sharding', 'out_sharding') if equation.params.get(name) is not None}


def scan_counts(constants: int, carried: int, elements: int, results: int) -> dict[str, Any]:
    """Returns the parameters of a `scan` that depend on its numbers of operands and results only.

    Relies on all others of its parameters being in `_SCAN_OPTIONS`.
    """
    return {**_scan_counts(constants, carried, elements, results)}


_SCAN_OPTIONS = frozenset(('jaxpr', 'length', 'reverse', 'unroll', '_split_transpose'))


@functools.lru_cache(maxsize=1024)
def _scan_counts(constants: int, carried: int, elements: int, results: int) -> dict[str, Any]:
    def run(fixed: Sequence[Any], begun: Sequence[Any], stacks: Sequence[Any]) -> Any:
        def layer(state: Sequence[Any], parts: Sequence[Any]) -> Any:
            total = sum([*fixed, *parts], jnp.float32(1.0))
            return [x + total for x in state], [total * i for i in range(2, 2 + results)]

        return jax.lax.scan(layer, begun, stacks, 2)

    number, stack = jax.ShapeDtypeStruct((), 'float32'), jax.ShapeDtypeStruct((2,), 'float32')
    jaxpr = open_jaxpr(jax.make_jaxpr(run)([number] * constants, [number] * carried, [stack] * elements))
    [equation] = [each for each in jaxpr.eqns if each.primitive.name == 'scan']
    return {name: value for name, value in equation.params.items() if name not in _SCAN_OPTIONS}


class _Keyed:
    """A function that equals others of its key."""

    def __init__(self, function: Callable[..., Any], key: Any) -> None:
        self.function, self._key = function, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=4096)
def _cached(keyed: _Keyed, types: Any, trace: Any) -> Sequence[Any]:
    return _traced(keyed.function, *types, trace=trace)


def _traced(function: Callable[..., Any], *types: Any, trace: Any) -> Sequence[Any]:
    """The equations of a function on every device of a mesh. Relies on *jaxpr* of `shard_map`."""
    whole, (mesh, manual, _) = PartitionSpec(), trace
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=whole, out_specs=whole, axis_names=manual, check_vma=False
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
    """Returns a jaxpr with the constants of another one and other variables, as open or as closed as it was.

    Relies on `replace` of jaxprs, which checks nothing and computes effects.
    """
    inner = open_jaxpr(jaxpr)
    names = inner.debug_info._replace(arg_names=None, result_paths=None)
    changed: dict[str, Any] = {} if constvars is None else {'constvars': [*constvars]}
    if changed and hasattr(inner, 'consts'):  # since JAX 0.11
        changed['consts'] = inner.consts
    new = inner.replace(invars=[*invars], eqns=[*eqns], outvars=[*outvars], debug_info=names, **changed)
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=new)
    return new
