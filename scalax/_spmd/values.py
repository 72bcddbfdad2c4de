"""Values of a jaxpr that is partitioned, and what is known of a jaxpr once it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from scalax._jax.equations import shape_of
from scalax._spmd.placements.collectives import Collective
from scalax._spmd.placements.placement import REPLICATE, Partial, Placements, Replicate, Shard

Origin = str | int | None
"""The path of the state that a value is, or the number of the argument of a jaxpr; None of other values."""


Settled = Literal['settled', 'reduced']
SETTLED: Settled = 'settled'
"""Of the placement of a result: it stays where it is, but sums are reduced to the layout of their state."""
REDUCED: Settled = 'reduced'
"""Of the placement of a result: it stays where it is, but sums are reduced to all devices."""


class CannotPartition(Exception):
    """A step that the partitioner cannot handle.

    Args:
        equation: the equation.
        why: what it cannot handle.
        remedy: what users do about it, if there is more than to change the line.
    """

    def __init__(self, equation: Any, why: str, remedy: str = 'change that line') -> None:
        super().__init__(why)
        self.equation, self.why, self.remedy = equation, why, remedy


class Argument(NamedTuple):
    """What is known of an argument of a jaxpr.

    Attributes:
        placements: its placements.
        is_state: whether it is state, or is computed of state alone.
        is_zero: whether it is zero.
        rounds: how often loops take it as it is: state is gathered once, before them.
    """

    placements: Placements
    is_state: bool = False
    is_zero: bool = False
    rounds: int = 1


class Partitioned(NamedTuple):
    """A jaxpr on the blocks of each device.

    Attributes:
        jaxpr: the jaxpr.
        placements: the placements of its results.
        zeros: which results are zero.
        origins: the origins of its results.
        collectives: the collectives that it and the jaxprs inside it run.
        gathered: the arguments, by number, that are gathered in it.
        sliced: the replicated arguments of which it takes blocks only, and the placements of these.
        takes_number: whether its first argument is the number of the microbatch, before those that are
            partitioned.
    """

    jaxpr: Any
    placements: tuple[Placements, ...]
    zeros: tuple[bool, ...]
    origins: tuple[Origin, ...]
    collectives: tuple[Collective, ...]
    gathered: frozenset[int]
    sliced: Mapping[int, Placements]
    takes_number: bool = False


class MappedBlocks(NamedTuple):
    """A result of a `shard_map` before its blocks are joined.

    Attributes:
        atom: what stands for it.
        manual: the mesh axes of the `shard_map`.
        spec: its spec.
        placements: its placements in the body, along the axes of the batch that the `shard_map` leaves out.
    """

    atom: Any
    manual: frozenset[str]
    spec: Any
    placements: Placements


_NONE: dict[Any, Any] = {}


class Value:
    """A value, in one or several placements.

    Args:
        var: the variable or literal, with the shape of all examples.
        placements: its placements.
        atom: what stands for it in the jaxpr on blocks.
        origin: what state it is.
        is_zero: whether it is zero.

    Attributes:
        has_sum: whether it is a sum, or another reduction, along some axis.
        is_replicated: whether every device holds all of it.
        is_state: whether devices hold blocks of state.
        versions: what stands for it in other placements; of gathered state, apart in forward and backward
            passes.
        maker: of a replicated value the equation that computes it and the values that this takes, if blocks
            of it are computed alone.
        narrow_maker: of state the equation that computes it, if what this takes may be gathered in its place.
        forms: of state its casts and transposes so far.
        argument: its number among the arguments of the jaxpr; None if it is none.
    """

    __slots__ = (
        *(
            'argument',
            'atom',
            'forms',
            'has_sum',
            'is_replicated',
            'is_state',
            'is_zero',
            'maker',
            'narrow_maker',
            'origin',
            'placements',
            'var',
        ),
        'versions',
    )

    def __init__(
        self, var: Any, placements: Placements, atom: Any, origin: Origin = None, *, is_zero: bool = False
    ) -> None:
        self.var, self.atom = var, atom
        self.place(placements)
        self.origin, self.is_zero = origin, is_zero
        self.versions = _NONE
        self.maker: tuple[Any, Sequence[Value]] | None = None
        self.narrow_maker: Any = None
        self.argument: int | None = None
        self.forms: tuple[Value, ...] = ()

    def beside(self, var: Any, atom: Any) -> Value:
        """Returns another value in the same placements. Most values are computed of such a one."""
        other = object.__new__(Value)
        other.var, other.atom, other.placements = var, atom, self.placements
        other.has_sum, other.is_replicated, other.is_state = self.has_sum, self.is_replicated, self.is_state
        other.origin = other.maker = other.narrow_maker = other.argument = None
        other.is_zero = False
        other.versions, other.forms = _NONE, ()
        return other

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all examples."""
        return shape_of(self.var)

    @property
    def has_examples(self) -> bool:
        """Whether devices hold blocks of examples, or sums over them."""
        return self.has_sum or any(isinstance(x, Shard) and not x.is_state for x in self.placements)

    def remember(self, key: Any, atom: Any) -> None:
        """Takes note of what stands for it in other placements."""
        if self.versions is _NONE:  # most values have none
            self.versions = {}
        self.versions[key] = atom

    def forget(self) -> None:
        """Forgets what stands for it in other placements."""
        self.versions = _NONE

    def place(self, placements: Placements) -> None:
        """Says which placements its atom has."""
        self.placements = placements
        self.has_sum = self.is_state = False
        self.is_replicated = True
        for placement in placements:
            if isinstance(placement, Partial):
                self.has_sum, self.is_replicated = True, False
            elif isinstance(placement, Shard):
                self.is_state, self.is_replicated = self.is_state or placement.is_state, False


def without_state(placements: Placements) -> Placements:
    """Returns placements that say where blocks are, and not of what."""
    return tuple([Shard(x.dim) if isinstance(x, Shard) else x for x in placements])


def is_replicated(placements: Placements) -> bool:
    """Returns whether every device holds all of a value."""
    return all(isinstance(x, Replicate) for x in placements)


def replicated(count: int) -> Placements:
    """Returns the placements, along so many axes, of what every device holds."""
    return (REPLICATE,) * count
