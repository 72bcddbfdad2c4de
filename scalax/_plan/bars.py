"""Which bars show a plan? Those of memory and of seconds: for pages and pictures alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from scalax._report.svg import told_apart

if TYPE_CHECKING:
    from scalax._plan.plan import Plan
    from scalax._plan.roofline import Roofline

_ARGUMENTS, _TEMPORARIES, _OUTPUTS = told_apart(3)
_COLORS = {'compute': _OUTPUTS, 'hbm': _ARGUMENTS}


class Bar(NamedTuple):
    """One bar, or one part of one.

    Attributes:
        label: what it stands for.
        value: bytes or seconds.
        color: as ``'#77AADD'``.
        marked: whether it is the one that bounds the step.
    """

    label: str
    value: float
    color: str
    marked: bool = False


def memory_bars(plan: Plan) -> tuple[float, list[Bar]]:
    """How long the whole bar is (bytes), and its parts from the left."""
    memory = plan.memory
    kept = min(memory.arguments + memory.outputs, memory.peak)
    bars = [
        Bar('arguments', min(memory.arguments, memory.peak), _ARGUMENTS),
        Bar('outputs', max(0, kept - memory.arguments), _OUTPUTS),
        Bar('temporaries at the peak', memory.peak - kept, _TEMPORARIES),
    ]
    return max(memory.peak, memory.limit or 0, 1), bars


def time_bars(roofline: Roofline) -> list[Bar]:
    """What takes how many seconds."""
    return [
        Bar(name, seconds, _COLORS.get(name, _TEMPORARIES), name == roofline.bound)
        for name, seconds in roofline.parts.items()
    ]
