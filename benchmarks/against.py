"""This checkout of scalax compared with a release; each is timed against hand-written JAX.

One process cannot import two libraries of the same name. So each library is timed against hand-written JAX
in its own process, call by call, and the table compares these ratios. The processes alternate,
and the table shows the medians of their ratios. Both libraries use the interpreter and the JAX of the
environment in which the release is installed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import Row, human_seconds, render

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 1800


def table(release: str, rounds: int, only: str, repeats: int) -> str:
    """Returns the comparison as text: the versions, and a Markdown table."""
    python = ROOT / f'.venv-{release}' / 'bin' / 'python'
    if not python.exists():
        sys.exit(f'there is no {python}: make bench ARGS="--against {release}" makes it')
    measured: dict[str, list[dict[str, Any]]] = {'checkout': [], 'installed': []}
    for repeat in range(repeats):
        for library in measured if repeat % 2 else reversed(measured):
            for devices in (1, 8):
                print(f'{library}, {devices} devices, {repeat + 1} of {repeats}', file=sys.stderr)
                measured[library].append(measure(str(python), library, devices, rounds, only))
    first = measured['checkout'][0]
    if measured['installed'][0]['scalax'] != release:
        sys.exit(f'{python} has scalax {measured["installed"][0]["scalax"]} installed, not {release}')
    head = f'JAX {first["jax"]}, Python {first["python"]}, simulated CPU devices, {os.cpu_count()} cores'
    rows = {
        library: [Row(**row) for process in processes for row in process['rows']]
        for library, processes in measured.items()
    }
    if not rows['checkout']:
        sys.exit(f'no group that {release} can run holds {only!r} in its name')
    columns = ('what', 'by hand', 'scalax / by hand', f'{release} / by hand')
    return f'{head}\n\n{render(columns, merged(rows["checkout"], rows["installed"]))}'


def measure(python: str, library: str, devices: int, rounds: int, only: str) -> dict[str, Any]:
    """Returns the measurements of one process (``worker.py``)."""
    hidden = ('PYTHONPATH', 'XLA_FLAGS', 'JAX_PLATFORMS', 'JAX_NUM_CPU_DEVICES')
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    worker = Path(__file__).with_name('worker.py')
    command = [python, str(worker), library, str(devices), str(rounds), only]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=_TIMEOUT_S
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def merged(ours: Sequence[Row], before: Sequence[Row]) -> Sequence[Sequence[str]]:
    """Returns the medians over processes, row by row, of the two libraries."""
    lines: list[tuple[str, ...]] = []
    for name in dict.fromkeys(row.name for row in ours):
        new_rows, old_rows = ([row for row in rows if row.name == name] for rows in (ours, before))
        hand = statistics.median(row.reference for row in (*new_rows, *old_rows))
        by_hand = f'{hand:g}' if new_rows[0].counted else human_seconds(hand)
        lines.append((name, by_hand, _middle(new_rows), _middle(old_rows)))
    return lines


def _middle(rows: Sequence[Row]) -> str:
    if rows[0].counted:
        return f'{statistics.median(row.ours for row in rows):g}'
    return f'{statistics.median(row.ratio for row in rows):.3f}'
