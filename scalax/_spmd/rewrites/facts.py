"""The properties of a step that rewrites use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import AbstractMesh

from scalax._spmd.placements.layouts import Layout
from scalax._spmd.values import Argument


class StepFacts(NamedTuple):
    """The properties of a step.

    Attributes:
        arguments: the properties of the arguments of its jaxpr.
        results: the layouts of its results; None where any layout is fine.
        mesh: the active mesh, of Auto axes.
        axes: the mesh axes of the batch, from major to minor.
        is_pipelined: whether scans over layers run as pipelines.
    """

    arguments: Sequence[Argument]
    results: Sequence[Layout | None]
    mesh: AbstractMesh
    axes: tuple[str, ...]
    is_pipelined: bool = False

    @property
    def has_other_axes(self) -> bool:
        """Whether the compiler partitions along other mesh axes."""
        return any(size > 1 and axis not in self.axes for axis, size in self.mesh.shape.items())
