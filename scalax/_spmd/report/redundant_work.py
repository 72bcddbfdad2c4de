"""Redundant work of a partitioned step: equations that several devices compute for the same values.

The analysis runs on the partitioned jaxpr. Shards, and values computed from them, vary along some batch axes;
replicated, gathered and reduced values do not. If the operands of an equation vary along no batch axis, all
devices repeat the same work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import spec_axes
from scalax._core.pytree.paths import array_bytes
from scalax._jax.equations import (
    WITH_JAXPRS,
    branches,
    call_jaxpr,
    conv_dims,
    loop_of,
    name_stack,
    named_axes_of,
    open_jaxpr,
    shape_of,
    shard_map_jaxpr,
    with_inner_equations,
)
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import SHAPE_OPS, count_multiplications, dim_rule
from scalax._spmd.placements.collectives import COLLECTIVE_SCOPE
from scalax._spmd.report.liveness import live_equations

OperandKind = Literal['examples', 'weight', 'replicated']
"""The operands of redundant work: gathered examples, a gathered weight, or values that were never sharded."""


EquationLocation = tuple[Any, tuple[Any, ...]]
"""An equation, and its enclosing calls, from the innermost one outwards."""


class Provenance(NamedTuple):
    """Where a value comes from.

    Attributes:
        varies: the batch axes along which devices have different values.
        of: the kind of its operands; empty for constants, which the compiler folds.
        has_examples: whether it depends on examples other than through reductions, as a gradient does.
        is_moved: whether it depends on examples from other devices, such as rows of a table.
    """

    varies: frozenset[str]
    of: OperandKind | Literal[''] = ''
    has_examples: bool = False
    is_moved: bool = False


@dataclasses.dataclass
class Work:
    """Work of one device.

    Attributes:
        flops: the FLOPs of matmuls and convolutions.
        bytes: the bytes of results.
        count: the number of executed equations.
    """

    flops: int = 0
    bytes: int = 0
    count: int = 0

    def add(self, flops: int, size: int, times: int) -> None:
        """Adds an equation that runs several times."""
        self.flops, self.bytes = self.flops + times * flops, self.bytes + times * size
        self.count += times


class Redundancy:
    """The redundant work in the partitioned jaxpr of a step, and the locations of its collectives.

    Args:
        jaxpr: the jaxpr.
        specs: the specs of its arguments along the batch axes.
        axes: the batch axes.
        batch: which arguments hold examples. If none does, the step creates its examples itself.

    Attributes:
        total: all work of one device.
        redundant: the redundant work, by the kind of its operands and the id of its equation.
        locations: the locations of the collectives, by collective id.
        of_examples: the ids of the collectives whose operands depend on examples.
    """

    def __init__(
        self, jaxpr: Any, specs: Sequence[PartitionSpec], axes: Sequence[str], batch: Sequence[bool]
    ) -> None:
        self._axes = frozenset(axes)
        self.total = Work()
        self.redundant: dict[tuple[OperandKind, int], tuple[EquationLocation, Work]] = {}
        self.locations: dict[int, EquationLocation] = {}
        self._calls: tuple[Any, ...] = ()
        self._live = live_equations(jaxpr)
        self.of_examples: set[int] = set()
        self._makes_examples = not any(batch)
        argument_provenance = [
            Provenance(frozenset(spec_axes(spec)), 'replicated', is_batch)
            for spec, is_batch in zip(specs, batch, strict=True)
        ]
        self._run(jaxpr, argument_provenance, 1, is_last=True)

    def _run(
        self, jaxpr: Any, arguments: Sequence[Provenance], times: int, *, is_last: bool
    ) -> list[Provenance]:
        """Returns the provenance of the results of a jaxpr.

        Args:
            jaxpr: the jaxpr.
            arguments: the provenance of its arguments.
            times: how often it runs.
            is_last: whether to add its work, as in the last pass over the body of a loop.
        """
        inner_jaxpr, unknown = open_jaxpr(jaxpr), Provenance(frozenset())
        provenance = dict(zip(map(id, inner_jaxpr.invars), arguments, strict=True))
        for equation in inner_jaxpr.eqns:
            if id(equation) not in self._live:
                continue
            operands = [provenance.get(id(atom), unknown) for atom in equation.invars]
            if scope := COLLECTIVE_SCOPE.search(name_stack(equation)):
                self.locations.setdefault(int(scope[2]), (equation, self._calls))
                # Values that are equal on all devices count as examples, because devices run equally many
                # iterations over their examples.
                if operands[0].has_examples or not operands[0].varies:
                    self.of_examples.add(int(scope[2]))
                result = self._collective_result(equation, operands[0], scope[1] == 'weight')
                are_examples = scope[1] == 'examples'
                has_examples = are_examples and bool(result.varies)
                results = [result._replace(has_examples=has_examples, is_moved=are_examples)]
            elif primitive_name(equation) in _WITH_JAXPRS:
                self._calls = equation, *self._calls
                results = self._inside(equation, operands, times, is_last)
                self._calls = self._calls[1:]
            else:
                result = self._result(equation, operands)
                results = [result] * len(equation.outvars)
                if primitive_name(equation) == 'optimization_barrier':  # each result is an operand
                    results = operands
                if is_last:
                    self._count(equation, result, times)
            provenance.update(zip(map(id, equation.outvars), results, strict=True))
        return [provenance.get(id(atom), unknown) for atom in inner_jaxpr.outvars]

    def _inside(
        self, equation: Any, operands: Sequence[Provenance], times: int, is_last: bool
    ) -> list[Provenance]:
        name = primitive_name(equation)
        if name == 'cond':
            [index, *others] = operands
            branch_results = [self._run(x, others, times, is_last=is_last) for x in branches(equation)]
            return [_join([index, *alternatives]) for alternatives in zip(*branch_results, strict=True)]
        if name not in ('scan', 'while'):
            jaxpr = shard_map_jaxpr(equation)[0] if name == 'shard_map' else call_jaxpr(equation)
            return self._run(jaxpr, operands, times, is_last=is_last)
        loop = loop_of(equation)
        consts, carry, xs = map(list, loop.split(operands))
        while True:
            results = self._run(loop.body, [*consts, *carry, *xs], times, is_last=False)
            after = [_join(pair) for pair in zip(carry, results, strict=False)]
            if after == carry:
                break
            carry = after
        if is_last:
            times *= 1 if loop.length is None else loop.length
            self._run(loop.body, [*consts, *carry, *xs], times, is_last=True)
        return [*carry, *results[loop.num_carry :]]

    def _result(self, equation: Any, operands: Sequence[Provenance]) -> Provenance:
        """Returns the provenance of the results of an equation without inner jaxprs."""
        name = str(equation.primitive)
        varies, of, has_examples, is_moved = _join(operands)
        if name == 'scatter-add' and is_moved:  # updates of local rows by moved examples are state
            has_examples = operands[0].has_examples
        axes = self._axes.intersection(named_axes_of(equation))
        if name in _GATHERS:
            return Provenance(varies - axes, 'examples', has_examples, is_moved)
        if name in _REDUCTIONS:
            return Provenance(varies - axes, 'replicated', has_examples, is_moved)
        if axes:  # local blocks, or the index of the device
            return Provenance(varies | axes, of, has_examples or self._makes_examples, is_moved)
        return Provenance(varies, of, has_examples, is_moved)

    def _collective_result(self, equation: Any, operand: Provenance, is_weight: bool) -> Provenance:
        """Returns the provenance of the result of an inserted collective, which may be inside a call."""
        for inner_equation in with_inner_equations([equation]):
            if self._axes.intersection(named_axes_of(inner_equation)):
                result = self._result(inner_equation, [operand])
                return result._replace(of='weight') if is_weight and result.of == 'examples' else result
        return operand

    def _count(self, equation: Any, result: Provenance, times: int) -> None:
        if primitive_name(equation) in _FREE_OPS:
            return
        size, flops = sum(map(array_bytes, [x.aval for x in equation.outvars])), matmul_flops(equation)
        self.total.add(flops, size, times)
        is_redundant = result.varies < self._axes if result.of == 'examples' else not result.varies
        if is_redundant and result.of and any(math.prod(shape_of(x)) > 1 for x in equation.outvars):
            key = result.of, id(equation)
            location = equation, self._calls
            self.redundant.setdefault(key, (location, Work()))[1].add(flops, size, times)

    def __iter__(self) -> Iterator[tuple[OperandKind, EquationLocation, Work]]:
        """Yields redundant work: the kind of its operands, its location, and its amount."""
        for (kind, _), (location, work) in self.redundant.items():
            yield kind, location, work


_FREE_OPS = SHAPE_OPS | {'optimization_barrier'}
# An inner shard_map is along other axes.
_WITH_JAXPRS = WITH_JAXPRS | {'shard_map'}
_GATHERS = ('all_gather', 'all_gather_invariant')
_REDUCTIONS = ('pmax', 'pmin', 'psum', 'psum_invariant')


def matmul_flops(equation: Any) -> int:
    """Returns the FLOPs of a matmul or a convolution; 0 for other equations."""
    name = primitive_name(equation)
    if name in ('dot_general', 'ragged_dot_general'):
        return 2 * count_multiplications(equation) if dim_rule(equation).reduced else 0
    if name == 'conv_general_dilated':
        kernel, result = shape_of(equation.invars[1]), shape_of(equation.outvars[0])
        return 2 * math.prod(result) * math.prod(kernel) // kernel[conv_dims(equation).rhs_spec[0]]
    return 0


def _operand_kind(operands: Sequence[Provenance]) -> OperandKind | Literal['']:
    kinds = {operand.of for operand in operands}
    return next((kind for kind in _KIND_PRIORITY if kind in kinds), '')


_KIND_PRIORITY: tuple[OperandKind, ...] = ('examples', 'weight', 'replicated')


def _join(operands: Sequence[Provenance]) -> Provenance:
    has_examples = any(operand.has_examples for operand in operands)
    is_moved = any(operand.is_moved for operand in operands)
    return Provenance(
        frozenset().union(*[operand.varies for operand in operands]),
        _operand_kind(operands),
        has_examples,
        is_moved,
    )
