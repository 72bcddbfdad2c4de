"""What the property tests of rules share: how rules are asked.

As a program it answers for another process: it reads situations and prints what they come to.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from scalax.errors import IndivisibleWarning, ScalaxError
from tests.support.rule_language import Situation, make


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, ScalaxError | None, bool]:
    """What a call returns, or its error; and whether it warned. Any other error fails the test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        try:
            result, error = call(*args), None
        except ScalaxError as raised:
            result, error = None, raised
    assert {warning.category for warning in caught} <= {IndivisibleWarning}
    return result, error, bool(caught)


def told(situation: Situation) -> str:
    """All that is decided about a situation, as text."""
    helper = situation.mesh.helper()
    report, error, warned = attempt(helper.explain, situation.tree, make(situation.terms, situation.mesh))
    return f'{warned}\n{report.to_json() if error is None else error}'


def backwards(situation: Situation) -> Situation:
    """The same on the same devices in another order."""
    mesh = situation.mesh
    order = None if mesh.order is None else 1 - min(mesh.order, 1)
    return dataclasses.replace(situation, mesh=dataclasses.replace(mesh, order=order))


def told_by_another_process(situations: list[Situation], folder: Path, seed: str) -> list[str]:
    """What a new Python says, which hashes strings in another way and counts the devices backwards."""
    path = folder / 'situations.pickle'
    path.write_bytes(pickle.dumps(situations))
    process = subprocess.run(
        [sys.executable, '-m', 'tests.support.rule_examples', str(path)],
        env={**os.environ, 'PYTHONHASHSEED': seed, 'PYTHONPATH': os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    texts: list[str] = json.loads(process.stdout)
    return texts


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 8)
    print(json.dumps([told(backwards(one)) for one in pickle.loads(Path(sys.argv[1]).read_bytes())]))
