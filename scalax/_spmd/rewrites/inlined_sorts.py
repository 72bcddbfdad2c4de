"""Sorts beside what takes their results, in place of the calls of ``jax.jit`` that hold them.

Whether each device may sort its own rows (`scalax._spmd.operations.local_sorts`) shows in one jaxpr only.
"""

from __future__ import annotations

from typing import Any

from scalax._jax.rewriting import inline_and_sink_constants
from scalax._jaxpr.local_sort_analysis import CONSTANT_OPS
from scalax._spmd.rewrites.facts import StepFacts


def inline_sorts(jaxpr: Any, facts: StepFacts) -> Any:
    """Returns the jaxpr with the equations of calls, and of constants of loops, in their place.

    Args:
        jaxpr: the closed jaxpr.
        facts: what is known of the step.
    """
    del facts
    return inline_and_sink_constants(jaxpr, CONSTANT_OPS)
