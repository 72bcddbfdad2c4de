"""Where a step uses its arguments in ways that not all values allow: as indices, under roots, as keys.

Nobody says which values an argument may have; the jaxpr does.
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
    """What values a leaf of the arguments may have.

    Attributes:
        kind: a `key`; a `mask` of booleans; an `index` in [0, bound); a `length` in [1, bound); a
            `count` of steps; any `integer`; a `fraction` of 1; `positive`; any `number`.
        bound: integers are below it.
        reason: what the step does with the leaf, and in which line; empty if it may be anything of its dtype.
    """

    kind: DomainKind
    bound: int | None = None
    reason: str = ''


def domains_by_use(jaxpr: Any) -> list[dict[DomainKind, ValueDomain]]:
    """The uses of each argument of a closed jaxpr: of each kind the one that allows least."""
    return _Uses(jaxpr).domains_of_arguments


def has_dtype(value: Any, kind: Any) -> bool:
    """Whether an array, or its type, has elements of a kind."""
    dtype = getattr(value, 'dtype', None)
    return dtype is not None and jnp.issubdtype(dtype, kind)


class _Source(NamedTuple):
    """What a value has elements of: ``x + offset``, of elements x of an argument, or less.

    Attributes:
        argument: its number; None for a value that is what its offset is, whatever the arguments are.
        form: of floats, whether they are positive where x is (`same`), always (`square`), or where x is less
            than a constant (`below`).
        low: the least offset.
        high: the largest one.
    """

    argument: int | None
    form: Literal['same', 'square', 'below'] = 'same'
    low: float = 0
    high: float = 0


_Fact = frozenset[_Source]
_NOTHING: _Fact = frozenset()
# An offset that is not known.
_ANY = 2.0**40

# The result has elements of the first operand, in their places or in others, or sums of them.
_NAMES = """
    broadcast_in_dim convert_element_type copy cumlogsumexp cummax cummin cumprod cumsum
    dynamic_slice gather name reduce_max reduce_min reduce_precision reduce_prod reduce_sum reduce_window_max
    reduce_window_sum reshape reshard rev sharding_constraint slice split squeeze tile top_k transpose unstack
