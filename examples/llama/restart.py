"""The duration of a restart: from the loss of a process to the end of the first step after it.

A launcher that starts a program again sets `LOST_AT`, the time of the loss in seconds since the epoch.
"""

from __future__ import annotations

import os
import time


class Restart:
    """The time of the loss, and the times at which the phases of the restart ended."""

    def __init__(self) -> None:
        lost = os.environ.get('LOST_AT')
        self._lost = float(lost) if lost else None
        self._ends: list[tuple[str, float]] = []

    def done(self, phase: str) -> None:
        """Records that a phase of the restart has ended."""
        self._ends.append((phase, time.time()))

    def report(self, step: int) -> str:
        """Returns the time of each phase, after the first step; empty if nothing was lost."""
        if self._lost is None:
            return ''
        self.done('first step')
        phases, before = [], self._lost
        for phase, end in self._ends:
            phases.append(f'{phase} {end - before:.1f}')
            before = end
        return f'restarted {before - self._lost:.1f} s from the loss to step {step}: {", ".join(phases)}'
