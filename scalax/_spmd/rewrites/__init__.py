"""Rewrites of a step before it is partitioned: algorithms that run on blocks, for algorithms that do not.

A rewrite takes the jaxpr of a step for all examples and returns a jaxpr of equal results, also for all
examples, which `scalax._spmd.partition` partitions better. Each file has one algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh

from scalax._jax.equations import equations
from scalax._jax.primitives import primitive_name
from scalax._spmd.values import Argument
from scalax._spmd.wanted import Layout


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


Rewrite = Callable[[Any, StepFacts], Any]
REWRITES: tuple[tuple[frozenset[str], Rewrite], ...] = ()
"""The rewrites in the order in which they run. Each has the primitives that make a step worth its look."""


def rewritten(jaxpr: Any, facts: StepFacts) -> Any:
    """Returns the jaxpr of a step after all rewrites that concern it.

    Args:
        jaxpr: the closed jaxpr.
        facts: what is known of the step.
    """
    if not REWRITES:
        return jaxpr
    primitives = {primitive_name(equation) for equation in equations(jaxpr)}
    for names, rewrite in REWRITES:
        if not names.isdisjoint(primitives):
            jaxpr = rewrite(jaxpr, facts)
    return jaxpr
