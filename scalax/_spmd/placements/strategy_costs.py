"""Choices between strategies by the bytes that devices send: state is gathered, or examples move to it.

State that meets examples is gathered, which is right if examples are many. Where they are fewer bytes, they
move instead: to the rows of a large table that they look up, to the experts that have tokens, to the weight
of a product of a few examples, to the kernel of a convolution of small images with many features. Bytes
decide, here alone. Both ways send them over the same links.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from scalax._jax.equations import shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import UNKNOWN, dim_rule
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.operations.embedding_tables import is_indexed
from scalax._spmd.placements.op_rules import Op, Strategy
from scalax._spmd.placements.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Replicate,
    Shard,
    same_blocks,
)
from scalax._spmd.values import Value

_PRODUCTS = frozenset(('dot_general', 'conv_general_dilated'))
_MOVES = _PRODUCTS | {'gather', 'scatter-add'}
_ADDS = frozenset(('add', 'add_any'))
_KEEPS_SUM = frozenset(('neg', 'reshape', 'squeeze', 'transpose'))
# Examples that move to state are on all of its devices, which takes memory, and for look-ups time.
_MARGIN = 2


def cheapest(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], usual: Sequence[Strategy]
) -> list[Strategy]:
    """Returns the strategy of an equation, along each batch axis, that moves the fewest bytes.

    Args:
        editor: the jaxpr that is partitioned.
        equation: the equation.
        values: its operands.
        usual: its strategies along each axis if state is gathered.
    """
    if editor.context.microbatch_axis is not None:  # a microbatch is split into the same blocks in all layers
        return [*usual]
    if primitive_name(equation) not in _MOVES or any(value.has_sum for value in values):
        return [*usual]
    return [_Axis(editor, equation, values, usual, axis).cheapest() for axis in range(len(usual))]


class _Axis:
    """The choice along one axis."""

    def __init__(
        self,
        editor: JaxprEditor,
        equation: Any,
        values: Sequence[Value],
        usual: Sequence[Strategy],
        axis: int,
    ) -> None:
        self._edit, self._equation, self._values, self._axis = editor, equation, values, axis
        self._usual, self._count = usual[axis], editor.context.sizes[axis]
        self._here = [value.placements[axis] for value in values]
        self._all_usual = usual

    @functools.cached_property
    def _wanted(self) -> Placement:
        """The placement that the result gets in the end."""
        editor, usual, axis, [result, *_] = self._edit, self._all_usual, self._axis, self._equation.outvars
        # A term of a sum that a loop carries stays a sum, which is reduced once, behind the loop.
        if isinstance(self._usual.results[0], Partial) and _is_term_of_sum(editor, result, axis):
            return SUM
        return editor.reduced_placements(result, tuple([each.results[0] for each in usual]))[axis]

    @functools.cached_property
    def _result_bytes(self) -> float:
        """The bytes of the result, of which devices have blocks along the other axes."""
        others = [
            size
            for i, (each, size) in enumerate(zip(self._all_usual, self._edit.context.sizes, strict=True))
            if i != self._axis and isinstance(each.results[0], Shard)
        ]
        return _bytes(self._equation.outvars[0]) / math.prod(others)

    def cheapest(self) -> Strategy:
        """The strategy."""
        best, least = self._usual, None
        for other, margin in self._others():
            if [*map(_plain, other.operands)] == [*map(_plain, self._usual.operands)]:
                continue
            if least is None:
                least = self._cost(self._usual)
            cost = self._cost(other) * margin
            if cost < least:
                best, least = other, cost
        return best

    def _others(self) -> Iterator[tuple[Strategy, int]]:
        """The strategies of which one operand stays as it is, or that give the result as it is wanted."""
        name, count = primitive_name(self._equation), len(self._here)
        operands = [0] if name == 'gather' else range(count) if name in _PRODUCTS else []
        # Only a batch of products is a dimension that both operands have.
        may_be_common = name == 'dot_general' and any(
            len(sources) > 1 for sources in dim_rule(self._equation).results[0]
        )
        for i in operands:
            here = self._here[i]
            if isinstance(here, Shard):
                comes_back = here.is_state or name == 'gather'
                comes_back = comes_back and isinstance(self._usual.results[0], Shard)
                found = self._strategy({i: here.dim}) if may_be_common or comes_back else None
                if found is None:
                    continue
                if self._is_common(found):
                    yield found, 1
                elif comes_back:
                    # Examples come back to where they were.
                    yield found._replace(final=self._usual.results), _MARGIN
        if isinstance(self._usual.results[0], Partial) and isinstance(wanted := self._wanted, Shard):
            found = self._of_result(name, wanted)
            if found is not None:
                is_common = name == 'dot_general' and self._is_common(found)
                yield found._replace(results=(wanted,)), 1 if is_common else _MARGIN

    def _strategy(self, dims: dict[int, int]) -> Strategy | None:
        """The strategy if these operands are sharded along these dimensions, and others are replicated."""
        placements = tuple([Shard(dims[i]) if i in dims else REPLICATE for i in range(len(self._here))])
        if (
            primitive_name(self._equation) not in _PRODUCTS
            and 0 in dims
            and is_indexed(self._equation, dims[0])
        ):
            return Strategy(placements, (SUM,))
        zeros = tuple([value.is_zero for value in self._values])
        return self._edit.context.strategy(Op(self._equation, placements, self._edit.context.blocks, zeros))

    def _of_result(self, name: str, wanted: Shard) -> Strategy | None:
        """The strategy of which the result is sharded as it is wanted."""
        if name == 'scatter-add' and is_indexed(self._equation, wanted.dim):
            if not self._values[0].is_zero:
                return None
            return Strategy((Shard(wanted.dim), REPLICATE, REPLICATE), (wanted,))
        dims = dim_rule(self._equation)
        if dims is UNKNOWN:
            return None
        found = self._strategy(dict(dims.results[0][wanted.dim]))
        return None if found is None or _plain(found.results[0]) != _plain(wanted) else found

    def _is_common(self, found: Strategy) -> bool:
        """Whether the result is sharded in a dimension that both operands of a product have: its batch."""
        [result] = found.results
        return (
            primitive_name(self._equation) == 'dot_general'
            and isinstance(result, Shard)
            and len(dim_rule(self._equation).results[0][result.dim]) > 1
        )

    def _cost(self, strategy: Strategy) -> float:
        """The bytes that a strategy moves, to its operands and from its results."""
        cost = sum(self._converted(*pair) for pair in zip(self._values, strategy.operands, strict=True))
        [result] = strategy.results
        if strategy.final is not None:
            [final] = strategy.final
        elif isinstance(result, Partial):
            final = self._wanted
        elif isinstance(result, Shard) and isinstance(self._usual.results[0], Shard):
            final = self._usual.results[0]  # sooner or later, where it meets other examples
        else:
            final = result
        return cost + self._bytes(result, final, self._result_bytes)

    def _converted(self, value: Value, target: Placement) -> float:
        """The bytes that devices send to convert an operand."""
        source = value.placements[self._axis]
        if value.is_zero or same_blocks(source, target):
            return 0
        backward = value.is_state and self._edit.is_backward(self._equation)
        for placements, is_backward in value.versions:
            if same_blocks(placements[self._axis], target) and is_backward == backward:
                return 0
        sizes, placements = self._edit.context.sizes, value.placements
        others = math.prod(
            size
            for i, (size, each) in enumerate(zip(sizes, placements, strict=True))
            if i != self._axis and isinstance(each, Shard)
        )
        size = _bytes(value.var) / others
        if isinstance(target, Replicate):  # state that a loop takes as it is, is gathered before the loop
            size /= self._edit.trip_count_of(value)
        return self._bytes(source, target, size)

    def _bytes(self, source: Placement, target: Placement, size: float) -> float:
        """The bytes that devices send to convert a value of this size."""
        if same_blocks(source, target) or isinstance(source, Replicate):
            return 0
        if isinstance(source, Shard):
            return size / self._count if isinstance(target, Shard) else size
        return size if isinstance(target, Shard) else 2 * size


def _is_term_of_sum(editor: JaxprEditor, var: Any, axis: int) -> bool:
    """Whether a variable is only added to a value that is a sum along an axis, by number."""
    while editor.uses.count(var) == 1 and not editor.uses.is_result(var):
        [equation] = editor.uses.equations(var)
        name = primitive_name(equation)
        if name in _ADDS:
            values = [editor.values.get(id(x)) for x in equation.invars if x is not var]
            if any(value is not None and value.placements[axis] == SUM for value in values):
                return True
        elif name not in _KEEPS_SUM:
            return False
        [var] = equation.outvars
    return False


def _plain(placement: Placement) -> Placement:
    """A placement that does not say of what blocks are."""
    return Shard(placement.dim) if isinstance(placement, Shard) else placement


def _bytes(atom: Any) -> int:
    return math.prod(shape_of(atom)) * getattr(atom.aval.dtype, 'itemsize', 1)
