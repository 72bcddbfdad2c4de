"""Value domains of the arguments of a step, derived from how its jaxpr uses them.

Not every value of a dtype is valid for every argument: an index has to be in range, the operand of a root has
to be positive, a length has to match. The jaxpr shows which arguments are used in these ways.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalax._jax import equations
from scalax._jax.equations import RUN_ONCE, WITH_JAXPRS, open_jaxpr, shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import constants_of
from scalax._jaxpr.abstract_interpreter import AbstractInterpreter
from scalax._jaxpr.source_lines import line_of

DomainKind = Literal['key', 'mask', 'index', 'length', 'count', 'integer', 'fraction', 'positive', 'number']


@dataclasses.dataclass(frozen=True)
class ValueDomain:
    """The valid values of a leaf of the arguments.

    Attributes:
        kind: a PRNG `key`; a `mask` of booleans; an `index` in [0, bound); a `length` in [1, bound); a
            `count` of steps; any `integer`; a `fraction` between 0 and 1; a `positive` number; any `number`.
        bound: the exclusive upper bound of integers.
        reason: the operation of the step that requires such values, with its line; empty if any value of the
            dtype is valid.
    """

    kind: DomainKind
    bound: int | None = None
    reason: str = ''


def domains_by_use(jaxpr: Any) -> list[dict[DomainKind, ValueDomain]]:
    """Returns, for each argument of a closed jaxpr, the smallest domain of each kind that a use requires."""
    return _UseAnalysis(jaxpr).domains_of_arguments


def has_dtype(value: Any, dtype: Any) -> bool:
    """Whether an array or an aval has a dtype, or a subtype of it."""
    value_dtype = getattr(value, 'dtype', None)
    return value_dtype is not None and jnp.issubdtype(value_dtype, dtype)


class _Origin(NamedTuple):
    """An argument that elements of a value come from: ``x + offset`` for elements x of the argument.

    Attributes:
        argument: the index of the argument. If None, the offset is a constant: the value itself.
        form: for floats: `same` if a value is positive where x is, `square` if it is always positive, `below`
            if it is positive where x is less than a constant.
        low: the smallest offset.
        high: the largest offset.
    """

    argument: int | None
    form: Literal['same', 'square', 'below'] = 'same'
    low: float = 0
    high: float = 0


_Origins = frozenset[_Origin]
_NONE: _Origins = frozenset()
_UNKNOWN_OFFSET = 2.0**40

# The elements of the result are elements of the first operand, or sums of them.
_NAMES = """
    broadcast_in_dim convert_element_type copy cumlogsumexp cummax cummin cumprod cumsum
    dynamic_slice gather name reduce_max reduce_min reduce_precision reduce_prod reduce_sum reduce_window_max
    reduce_window_sum reshape reshard rev sharding_constraint slice split squeeze tile top_k transpose unstack
