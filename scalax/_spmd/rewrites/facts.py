"""Facts of a step that rewrites take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import AbstractMesh

from scalax._spmd.placements.layouts import Layout
from scalax._spmd.values import Argument


class StepFacts(NamedTuple):
    """What is known of a step that is rewritten.

    Attributes:
        arguments: the arguments of its jaxpr.
        results: the layouts of its results; None where any will do.
        mesh: the mesh, in force, of Auto axes.
        axes: the mesh axes of the batch, from the major axis to the minor one.
    """

    arguments: Sequence[Argument]
    results: Sequence[Layout | None]
    mesh: AbstractMesh
    axes: tuple[str, ...]
