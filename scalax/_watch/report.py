"""Which processes are behind, and what is said about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scalax._watch.state import CALLED, ENDING, LOADING, PYTHON, RESTORING, SAVING, State
from scalax.errors import plural, shown

# What tells a process that is behind from those that wait for it, the surest first.
_SIGNS: tuple[Callable[[State], int], ...] = (
    lambda state: state.phase in (LOADING, SAVING, RESTORING, ENDING, CALLED),
    lambda state: -state.step,
    lambda state: state.phase == PYTHON,
)


def report(states: Sequence[State], late: bool, usual: float, silence: float, address: str) -> str:
    """What is said if a process is silent, or a step takes longer than it may; else empty.

    Args:
        states: of the processes.
        late: whether the step does.
        usual: the seconds of a step, as far as they are known.
        silence: after how many seconds a process that says nothing counts as stuck.
        address: where `scalax doctor --run` finds the program.
    """
    stuck = [state for state in states if state.silent > silence and state.phase != ENDING]
    silent = bool(stuck)
    for sign in _SIGNS:
        most = max(map(sign, states))
        if late and not stuck and any(sign(state) < most for state in states):
            stuck = [state for state in states if sign(state) == most]
    if not stuck and not (late and usual):  # they compile, as far as anybody can tell
        return ''
    step, ago = max((state.step, state.ago + state.silent) for state in states)
    head = f'{ago:.0f} s have passed since {"the start" if step < 0 else f"step {step}"}'
    head += f' (a step usually takes {usual:.2g} s)' if usual else ''
    head += f'; {plural(len(states) - len(stuck), "process waits", "processes wait")}' if stuck else ''
    cure = 'no process is behind; if that is healthy, give initialize a larger step_timeout'
    if stuck:
        cure = f'`py-spy dump --pid {stuck[0].pid}` on {stuck[0].host} shows the threads of that process'
    lines = []
    for state in stuck or states:
        who = f'process {state.process} (host {state.host}, pid {state.pid})'
        if stuck and not silent:
            who += ' is behind'
        elif silent:
            who += f' is stopped, dead or out of reach: silent for {state.silent:.0f} s; last'
        lines.append(f'{who}: {state.phase} for {state.since:.0f} s{state.line and f", at {state.line}"}')
        lines[-1] += f', after step {state.step}' if state.step >= 0 else ', before the first step'
        lines[-1] += state.before and f'; {state.before} before that'
    return (
        f'{head}:\n{shown(lines)}\nWhat to do: {cure}; `scalax doctor --run {address}` shows all processes.'
    )
