"""Layers whose features are sharded in place of their examples, because the examples take fewer bytes.

A feed-forward layer multiplies examples by one weight, applies elementwise operations, and multiplies the
features by a second weight. If both weights are sharded along these features, each device can compute its
shard of the features for all examples, as in tensor parallelism: the examples of the layer are gathered, its
results are scattered, and the weights and their gradients stay where they are. `strategy_costs` compares one
equation at a time, and returns its result to the devices of the examples. Here, all matmuls around a feature
dimension are compared together, since the features between them need not return.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import CALLS, Literal, call_jaxpr, open_jaxpr, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import dim_rule
from scalax._spmd.batch.replicated_parts import is_computed_by_block
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.op_rules import POINTWISE, Op, Strategy, bytes_of
from scalax._spmd.placements.placement import Replicate, Shard, same_blocks
from scalax._spmd.values import Value

# A layer waits for its examples, while the compiler gathers weights ahead, several in one collective. So the
# bytes have to fall by this factor, and by this much for each collective: a device could send about that on a
# fast link in the time that a collective takes to begin.
_MARGIN = 1.25
_LATENCY_BYTES = 8 * 2**20
# Examples that are more than this many times larger than a weight are not considered, to save time.
_MAX_EXAMPLES_PER_WEIGHT = 4


def feature_strategy(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], axis: int
) -> Strategy | None:
    """Returns the strategy of an equation along an axis if features are sharded there; None otherwise.

    Args:
        editor: the editor of the jaxpr.
        equation: the equation.
        values: its operands.
        axis: the index of the axis.
    """
    regions = editor.feature_dims
    if primitive_name(equation) == 'dot_general' and (id(equation), axis) not in regions:
        region = _region_of(editor, equation, values, axis)
        chosen = region is not None and region.is_cheaper()
        regions[id(equation), axis] = None
        for key, sharded_dims in () if region is None else region.sharded_dims.items():
            regions[key, axis] = sharded_dims if chosen else None
    dims = regions.get((id(equation), axis))
    if dims is None:
        return None
    [var, *_] = equation.outvars
    placements = tuple([Shard(dims[i]) if i in dims else Replicate() for i in range(len(values))])
    zeros = tuple([value.is_zero for value in values])
    strategy = editor.context.strategy(Op(equation, placements, editor.context.blocks, zeros))
    if strategy is None:
        return None
    [result] = strategy.results
    layout = editor.context.reduction_layouts.of(var)
    if layout is not None:
        target = layout.placements[axis]
    elif isinstance(result, Shard):
        return strategy
    else:
        target = editor.context.batch_dims.placements(var, editor.context.replicated)[axis]
    if same_blocks(result, target):
        return strategy._replace(results=(target,))
    return strategy._replace(final=(target,))


def _region_of(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], axis: int
) -> _FeatureRegion | None:
    """Returns the region of the features that a matmul of examples and a weight computes, if there is one."""
    context = editor.context
    if context.is_mixed or context.auto.sizes or any(value.has_sum for value in values):
        return None
    for i, value in enumerate(values):
        weight, examples = value.placements[axis], values[1 - i]
        if not (isinstance(weight, Shard) and weight.is_state and examples.has_examples):
            continue
        dim = dim_rule(equation).dim_from_exactly([(i, weight.dim)])
        if dim is None or bytes_of(examples.var) > _MAX_EXAMPLES_PER_WEIGHT * bytes_of(value.var):
            continue
        region = _FeatureRegion(editor, axis, value, is_backward=editor.is_backward(equation))
        return region if region.explore(equation.outvars[0], dim) else None
    return None


class _FeatureRegion:
    """The values with one feature dimension, and the equations between them and other values.

    Args:
        editor: the editor of the jaxpr.
        axis: the index of the mesh axis that may shard the features.
        weight: one of the weights.
        is_backward: whether the values belong to a backward pass.

    Attributes:
        sharded_dims: for each matmul and reduction, by equation id, the dimensions of its operands that are
            sharded.
    """

    def __init__(self, editor: JaxprEditor, axis: int, weight: Value, *, is_backward: bool) -> None:
        self._editor, self._context, self._axis = editor, editor.context, axis
        self._is_backward = is_backward
        self._size = self._context.sizes[axis]
        self._other_blocks = self._context.blocks // self._size
        # One collective exchanges blocks along all axes that shard a weight.
        self._latency_bytes = _LATENCY_BYTES / self._shard_count(weight.placements)
        self.sharded_dims: dict[int, dict[int, int]] = {}
        self._dims: dict[int, int] = {}
        self._pending: list[Any] = []
        self._exchanged: dict[int, float] = {}  # bytes of gathered examples and scattered results
        self._state: dict[int, float] = {}  # bytes of weights and gradients
        self._moved: dict[int, list[float]] = {}  # bytes of examples, if they move for each matmul alone

    def explore(self, var: Any, dim: int) -> bool:
        """Adds all values with the feature dimension of a variable.

        Returns whether only matmuls with weights, matmuls and sums that make gradients, and elementwise
        operations have these features.
        """
        self._add(var, dim)
        while self._pending:
            var = self._pending.pop()
            dim, producer = self._dims[id(var)], self._editor.equation_of(var)
            users = self._editor.uses.equations(var)
            if producer is None or self._editor.uses.is_result(var):
                return False
            # The gathered examples of a forward pass would stay in memory until the backward pass.
            if any(self._editor.is_backward(x) != self._is_backward for x in (producer, *users)):
                return False
            if not self._produces(producer, dim):
                return False
            if not all(self._uses(equation, var, dim) for equation in users):
                return False
        return True

    def is_cheaper(self) -> bool:
        """Returns whether it takes less time to send the examples than weights and gradients."""
        exchanged = [size for size in self._exchanged.values() if size]
        usual, latency = sum(map(self._usual_bytes, self._state)), self._latency_bytes * len(exchanged)
        return max(sum(exchanged) * _MARGIN, sum(exchanged) + latency) < usual

    def _usual_bytes(self, state: int) -> float:
        """Returns the bytes that devices send for a weight or a gradient if matmuls are considered alone."""
        size, moved = self._state[state], self._moved[state]
        if size <= 2 * sum(moved):
            return size
        return sum(moved) + 2 * self._latency_bytes * len(moved)  # examples move to the weight and back

    def _add(self, var: Any, dim: int) -> bool:
        if id(var) not in self._dims:
            self._dims[id(var)] = dim
            self._pending.append(var)
        return self._dims[id(var)] == dim

    def _produces(self, equation: Any, dim: int) -> bool:
        """Whether an equation computes a shard of the features alone."""
        if _is_pointwise(equation):
            return self._pointwise(equation, dim)
        if primitive_name(equation) != 'dot_general' or len(dim_rule(equation).results[0][dim]) != 1:
            return False
        [(i, weight_dim)] = dim_rule(equation).results[0][dim]
        if not self._add_weight(equation, i, weight_dim):
            return False
        self.sharded_dims[id(equation)] = {i: weight_dim}
        return self._gather(equation.invars[1 - i], equation.invars[i], equation.outvars[0])

    def _uses(self, equation: Any, var: Any, dim: int) -> bool:
        """Whether an equation uses a shard of the features alone."""
        if _is_pointwise(equation):
            return self._pointwise(equation, dim)
        name, rule = primitive_name(equation), dim_rule(equation)
        if name not in ('dot_general', 'reduce_sum'):
            return False
        operands = [i for i, atom in enumerate(equation.invars) if atom is var]
        if len(operands) != 1:
            return False
        [i], [result] = operands, equation.outvars
        self.sharded_dims[id(equation)] = {i: dim}
        for group in rule.reduced:
            if (i, dim) in group:
                weights = [operand_dim for operand_dim in group if operand_dim[0] != i]
                return len(weights) == 1 and self._contract(equation, *weights[0])
        layout, result_dim = self._context.reduction_layouts.of(result), rule.dim_from_exactly([(i, dim)])
        if layout is None or result_dim is None:
            return False
        target = layout.placements[self._axis]
        if name == 'reduce_sum':
            return isinstance(target, Replicate) or same_blocks(target, Shard(result_dim))
        if not same_blocks(target, Shard(result_dim)):
            return False
        other_shards = self._shard_count(layout.placements)
        self._state[id(result)] = bytes_of(result) / other_shards
        return self._gather(equation.invars[1 - i], result, var)

    def _contract(self, equation: Any, i: int, weight_dim: int) -> bool:
        """Whether an equation contracts the features with a weight, and its result can be scattered."""
        [result] = equation.outvars
        target = self._context.batch_dims.placements(result, self._context.replicated)[self._axis]
        if not isinstance(target, Shard) or not self._add_weight(equation, i, weight_dim):
            return False
        self.sharded_dims[id(equation)][i] = weight_dim
        self._exchange(result, bytes_of(result), equation.invars[i], equation.invars[1 - i])
        return True

    def _pointwise(self, equation: Any, dim: int) -> bool:
        shape = shape_of(equation.outvars[0])
        if any(shape_of(var) != shape for var in equation.outvars):
            return False
        operands = (self._pointwise_operand(atom, shape, dim) for atom in equation.invars)
        return all(operands) and all(self._add(var, dim) for var in equation.outvars)

    def _pointwise_operand(self, atom: Any, shape: Sequence[int], dim: int) -> bool:
        depends_on_examples = self._context.depends_on_examples(atom)
        if shape_of(atom) != shape:  # for all examples, one value, or one for each feature
            return not depends_on_examples and len(shape_of(atom)) in (0, len(shape))
        value = self._editor.values.get(id(atom))
        if value is not None and id(atom) not in self._dims:
            return value.is_replicated or value.producer is not None
        if depends_on_examples:
            return self._add(atom, dim)
        producer = self._editor.equation_of(atom)
        return producer is not None and is_computed_by_block(producer)

    def _add_weight(self, equation: Any, i: int, dim: int) -> bool:
        """Whether an operand is a weight that is sharded along a dimension."""
        var = equation.invars[i]
        if isinstance(var, Literal):
            return False
        source = var
        while id(source) not in self._editor.values:  # the cast of a weight
            producer = self._editor.equation_of(source)
            if producer is None or primitive_name(producer) != 'convert_element_type':
                return False
            [source] = producer.invars
        value = self._editor.values[id(source)]
        placement = value.placements[self._axis]
        if not (isinstance(placement, Shard) and placement.is_state and placement.dim == dim):
            return False
        size = bytes_of(var) / self._shard_count(value.placements) / self._editor.trip_count_of(value)
        self._state[id(var)] = size
        return True

    def _gather(self, examples: Any, state: Any, features: Any) -> bool:
        """Adds the bytes of examples that are gathered for a matmul."""
        if isinstance(examples, Literal) or id(examples) in self._dims:
            return False
        value = self._editor.values.get(id(examples))
        size = 0 if value is not None and value.is_replicated else bytes_of(examples)
        self._exchange(examples, size, state, features)
        return True

    def _exchange(self, var: Any, size: float, state: Any, features: Any) -> None:
        """Adds the bytes of examples that move for a matmul, with a weight or for a gradient."""
        self._exchanged[id(var)] = size / self._other_blocks
        moved = size + bytes_of(features) / self._size
        self._moved.setdefault(id(state), []).append(moved / self._other_blocks)

    def _shard_count(self, placements: Sequence[Any]) -> int:
        """Returns the number of shards of a value along the other axes."""
        pairs = enumerate(zip(placements, self._context.sizes, strict=True))
        return math.prod(size for i, (x, size) in pairs if i != self._axis and isinstance(x, Shard))


def _is_pointwise(equation: Any) -> bool:
    """Whether each element of the results depends on the elements at its index alone, in calls too."""
    name = primitive_name(equation)
    if name not in CALLS:
        return name in POINTWISE
    inner = open_jaxpr(call_jaxpr(equation))
    shapes = {shape_of(x) for x in (*inner.invars, *inner.outvars) if shape_of(x)}
    return len(shapes) == 1 and all(_is_pointwise(x) or _broadcasts_scalar(x) for x in inner.eqns)


def _broadcasts_scalar(equation: Any) -> bool:
    return primitive_name(equation) == 'broadcast_in_dim' and not shape_of(equation.invars[0])
