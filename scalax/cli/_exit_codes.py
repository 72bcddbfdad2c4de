"""Exit codes of the command line."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """The exit codes of commands, with their meaning; `docs/command_line.md` has the same table."""

    DONE = 0, 'done: the step fits, or its memory is unknown; doctor and verify find nothing'
    FAILED = 1, 'it failed: the compiler, the file, a missing package'
    INVALID = 2, 'the command is invalid'
    TOO_LARGE = 3, 'the step does not fit into memory'
    FOUND = 4, 'doctor has findings; verify has results that differ or could not be compared'
    CRASHED = 5, 'the compiler has crashed, or the system has killed it'
    INTERRUPTED = 130, 'Ctrl-C has ended it; verify has printed what it had compared'

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        """Makes a code with its meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member
