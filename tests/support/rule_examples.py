"""Resolution of random situations for the property tests of rules.

As a program, it reads situations from a file and prints their outcomes, to compare two processes.
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
    """Returns the result of a call or its ScalaxError, and whether it warned about indivisible dimensions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        try:
            result, error = call(*args), None
        except ScalaxError as raised:
            result, error = None, raised
    assert {warning.category for warning in caught} <= {IndivisibleWarning}
    return result, error, bool(caught)


def outcome_text(situation: Situation) -> str:
    """Returns all decisions about a situation as text."""
    helper = situation.mesh.helper()
    report, error, warned = attempt(helper.explain, situation.tree, make(situation.terms, situation.mesh))
    return f'{warned}\n{report.to_json() if error is None else error}'


def backwards(situation: Situation) -> Situation:
    """Returns the situation with its devices in another order."""
    mesh = situation.mesh
    order = None if mesh.order is None else 1 - min(mesh.order, 1)
    return dataclasses.replace(situation, mesh=dataclasses.replace(mesh, order=order))


def outcome_texts_of_another_process(situations: list[Situation], folder: Path, seed: str) -> list[str]:
    """Returns the outcomes in a new process with another hash seed and another order of devices."""
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
    drawn = pickle.loads(Path(sys.argv[1]).read_bytes())
    print(json.dumps([outcome_text(backwards(situation)) for situation in drawn]))
