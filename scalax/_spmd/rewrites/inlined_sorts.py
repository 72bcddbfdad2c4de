"""Inlining of sorts, which NumPy functions wrap in ``jax.jit``.

The analysis of whether each device may sort its local rows (`scalax._spmd.operations.local_sorts`) needs the
sort and the uses of its results in one jaxpr.
"""

from __future__ import annotations

from typing import Any

from scalax._jax.rewriting import inline_and_sink_constants
from scalax._jaxpr.local_sort_analysis import CONSTANT_OPS
from scalax._spmd.rewrites.facts import StepFacts


def inline_sorts(jaxpr: Any, facts: StepFacts) -> Any:
    """Inlines calls, and moves constants of loops into the loops.

    Args:
        jaxpr: the closed jaxpr.
        facts: the properties of the step.
    """
    del facts
    return inline_and_sink_constants(jaxpr, CONSTANT_OPS)
