"""Redundant work of a partitioned step: what several devices compute alike, read from the jaxpr on blocks.

Every value varies along some batch axes: blocks do, and what is computed of them; what is replicated,
gathered or reduced does not. An equation whose operands vary along no batch axis is computed by all devices
alike.
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
"""What redundant work computes on: gathered examples, a gathered weight, or what was never sharded."""


EquationLocation = tuple[Any, tuple[Any, ...]]
"""An equation, and the calls in whose jaxprs it is, from the innermost call outwards."""


class Provenance(NamedTuple):
    """What is known of a value.

    Attributes:
        varies: the batch axes along which devices have different values.
        of: what it is computed of; empty of constants, which the compiler computes.
        has_examples: whether it is computed of examples, and not of what was reduced over them, such as a
            gradient.
        is_moved: whether it is computed of examples that came from other devices, as to the rows of a table.
    """

    varies: frozenset[str]
    of: OperandKind | Literal[''] = ''
    has_examples: bool = False
    is_moved: bool = False


@dataclasses.dataclass
class Work:
    """Work of one device.

    Attributes:
        flops: the operations of products.
        bytes: the bytes of results.
        count: how many equations, each as often as it runs.
    """

    flops: int = 0
    bytes: int = 0
    count: int = 0

    def add(self, flops: int, size: int, times: int) -> None:
        """Adds an equation that runs so often."""
        self.flops, self.bytes = self.flops + times * flops, self.bytes + times * size
        self.count += times


class Redundancy:
    """The redundant work of the jaxpr of a step on blocks, and the collectives that it runs.

    Args:
        jaxpr: the jaxpr.
        specs: the specs of its arguments along the batch axes.
        axes: the batch axes.
        batch: which arguments hold examples. Without one, the step makes its examples itself.

    Attributes:
        total: all work of one device.
        redundant: what is redundant, by what it computes on and its equation.
        places: the equations of its collectives and the calls around each, by the numbers of the collectives.
        of_examples: the numbers of the collectives that take examples, and not state alone.
    """

    def __init__(
        self, jaxpr: Any, specs: Sequence[PartitionSpec], axes: Sequence[str], batch: Sequence[bool]
    ) -> None:
        self._axes = frozenset(axes)
        self.total = Work()
        self.redundant: dict[tuple[OperandKind, int], tuple[EquationLocation, Work]] = {}
        self.places: dict[int, EquationLocation] = {}
        self._calls: tuple[Any, ...] = ()
        self._live = live_equations(jaxpr)
        self.of_examples: set[int] = set()
        self._makes_examples = not any(batch)
        facts = [
            Provenance(frozenset(spec_axes(spec)), 'replicated', is_batch)
            for spec, is_batch in zip(specs, batch, strict=True)
        ]
        self._run(jaxpr, facts, 1, is_last=True)

    def _run(
        self, jaxpr: Any, arguments: Sequence[Provenance], times: int, *, is_last: bool
    ) -> list[Provenance]:
        """Returns the facts about the results of a jaxpr; adds its work in the last round of loops."""
        inner, none = open_jaxpr(jaxpr), Provenance(frozenset())
        facts = dict(zip(map(id, inner.invars), arguments, strict=True))
        for equation in inner.eqns:
            if id(equation) not in self._live:
                continue
            operands = [facts.get(id(atom), none) for atom in equation.invars]
            if number := COLLECTIVE_SCOPE.search(name_stack(equation)):
                self.places.setdefault(int(number[2]), (equation, self._calls))
                # What is equal on all devices counts: they run equally many rounds over examples.
                if operands[0].has_examples or not operands[0].varies:
                    self.of_examples.add(int(number[2]))
                result = self._exchanged(equation, operands[0], number[1] == 'weight')
                are_examples = number[1] == 'examples'
                has_examples = are_examples and bool(result.varies)
                results = [result._replace(has_examples=has_examples, is_moved=are_examples)]
            elif primitive_name(equation) in _WITH_JAXPRS:
                self._calls = equation, *self._calls
                results = self._inside(equation, operands, times, is_last)
                self._calls = self._calls[1:]
            else:
                result = self._result(equation, operands)
                results = [result] * len(equation.outvars)
                if primitive_name(equation) == 'optimization_barrier':  # it hands each operand on
                    results = operands
                if is_last:
                    self._count(equation, result, times)
            facts.update(zip(map(id, equation.outvars), results, strict=True))
        return [facts.get(id(atom), none) for atom in inner.outvars]

    def _inside(
        self, equation: Any, operands: Sequence[Provenance], times: int, is_last: bool
    ) -> list[Provenance]:
        name = primitive_name(equation)
        if name == 'cond':
            [index, *others] = operands
            found = [self._run(x, others, times, is_last=is_last) for x in branches(equation)]
            return [_joined([index, *each]) for each in zip(*found, strict=True)]
        if name not in ('scan', 'while'):
            jaxpr = shard_map_jaxpr(equation)[0] if name == 'shard_map' else call_jaxpr(equation)
            return self._run(jaxpr, operands, times, is_last=is_last)
        loop = loop_of(equation)
        constants, carried, stacks = map(list, loop.split(operands))
        while True:
            results = self._run(loop.body, [*constants, *carried, *stacks], times, is_last=False)
            after = [_joined(pair) for pair in zip(carried, results, strict=False)]
            if after == carried:
                break
            carried = after
        if is_last:
            times *= 1 if loop.length is None else loop.length
            self._run(loop.body, [*constants, *carried, *stacks], times, is_last=True)
        return [*carried, *results[loop.num_carry :]]

    def _result(self, equation: Any, operands: Sequence[Provenance]) -> Provenance:
        """Returns the fact about the results of an equation without a jaxpr."""
        name = str(equation.primitive)
        varies, of, has_examples, is_moved = _joined(operands)
        if name == 'scatter-add' and is_moved:  # what examples add to the rows that a device has is state
            has_examples = operands[0].has_examples
        axes = self._axes.intersection(named_axes_of(equation))
        if name in _GATHERS:
            return Provenance(varies - axes, 'examples', has_examples, is_moved)
        if name in _REDUCTIONS:
            return Provenance(varies - axes, 'replicated', has_examples, is_moved)
        if axes:  # blocks that differ, and the index of a device
            return Provenance(varies | axes, of, has_examples or self._makes_examples, is_moved)
        return Provenance(varies, of, has_examples, is_moved)

    def _exchanged(self, equation: Any, operand: Provenance, is_weight: bool) -> Provenance:
        """Returns the fact about the result of a collective that scalax wrote, which may be inside a call."""
        for each in with_inner_equations([equation]):
            if self._axes.intersection(named_axes_of(each)):
                result = self._result(each, [operand])
                return result._replace(of='weight') if is_weight and result.of == 'examples' else result
        return operand

    def _count(self, equation: Any, result: Provenance, times: int) -> None:
        if primitive_name(equation) in _FREE:
            return
        size, flops = sum(map(array_bytes, [x.aval for x in equation.outvars])), product_flops(equation)
        self.total.add(flops, size, times)
        is_alike = result.varies < self._axes if result.of == 'examples' else not result.varies
        if is_alike and result.of and any(math.prod(shape_of(x)) > 1 for x in equation.outvars):
            key = result.of, id(equation)
            place = equation, self._calls
            self.redundant.setdefault(key, (place, Work()))[1].add(flops, size, times)

    def __iter__(self) -> Iterator[tuple[OperandKind, EquationLocation, Work]]:
        """Redundant work: what it computes on, where it is, and how much it is."""
        for (of, _), (place, work) in self.redundant.items():
            yield of, place, work


_FREE = SHAPE_OPS | {'optimization_barrier'}
# A shard_map inside is along other axes.
_WITH_JAXPRS = WITH_JAXPRS | {'shard_map'}
_GATHERS = ('all_gather', 'all_gather_invariant')
_REDUCTIONS = ('pmax', 'pmin', 'psum', 'psum_invariant')


def product_flops(equation: Any) -> int:
    """Returns the operations of a product or a convolution; 0 of other equations."""
    name = primitive_name(equation)
    if name in ('dot_general', 'ragged_dot_general'):
        return 2 * count_multiplications(equation) if dim_rule(equation).reduced else 0
    if name == 'conv_general_dilated':
        kernel, result = shape_of(equation.invars[1]), shape_of(equation.outvars[0])
        return 2 * math.prod(result) * math.prod(kernel) // kernel[conv_dims(equation).rhs_spec[0]]
    return 0


def _of(facts: Sequence[Provenance]) -> OperandKind | Literal['']:
    of = {fact.of for fact in facts}
    return next((each for each in _ORDER if each in of), '')


_ORDER: tuple[OperandKind, ...] = ('examples', 'weight', 'replicated')


def _joined(facts: Sequence[Provenance]) -> Provenance:
    has_examples = any(fact.has_examples for fact in facts)
    is_moved = any(fact.is_moved for fact in facts)
    return Provenance(frozenset().union(*[fact.varies for fact in facts]), _of(facts), has_examples, is_moved)
