"""Attempts: candidates of a search are bounded, and compiled."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scalax._plan.hardware import Hardware
from scalax._plan.lowered_step import LoweredStep, lower_step
from scalax._plan.make import plan_lowered
from scalax._plan.page import memory_taken
from scalax._report.tables import human_bytes
from scalax._search.candidate import Candidate
from scalax._search.meshes import helper_of, slices_along
from scalax._search.objective import lost_by
from scalax.errors import IndivisibleWarning, StagesWarning


@dataclasses.dataclass
class Attempts:
    """What a search tries its candidates with, and how often it has compiled.

    Attributes:
        make_step: makes the step and its arguments for a helper, and perhaps a set of rules.
        rules: the sets of rules by name; None if there are none.
        devices: the devices.
        slices: how many slices there are, and along which mesh axes, the first ones first.
        has_stages: whether *make_step* takes ``stages=``.
        hardware: the numbers of the devices, if they are not those that are known of them.
        quick: how many quick plans were compiled.
        full: how many full plans were.
    """

    make_step: Callable[..., tuple[Any, Sequence[Any]]]
    rules: Mapping[str, Any] | None
    devices: Sequence[Any]
    slices: tuple[int, Sequence[str]]
    has_stages: bool
    hardware: Hardware | None
    quick: int = 0
    full: int = 0

    def __call__(self, candidate: Candidate, *, quick: bool) -> Candidate:
        """The candidate with its plan, or with the reason why there is none; raises as `lost_by` does."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('error', IndivisibleWarning)
                warnings.simplefilter('ignore', StagesWarning)
                step = self._lowered(candidate)
                candidate = dataclasses.replace(candidate, least_memory=step.argument_bytes)
                limit = step.hardware.hbm_bytes if step.hardware else None
                if quick and limit is not None and candidate.least_memory > limit:
                    least, most = human_bytes(candidate.least_memory), human_bytes(limit)
                    lost = f'cannot fit: its arguments alone take {least} of {most}'
                    return dataclasses.replace(candidate, lost=lost, ruled_out=True)
                plan = plan_lowered(step, quick=quick)
                self.quick, self.full = self.quick + quick, self.full + (not quick)
        except Exception as error:  # noqa: BLE001 - lost_by raises what is no result of the compiler
            return dataclasses.replace(candidate, lost=lost_by(error, candidate.name))
        lost = f'does not fit: {memory_taken(plan)}' if plan.fits is False else ''
        return dataclasses.replace(candidate, plan=plan, lost=lost)

    def _lowered(self, candidate: Candidate) -> LoweredStep:
        sizes = dict(candidate.mesh)
        helper = helper_of(sizes, self.devices, slices_along(sizes, *self.slices))
        rules = [self.rules[candidate.rules]] if self.rules else []
        step, arguments = self.make_step(
            helper, *rules, **({'stages': candidate.stages} if self.has_stages else {})
        )
        return lower_step(helper, step, arguments, {}, self.hardware)
