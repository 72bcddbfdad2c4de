"""Where a step uses its arguments in ways that not all values allow: as indices, under roots, as keys.

Nobody says which values an argument may have; the jaxpr does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalax._follow.followed_batch import line_of
from scalax._jax import equations
from scalax._jax.equations import RUN_ONCE, WITH_JAXPRS, opened, shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import constants_of
from scalax._jaxprs.interpreter import Interpreter

Need = Literal['key', 'index', 'sorted', 'length', 'fraction', 'positive']


class Use(NamedTuple):
    """A use that not all values allow.

    Attributes:
        need: what they must be: bits of a `key`; in [0, bound) as an `index`, or in order, too (`sorted`); in
            [1, bound) as a `length`; a `fraction` of 1; `positive`.
        what: what is done with them.
        equation: the equation that does it.
        calls: those in whose jaxprs it is, from the innermost one outwards.
        bound: integers are below it.
        blocks: elements are in so many blocks, one after the other; each begins where the one before ends.
    """

    need: Need
    what: str
    equation: Any
    calls: tuple[Any, ...]
    bound: int = 0
    blocks: int = 1

    def __str__(self) -> str:
        line = line_of(self.equation, self.calls)
        return f'{self.what} in {line}' if line else self.what


def uses_of(jaxpr: Any) -> list[dict[Need, Use]]:
    """The uses of each argument of a closed jaxpr: of each kind the one that allows least."""
    return _Uses(jaxpr).of_arguments


def is_of(value: Any, kind: Any) -> bool:
    """Whether an array, or its type, has elements of a kind."""
    dtype = getattr(value, 'dtype', None)
    return dtype is not None and jnp.issubdtype(dtype, kind)


class _Source(NamedTuple):
    """What a value has elements of: ``factor * x + offset``, of elements x of an argument.

    Attributes:
        argument: its number; None for a value that is what its offset is, whatever the arguments are.
        form: of floats, whether they are positive where x is (`same`), always (`square`), or where x is less
            than a constant (`below`).
        factor: the factor, of integers.
        low: the least offset.
        high: the largest one.
        column: where these elements are along the last dimension; None if everywhere.
    """

    argument: int | None
    form: Literal['same', 'square', 'below'] = 'same'
    factor: float = 1
    low: float = 0
    high: float = 0
    column: int | None = None


_Fact = frozenset[_Source]
_NOTHING: _Fact = frozenset()
# An offset or a factor that is not known, or grows from round to round of a loop.
_ANY = 2.0**40

# The result has elements of the first operand, in their places or in others, or sums of them.
_NAMES = """
    broadcast_in_dim convert_element_type copy cumlogsumexp cummax cummin cumprod cumsum
    dynamic_slice gather name reduce_max reduce_min reduce_precision reduce_prod reduce_sum reduce_window_max
    reduce_window_sum reshape reshard rev sharding_constraint slice split squeeze tile transpose unstack
