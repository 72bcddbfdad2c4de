"""Handling of Ctrl-C: the first one ends the run after the current step, the second one immediately.

With several processes, each may be in a different step. There the first Ctrl-C becomes SIGTERM, after which
all processes stop after the same step.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

MESSAGE = b'\nInterrupted: keeping what was reached. Ctrl-C again to abort.\n'


class Interrupt:
    """A context in which the first Ctrl-C sets `requested`, and the second one kills the program."""

    def __init__(self, several: bool) -> None:
        self.requested, self._several = False, several

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._on_first)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_first(self, signum: int, frame: FrameType | None) -> None:
        # The default action does not run Python, so the second Ctrl-C works during a compilation.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.requested = True
        os.write(2, MESSAGE)  # print() may be the interrupted call, and is not re-entrant
