"""A separate process for commands that compile, so that a crash of the compiler can be reported.

The process that the user started runs the same command in a child process, with the same input and output,
and waits for it. Only crashes are handled differently than without the child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scalax._planning.compiler import running_compilations
from scalax.cli._exit_codes import ExitCode

_VARIABLE = 'SCALAX_COMPILER_PROCESS'
_STDERR = 2
# Signals that users and systems send to end a process, as opposed to signals of a crash.
_TERMINATING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if os.name == 'posix' else ()


def run_in_compiler_process(function: str, topology: str | None) -> int | None:
    """Runs the command line of this process in a child process, and reports a crash.

    Args:
        function: the user's function, for the message.
        topology: the hardware that the command compiles for, for the message; None for simulated devices.

    Returns:
        The exit code. None if no child process was started: in the child itself, if the command line of this
        process is unknown, or on Windows.
    """
    descriptors = os.environ.pop(
        _VARIABLE, None
    )  # so that processes that the user's file starts do not inherit it
    if descriptors is not None:
        *numbers, folder = descriptors.split(',', 2)
        running_compilations.dump_in(folder)
        _report_to_parent(*map(int, numbers))
        return None
    _open_closed_streams()
    command = _own_command()
    if command is None:
        return None
    with (
        # A compiler that crashes leaves files behind, and after Ctrl-C it may still write.
        tempfile.TemporaryDirectory(prefix='scalax-plan-', ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as file,
        _pipe() as (parent_pipe, _),
    ):
        process = subprocess.Popen(
            command,
            env={**os.environ, _VARIABLE: f'{parent_pipe},{file.fileno()},{folder}'},
            pass_fds=(parent_pipe, file.fileno()),
        )
        with _forward_signals(process):
            code = process.wait()
        file.seek(0)
        compilations = file.read().decode(errors='replace')
    if code >= 0:
        return code
    if code == -signal.SIGINT:
        return ExitCode.INTERRUPTED
    if -code in _TERMINATING_SIGNALS:
        return _terminate_by(-code)
    print(_crash_message(-code, compilations, function, topology), file=sys.stderr)
    return ExitCode.CRASHED


def _open_closed_streams() -> None:
    """Opens the standard streams that are closed (``>&-``), also for the child process.

    Otherwise the next file or pipe would get the descriptor of a standard stream, and receive its output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _own_command() -> list[str] | None:
    """Returns the command that started this process, if it is `python -m scalax` or the script `scalax`."""
    count = len(sys.argv) - 1
    begin = sys.orig_argv[: len(sys.orig_argv) - count]
    is_script = len(begin) > 1 and Path(begin[-1]).name == 'scalax' and begin[-1] == sys.argv[0]
    is_known = begin[-2:] == ['-m', 'scalax'] or is_script
    if os.name != 'posix' or not sys.executable or not is_known or [*begin, *sys.argv[1:]] != sys.orig_argv:
        return None
    return [sys.executable, *sys.orig_argv[1:]]


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


@contextlib.contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forwards terminating signals to *process*, whose end then ends this process."""

    def forward(number: int, _: Any) -> None:
        # The terminal sends Ctrl-C to both processes.
        if number != signal.SIGINT or not _is_in_foreground():
            process.send_signal(number)

    old_handlers: dict[signal.Signals, Any] = {}
    try:
        for number in _TERMINATING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                old_handlers[number] = signal.signal(number, forward)
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Whether the terminal of this process sends it Ctrl-C."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # there is no terminal
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _terminate_by(number: int) -> int:
    """Ends this process by a signal, or returns the exit code that shells use for it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def _report_to_parent(parent_pipe: int, report: int) -> None:
    """Reports running compilations to the parent, and ends this process when the parent ends.

    Args:
        parent_pipe: the end of a pipe that is closed when the parent ends, even by SIGKILL.
        report: a file that the parent reads after a crash.
    """
    for descriptor in (parent_pipe, report):
        os.set_inheritable(descriptor, False)

    def write(compilations: Sequence[str]) -> None:
        text = ', and '.join(compilations).encode()
        os.pwrite(report, text, 0)
        os.ftruncate(report, len(text))

    def wait_for_parent() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINATING_SIGNALS)  # only the main thread handles them
        os.read(parent_pipe, 1)
        os._exit(ExitCode.FAILED)

    running_compilations.watch(write)
    threading.Thread(target=wait_for_parent, name='scalax-parent', daemon=True).start()


def _crash_message(number: int, compilations: str, function: str, topology: str | None) -> str:
    """Returns the message about a child process that a signal has ended."""
    names = {member.value: member.name for member in signal.Signals}
    name = f'{names.get(number, number)}, {(signal.strsignal(number) or "unknown").lower()}'
    where = f'{function!r} on {topology or "simulated devices"}'
    activity = f'it was compiling {compilations}' if compilations else 'no compiler was running'
    if number == signal.SIGKILL:
        return (
            f'error: the process of the compiler was killed ({name}) for {where}: {activity}\n'
            'What to do: the system kills a process if memory runs out (see the system log). Provide more '
            'memory, or compile less: --quick, or a smaller mesh.'
        )
    if not compilations:
        return (
            f'error: the process crashed ({name}) for {where}: {activity}\n'
            'What to do: look for native code that the function calls; `python -X faulthandler -m scalax` '
            'prints the line of the crash.'
        )
    return (
        f'error: the compiler crashed ({name}) for {where}: {activity}\n'
        'What to do: this is a bug in the compiler, which may have printed more above. Remove parts of the '
        'function until you know which operation causes it, and write that operation in another way. Other '
        'programs may compile: for another topology or mesh (--sizes leaves meshes out), with --quick, which '
        'skips the last passes of the compiler for TPUs, or without --topology, for simulated devices. '
        'Please report it: https://github.com/openxla/xla/issues'
    )