"""
_OF_FIRST = frozenset(_NAMES.split())
_SUMS = frozenset({'cumlogsumexp', 'cumprod', 'cumsum', 'reduce_prod', 'reduce_sum', 'reduce_window_sum'})
_IN_PLACE = frozenset({'convert_element_type', 'copy', 'name', 'sharding_constraint'})
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


class _Uses(Interpreter[_Fact]):
    def __init__(self, jaxpr: Any) -> None:
        super().__init__(_NOTHING)
        count = len(opened(jaxpr).invars)
        self.of_arguments: list[dict[Need, Use]] = [{} for _ in range(count)]
        self._constants: dict[int, _Fact] = {
            id(var): _constant(value)
            for var, value in constants_of(jaxpr)
            if isinstance(value, np.ndarray | jax.Array)
        }
        self._folded: set[Any] = set()
        self._calls: list[Any] = []
        self.results(jaxpr, [frozenset({_Source(i)}) for i in range(count)])

    def results(self, jaxpr: Any, arguments: Sequence[_Fact]) -> list[_Fact]:
        if (inner := opened(jaxpr)) not in self._folded:
            self._folded.add(inner)
            for equation in inner.eqns:
                self._fold(equation)
        return super().results(jaxpr, arguments)

    def _fold(self, equation: Any) -> None:
        """Takes note of a result that does not depend on the arguments, such as numbers of rows."""
        if primitive_name(equation) == 'iota':
            [var] = equation.outvars
            self._constants[id(var)] = _between(0, shape_of(var)[equations.dim_of(equation)] - 1)
            return
        operands = [*map(self._constant_of, equation.invars)]
        if operands and all(operands):
            found = self.equation(equation, operands)
            self._constants.update(zip(map(id, equation.outvars), found, strict=False))

    def _constant_of(self, atom: Any) -> _Fact:
        if isinstance(atom, equations.Literal):
            return _constant(np.asarray(atom.val)) if is_of(atom.aval, np.number) else _NOTHING
        return self._constants.get(id(atom), _NOTHING)

    def equation(self, equation: Any, operands: Sequence[_Fact]) -> Sequence[_Fact]:
        name, pairs = primitive_name(equation), zip(operands, equation.invars, strict=True)
        operands = [fact or self._constant_of(atom) for fact, atom in pairs]
        self._calls.append(equation)
        if name in RUN_ONCE and name not in WITH_JAXPRS:
            inner = equations.run_once(equation)
            is_known = len(inner.invars) == len(operands)
            found: Sequence[_Fact] = self.results(inner, operands) if is_known else []
        else:
            found = super().equation(equation, operands)
        self._calls.pop()
        return found

    def branches(self, equation: Any, operands: Sequence[_Fact]) -> Sequence[_Fact]:
        count = len(equations.branches(equation))
        self._use('index', operands[0], equation, f'index of {count} branches', count)
        return super().branches(equation, operands)

    def joined(self, facts: Sequence[_Fact]) -> _Fact:
        return _hull(facts, widened=True)

    def primitive(self, name: str, equation: Any, operands: Sequence[_Fact]) -> Sequence[_Fact]:
        self._look(name, equation, operands)
        if not equation.outvars:
            return ()
        if name in _EACH:
            return operands[: len(equation.outvars)]
        if name == 'top_k':
            return [_placed(operands[0])]
        return [self._result(name, equation, operands)] * len(equation.outvars)

    # What comes of them

    def _result(self, name: str, equation: Any, operands: Sequence[_Fact]) -> _Fact:
        whole, first = not is_of(equation.outvars[0].aval, np.inexact), operands[0]
        if name in _OF_FIRST:
            is_other = whole and (name in _SUMS or is_of(equation.invars[0].aval, np.inexact))
            return _NOTHING if is_other else first if name in _IN_PLACE else _placed(first)
        if name in _MIXED:
            return self._mixed(name, equation, operands)
        if name in _POWERS or (name == 'mul' and equation.invars[0] is equation.invars[1]):
            squared = [each for each in first if each.form == 'same' and each.argument is not None]
            return frozenset([each._replace(form='square', factor=_ANY) for each in squared])
        if name in ('add', 'add_any'):
            return _sum(first, operands[1], whole)
        if name == 'sub':
            return _difference(first, operands[1], whole)
        if name == 'mul':
            return self._product(equation, operands, whole)
        if name == 'div':
            limits = _limits(operands[1])
            if limits is None:
                return first
            return _scaled(first, 1 / limits[0]) if limits[0] > 0 else _NOTHING
        if name == 'lt' and not is_of(equation.invars[0].aval, np.inexact):
            # Integers that count from the end are not drawn.
            is_never = first and _limits(first) is None and _limits(operands[1]) == (0, 0)
            return _between(0, 0) if is_never else _NOTHING
        return _NOTHING

    def _mixed(self, name: str, equation: Any, operands: Sequence[_Fact]) -> _Fact:
        if name == 'select_n' and _limits(operands[0]) == (0, 0):
            return operands[1]
        chosen = operands[_MIXED[name]]
        if name == 'concatenate' and shape_of(equation.outvars[0])[-1] == len(chosen) > 1:
            columns = enumerate(chosen)  # each operand is one, if that is where they are put together
            if {shape_of(atom)[-1] for atom in equation.invars} == {1}:
                return frozenset([each._replace(column=i) for i, fact in columns for each in fact])
        if name in ('clamp', 'min'):
            chosen = [frozenset([each for each in fact if each.factor < _ANY]) for fact in chosen]
        return _hull(chosen)

    def _product(self, equation: Any, operands: Sequence[_Fact], whole: bool) -> _Fact:
        one, other = map(_limits, operands)
        if one is not None and other is not None:
            corners = [a * b for a in one for b in other]
            return _between(min(corners), max(corners))
        for fact, limits in ((operands[0], other), (operands[1], one)):
            if limits is not None:
                return _scaled(fact, limits[1]) if limits[0] >= 0 < limits[1] else _NOTHING
        if whole:
            return _unknown(_hull(operands))
        # Single numbers, such as those of schedules, are positive.
        alone = [size_of(atom) == 1 for atom in equation.invars]
        return _hull(operands) if all(operands) or any(alone) else _NOTHING

    # What they are used for

    def _look(self, name: str, equation: Any, operands: Sequence[_Fact]) -> None:
        shapes = [*map(shape_of, equation.invars)]
        if name == 'gather':
            sizes = equations.slice_sizes(equation)
            dims = equations.gather_dims(equation).start_index_map
            self._index(equation, operands[1], [(dim, sizes[dim]) for dim in dims])
        elif name.startswith('scatter'):
            numbers = equations.scatter_dims(equation)
            gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
            windows = [dim for dim in range(len(shapes[0])) if dim not in gone]
            taken = dict(zip(windows, numbers.update_window_dims, strict=True))
            dims = numbers.scatter_dims_to_operand_dims
            columns = [(dim, shapes[2][taken[dim]] if dim in taken else 1) for dim in dims]
            self._index(equation, operands[1], columns)
        elif name in ('dynamic_slice', 'dynamic_update_slice'):
            part = shape_of(equation.outvars[0]) if name == 'dynamic_slice' else shapes[1]
            for dim, fact in enumerate(operands[len(operands) - len(part) :]):
                self._index(equation, fact, [(dim, part[dim])])
        elif name == 'ragged_dot_general':
            rows, groups = shapes[0][equations.ragged_dim(equation)], size_of(equation.invars[2])
            what = f'sizes of {groups} groups of {rows} rows'
            self._use('index', operands[2], equation, what, rows // groups + 1)
        elif name in ('random_wrap', 'threefry2x32'):
            self._use('key', frozenset().union(*operands[:2]), equation, 'bits of a key')
        elif name in _COMPARISONS:
            for fact, other in (operands, operands[::-1]):
                self._compared(name, equation, fact, _limits(other))
        elif name in _POSITIVE and not (name == 'pow' and _is_whole(operands[1])):
            self._positive(equation, operands[0], f'argument of {name}')
        elif name in ('div', 'rem'):
            self._positive(equation, operands[1], 'divisor')

    def _index(self, equation: Any, fact: _Fact, columns: Sequence[tuple[int, int]]) -> None:
        """Numbers of rows: of each column, along which dimension, and how many are taken at once."""
        shape = shape_of(equation.invars[0])
        needs: list[Need] = ['index']
        if equations.says_sorted(equation):
            needs.append('sorted')
        for column, (dim, size) in enumerate(columns):
            own = [each for each in fact if each.column in (None, column)]
            what = f'index in dimension {dim} of {shape}'
            for need in needs:
                self._use(need, own, equation, what, shape[dim] - size + 1)

    def _compared(self, name: str, equation: Any, fact: _Fact, limits: tuple[float, float] | None) -> None:
        if limits is None or not 0 < limits[1] < _ANY or is_of(equation.invars[0].aval, np.inexact):
            return
        fact = frozenset([each for each in fact if each.factor < _ANY])
        most = int(limits[1]) + 1
        if limits[0] < limits[1]:
            need: Need = 'index' if name in ('eq', 'ne') else 'length'
            self._use(need, fact, equation, f'compared with each of {most}', most + (need == 'length'))
        elif name in ('eq', 'ne') and not shape_of(equation.outvars[0]):
            # One of rounds, as where gradients are accumulated.
            self._use('index', fact, equation, f'compared with {most - 1}', most)

    def _positive(self, equation: Any, fact: _Fact, what: str) -> None:
        self._use('positive', [each for each in fact if each.form == 'same'], equation, what)
        self._use('fraction', [each for each in fact if each.form == 'below'], equation, what)

    def _use(
        self, need: Need, fact: Iterable[_Source], equation: Any, what: str, limit: int | None = None
    ) -> None:
        for source in fact:
            if source.argument is None:
                continue
            bound, blocks = 0, 1
            if limit is not None:
                most = (limit - 1 - max(source.high, 0)) // max(source.factor, 1 / _ANY)
                bound = int(max(1, most + 1))
                if -_ANY < source.low < source.high == 0 and source.low % bound == 0:
                    blocks = int(-source.low // bound) + 1
            uses = self.of_arguments[source.argument]
            if need not in uses or bound < uses[need].bound:
                calls = (*reversed(self._calls),)
                uses[need] = Use(need, what, equation, calls, bound, blocks)


def _between(low: float, high: float) -> _Fact:
    """A value that does not depend on the arguments."""
    return frozenset({_Source(None, 'same', 0, low, high)})


def _constant(value: Any) -> _Fact:
    if not is_of(value, np.number) or is_of(value, np.complexfloating) or value.size == 0:
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


def _placed(fact: _Fact) -> _Fact:
    return frozenset([each._replace(column=None) for each in fact])


def _hull(facts: Iterable[_Fact], *, widened: bool = False) -> _Fact:
    """The sources of several values: of each argument all that any has.

    Args:
        facts: the sources of each.
        widened: what the first one does not have is everything, so that loops come to an end.
    """
    found: dict[Any, _Source] = {}
    for source in (each for fact in facts for each in fact):
        key = source.argument, source.form, source.column
        before = found.setdefault(key, source)
        factor, low = max(before.factor, source.factor), min(before.low, source.low)
        high = max(before.high, source.high)
        if widened:
            factor = factor if factor == before.factor else _ANY
            low, high = low if low == before.low else -_ANY, high if high == before.high else _ANY
        found[key] = before._replace(factor=factor, low=low, high=high)
    return frozenset(found.values())


def _sum(first: _Fact, second: _Fact, whole: bool) -> _Fact:
    """The sources of a sum. Floats may have anything added, as moving averages have squares."""
    if whole and not (first and second):
        return _unknown(first or second)
    one, other = _limits(first), _limits(second)
    if one is not None and other is not None:
        return _between(one[0] + other[0], one[1] + other[1])
    if other is not None:
        return _moved(first, *other)
    if one is not None:
        return _moved(second, *one)
    # Each is at most half of what both are together.
    return _hull([_scaled(fact, 2 if whole else 1) for fact in (first, second)])


def _difference(first: _Fact, second: _Fact, whole: bool) -> _Fact:
    """The sources of a difference. Of floats, what is subtracted from an argument is taken to be small."""
    if (limits := _limits(second)) is not None:
        return _sum(first, _between(-limits[1], -limits[0]), whole)
    if whole:
        return _unknown(_hull([first, second]))
    if _limits(first) is not None:
        return frozenset([each._replace(form='below') for each in second])
    return first


def _unknown(fact: _Fact) -> _Fact:
    """The sources of integers that are not known, but taken to be within bounds if the argument is zero."""
    return frozenset([each._replace(factor=_ANY) for each in fact if each.argument is not None])


def _moved(fact: _Fact, low: float, high: float) -> _Fact:
    return frozenset([each._replace(low=each.low + low, high=each.high + high) for each in fact])


def _scaled(fact: _Fact, by: float) -> _Fact:
    return frozenset(
        [each._replace(factor=by * each.factor, low=by * each.low, high=by * each.high) for each in fact]
    )
