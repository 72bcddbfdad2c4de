"""A process of its own for commands that compile: a compiler that crashes ends that process alone.

The process that the user has started only waits for it. The other one is the same command once more, with the
same input and output, so everything but a crash is as without it.
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
_STDERR = 2  # its number; stdin and stdout come before
# Signals with which somebody ends a process, as opposed to those of a crash.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if os.name == 'posix' else ()


def run_in_compiler_process(function: str, topology: str | None) -> int | None:
    """Runs the command line of this process in another one, and reports a crash of that.

    Args:
        function: the function of the user, for the message.
        topology: the devices that the command compiles for, for the message; None for simulated ones.

    Returns:
        The exit code; None if there is no other process, because this is that one, because the command line
        that started this process is unknown, or on Windows.
    """
    descriptors = os.environ.pop(_VARIABLE, None)  # not for processes that the user's file starts
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
        # A compiler that crashes leaves its files behind; one that Ctrl-C left may still write.
        tempfile.TemporaryDirectory(prefix='scalax-plan-', ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as file,
        _pipe() as (lives, _),
    ):
        process = subprocess.Popen(
            command,
            env={**os.environ, _VARIABLE: f'{lives},{file.fileno()},{folder}'},
            pass_fds=(lives, file.fileno()),
        )
        with _signals_passed_on(process):
            code = process.wait()
        file.seek(0)
        compilations = file.read().decode(errors='replace')
    if code >= 0:
        return code
    if code == -signal.SIGINT:
        return ExitCode.INTERRUPTED
    if -code in _ENDING:
        return _end_by(-code)
    print(_crash(-code, compilations, function, topology), file=sys.stderr)
    return ExitCode.CRASHED


def _open_closed_streams() -> None:
    """Opens the standard streams that are closed (``>&-``), for the other process too.

    A file or a pipe that is opened next would get the number of one of them, and what is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _own_command() -> list[str] | None:
    """The command that started this process, if it is `python -m scalax` or the script `scalax`."""
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
def _signals_passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Passes the signals that end this process on to *process*, which then ends both."""

    def pass_on(number: int, _: Any) -> None:
        # The terminal sends Ctrl-C to both.
        if number != signal.SIGINT or not _is_in_foreground():
            process.send_signal(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, pass_on)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Whether the terminal of this process sends it Ctrl-C."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # it has none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _end_by(number: int) -> int:
    """Ends this process by a signal, as the other one was ended; else returns the code that shells give."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def _report_to_parent(lives: int, report: int) -> None:
    """Writes down what is compiled, and ends this process with its parent.

    Args:
        lives: the end of a pipe that is closed when the parent ends, even by SIGKILL.
        report: a file that the parent reads after a crash.
    """
    for descriptor in (lives, report):
        os.set_inheritable(descriptor, False)

    def write(compilations: Sequence[str]) -> None:
        text = ', and '.join(compilations).encode()
        os.pwrite(report, text, 0)
        os.ftruncate(report, len(text))

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # they are for the main thread, and interrupt it
        os.read(lives, 1)
        os._exit(ExitCode.FAILED)

    running_compilations.watch(write)
    threading.Thread(target=wait, name='scalax-parent', daemon=True).start()


def _crash(number: int, compilations: str, function: str, topology: str | None) -> str:
    """The message about a process that a signal has ended."""
    names = {known.value: known.name for known in signal.Signals}
    name = f'{names.get(number, number)}, {(signal.strsignal(number) or "unknown").lower()}'
    where = f'{function!r} on {topology or "simulated devices"}'
    compiled = f'it was compiling {compilations}' if compilations else 'no compiler was running'
    if number == signal.SIGKILL:
        return (
            f'error: the process of the compiler was killed ({name}) for {where}: {compiled}\n'
            'What to do: the system kills a process if there is no memory left (see the log of the system). '
            'Give it more, or compile less: --quick, or a smaller mesh.'
        )
    if not compilations:
        return (
            f'error: the process crashed ({name}) for {where}: {compiled}\n'
            'What to do: look for native code that the function calls; `python -X faulthandler -m scalax` '
            'prints the line of the crash.'
        )
    return (
        f'error: the compiler crashed ({name}) for {where}: {compiled}\n'
        'What to do: this is a fault of the compiler, which may have printed more above. Leave out parts of '
        'the function, until you know which operation it is, and write that in another way. Other programs '
        'may compile: for another topology or mesh (--sizes leaves meshes out), with --quick, which skips '
        'the last passes of the compiler for TPUs, or without --topology, where devices are simulated. '
        'Please report it: https://github.com/openxla/xla/issues'
    )
