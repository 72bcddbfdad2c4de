"""What is asked for, which steps are there, and which are sound, in the eyes of every process?

They all restore the same, or none does: each reads its own part of a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from scalax import _agree, _processes, _spec
from scalax.checkpoint._saved import Saved
from scalax.errors import CheckpointError


def same(mesh: Mesh, call: str, wanted: Mapping[str, Any], error: BaseException | None) -> None:
    """Returns if all processes ask for the same; raises on every process if not.

    Args:
        mesh: of the arrays.
        call: the arguments, as text.
        wanted: by path, structs with shardings, or the types of Python numbers.
        error: why this process cannot go on; raised here, and told to the others.

    Raises:
        CheckpointError: names the processes and leaves that differ.
    """
    if _processes.processes_of(mesh).several:
        leaves = [(path, _text(leaf)) for path, leaf in wanted.items()]
        advice = (
            'What to do: ask for the same tree on every process, and for the same step; without a step it is '
            'the latest that all of them see.'
        )
        statement = _agree.Statement(call, leaves)
        _agree.agree(mesh, statement, 'restore', advice, error, CheckpointError)
    elif error is not None:
        raise error


def _text(leaf: Any) -> str:
    if isinstance(leaf, type):
        return f'Python {leaf.__name__}'
    return f'{leaf.dtype}{list(leaf.shape)} as {_spec.text(leaf.sharding.spec)}'


def steps(mesh: Mesh, found: Sequence[int]) -> list[int]:
    """The steps that every process sees."""
    if not _processes.processes_of(mesh).several:
        return list(found)
    seen = [set(json.loads(text)) for text in _processes.gather_bytes(mesh, json.dumps(found).encode())]
    return sorted(set.intersection(*seen))


def damage(mesh: Mesh, saved: Saved, checksums: bool) -> list[str]:
    """What is wrong with a step's files; every process looks at some of them, and learns of all."""
    processes = _processes.processes_of(mesh)
    if not processes.several:
        return saved.damage(checksums)
    mine = saved.damage(checksums, (processes.here, len(processes.indices)))
    texts = _processes.gather_bytes(mesh, json.dumps(mine[:10]).encode())
    return list(dict.fromkeys(line for text in texts for line in json.loads(text)))
