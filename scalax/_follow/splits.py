"""Dimensions of weights that stay split over axes of the batch, as tensor parallelism splits them.

FSDP gathers a weight for each product, and leaves rows in place. Where the rows of a block are smaller than
its weights, it takes less to gather the rows in front of the block, leave each device its columns of all that
is computed in between, and add up and scatter what comes out. The last product with a large vocabulary
is such a block, with the loss behind it; so are two feed-forward matrices of many hidden columns.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._follow.dimensions import WholeDimensions
from scalax._follow.experts import Stored
from scalax._follow.trail import Trail, Trails, axes_of
from scalax._follow.types import Move
from scalax._follow.weights import Weights
from scalax._jax.equations import dot_dims, opened
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dependence import Dependence
from scalax._jaxprs.dims import FORWARDS, multiplications
from scalax._jaxprs.machine_balance import PER_BYTE, PER_OPERATION
from scalax._tree.specs import canonical_entry, only_axes

# This part of all that is sent has to be saved: another layout may cost as much elsewhere, as in memory.
_LEAST = 0.005


class Splits:
    """The dimensions that stay split.

    Args:
        jaxpr: the jaxpr that has all others in it.
        given: the trails of its arguments.
        stored: where weights are over the axes of the batch.
        from_batch: the variables that depend on the batch.
        trails: answers about trails.

    Attributes:
        axes: the mesh axes that shard weights, if these are the same for all.
        others: the axes of the batch that shard no weight.
        possible: the dimensions that may stay split: none if the axes differ between weights.
        classes: gives the class of each dimension of a value; only if some are possible.
    """

    def __init__(
        self, jaxpr: Any, given: Sequence[Trail], stored: Stored, from_batch: Dependence, trails: Trails
    ) -> None:
        self.stored, self.from_batch = stored, from_batch
        self.bytes_of, self._shards = trails.bytes_of, trails.shards
        self.possible: set[int] = set()
        self._split: set[int] = set()
        arguments = opened(jaxpr).invars
        sharded = {axes for var in arguments for axes in stored.of(var) if axes}
        self.axes, self.others = min(sharded, default=()), trails.batch_axes.difference(*sharded)
        self._left = trails.sizes.keys() - self.axes
        if len(sharded) == 1 and self._may_pay(stored.products):
            dims = WholeDimensions(jaxpr, trails.shards(self.axes))
            self.classes = dims.classes_of
            weights = self.along(arguments, map(stored.of, arguments))
            self.possible = weights - self.along(arguments, given) - dims.whole

    def _may_pay(self, products: Iterable[Any]) -> bool:
        """Whether rows are smaller than what it takes to gather the weights that they are multiplied with.

        It is asked first, since numbering the dimensions of all values takes long. A weight is gathered once
        for all of its products, and once more for its gradient; rows are gathered for each product.
        """
        pairs = [
            (product, rows, weight)
            for product in products
            for rows, weight in (product.invars, product.invars[::-1])
            if rows in self.from_batch and any(self.stored.of(weight))
        ]
        uses = Counter(id(weight) for _, _, weight in pairs)
        gathered, least = defaultdict[int, float](float), dict[int, float]()
        for product, rows, weight in pairs:
            gathered[id(rows)] += 2 * self.bytes_of(weight, ()) / uses[id(weight)]
            sizes = map(self.rows_of, (rows, *product.outvars))
            least[id(rows)] = min(least.get(id(rows), math.inf), *sizes)
        return any(gathered[rows] > least[rows] for rows in least)

    def choose(self, gathered: Mapping[int, float], sent: Mapping[int, float]) -> bool:
        """Leaves those dimensions split for which that sends less. Returns whether there are any."""
        least = _LEAST * sum(gathered.values())
        for dim in self.possible:
            if gathered.get(dim, 0) - sent.get(dim, 0) > least:
                self._split.add(dim)
        return bool(self._split)

    def dim(self, atom: Any) -> int | None:
        """The dimension of a value that stays split; None if none does."""
        if not self._split:
            return None
        return next((i for i, each in enumerate(self.classes(atom)) if each in self._split), None)

    def are_in(self, jaxpr: Any) -> bool:
        """Whether a jaxpr has a dimension that stays split: some argument or result of it then has it."""
        inner = opened(jaxpr)
        return any(self.dim(atom) is not None for atom in (*inner.invars, *inner.outvars))

    def spec(self, atom: Any, spec: PartitionSpec) -> PartitionSpec:
        """The spec of a value. If a dimension of it stays split, that one alone has the axes."""
        dim = self.dim(atom)
        if dim is None:
            return spec
        left = [*only_axes(spec, self._left), *[None] * len(spec)]
        return PartitionSpec(*left[:dim], canonical_entry(self.axes), *left[dim + 1 : len(spec)])

    def sums(self, equation: Any, spec: PartitionSpec) -> PartitionSpec | None:
        """Where sums over columns that stay split are before they are scattered; None if that is left open.

        The compiler may scatter sums in a ring beside the product, which sends more, over fewer links. That
        pays where the product takes longer, as with a large vocabulary.
        """
        if not self._split or primitive_name(equation) != 'dot_general':
            return None
        [out], [*operands, result] = equation.outvars, map(self.dim, (*equation.invars, *equation.outvars))
        computed = 2 * multiplications(equation) / self._shards(self.axes)
        is_longer = computed * PER_OPERATION > self.bytes_of(out, ()) * PER_BYTE
        if is_longer or result is not None or None in operands:
            return None
        return PartitionSpec(*only_axes(spec, self._left))

    def along(self, atoms: Iterable[Any], trails: Iterable[Trail]) -> set[int]:
        """The classes of the dimensions that mesh axes shard."""
        return {
            dim
            for atom, trail in zip(atoms, trails, strict=True)
            for dim, axes in zip(self.classes(atom), trail, strict=False)
            if axes
        }

    def rows_of(self, atom: Any) -> float:
        """The bytes of a value with rows that is whole along the axes that shard weights."""
        return self.bytes_of(atom, self.others)

    def has_few_rows(self, equation: Any) -> bool:
        """Whether a product's weight, gathered twice as for a gradient, is more than its rows, in or out."""
        rows = [self.rows_of(x) for x in (*equation.invars, *equation.outvars) if x in self.from_batch]
        weights = [self.bytes_of(atom, ()) for atom in equation.invars if any(self.stored.of(atom))]
        return bool(rows and weights) and 2 * max(weights) > min(rows)


