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
    """

    arguments: Sequence[Argument]
    results: Sequence[Layout | None]
    mesh: AbstractMesh
    axes: tuple[str, ...]
