"""Values of a jaxpr during partitioning, and the partitioned jaxpr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from scalax._jax.equations import shape_of
from scalax._spmd.placements.collectives import Collective
from scalax._spmd.placements.placement import (
    REPLICATE,
    Partial,
    Placements,
    Replicate,
    Shard,
    shards_examples,
    without_state_mark,
)

Origin = str | int | None
"""Which state a value is: its leaf path in the step, or an argument's index in an inner jaxpr.

None for values that are not state.
"""


ReductionTarget = Literal['state', 'all']
"""How partial sums among the results of a jaxpr are reduced. All other results keep their placements."""
REDUCE_TO_STATE: ReductionTarget = 'state'
"""Reduces a partial sum to the layout of its state, if that is known."""
REDUCE_TO_ALL: ReductionTarget = 'all'
"""Reduces a partial sum to all devices."""


class CannotPartition(Exception):
    """A step has an equation that the partitioner does not support.

    Args:
        equation: the equation.
        reason: why the partitioner does not support it.
        remedy: what users can do, if changing the line is not enough.
    """

    def __init__(self, equation: Any, reason: str, remedy: str = 'change that line') -> None:
        super().__init__(reason)
        self.equation, self.reason, self.remedy = equation, reason, remedy


class Argument(NamedTuple):
    """The properties of an argument of a jaxpr.

    Attributes:
        placements: its placements.
        is_state: whether it is state, or is computed from state alone.
        is_zero: whether it is zero.
        trip_count: how many iterations of the enclosing loops use it unchanged. State is gathered once,
            before these loops.
    """

    placements: Placements
    is_state: bool = False
    is_zero: bool = False
    trip_count: int = 1


class PartitionedJaxpr(NamedTuple):
    """A jaxpr that each device runs on its local shards.

    Attributes:
        jaxpr: the jaxpr.
        placements: the placements of its results.
        zeros: which results are zero.
        origins: the origins of its results.
        collectives: the collectives that it and its inner jaxprs run.
        gathered_arguments: the indices of the arguments that it gathers.
        sliced_arguments: the indices of replicated arguments of which it only uses a block, with the
            placements of the block.
        takes_microbatch_index: whether an additional first argument is the index of the microbatch.
    """

    jaxpr: Any
    placements: tuple[Placements, ...]
    zeros: tuple[bool, ...]
    origins: tuple[Origin, ...]
    collectives: tuple[Collective, ...]
    gathered_arguments: frozenset[int]
    sliced_arguments: Mapping[int, Placements]
    takes_microbatch_index: bool = False


_NONE: dict[Any, Any] = {}


class Value:
    """A value of the original jaxpr, with the variables that hold it in the partitioned jaxpr.

    Args:
        var: the variable or literal of the original jaxpr, with the global shape.
        placements: its placements.
        atom: the variable or literal of the partitioned jaxpr that holds it.
        origin: which state it is.
        is_zero: whether it is zero.

    Attributes:
        has_sum: whether it is partial (a sum or another reduction) along some axis.
        is_replicated: whether every device holds the entire value.
        is_state: whether devices hold blocks of state.
        versions: the variables that hold it in other placements. The forward and the backward pass have
            separate versions of gathered state.
        producer: the equation that computes a replicated value, and the operands, if the equation can compute
            a block alone.
        narrow_producer: the equation that computes state, if its operands may be gathered instead.
        casts: the casts and transposes of a state value so far.
        argument: its index among the arguments of the jaxpr; None if it is not an argument.
    """

    __slots__ = (
        'argument',
        'atom',
        'casts',
        'has_sum',
        'is_replicated',
        'is_state',
        'is_zero',
        'narrow_producer',
        'origin',
        'placements',
        'producer',
        'var',
        'versions',
    )

    def __init__(
        self, var: Any, placements: Placements, atom: Any, origin: Origin = None, *, is_zero: bool = False
    ) -> None:
        self.var, self.atom = var, atom
        self.set_placements(placements)
        self.origin, self.is_zero = origin, is_zero
        self.versions = _NONE
        self.producer: tuple[Any, Sequence[Value]] | None = None
        self.narrow_producer: Any = None
        self.argument: int | None = None
        self.casts: tuple[Value, ...] = ()

    def with_same_placements(self, var: Any, atom: Any) -> Value:
        """Returns a new value with the placements of this one, as the results of most equations have."""
        other = object.__new__(Value)
        other.var, other.atom, other.placements = var, atom, self.placements
        other.has_sum, other.is_replicated, other.is_state = self.has_sum, self.is_replicated, self.is_state
        other.origin = other.producer = other.narrow_producer = other.argument = None
        other.is_zero = False
        other.versions, other.casts = _NONE, ()
        return other

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return shape_of(self.var)

    @property
    def has_examples(self) -> bool:
        """Whether devices hold blocks of examples, or partial sums over examples."""
        return self.has_sum or any(shards_examples(x) for x in self.placements)

    def as_argument(self) -> Argument:
        """Returns the properties of this value as an argument of an inner jaxpr."""
        return Argument(self.placements, self.origin is not None or self.is_state, self.is_zero)

    def add_version(self, key: Any, atom: Any) -> None:
        """Records the variable that holds this value in other placements."""
        if self.versions is _NONE:  # most values have none
            self.versions = {}
        self.versions[key] = atom

    def clear_versions(self) -> None:
        """Drops the variables that hold this value in other placements."""
        self.versions = _NONE

    def set_placements(self, placements: Placements) -> None:
        """Sets the placements of its atom."""
        self.placements = placements
        self.has_sum = self.is_state = False
        self.is_replicated = True
        for placement in placements:
            if isinstance(placement, Partial):
                self.has_sum, self.is_replicated = True, False
            elif isinstance(placement, Shard):
                self.is_state, self.is_replicated = self.is_state or placement.is_state, False


def without_state(placements: Placements) -> Placements:
    """Returns the placements with no shard marked as state."""
    return tuple(map(without_state_mark, placements))


def is_replicated(placements: Placements) -> bool:
    """Returns whether every device holds the entire value."""
    return all(isinstance(x, Replicate) for x in placements)


def replicated(count: int) -> Placements:
    """Returns the placements of a replicated value, along *count* axes."""
    return (REPLICATE,) * count
