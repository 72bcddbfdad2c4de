"""The assignment of microbatches and repeats to the steps of a stage."""

from __future__ import annotations

from typing import Any


def microbatch_at(step: Any, num_stages: int, num_repeats: int) -> tuple[Any, Any]:
    """Returns the microbatch that a stage computes in its step of this index, and the repeat.

    With several repeats, microbatches go in groups of *num_stages*. Each group passes through all repeats
    before the next one enters.
    """
    microbatch = step // (num_repeats * num_stages) * num_stages + step % num_stages
    return microbatch, step // num_stages % num_repeats
