"""What the jaxprs of one function share while its batch is followed."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._follow.experts import Stored
from scalax._follow.splits import Splits
from scalax._follow.trail import Trail, Trails, axes_of, of_dims, without
from scalax._follow.types import ONCE, Arguments, Followed, Use
from scalax._jax.equations import shape_of
from scalax._jax.rewriting import constraint
from scalax._jax.tracing import trace_context
from scalax._jaxprs.dependence import Dependence
from scalax._tree.specs import entry_axes


class Shared(abc.ABC):
    """What is known of a jaxpr and those inside it.

    Args:
        mesh: the mesh.
        arguments: those of the jaxpr that has all others in it.
        whole: this jaxpr.

    Attributes:
        mesh: the mesh.
        trails: answers about trails.
        has_rows: tells whether some dimension of a trail holds rows of the batch.
        placed: as for `Arguments`.
        has_columns: whether mesh axes that shard no rows may shard columns, and it is known where.
        from_batch: the variables that depend on the batch.
        stored: where weights are over the axes of the batch.
        stored_axes: the axes of the batch that shard weights.
        splits: the dimensions of weights that stay split over the axes of the batch.
        tables: the shapes of weights that rows are looked up in, and where these are over the batch's axes.
        ordered, has_matrices: as for `Followed`.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, arguments: Arguments, whole: Any) -> None:
        self._context = trace_context()
        self.placed = arguments.placed
        self.tables: dict[tuple[int, ...], Trail] = {}
        self.mesh = mesh
        self.trails = Trails(dict(mesh.shape), arguments.batch_axes)
        self.has_rows = self.trails.has_rows
        others = mesh.shape.keys() - arguments.batch_axes
        self.has_columns = arguments.placed and any(mesh.shape[axis] > 1 for axis in others)
        self.stored_axes = {axis for trail in arguments.stored for axis in axes_of(trail)}
        self.from_batch = Dependence(whole, list(map(self.has_rows, arguments.trails)))
        self.stored = Stored(whole, arguments.stored, self.trails, self.from_batch)
        self.ordered: dict[str, dict[Any, Any]] = {'scan': {}, 'sort': {}, 'ragged_dot_general': {}}
        self.has_matrices = False
        self.splits = Splits(whole, arguments.trails, self.stored, self.from_batch, self.trails)

    @abc.abstractmethod
    def follow(self, jaxpr: Any, trails: Sequence[Trail], use: Use = ONCE) -> Followed:
        """A jaxpr with constraints.

        Args:
            jaxpr: the jaxpr, open or closed.
            trails: those of its arguments.
            use: how it is used.
        """

    def possible(self, trail: Trail, var: Any) -> Trail:
        """The part of a trail that a variable can have."""
        return self.trails.possible(trail, shape_of(var))

    def beside_weights(self, operands: Sequence[Trail]) -> list[Trail]:
        """The operands of a product of rows and a weight: mesh axes of the weight that shard no rows.

        They shard its columns, or are summed over, and no other dimension of the rows: a residual that is
        split over them is gathered before the product.
        """
        weights = [trail for trail in operands if not self.has_rows(trail)]
        if len(weights) != 1:
            return list(operands)
        taken = axes_of(weights[0]) - self.trails.batch_axes
        return [without(trail, taken) if self.has_rows(trail) else trail for trail in operands]

    def placed_at(self, place: Any, trail: Trail, var: Any) -> Trail:
        """The trail of a value that the user places. Dimensions that are left open stay as they were.

        Of one that does not depend on the batch, nothing is said about rows.

        Args:
            place: its sharding or spec.
            trail: its trail, without what is said.
            var: the value.
        """
        spec = place if isinstance(place, PartitionSpec) else getattr(place, 'spec', ())
        before = trail or ((),) * len(spec)
        pairs = zip(spec, before, strict=False)
        said = [each if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry) for entry, each in pairs]
        found = of_dims(dict(enumerate(said)), len(shape_of(var)))
        unknown = {axis for axis in axes_of(found) if self.trails.sizes.get(axis, 1) == 1}
        return without(found, unknown if var in self.from_batch else unknown | self.trails.batch_axes)

    def constraint(self, var: Any, spec: PartitionSpec, like: Any) -> Any:
        """An equation that constrains a variable, with the line of another one."""
        return constraint(var, NamedSharding(self.mesh, spec), like, self._context)
