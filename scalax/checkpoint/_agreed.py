"""What is asked for, which steps are there, and which are sound, in the eyes of every process?

They all restore the same, or none does: each reads its own part of a step.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from scalax._hostdata import agreement, collectives
from scalax._tree import specs
from scalax._tree.paths import NamedTree
from scalax.checkpoint._orbax import orbax
from scalax.errors import CheckpointError

_SHARED = 12  # bytes


def meet(where: str, timeout: float, mesh: Mesh | None = None) -> None:
    """Waits until all processes have come, or those of a mesh; no device is involved.

    Args:
        where: the name of this meeting, the same on every process.
        timeout: how many seconds to wait.
        mesh: whose processes; all by default.

    Raises:
        CheckpointError: some have not come.
    """
    indices = set(range(jax.process_count()) if mesh is None else collectives.processes_of(mesh).indices)
    if len(indices) == 1 or not jax.distributed.is_initialized():
        return
    several = None if len(indices) == jax.process_count() else indices
    try:
        barrier = orbax().multihost.get_barrier_sync_fn(processes=several)
        barrier(key=f'scalax.checkpoint {where}', timeout_ms=int(1000 * timeout))
    except Exception as error:
        raise CheckpointError(
            f'some processes have not come within {timeout:.0f} seconds, and all have to make this call. '
            f'They cannot meet any more: start the job again. {error}'
        ) from error


def saved_alike(call: str, name: str, tree: NamedTree | None, error: BaseException | None) -> str:
    """Returns if all processes save the same; raises on every process if not.

    Args:
        call: the arguments, as text.
        name: by which this process would call the save: 24 hexadecimal digits.
        tree: the state; None where there is none because of *error*.
        error: why this process cannot save; raised here, and told to the others.

    Returns:
        The name that process 0 has given.

    Raises:
        CheckpointError: names the processes and leaves that differ.
    """
    if jax.process_count() > 1:
        leaves = [] if tree is None else [*zip(tree.paths, map(_saved_text, tree.leaves), strict=True)]
        advice = (
            'What to do: save the same step of the same tree on every process; a leaf that every process has '
            'for itself belongs into data=.'
        )
        mesh = Mesh(np.asarray(jax.devices(), dtype=object), ('device',))  # all of them take part in a save
        statement, mine = agreement.Statement(call, leaves), bytes.fromhex(name)
        return agreement.agree(mesh, statement, 'save', advice, error, CheckpointError, mine)[0].hex()
    if error is not None:
        raise error
    return name


def _saved_text(leaf: Any) -> str:
    """What is saved once, and so must be the same everywhere: of arrays on the host also the values."""
    if isinstance(leaf, jax.Array):
        spec = specs.text(leaf.sharding.spec) if isinstance(leaf.sharding, NamedSharding) else ''
        return f'{leaf.dtype}{list(leaf.shape)} as {spec}'
    if hasattr(leaf, 'dtype'):
        crc32 = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        return f'{leaf.dtype}{list(leaf.shape)} with the checksum {crc32:08x}'
    return f'Python {type(leaf).__name__} {leaf!r}'


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
    if collectives.processes_of(mesh).several:
        leaves = [(path, _text(leaf)) for path, leaf in wanted.items()]
        advice = (
            'What to do: ask for the same tree on every process, and for the same step; without a step it is '
            'the latest that all of them see.'
        )
        statement = agreement.Statement(call, leaves)
        # As many bytes as a save shares: one process may save where another restores.
        agreement.agree(mesh, statement, 'restore', advice, error, CheckpointError, bytes(_SHARED))
    elif error is not None:
        raise error


def _text(leaf: Any) -> str:
    if isinstance(leaf, type):
        return f'Python {leaf.__name__}'
    return f'{leaf.dtype}{list(leaf.shape)} as {specs.text(leaf.sharding.spec)}'


def steps(mesh: Mesh, found: Sequence[int]) -> list[int]:
    """The steps that every process sees."""
    if not collectives.processes_of(mesh).several:
        return list(found)
    seen = [set(json.loads(text)) for text in collectives.gather_bytes(mesh, json.dumps(found).encode())]
    return sorted(set.intersection(*seen))


def damage(mesh: Mesh, look: Callable[[tuple[int, int]], list[str]]) -> list[str]:
    """What is wrong with a step's files; every process looks at some of them, and learns of all.

    Args:
        mesh: of the arrays.
        look: finds what is wrong, given the number of this process and how many there are.

    Raises:
        CheckpointError: a process cannot look.
    """
    processes = collectives.processes_of(mesh)
    share = (processes.here, len(processes.indices)) if processes.several else (0, 1)
    wrong: list[str] = []
    error: CheckpointError | None = None
    try:
        wrong = look(share)
    except OSError as fault:
        wrong = [f'it cannot be read: {fault}']
    except CheckpointError as fault:
        error = fault
    if processes.several:
        said = json.dumps([wrong[:10], error and str(error)]).encode()
        found = [json.loads(text) for text in collectives.gather_bytes(mesh, said)]
        wrong = list(dict.fromkeys(line for lines, _ in found for line in lines))
        errors = [text for _, text in found if text is not None]
        error = error or (CheckpointError(errors[0]) if errors else None)
    if error is not None:
        raise error
    return wrong