"""
_FROM_FIRST_OPERAND = frozenset(_NAMES.split())
_SUMS = frozenset({'cumlogsumexp', 'cumprod', 'cumsum', 'reduce_prod', 'reduce_sum', 'reduce_window_sum'})
# The elements of each result are elements of the operand at the same index.
_OPERANDWISE = frozenset({'device_put', 'optimization_barrier', 'pvary', 'sort'})
# The elements of the result are elements of these operands.
_FROM_SEVERAL_OPERANDS = {
    **dict.fromkeys(('concatenate', 'max', 'min', 'pad', 'stack'), slice(None)),
    **dict.fromkeys(('scatter', 'scatter-add', 'scatter-max', 'scatter-min'), slice(0, 3, 2)),
    'clamp': slice(1, 2),
    'dynamic_update_slice': slice(0, 2),
    'select_n': slice(1, None),
}
_NEED_POSITIVE = frozenset({'log', 'log1p', 'log2', 'pow', 'rsqrt', 'sqrt'})
_POWERS = frozenset({'integer_pow', 'pow', 'square'})
_COMPARISONS = frozenset({'eq', 'ge', 'gt', 'le', 'lt', 'ne'})


class _UseAnalysis(AbstractInterpreter[_Origins]):
    """Traces the elements of values back to arguments, and records how each argument is used."""

    def __init__(self, jaxpr: Any) -> None:
        super().__init__(_NONE)
        count = len(open_jaxpr(jaxpr).invars)
        self.domains_of_arguments: list[dict[DomainKind, ValueDomain]] = [{} for _ in range(count)]
        self._constants: dict[int, _Origins] = {
            id(var): _constant(value)
            for var, value in constants_of(jaxpr)
            if isinstance(value, np.ndarray | jax.Array)
        }
        self._calls: list[Any] = []
        self.eval_jaxpr(jaxpr, [frozenset({_Origin(i)}) for i in range(count)])

    def eval_jaxpr(self, jaxpr: Any, arguments: Sequence[_Origins]) -> list[_Origins]:
        for equation in open_jaxpr(jaxpr).eqns:
            self._fold_constants(equation)
        return super().eval_jaxpr(jaxpr, arguments)

    def _fold_constants(self, equation: Any) -> None:
        """Records results that do not depend on the arguments, such as an iota."""
        if primitive_name(equation) == 'iota':
            [var] = equation.outvars
            self._constants[id(var)] = _range(0, shape_of(var)[equations.dim_of(equation)] - 1)
            return
        operands = [*map(self._constant_of, equation.invars)]
        if operands and all(operands):
            results = self.eval_equation(equation, operands)
            self._constants.update(zip(map(id, equation.outvars), results, strict=False))

    def _constant_of(self, atom: Any) -> _Origins:
        if isinstance(atom, equations.Literal):
            return _constant(np.asarray(atom.val)) if has_dtype(atom.aval, np.number) else _NONE
        return self._constants.get(id(atom), _NONE)

    def eval_equation(self, equation: Any, operands: Sequence[_Origins]) -> Sequence[_Origins]:
        name, pairs = primitive_name(equation), zip(operands, equation.invars, strict=True)
        operands = [origins or self._constant_of(atom) for origins, atom in pairs]
        self._calls.append(equation)
        if name in RUN_ONCE and name not in WITH_JAXPRS:
            inner = equations.run_once_jaxpr(equation)
            takes_operands = len(inner.invars) == len(operands)
            results: Sequence[_Origins] = self.eval_jaxpr(inner, operands) if takes_operands else []
        else:
            results = super().eval_equation(equation, operands)
        self._calls.pop()
        return results

    def join(self, facts: Sequence[_Origins]) -> _Origins:
        """Returns the union of the origins. Offsets that grow become unknown, so that loops terminate."""
        first = {(origin.argument, origin.form): origin for origin in facts[0]}
        return frozenset(
            origin
            if first.get((origin.argument, origin.form), origin) == origin
            else origin._replace(low=-_UNKNOWN_OFFSET, high=_UNKNOWN_OFFSET)
            for origin in _union(facts)
        )

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[_Origins]) -> Sequence[_Origins]:
        self._record_uses(name, equation, operands)
        if name in _OPERANDWISE:
            return operands[: len(equation.outvars)]
        return [
            self._result(name, equation, operands, not has_dtype(var.aval, np.inexact))
            for var in equation.outvars
        ]

    # Origins of results

    def _result(self, name: str, equation: Any, operands: Sequence[_Origins], is_integer: bool) -> _Origins:
        first = operands[0]
        if name in _FROM_FIRST_OPERAND:
            is_new = is_integer and (name in _SUMS or has_dtype(equation.invars[0].aval, np.inexact))
            return _NONE if is_new else first
        if name == 'select_n' and _limits(first) == (0, 0):
            return operands[1]
        if name in _FROM_SEVERAL_OPERANDS:
            is_clipped = name in ('clamp', 'min')
            sources = operands[_FROM_SEVERAL_OPERANDS[name]]
            return _union(map(_with_known_offsets, sources) if is_clipped else sources)
        if name in _POWERS or (name == 'mul' and equation.invars[0] is equation.invars[1]):
            return frozenset(
                origin._replace(form='square', high=_UNKNOWN_OFFSET)
                for origin in first
                if origin.form == 'same' and origin.argument is not None
            )
        if name in ('add', 'add_any'):
            return _sum(first, operands[1], is_integer)
        if name == 'sub':
            return _difference(first, operands[1], is_integer)
        if name == 'mul':
            return _product(equation, operands, is_integer)
        if name == 'div':
            limits = _limits(operands[1])
            return first if limits is None or limits[0] > 0 else _NONE
        if name == 'lt' and not has_dtype(equation.invars[0].aval, np.inexact):
            # Negative indices, which count from the end, are never sampled.
            is_never = first and _limits(first) is None and _limits(operands[1]) == (0, 0)
            return _range(0, 0) if is_never else _NONE
        return _NONE

    # Uses of arguments

    def _record_uses(self, name: str, equation: Any, operands: Sequence[_Origins]) -> None:
        shapes = [*map(shape_of, equation.invars)]
        if name == 'gather':
            dims, sizes = equations.gather_dims(equation).start_index_map, equations.slice_sizes(equation)
            self._record_index(equation, operands[1], {dim: sizes[dim] for dim in dims})
        elif name.startswith('scatter'):
            dimension_numbers = equations.scatter_dims(equation)
            inserted = {*dimension_numbers.inserted_window_dims, *dimension_numbers.operand_batching_dims}
            window_dims = [dim for dim, _ in enumerate(shapes[0]) if dim not in inserted]
            update_dim = dict(zip(window_dims, dimension_numbers.update_window_dims, strict=True))
            dims = dimension_numbers.scatter_dims_to_operand_dims
            update_sizes = {dim: shapes[2][update_dim[dim]] if dim in update_dim else 1 for dim in dims}
            self._record_index(equation, operands[1], update_sizes)
        elif name in ('dynamic_slice', 'dynamic_update_slice'):
            slice_shape = shape_of(equation.outvars[0]) if name == 'dynamic_slice' else shapes[1]
            for dim, origins in enumerate(operands[len(operands) - len(slice_shape) :]):
                self._record_index(equation, origins, {dim: slice_shape[dim]})
        elif name in ('random_wrap', 'threefry2x32'):
            self._record('key', frozenset().union(*operands[:2]), equation, 'bits of a key')
        elif name in _COMPARISONS:
            for origins, other in (operands, operands[::-1]):
                self._record_comparison(name, equation, origins, _limits(other))
        elif name in _NEED_POSITIVE and not (name == 'pow' and _is_integer_constant(operands[1])):
            self._record_positive(equation, operands[0], f'argument of {name}')
        elif name in ('div', 'rem'):
            self._record_positive(equation, operands[1], 'divisor')

    def _record_index(self, equation: Any, origins: _Origins, sizes: Mapping[int, int]) -> None:
        """Records indices into an array.

        Args:
            equation: the equation that indexes its first operand.
            origins: the origins of the indices.
            sizes: indexed dimension -> the size of the slice along it.
        """
        shape = shape_of(equation.invars[0])
        bounds = {dim: shape[dim] - size + 1 for dim, size in sizes.items()}
        for dim, bound in bounds.items():
            if bound > 1 or max(bounds.values()) == 1:  # the index is 0 along a dimension that is not sliced
                self._record('index', origins, equation, f'index in dimension {dim} of {shape}', bound)

    def _record_comparison(
        self, name: str, equation: Any, origins: _Origins, limits: tuple[float, float] | None
    ) -> None:
        if limits is None or not 0 < limits[1] < _UNKNOWN_OFFSET:
            return
        if has_dtype(equation.invars[0].aval, np.inexact):
            return
        is_equality, count = name in ('eq', 'ne'), int(limits[1]) + 1
        origins = _with_known_offsets(origins)
        if limits[0] < limits[1]:
            kind: DomainKind = 'index' if is_equality else 'length'
            self._record(kind, origins, equation, f'compared with each of {count}', count + (not is_equality))
        elif is_equality and not shape_of(equation.outvars[0]):
            # The index of a microbatch, as in gradient accumulation.
            self._record('index', origins, equation, f'compared with {count - 1}', count)

    def _record_positive(self, equation: Any, origins: _Origins, use: str) -> None:
        self._record('positive', [origin for origin in origins if origin.form == 'same'], equation, use)
        self._record('fraction', [origin for origin in origins if origin.form == 'below'], equation, use)

    def _record(
        self,
        kind: DomainKind,
        origins: Iterable[_Origin],
        equation: Any,
        use: str,
        index_bound: int | None = None,
    ) -> None:
        for origin in origins:
            if origin.argument is None:
                continue
            bound = None if index_bound is None else int(max(1, index_bound - max(origin.high, 0)))
            domains = self.domains_of_arguments[origin.argument]
            if kind not in domains or (bound or 0) < (domains[kind].bound or 0):
                line = line_of(equation, self._calls[::-1])
                domains[kind] = ValueDomain(kind, bound, f'{use} in {line}' if line else use)


def _range(low: float, high: float) -> _Origins:
    """Returns the origins of a value that does not depend on the arguments."""
    return frozenset({_Origin(None, 'same', low, high)})


def _constant(value: Any) -> _Origins:
    if not has_dtype(value, np.number) or has_dtype(value, np.complexfloating) or value.size == 0:
        return _NONE
    low, high = float(np.min(value)), float(np.max(value))
    return _range(low, high) if math.isfinite(low) and math.isfinite(high) else _NONE


def _limits(origins: _Origins) -> tuple[float, float] | None:
    """Returns the smallest and the largest element of a value that does not depend on the arguments."""
    if not origins or any(origin.argument is not None for origin in origins):
        return None
    return min(origin.low for origin in origins), max(origin.high for origin in origins)


def _is_integer_constant(origins: _Origins) -> bool:
    limits = _limits(origins)
    return limits is not None and limits[0] == limits[1] and limits[0].is_integer()


def _union(values: Iterable[_Origins]) -> _Origins:
    """Merges the origins of several values, with the convex hull of the offsets for each argument."""
    merged: dict[Any, _Origin] = {}
    for origin in itertools.chain.from_iterable(values):
        hull = merged.setdefault((origin.argument, origin.form), origin)
        low, high = min(hull.low, origin.low), max(hull.high, origin.high)
        merged[origin.argument, origin.form] = hull._replace(low=low, high=high)
    return frozenset(merged.values())


def _sum(first: _Origins, second: _Origins, is_integer: bool) -> _Origins:
    """Returns the origins of a sum. Any summand leaves a float positive, as in moving averages of squares."""
    for origins, limits in ((first, _limits(second)), (second, _limits(first))):
        if limits is not None and origins:
            low, high = limits
            return frozenset(
                origin._replace(low=origin.low + low, high=origin.high + high) for origin in origins
            )
    both = _union([first, second])
    return _with_unknown_offsets(both) if is_integer else both


def _difference(first: _Origins, second: _Origins, is_integer: bool) -> _Origins:
    """Returns the origins of a difference. Floats subtracted from an argument are assumed to be small."""
    if (limits := _limits(second)) is not None:
        return _sum(first, _range(-limits[1], -limits[0]), is_integer)
    if is_integer:
        return _with_unknown_offsets(_union([first, second]))
    if _limits(first) is not None:
        return frozenset(origin._replace(form='below') for origin in second)
    return first


def _product(equation: Any, operands: Sequence[_Origins], is_integer: bool) -> _Origins:
    first, second = map(_limits, operands)
    if first is not None and second is not None:
        corners = [a * b for a in first for b in second]
        return _range(min(corners), max(corners))
    if is_integer:
        return _with_unknown_offsets(_union(operands))
    for origins, factor in ((operands[0], second), (operands[1], first)):
        if factor is not None:
            return origins if factor[0] >= 0 < factor[1] else _NONE
    # A scalar factor, such as a learning rate schedule, is assumed to be positive.
    any_scalar = any(size_of(atom) == 1 for atom in equation.invars)
    return _union(operands) if all(operands) or any_scalar else _NONE


def _with_unknown_offsets(origins: _Origins) -> _Origins:
    """Marks the offsets of integers as unknown. They are assumed to be in range if the argument is zero."""
    return frozenset(
        origin._replace(high=_UNKNOWN_OFFSET) for origin in origins if origin.argument is not None
    )


def _with_known_offsets(origins: _Origins) -> _Origins:
    return frozenset(origin for origin in origins if origin.high < _UNKNOWN_OFFSET)
