"""Choice of the strategy that sends the fewest bytes: gather the state, or move the examples.

By default, state is gathered where it meets examples. If the examples are smaller, they move to the shards of
the state instead: to the rows of a large embedding table, to the experts that tokens select, to the weight of
a matmul with few examples (a weight-stationary layout), or to the kernel of a convolution with many features.
Bytes only decide here and in `feature_regions`, which compares all matmuls of a layer. Both ways use the same
links.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scalax._jax.equations import operation_key
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import UNKNOWN, dim_rule
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.operations.embedding_tables import is_indexed
from scalax._spmd.placements.feature_regions import feature_strategy
from scalax._spmd.placements.op_rules import Op, Strategy, bytes_of
from scalax._spmd.placements.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    same_blocks,
    without_state_mark,
)
from scalax._spmd.values import Value, without_state

_CONTRACTIONS = frozenset(('dot_general', 'conv_general_dilated'))
_CONSIDERED = _CONTRACTIONS | {'gather', 'scatter-add'}
_ADDS = frozenset(('add', 'add_any'))
_PRESERVES_SUM = frozenset(('neg', 'reshape', 'squeeze', 'transpose'))
# Moving examples has to be this many times cheaper: the examples are then replicated over the devices of the
# state, which costs memory, and for look-ups time.
_MARGIN = 2


def cheapest(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], usual: Sequence[Strategy]
) -> list[Strategy]:
    """Returns, for each batch axis, the strategy of an equation that sends the fewest bytes.

    Args:
        editor: the editor of the jaxpr.
        equation: the equation.
        values: its operands.
        usual: for each axis, its strategy if state is gathered.
    """
    if editor.context.microbatch_axis is not None:  # a microbatch is split into the same blocks in all layers
        return [*usual]
    axes = range(len(usual))
    regional = [feature_strategy(editor, equation, values, axis) for axis in axes]
    if all(regional) or primitive_name(equation) not in _CONSIDERED or any(value.has_sum for value in values):
        return [strategy or usual[axis] for axis, strategy in enumerate(regional)]
    target = _result_target(editor, equation, usual)
    operands = tuple([(x.placements, x.is_zero, editor.trip_count_of(x), (*x.versions,)) for x in values])
    is_backward = any(x.is_state for x in values) and editor.is_backward(equation)
    key = 'cheapest', operation_key(equation), operands, is_backward, target, (*usual,)
    best = editor.context.repeated(
        key,
        lambda: [_AxisChoice(editor, equation, values, usual, target, axis).cheapest() for axis in axes],
    )
    return [strategy or best[axis] for axis, strategy in enumerate(regional)]


def _result_target(editor: JaxprEditor, equation: Any, usual: Sequence[Strategy]) -> Placements:
    """Returns the placements to which the result of an equation is converted in the end."""
    [result, *_] = equation.outvars
    placements = tuple([strategy.results[0] for strategy in usual])
    if not any(isinstance(x, Partial) for x in placements):
        return placements
    reduced = editor.reduced_placements(result, placements)
    # A term of a sum that a loop carries stays partial, and is reduced once, after the loop.
    return tuple(
        [
            SUM if isinstance(before, Partial) and _is_term_of_sum(editor, result, axis) else after
            for axis, (before, after) in enumerate(zip(placements, reduced, strict=True))
        ]
    )


class _AxisChoice:
    """The choice between strategies along one axis."""

    def __init__(
        self,
        editor: JaxprEditor,
        equation: Any,
        values: Sequence[Value],
        usual: Sequence[Strategy],
        target: Placements,
        axis: int,
    ) -> None:
        self._editor, self._context = editor, editor.context
        self._equation, self._values, self._axis = equation, values, axis
        self._usual, self._axis_size = usual[axis], editor.context.sizes[axis]
        self._placements = [value.placements[axis] for value in values]
        self._usual_by_axis, self._result_target = usual, target[axis]

    @functools.cached_property
    def _result_bytes(self) -> float:
        """The bytes of the result on a device that holds its shard along the other axes."""
        shard_counts = [
            size
            for i, (strategy, size) in enumerate(zip(self._usual_by_axis, self._context.sizes, strict=True))
            if i != self._axis and isinstance(strategy.results[0], Shard)
        ]
        return bytes_of(self._equation.outvars[0]) / math.prod(shard_counts)

    def cheapest(self) -> Strategy:
        """Returns the cheapest strategy."""
        best, lowest_cost = self._usual, None
        for candidate, margin in self._alternatives():
            if without_state(candidate.operands) == without_state(self._usual.operands):
                continue
            if lowest_cost is None:
                lowest_cost = self._cost(self._usual)
            cost = self._cost(candidate) * margin
            if cost < lowest_cost:
                best, lowest_cost = candidate, cost
        return best

    def _alternatives(self) -> Iterator[tuple[Strategy, int]]:
        """Yields alternatives to the usual strategy, each with the factor by which it has to be cheaper.

        An alternative leaves one operand in its placement, or computes the result in its final placement.
        """
        name, count = primitive_name(self._equation), len(self._placements)
        operands = [0] if name == 'gather' else range(count) if name in _CONTRACTIONS else []
        # Only a batch dimension of a dot_general is a dimension of both operands.
        may_shard_batch = name == 'dot_general' and any(
            len(sources) > 1 for sources in dim_rule(self._equation).results[0]
        )
        for i in operands:
            placement = self._placements[i]
            if isinstance(placement, Shard):
                may_return = placement.is_state or name == 'gather'
                may_return = may_return and isinstance(self._usual.results[0], Shard)
                candidate = self._strategy_for({i: placement}) if may_shard_batch or may_return else None
                if candidate is None:
                    continue
                if self._shards_matmul_batch(candidate):
                    yield candidate, 1
                elif may_return:
                    # The results return to the devices of their examples.
                    yield candidate._replace(final=self._usual.results), _MARGIN
        if isinstance(self._usual.results[0], Partial) and isinstance(target := self._result_target, Shard):
            candidate = self._with_result(name, target)
            if candidate is not None:
                shards_batch = name == 'dot_general' and self._shards_matmul_batch(candidate)
                yield candidate._replace(results=(target,)), 1 if shards_batch else _MARGIN

    def _strategy_for(self, shards: Mapping[int, Shard]) -> Strategy | None:
        """Returns the strategy with some operands sharded, given by their indices."""
        placements = tuple(
            [without_state_mark(shards.get(i, REPLICATE)) for i in range(len(self._placements))]
        )
        if (
            primitive_name(self._equation) not in _CONTRACTIONS
            and 0 in shards
            and is_indexed(self._equation, shards[0].dim)
        ):
            return Strategy(placements, (SUM,))
        zeros = tuple([value.is_zero for value in self._values])
        return self._context.strategy(Op(self._equation, placements, self._context.blocks, zeros))

    def _with_result(self, name: str, target: Shard) -> Strategy | None:
        """Returns the strategy that computes the result in its final placement; None if there is none."""
        if name == 'scatter-add' and is_indexed(self._equation, target.dim):
            if not self._values[0].is_zero:
                return None
            return Strategy((without_state_mark(target), REPLICATE, REPLICATE), (target,))
        dims = dim_rule(self._equation)
        if dims is UNKNOWN:
            return None
        shards = {i: target.at(dim) for i, dim in dims.results[0][target.dim]}
        candidate = self._strategy_for(shards)
        is_target = candidate is not None and same_blocks(candidate.results[0], target)
        return candidate if is_target else None

    def _shards_matmul_batch(self, strategy: Strategy) -> bool:
        """Whether the result of a dot_general is sharded along a batch dimension of the dot_general."""
        [result] = strategy.results
        return (
            primitive_name(self._equation) == 'dot_general'
            and isinstance(result, Shard)
            and len(dim_rule(self._equation).results[0][result.dim]) > 1
        )

    def _cost(self, strategy: Strategy) -> float:
        """Returns the bytes that devices send for a strategy: to convert its operands and its result."""
        cost = sum(self._operand_bytes(*pair) for pair in zip(self._values, strategy.operands, strict=True))
        [result] = strategy.results
        if strategy.final is not None:
            [final] = strategy.final
        elif isinstance(result, Partial):
            final = self._result_target
        elif isinstance(result, Shard) and isinstance(self._usual.results[0], Shard):
            final = self._usual.results[0]  # at the latest where it meets other examples
        else:
            final = result
        minor_count = self._minor_count(final, [strategy.results[0] for strategy in self._usual_by_axis])
        size = self._result_bytes * minor_count
        if minor_count > 1 and not same_blocks(result, final):
            cost += size  # gathered along the minor axes, before it is sharded along all
        return cost + self._conversion_bytes(result, final, size)

    def _minor_count(self, placement: Placement, placements: Sequence[Placement]) -> int:
        """Returns the number of blocks that minor axes split each block of a dimension into.

        Values that move along this axis are gathered along the minor axes first, unless they move along these
        too, because state is sharded over them.
        """
        if not isinstance(placement, Shard):
            return 1
        axes = range(self._axis + 1, len(placements))
        same = [axis for axis in axes if same_blocks(placements[axis], placement)]
        return math.prod(self._context.sizes[axis] for axis in same if axis not in self._state_axes)

    @functools.cached_property
    def _state_axes(self) -> frozenset[int]:
        """The axes that shard a state operand, or a result that is reduced to shards of state."""
        results = tuple([strategy.results[0] for strategy in self._usual_by_axis])
        targets = self._editor.reduced_placements(self._equation.outvars[0], results)
        reduced = [axis for axis, result in enumerate(results) if isinstance(result, Partial)]
        return frozenset(
            [axis for axis in reduced if isinstance(targets[axis], Shard)]
            + [
                axis
                for value in self._values
                if value.is_state
                for axis, placement in enumerate(value.placements)
                if isinstance(placement, Shard)
            ]
        )

    def _operand_bytes(self, value: Value, target: Placement) -> float:
        """Returns the bytes that devices send to convert an operand."""
        source = value.placements[self._axis]
        if value.is_zero or same_blocks(source, target):
            return 0
        backward = value.is_state and self._editor.is_backward(self._equation)
        for placements, is_backward in value.versions:
            if same_blocks(placements[self._axis], target) and is_backward == backward:
                return 0
        sizes, placements = self._context.sizes, value.placements
        shard_count = math.prod(
            size
            for i, (size, placement) in enumerate(zip(sizes, placements, strict=True))
            if i != self._axis and isinstance(placement, Shard)
        )
        size = bytes_of(value.var) / shard_count * self._minor_count(source, placements)
        if isinstance(target, Replicate):  # loop-invariant state is gathered before the loop
            size /= self._editor.trip_count_of(value)
        return self._conversion_bytes(source, target, size)

    def _conversion_bytes(self, source: Placement, target: Placement, size: float) -> float:
        """Returns the bytes that devices send to convert a value of a size."""
        if same_blocks(source, target) or isinstance(source, Replicate):
            return 0
        if isinstance(source, Shard):
            is_exchanged = isinstance(target, Shard) and source.dim != target.dim
            return size / self._axis_size if is_exchanged else size
        return size if isinstance(target, Shard) else 2 * size


def _is_term_of_sum(editor: JaxprEditor, var: Any, axis: int) -> bool:
    """Whether the only use of a variable is to be added to a value that is partial along an axis."""
    while editor.uses.count(var) == 1 and not editor.uses.is_result(var):
        [equation] = editor.uses.equations(var)
        name = primitive_name(equation)
        if name in _ADDS:
            values = [editor.values.get(id(x)) for x in equation.invars if x is not var]
            if any(value is not None and value.placements[axis] == SUM for value in values):
                return True
        elif name not in _PRESERVES_SUM:
            return False
        [var] = equation.outvars
    return False
