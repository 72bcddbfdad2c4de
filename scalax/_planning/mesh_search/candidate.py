"""A candidate of a mesh search, with its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._planning.report.plan import Plan
from scalax._spmd.pipelines.config import Pipeline, options_text


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh of a search.

    Attributes:
        mesh: mesh axis name -> size.
        plan: the plan of the step on this mesh; None if it could not be planned.
        reason: why it is not the best; empty for the best.
        ruled_out: whether the arguments alone do not fit, so that the step was not compiled.
        argument_bytes: the bytes of the arguments on a device.
        pipeline: the pipeline, if a mesh axis is one.
    """

    mesh: Mapping[str, int]
    plan: Plan | None = None
    reason: str = ''
    ruled_out: bool = False
    argument_bytes: int = 0
    pipeline: Pipeline | None = None

    @property
    def name(self) -> str:
        """The sizes, such as ``'fsdp=16, tp=4'``, and the options of a pipeline."""
        pipeline = f'; {options_text(self.pipeline)}' if self.pipeline else ''
        return f'{axis_sizes_text(self.mesh)}{pipeline}'
