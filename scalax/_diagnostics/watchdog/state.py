"""State of a process: its step, its phase, and its line, read from the stacks of its threads."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections import namedtuple
from types import FrameType, SimpleNamespace

import jax

from scalax._core.util.user_frames import file_text, innermost_user_frame

LOADING, SAVING, RESTORING, WAITING = 'loading', 'saving', 'restoring', 'waiting for the others'
COMPUTING, PYTHON, CALLED, ENDING = 'computing', 'in Python', 'in Python that JAX calls', 'ending'
FINISHING = 'waiting at exit for data'
FUNCTIONS = {
    LOADING: ('Prefetch.__next__', 'local_data_to_global_array'),
    SAVING: ('Checkpointer.save', 'Checkpointer.wait'),
    RESTORING: ('Checkpointer.restore',),
    WAITING: ('gather', 'barrier'),
}
"""Phase -> the functions of scalax in which a thread is in this phase. The innermost function decides."""
THREADS = {LOADING: '_load_all', SAVING: 'SaveThread.run'}
"""Phase -> the function of the background thread that does the work while the main thread waits."""

_JAX = os.path.dirname(jax.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep

ProcessState = namedtuple('ProcessState', 'process host pid step ago phase since line before silent')
"""The state of a process. Times are in seconds before now, because clocks differ.

Attributes:
    process: its index.
    host: the name of its host.
    pid: its process id on that host.
    step: the last step that has ended; 0 before the first.
    ago: the seconds since that step has ended.
    phase: what it is doing.
    since: the seconds since it entered this phase.
    line: the line of the user's code; may be empty.
    before: the previous phase; may be empty.
    silent: the seconds since its last message.
"""

INITIAL = ProcessState(0, '', 0, 0, 0.0, '', 0.0, '', '', 0.0)

recorded = SimpleNamespace(step=(0, time.monotonic(), 0), thread=threading.main_thread().ident, exits='')
"""The progress that steps record.

Attributes:
    step: the last step that has ended (0: none yet), the time of its end, and the number of steps so far.
    thread: the thread of that step.
    exits: `FINISHING` or `ENDING` once the program has ended. JAX may then wait for the other processes.
"""


def record_step(step: int) -> None:
    """Records that a step has ended; may be called several times for one step."""
    if step != recorded.step[0]:
        recorded.step, recorded.thread = (step, time.monotonic(), recorded.step[2] + 1), threading.get_ident()


def sample_state(process: int, previous: ProcessState | None) -> ProcessState:
    """Returns the state of this process, given the previous sample."""
    (step, ended, _), (phase, line) = recorded.step, _phase_and_line()
    previous, ago = previous or INITIAL, time.monotonic() - ended
    before = previous.before if phase == previous.phase else previous.phase
    is_unchanged = (step, phase, line) == (previous.step, previous.phase, previous.line)
    since = previous.since + ago - previous.ago if is_unchanged else 0.0
    return ProcessState(
        process, socket.gethostname(), os.getpid(), step, ago, phase, since, line[-200:], before, 0.0
    )


def _phase_and_line() -> tuple[str, str]:
    """Returns the phase of the training loop, and the line of the user's code.

    If JAX is calling the user's code (a callback, or tracing), the phase is `CALLED`. JAX may do so in the
    thread of the training loop, or in a thread that it has started: one whose outermost frame is not in
    Python's `threading`.
    """
    # Python documents this function. The stack of a running thread may be incomplete.
    stacks = {
        ident: [frame for frame, _ in traceback.walk_stack(top)]
        for ident, top in sys._current_frames().items()
    }
    loop_stack = stacks.get(recorded.thread or 0, [])
    phase, line = _phase(loop_stack), _line(loop_stack)
    for ident, stack in stacks.items():
        if THREADS.get(phase, '?') in map(_scalax_function, stack[1:]):
            phase, line = _phase(stack) or phase, _line(stack) or line
        called_frames = next((i for i, frame in enumerate(stack) if _file(frame).startswith(_JAX)), 0)
        is_jax_thread = ident != threading.main_thread().ident and _file(stack[-1]) != threading.__file__
        if called_frames and (not phase if stack is loop_stack else is_jax_thread):
            return CALLED, _line(stack[:called_frames])
    phase = phase or (COMPUTING if loop_stack and _file(loop_stack[0]).startswith(_JAX) else PYTHON)
    return (recorded.exits, '') if recorded.exits else (phase, line)


def _phase(stack: list[FrameType]) -> str:
    return next(
        (phase for name in map(_scalax_function, stack) for phase in FUNCTIONS if name in FUNCTIONS[phase]),
        '',
    )


def _scalax_function(frame: FrameType) -> str:
    return frame.f_code.co_qualname if _file(frame).startswith(_PACKAGE) else ''


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _line(stack: list[FrameType]) -> str:
    frame = innermost_user_frame(stack, _file)
    return f'{file_text(_file(frame))}:{frame.f_lineno} in {frame.f_code.co_name}' if frame else ''
