"""The progress of a search: a bar in a terminal, else log messages."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator

_log = logging.getLogger('scalax.search')

Advance = Callable[[str], None]
"""Called with the name of the next step, when the one before it is done."""


@contextlib.contextmanager
def progress(steps: int, shown: bool | None) -> Iterator[Advance]:
    """A progress bar in a terminal if rich is installed, else a log message for each step.

    Args:
        steps: the number of steps.
        shown: whether to show it; by default if stderr is a terminal.
    """
    if shown is None:
        shown = sys.stderr.isatty()
    if not shown:
        yield lambda text: None
    elif importlib.util.find_spec('rich'):
        with _rich(steps) as advance:
            yield advance
    else:
        yield lambda text: _log.info('planning %s', text)


@contextlib.contextmanager
def _rich(steps: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    step = TextColumn('{task.description}', markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), step)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task('', total=steps)
        started = False

        def advance(text: str) -> None:
            nonlocal started
            bar.update(task, description=text, advance=int(started))
            started = True

        yield advance
