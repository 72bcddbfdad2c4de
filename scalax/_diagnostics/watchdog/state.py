"""The state of a process: its step, what it does, and at which line, read from the stacks of its threads."""

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
"""The functions of scalax in which a thread does this; the innermost counts."""
THREADS = {LOADING: '_load_all', SAVING: 'SaveThread.run'}
"""The functions of the threads that do it where the first one waits for them."""

_JAX = os.path.dirname(jax.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep

ProcessState = namedtuple('ProcessState', 'process host pid step ago phase since line before silent')
"""The state of a process; times are in seconds before now, because clocks differ.

Attributes:
    process: its index.
    host: the name of its host.
    pid: its id there.
    step: the last step that has ended; 0 before the first.
    ago: when that was.
    phase: what it does.
    since: for how long.
    line: the line of the user's code; may be empty.
    before: what it did before; may be empty.
    silent: how long nothing has been heard of it.
"""


recorded = SimpleNamespace(step=(0, time.monotonic(), 0), thread=threading.main_thread().ident, exits='')
"""What steps note.

Attributes:
    step: the last one that has ended (0: none yet), when that was, and how many have.
    thread: in which thread.
    exits: `FINISHING` or `ENDING` once the program has ended; JAX may then wait for the other processes.
"""


def record_step(step: int) -> None:
    """Notes that a step has ended; may be called several times for one step."""
    if step != recorded.step[0]:
        recorded.step, recorded.thread = (step, time.monotonic(), recorded.step[2] + 1), threading.get_ident()


def sample_state(process: int, then: ProcessState | None) -> ProcessState:
    """The state of this process, given the one before."""
    (step, begun, _), (phase, line) = recorded.step, _phase_and_line()
    then, ago = then or ProcessState(0, '', 0, 0, 0.0, '', 0.0, '', '', 0.0), time.monotonic() - begun
    before = then.before if phase == then.phase else then.phase
    same = (step, phase, line) == (then.step, then.phase, then.line)
    since = then.since + ago - then.ago if same else 0.0
    return ProcessState(
        process, socket.gethostname(), os.getpid(), step, ago, phase, since, line[-200:], before, 0.0
    )


def _phase_and_line() -> tuple[str, str]:
    """What the training loop does, and at which line of the user's code.

    Where JAX calls the user's code (a callback, or tracing), that is the answer, in any thread that JAX has
    started: one whose outermost frame is not that of Python's own threads.
    """
    # A function that Python documents. The stack of a thread that runs may come out short.
    stacks = {i: [at[0] for at in traceback.walk_stack(top)] for i, top in sys._current_frames().items()}
    own = stacks.get(recorded.thread or 0, [])
    phase, line = _phase(own), _line(own)
    for ident, stack in stacks.items():
        if THREADS.get(phase, '?') in map(_own_name, stack[1:]):
            phase, line = _phase(stack) or phase, _line(stack) or line
        inside = next((i for i, frame in enumerate(stack) if _file(frame).startswith(_JAX)), 0)
        of_jax = ident != threading.main_thread().ident and _file(stack[-1]) != threading.__file__
        if inside and (not phase if stack is own else of_jax):
            return CALLED, _line(stack[:inside])
    phase = phase or (COMPUTING if own and _file(own[0]).startswith(_JAX) else PYTHON)
    return (recorded.exits, '') if recorded.exits else (phase, line)


def _phase(stack: list[FrameType]) -> str:
    return next(
        (phase for name in map(_own_name, stack) for phase in FUNCTIONS if name in FUNCTIONS[phase]), ''
    )


def _own_name(frame: FrameType) -> str:
    return frame.f_code.co_qualname if _file(frame).startswith(_PACKAGE) else ''


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _line(stack: list[FrameType]) -> str:
    frame = innermost_user_frame(stack, _file)
    return f'{file_text(_file(frame))}:{frame.f_lineno} in {frame.f_code.co_name}' if frame else ''
