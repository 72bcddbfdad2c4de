"""WHERE: a mesh of devices, however it was come by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax import _context, _mesh
from scalax._resolve import ResolutionCache
from scalax._spec import MeshAxes, OnIndivisible, checked_policy


class Where:
    """The mesh of a helper, and its constructors."""

    def __init__(
        self,
        axis_dims: Sequence[int],
        axis_names: Sequence[str],
        mesh_axis_splitting: bool = False,
        *,
        dcn_axis_dims: Sequence[int] | None = None,
        devices: Sequence[Any] | None = None,
        axis_types: AxisType | Sequence[AxisType] | None = None,
        on_indivisible: OnIndivisible = 'error',
    ) -> None:
        mesh = _mesh.build_mesh(
            axis_dims,
            axis_names,
            split_physical_axes=mesh_axis_splitting,
            dcn_axis_dims=dcn_axis_dims,
            devices=devices,
            axis_types=axis_types,
        )
        self._set_up(mesh, on_indivisible)

    def _set_up(self, mesh: Mesh | AbstractMesh, on_indivisible: OnIndivisible) -> None:
        self._mesh = mesh
        self._on_indivisible = checked_policy(on_indivisible)
        self._contexts = _context.ContextCache(self)
        self._resolutions = ResolutionCache()

    @classmethod
    def from_mesh(cls, mesh: Mesh | AbstractMesh, *, on_indivisible: OnIndivisible = 'error') -> Self:
        """A helper over a mesh that exists; an AbstractMesh serves for all that needs no devices.

        Args:
            mesh: any ``jax.sharding.Mesh``, with its axis types as they are, or an ``AbstractMesh``.
            on_indivisible: as in the constructor.

        Raises:
            MeshError: *mesh* is neither.
        """
        helper = cls.__new__(cls)
        helper._set_up(_mesh.checked_mesh(mesh), on_indivisible)
        return helper

    @classmethod
    def from_topology(
        cls,
        topology: str,
        axis_dims: Sequence[int],
        axis_names: Sequence[str],
        mesh_axis_splitting: bool = False,
        *,
        num_slices: int = 1,
        dcn_axis_dims: Sequence[int] | None = None,
        axis_types: AxisType | Sequence[AxisType] | None = None,
        on_indivisible: OnIndivisible = 'error',
    ) -> Self:
        """A helper over TPU hardware that is not here, for compiling and planning.

        Args:
            topology: the slice, such as ``'v5p:4x4x4'``.
            num_slices: the number of slices, joined by the data-center network.
            axis_dims: over all slices together; this and the others as in the constructor.
            axis_names: see above.
            mesh_axis_splitting: see above.
            dcn_axis_dims: see above; needed with several slices.
            axis_types: see above.
            on_indivisible: see above.

        Raises:
            MissingDependencyError: libtpu, the TPU compiler, is not installed, or is none for this JAX.
            MeshError: the topology is unknown, or cannot hold the mesh.
        """
        return cls(
            axis_dims,
            axis_names,
            mesh_axis_splitting,
            dcn_axis_dims=dcn_axis_dims,
            devices=_mesh.topology_devices(topology, num_slices),
            axis_types=axis_types,
            on_indivisible=on_indivisible,
        )

    @property
    def mesh(self) -> Mesh:
        """The ``jax.sharding.Mesh`` (an ``AbstractMesh`` if the helper was made from one)."""
        return cast(Mesh, self._mesh)  # for the common case: users would have to narrow it at every use

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the mesh axes."""
        return tuple(self._mesh.axis_names)

    @property
    def axis_dims(self) -> tuple[int, ...]:
        """The sizes of the mesh axes, with -1 resolved."""
        return tuple(self._mesh.shape.values())

    @property
    def axis_types(self) -> tuple[AxisType, ...]:
        """The types of the mesh axes."""
        return tuple(self._mesh.axis_types)

    @property
    def on_indivisible(self) -> OnIndivisible:
        """The policy for bare PartitionSpecs where a dimension does not divide."""
        return self._on_indivisible

    def __reduce__(self) -> Any:
        return _unpickled, (type(self), _mesh.pickled(self._mesh), self._on_indivisible)

    def __repr__(self) -> str:
        auto = set(self.axis_types) <= {AxisType.Auto}
        types = '' if auto else '; ' + ', '.join(kind.name for kind in self.axis_types)
        return f'MeshShardingHelper({MeshAxes.of(self._mesh)}{types})'


def _unpickled(cls: type[Where], parts: Any, on_indivisible: OnIndivisible) -> Where:
    return cls.from_mesh(_mesh.unpickled(parts), on_indivisible=on_indivisible)