class Costs:
    """What the dimensions that may stay split send either way, in a jaxpr: bytes that each device gets.

    Args:
        splits: the dimensions.
        jaxpr: the jaxpr, an open one.
        weights: the weights in it.

    Attributes:
        gathered: dimension -> with rows in place: weights that are gathered, gradients that are scattered.
        sent: dimension -> with columns in place: rows that are gathered, sums that are scattered.
    """

    def __init__(self, splits: Splits, jaxpr: Any, weights: Weights) -> None:
        self._gathered, self.sent = defaultdict[int, float](float), defaultdict[int, float](float)
        self._gradients = defaultdict[int, float](float)
        self._splits, self._weights = splits, weights
        self._seen = set[tuple[int, int]]()
        self._rounds = dict[int, int]()  # for how many rounds of loops the weights are the same
        self._jaxpr = jaxpr

    @property
    def gathered(self) -> Mapping[int, float]:
        """The attribute above.

        Of gradients those of weights that are gathered count. They are added here, since a jaxpr may compute
        the gradient before it uses the weight.
        """
        found = self._gathered.copy()
        for dim, rounds in self._rounds.items():
            found[dim] += self._gradients[dim] / rounds
        return found

    @functools.cached_property
    def _sums(self) -> dict[int, int]:
        """Value -> the sum that it is added to, by ids."""
        joins = [each for each in self._jaxpr.eqns if primitive_name(each) in ('add', 'add_any')]
        return {id(atom): id(each.outvars[0]) for each in joins for atom in each.invars}

    @functools.cached_property
    def _forms(self) -> dict[int, int]:
        """Value -> what has it in another form, by ids."""
        forms = [each for each in self._jaxpr.eqns if primitive_name(each) in FORWARDS]
        return {id(each.invars[0]): id(each.outvars[0]) for each in forms}

    def note_inside(self, gathered: Mapping[int, float], sent: Mapping[int, float], times: int) -> None:
        """Takes note of what a jaxpr inside sends, so many times."""
        for mine, theirs in ((self._gathered, gathered), (self.sent, sent)):
            for dim, amount in theirs.items():
                mine[dim] += times * amount

    def note(
        self,
        equation: Any,
        operands: Sequence[Trail],
        results: Sequence[Trail],
        staying: Container[int],
        move: Move | None,
    ) -> None:
        """Takes note of what an equation without jaxprs sends.

        Args:
            equation: the equation.
            operands: the trails of its operands.
            results: those of its results.
            staying: the operands that are weights and are not gathered, since rows move to them, by number.
            move: how rows of a product move to its weight, if they do.
        """
        splits, out = self._splits, equation.outvars[0]
        dims = [splits.classes(atom) for atom in (*equation.invars, out)]
        for dim in splits.possible.intersection(itertools.chain(*dims)):
            if primitive_name(equation) == 'dot_general':
                self._note_product(equation, operands, results, staying, move, dim, dims)
            elif dim in dims[0] and dim not in dims[-1] and equation.invars[0] in splits.from_batch:
                self.sent[dim] += 2 * splits.rows_of(out)  # a sum that all devices get

    def _note_product(
        self,
        equation: Any,
        operands: Sequence[Trail],
        results: Sequence[Trail],
        staying: Container[int],
        move: Move | None,
        dim: int,
        dims: Sequence[list[int]],
    ) -> None:
        splits, [out] = self._splits, equation.outvars
        contracted, (batch, _) = dot_dims(equation)
        is_rows = [atom in splits.from_batch for atom in equation.invars]
        for place, atom in enumerate(equation.invars):
            is_new = self._is_new(id(atom), dim)
            if is_rows[place]:
                self.sent[dim] += splits.rows_of(atom) if is_new and dim not in dims[place] else 0
                continue
            # A weight has to lie along the dimension, once; and products over experts are left to `experts`.
            once = dim in splits.along([atom], [splits.stored.of(atom)]) and dims[place].count(dim) == 1
            if not once or any(dims[0][i] == dim for i in batch):
                self.sent[dim] = math.inf
            elif move is not None and place == move.weight:
                self._gathered[dim] += move.sent
            elif is_new and place not in staying and operands[1 - place]:
                self._rounds[dim] = self._weights.rounds_of(equation, operands, place, 1 - place)
                self._gathered[dim] += splits.bytes_of(atom, ()) / self._rounds[dim]
        summed = axes_of(operands[0][i] for i in contracted[0] if operands[0])
        if all(is_rows) and dim in dims[-1] and not summed.isdisjoint(splits.axes):
            self._gradients[dim] += splits.bytes_of(out, ())
        elif dim not in dims[-1] and self._is_new(self._total(out), dim):
            # XLA may add up sums everywhere in place of scattering them, in a dimension behind the first one
            # that further axes shard too.
            first = axes_of(trail[0] for trail in results if trail)
            scatters = not splits.others or not first.isdisjoint(splits.axes)
            self.sent[dim] += (1 if scatters else 2) * splits.rows_of(out)

    def is_part(self, product: Any) -> bool:
        """Whether the result of a product is added to others, also in another form."""
        value = id(product.outvars[0])
        while value in self._forms:
            value = self._forms[value]
        return value in self._sums

    def _is_new(self, value: int, dim: int) -> bool:
        """Whether a value is met for the first time."""
        is_new = (value, dim) not in self._seen
        self._seen.add((value, dim))
        return is_new

    def _total(self, product: Any) -> int:
        """The id of a product, or of the sum that it is added to."""
        total = id(product)
        while total in self._sums:
            total = self._sums[total]
        return total
