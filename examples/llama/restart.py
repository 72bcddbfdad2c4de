"""How long a restart takes: from the loss of a process to the end of the first step after it.

A launcher that starts a program again sets `LOST_AT`, the time of the loss in seconds since the epoch.
"""

from __future__ import annotations

import os
import time


class Restart:
    """The time of the loss, and when which stage of the start had ended."""

    def __init__(self) -> None:
        lost = os.environ.get('LOST_AT')
        self._lost = float(lost) if lost else None
        self._ends: list[tuple[str, float]] = []

    def done(self, stage: str) -> None:
        """Notes that a stage of the start has ended."""
        self._ends.append((stage, time.time()))

    def report(self, step: int) -> str:
        """Where the time went up to now, the end of the first step; nothing if nothing was lost."""
        if self._lost is None:
            return ''
        self.done('first step')
        stages, before = [], self._lost
        for stage, end in self._ends:
            stages.append(f'{stage} {end - before:.1f}')
            before = end
        return f'restarted {before - self._lost:.1f} s from the loss to step {step}: {", ".join(stages)}'
