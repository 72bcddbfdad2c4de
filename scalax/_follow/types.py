"""What goes into the pass that follows a batch, and what comes out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from scalax._follow.trail import LOST, Trail


class Use(NamedTuple):
    """How an equation uses a jaxpr.

    Attributes:
        before: of a round of a loop, how many arguments are no elements of stacks. They come first, and are
            constrained as well, and so are its results.
        rounds: of a round of a loop, for how many rounds each argument is the same.
        taken: the arguments that the user places, by number.
        given: the results that the user places, likewise.
    """

    before: int | None = None
    rounds: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    given: tuple[int, ...] = ()


ONCE = Use()
_ANYWHERE = PartitionSpec()


@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """What is known of the arguments of a jaxpr.

    Attributes:
        trails: their trails; of those that are no batches, along the mesh axes that shard no rows.
        stored: of arguments that are not batches, the dimensions that axes of the batch shard, as FSDP does.
        batch_axes: the mesh axes that shard rows.
        placed: whether it is known where each of them is; else the compiler decides about some.
    """

    trails: Sequence[Trail]
    stored: Sequence[Trail]
    batch_axes: frozenset[str]
    placed: bool = True


@dataclasses.dataclass(frozen=True)
class Noted:
    """An equation of which users are told: it keeps rows where they are, moves them, or loses them.

    An equation loses rows if operands have rows, no result has, and these are not just summed over.

    Attributes:
        equation: the equation.
        aval: the shape and dtype of what is kept, or of its largest result; of a loop over rows, or of what
            takes them by number, of all rows.
        calls: the equations in whose jaxprs it is, from the innermost one outwards.
        spec: where what is kept is.
        rows: where rows were that are lost.
    """

    equation: Any
    aval: Any
    calls: tuple[Any, ...] = ()
    spec: PartitionSpec = _ANYWHERE
    rows: Trail = LOST


@dataclasses.dataclass(frozen=True)
class Followed:
    """A jaxpr that was followed.

    Attributes:
        jaxpr: the jaxpr, with constraints.
        trails: those of its results.
        kept: the values that are constrained, those of jaxprs inside it too.
        lost: where rows were lost, likewise.
        moved: the equations whose rows move: to a larger weight, or dealt to the devices in another order.
        gathered, sent: of dimensions that may stay split, as for `Costs`.
        multiplied: the arguments without rows that are multiplied with rows, by number, and with how many of
            these each device does so at once, at most.
        summed: the results that are sums over few rows, by number.
        ordered: of each `scan`, each `sort` and each product of rows in groups the trails of its operands: by
            the name of the primitive, and the equation.
        has_matrices: whether there are products of values without rows.
        failure: why nothing is followed, if the pass failed.
    """

    jaxpr: Any
    trails: tuple[Trail, ...]
    kept: Sequence[Noted] = ()
    lost: Sequence[Noted] = ()
    moved: Sequence[Noted] = ()
    gathered: Mapping[int, float] = dataclasses.field(default_factory=dict)
    sent: Mapping[int, float] = dataclasses.field(default_factory=dict)
    multiplied: Mapping[int, int] = dataclasses.field(default_factory=dict)
    summed: frozenset[int] = frozenset()
    ordered: Mapping[str, Mapping[Any, Sequence[Trail]]] = dataclasses.field(default_factory=dict)
    has_matrices: bool = False
    failure: str = ''


class Move(NamedTuple):
    """Rows that move to the weight of a product.

    Attributes:
        weight: which operand it is.
        result: where the result is before it moves back.
        sent: the bytes that each device gets for it, there and back.
    """

    weight: int
    result: PartitionSpec
    sent: float
