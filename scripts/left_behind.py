"""Processes that outlive what started them, found by a variable of their environment.

Whoever wants to know sets the variable, starts something, and asks when that has ended. Sessions, groups and
parents do not matter: a process that was started in a session of its own, and whose parent is gone, has the
variable still.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil

GRACE_S = 10  # for those that were about to end


def find(variable: str) -> list[psutil.Process]:
    """The other processes of this user that have the variable in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            # What has ended and was not waited for yet has no environment any more.
            if process.pid != os.getpid() and variable in process.environ():
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def end(variable: str) -> list[str]:
    """Kills those that are still there after a moment, each by its id, and says which these were."""
    _, left = psutil.wait_procs(find(variable), timeout=GRACE_S)
    said = [f'{process.pid}: {_command(process)}' for process in left]
    _kill(left)
    return said


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=GRACE_S)


def _command(process: psutil.Process) -> str:
    try:
        return ' '.join(process.cmdline())[:200]
    except psutil.Error:
        return '(it has just ended)'
