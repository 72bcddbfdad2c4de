"""Which steps are there, and which are sound, in the eyes of every process? They all restore the same."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jax.sharding import Mesh

from scalax import _processes
from scalax.checkpoint._saved import Saved


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