"""
_OF_FIRST = frozenset(_NAMES.split())
_SUMS = frozenset({'cumlogsumexp', 'cumprod', 'cumsum', 'reduce_prod', 'reduce_sum', 'reduce_window_sum'})
# Each result has elements of one operand.
_EACH = frozenset({'device_put', 'optimization_barrier', 'pvary', 'sort'})
# The result has elements of several operands: of which.
_MIXED = {
    **dict.fromkeys(('concatenate', 'max', 'min', 'pad', 'stack'), slice(None)),
    **dict.fromkeys(('scatter', 'scatter-add', 'scatter-max', 'scatter-min'), slice(0, 3, 2)),
    'clamp': slice(1, 2),
    'dynamic_update_slice': slice(0, 2),
    'select_n': slice(1, None),
}
_POSITIVE = frozenset({'log', 'log1p', 'log2', 'pow', 'rsqrt', 'sqrt'})
_POWERS = frozenset({'integer_pow', 'pow', 'square'})
_COMPARISONS = frozenset({'eq', 'ge', 'gt', 'le', 'lt', 'ne'})


class _Uses(AbstractInterpreter[_Fact]):
    def __init__(self, jaxpr: Any) -> None:
        super().__init__(_NOTHING)
        count = len(open_jaxpr(jaxpr).invars)
        self.domains_of_arguments: list[dict[DomainKind, ValueDomain]] = [{} for _ in range(count)]
        self._constants: dict[int, _Fact] = {
            id(var): _constant(value)
            for var, value in constants_of(jaxpr)
            if isinstance(value, np.ndarray | jax.Array)
        }
        self._calls: list[Any] = []
        self.eval_jaxpr(jaxpr, [frozenset({_Source(i)}) for i in range(count)])

    def eval_jaxpr(self, jaxpr: Any, arguments: Sequence[_Fact]) -> list[_Fact]:
        for equation in open_jaxpr(jaxpr).eqns:
            self._fold(equation)
        return super().eval_jaxpr(jaxpr, arguments)

    def _fold(self, equation: Any) -> None:
        """Takes note of a result that does not depend on the arguments, such as numbers of rows."""
        if primitive_name(equation) == 'iota':
            [var] = equation.outvars
            self._constants[id(var)] = _between(0, shape_of(var)[equations.dim_of(equation)] - 1)
            return
        operands = [*map(self._constant_of, equation.invars)]
        if operands and all(operands):
            found = self.eval_equation(equation, operands)
            self._constants.update(zip(map(id, equation.outvars), found, strict=False))

    def _constant_of(self, atom: Any) -> _Fact:
        if isinstance(atom, equations.Literal):
            return _constant(np.asarray(atom.val)) if has_dtype(atom.aval, np.number) else _NOTHING
        return self._constants.get(id(atom), _NOTHING)

    def eval_equation(self, equation: Any, operands: Sequence[_Fact]) -> Sequence[_Fact]:
        name, pairs = primitive_name(equation), zip(operands, equation.invars, strict=True)
        operands = [fact or self._constant_of(atom) for fact, atom in pairs]
        self._calls.append(equation)
        if name in RUN_ONCE and name not in WITH_JAXPRS:
            inner = equations.run_once_jaxpr(equation)
            is_known = len(inner.invars) == len(operands)
            found: Sequence[_Fact] = self.eval_jaxpr(inner, operands) if is_known else []
        else:
            found = super().eval_equation(equation, operands)
        self._calls.pop()
        return found

    def join(self, facts: Sequence[_Fact]) -> _Fact:
        """Those of all; offsets that grow may be any, so that loops come to an end."""
        first = {(each.argument, each.form): each for each in facts[0]}
        return frozenset(
            each
            if first.get((each.argument, each.form), each) == each
            else each._replace(low=-_ANY, high=_ANY)
            for each in _hull(facts)
        )

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[_Fact]) -> Sequence[_Fact]:
        self._look(name, equation, operands)
        if name in _EACH:
            return operands[: len(equation.outvars)]
        return [
            self._result(name, equation, operands, not has_dtype(var.aval, np.inexact))
            for var in equation.outvars
        ]

    # What comes of them

    def _result(self, name: str, equation: Any, operands: Sequence[_Fact], whole: bool) -> _Fact:
        first = operands[0]
        if name in _OF_FIRST:
            is_other = whole and (name in _SUMS or has_dtype(equation.invars[0].aval, np.inexact))
            return _NOTHING if is_other else first
        if name == 'select_n' and _limits(first) == (0, 0):
            return operands[1]
        if name in _MIXED:
            is_clipped = name in ('clamp', 'min')
            mixed = operands[_MIXED[name]]
            return _hull(map(_bounded, mixed) if is_clipped else mixed)
        if name in _POWERS or (name == 'mul' and equation.invars[0] is equation.invars[1]):
            squared = [each for each in first if each.form == 'same' and each.argument is not None]
            return frozenset([each._replace(form='square', high=_ANY) for each in squared])
        if name in ('add', 'add_any'):
            return _sum(first, operands[1], whole)
        if name == 'sub':
            return _difference(first, operands[1], whole)
        if name == 'mul':
            return _product(equation, operands, whole)
        if name == 'div':
            limits = _limits(operands[1])
            return first if limits is None or limits[0] > 0 else _NOTHING
        if name == 'lt' and not has_dtype(equation.invars[0].aval, np.inexact):
            # Integers that count from the end are not drawn.
            is_never = first and _limits(first) is None and _limits(operands[1]) == (0, 0)
            return _between(0, 0) if is_never else _NOTHING
        return _NOTHING

    # What they are used for

    def _look(self, name: str, equation: Any, operands: Sequence[_Fact]) -> None:
        shapes = [*map(shape_of, equation.invars)]
        if name == 'gather':
            dims, sizes = equations.gather_dims(equation).start_index_map, equations.slice_sizes(equation)
            self._index(equation, operands[1], {dim: sizes[dim] for dim in dims})
        elif name.startswith('scatter'):
            numbers = equations.scatter_dims(equation)
            gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
            windows = [dim for dim, _ in enumerate(shapes[0]) if dim not in gone]
            taken = dict(zip(windows, numbers.update_window_dims, strict=True))
            dims = numbers.scatter_dims_to_operand_dims
            self._index(
                equation, operands[1], {dim: shapes[2][taken[dim]] if dim in taken else 1 for dim in dims}
            )
        elif name in ('dynamic_slice', 'dynamic_update_slice'):
            part = shape_of(equation.outvars[0]) if name == 'dynamic_slice' else shapes[1]
            for dim, fact in enumerate(operands[len(operands) - len(part) :]):
                self._index(equation, fact, {dim: part[dim]})
        elif name in ('random_wrap', 'threefry2x32'):
            self._use('key', frozenset().union(*operands[:2]), equation, 'bits of a key')
        elif name in _COMPARISONS:
            for fact, other in (operands, operands[::-1]):
                self._compared(name, equation, fact, _limits(other))
        elif name in _POSITIVE and not (name == 'pow' and _is_whole(operands[1])):
            self._positive(equation, operands[0], f'argument of {name}')
        elif name in ('div', 'rem'):
            self._positive(equation, operands[1], 'divisor')

    def _index(self, equation: Any, fact: _Fact, sizes: Mapping[int, int]) -> None:
        """Numbers of rows: along which dimensions, and how many are taken at once."""
        shape = shape_of(equation.invars[0])
        limits = {dim: shape[dim] - size + 1 for dim, size in sizes.items()}
        for dim, limit in limits.items():
            if limit > 1 or max(limits.values()) == 1:  # where all is taken, the number is 0
                self._use('index', fact, equation, f'index in dimension {dim} of {shape}', limit)

    def _compared(self, name: str, equation: Any, fact: _Fact, limits: tuple[float, float] | None) -> None:
        if limits is None or not 0 < limits[1] < _ANY or has_dtype(equation.invars[0].aval, np.inexact):
            return
        is_equality, most = name in ('eq', 'ne'), int(limits[1]) + 1
        if limits[0] < limits[1]:
            need: DomainKind = 'index' if is_equality else 'length'
            what = f'compared with each of {most}'
            self._use(need, _bounded(fact), equation, what, most + (not is_equality))
        elif is_equality and not shape_of(equation.outvars[0]):
            # One of rounds, as where gradients are accumulated.
            self._use('index', _bounded(fact), equation, f'compared with {most - 1}', most)

    def _positive(self, equation: Any, fact: _Fact, what: str) -> None:
        self._use('positive', [each for each in fact if each.form == 'same'], equation, what)
        self._use('fraction', [each for each in fact if each.form == 'below'], equation, what)

    def _use(
        self, kind: DomainKind, fact: Iterable[_Source], equation: Any, what: str, limit: int | None = None
    ) -> None:
        for source in fact:
            if source.argument is not None:
                bound = None if limit is None else int(max(1, limit - max(source.high, 0)))
                uses = self.domains_of_arguments[source.argument]
                if kind not in uses or (bound or 0) < (uses[kind].bound or 0):
                    line = line_of(equation, self._calls[::-1])
                    uses[kind] = ValueDomain(kind, bound, f'{what} in {line}' if line else what)


def _between(low: float, high: float) -> _Fact:
    """A value that does not depend on the arguments."""
    return frozenset({_Source(None, 'same', low, high)})


def _constant(value: Any) -> _Fact:
    if not has_dtype(value, np.number) or has_dtype(value, np.complexfloating) or value.size == 0:
        return _NOTHING
    low, high = float(np.min(value)), float(np.max(value))
    return _between(low, high) if math.isfinite(low) and math.isfinite(high) else _NOTHING


def _limits(fact: _Fact) -> tuple[float, float] | None:
    """The least and the largest element of what does not depend on the arguments."""
    if not fact or any(each.argument is not None for each in fact):
        return None
    return min(each.low for each in fact), max(each.high for each in fact)


def _is_whole(fact: _Fact) -> bool:
    limits = _limits(fact)
    return limits is not None and limits[0] == limits[1] and limits[0].is_integer()


def _hull(facts: Iterable[_Fact]) -> _Fact:
    """The sources of several values: of each argument all that any has."""
    found: dict[Any, _Source] = {}
    for source in itertools.chain.from_iterable(facts):
        before = found.setdefault((source.argument, source.form), source)
        low, high = min(before.low, source.low), max(before.high, source.high)
        found[source.argument, source.form] = before._replace(low=low, high=high)
    return frozenset(found.values())


def _sum(first: _Fact, second: _Fact, whole: bool) -> _Fact:
    """The sources of a sum. Floats may have anything added, as moving averages have squares."""
    for fact, limits in ((first, _limits(second)), (second, _limits(first))):
        if limits is not None and fact:
            low, high = limits
            return frozenset([each._replace(low=each.low + low, high=each.high + high) for each in fact])
    both = _hull([first, second])
    return _unknown(both) if whole else both


def _difference(first: _Fact, second: _Fact, whole: bool) -> _Fact:
    """The sources of a difference. Of floats, what is subtracted of an argument is taken to be small."""
    if (limits := _limits(second)) is not None:
        return _sum(first, _between(-limits[1], -limits[0]), whole)
    if whole:
        return _unknown(_hull([first, second]))
    if _limits(first) is not None:
        return frozenset([each._replace(form='below') for each in second])
    return first


def _product(equation: Any, operands: Sequence[_Fact], whole: bool) -> _Fact:
    one, other = map(_limits, operands)
    if one is not None and other is not None:
        corners = [a * b for a in one for b in other]
        return _between(min(corners), max(corners))
    if whole:
        return _unknown(_hull(operands))
    for fact, limits in ((operands[0], other), (operands[1], one)):
        if limits is not None:
            return fact if limits[0] >= 0 < limits[1] else _NOTHING
    # Single numbers, such as those of schedules, are positive.
    alone = [size_of(atom) == 1 for atom in equation.invars]
    return _hull(operands) if all(operands) or any(alone) else _NOTHING


def _unknown(fact: _Fact) -> _Fact:
    """The sources of integers that are not known, but taken to be within bounds if the argument is zero."""
    return frozenset([each._replace(high=_ANY) for each in fact if each.argument is not None])


def _bounded(fact: _Fact) -> _Fact:
    return frozenset([each for each in fact if each.high < _ANY])
