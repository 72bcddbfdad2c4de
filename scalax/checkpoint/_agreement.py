"""Agreement of processes on what to save or restore: they all do the same, or none does anything.

Each process reads its own part of a step, so all have to see the same steps, and none that is damaged.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from scalax._hostdata import agreement, collectives
from scalax._tree.paths import NamedTree
from scalax.checkpoint._files import orbax
from scalax.errors import CheckpointError

_NAME_BYTES = 12  # of the name of a save


def barrier(name: str, timeout: float, mesh: Mesh | None = None) -> None:
    """Waits for all processes, or those of a mesh; uses no device.

    Args:
        name: the name of this barrier, the same on every process.
        timeout: how many seconds to wait.
        mesh: whose processes; all by default.

    Raises:
        CheckpointError: some did not come.
    """
    indices = set(range(jax.process_count()) if mesh is None else collectives.processes_of(mesh).indices)
    if len(indices) == 1 or not jax.distributed.is_initialized():
        return
    some = None if len(indices) == jax.process_count() else indices
    try:
        sync = orbax().multihost.get_barrier_sync_fn(processes=some)
        sync(key=f'scalax.checkpoint {name}', timeout_ms=int(1000 * timeout))
    except Exception as error:
        raise CheckpointError(
            f'some processes did not make this call within {timeout:.0f} seconds, and all have to make it. '
            f'They are no longer in step: start the job again. {error}'
        ) from error


def agree_on_save(call: str, name: str, tree: NamedTree | None, error: BaseException | None) -> str:
    """Returns if all processes save the same; raises on every process if not.

    Args:
        call: the arguments, as text.
        name: this process's name for the save: 24 hexadecimal digits.
        tree: the state; None if there is none because of *error*.
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
            'for itself belongs in data=.'
        )
        mesh = Mesh(np.asarray(jax.devices(), dtype=object), ('device',))  # a save involves all processes
        statement, mine = agreement.Statement(call, leaves), bytes.fromhex(name)
        return agreement.agree(mesh, statement, 'save', advice, error, CheckpointError, mine)[0].hex()
    if error is not None:
        raise error
    return name


def _saved_text(leaf: Any) -> str:
    """What has to be the same on every process; for arrays on the host this includes the values."""
    text = agreement.placed_text(leaf)
    if isinstance(leaf, jax.Array):
        return text
    if not hasattr(leaf, 'dtype'):
        return f'{text} {leaf!r}'
    crc32 = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return f'{text} with the checksum {crc32:08x}'


def agree_on_restore(mesh: Mesh, call: str, wanted: Mapping[str, Any], error: BaseException | None) -> None:
    """Returns if all processes restore the same; raises on every process if not.

    Args:
        mesh: the mesh of the arrays.
        call: the arguments, as text.
        wanted: by path, structs with shardings, or the types of Python numbers.
        error: why this process cannot go on; raised here, and told to the others.

    Raises:
        CheckpointError: names the processes and leaves that differ.
    """
    if collectives.processes_of(mesh).several:
        leaves = [(path, agreement.placed_text(leaf)) for path, leaf in wanted.items()]
        advice = (
            'What to do: ask for the same tree on every process, and for the same step; without a step it is '
            'the latest that all of them see.'
        )
        statement = agreement.Statement(call, leaves)
        # As many bytes as a save shares: one process may save where another restores.
        shared = bytes(_NAME_BYTES)
        agreement.agree(mesh, statement, 'restore', advice, error, CheckpointError, shared)
    elif error is not None:
        raise error


@contextlib.contextmanager
def all_or_none(mesh: Mesh, call: str) -> Iterator[None]:
    """A part of a restore that has to succeed on every process of the mesh; errors are told to the others.

    Raises:
        CheckpointError: it failed on another process; on this one, its own error is raised.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as fault:  # noqa: BLE001 - raised once all processes know
        error = fault
    agree_on_restore(mesh, call, {}, error)


def common_steps(mesh: Mesh, steps: Sequence[int]) -> list[int]:
    """The steps that every process sees."""
    if not collectives.processes_of(mesh).several:
        return list(steps)
    seen = [set(json.loads(text)) for text in collectives.gather_bytes(mesh, json.dumps(steps).encode())]
    return sorted(set.intersection(*seen))


def common_damage(mesh: Mesh, look: Callable[[tuple[int, int]], list[str]]) -> list[str]:
    """What is wrong with the files of a step. Each process looks at some of them, and learns about all.

    Args:
        mesh: the mesh of the arrays.
        look: finds what is wrong, given the number of this process and how many there are.

    Raises:
        CheckpointError: a process cannot look.
    """
    processes = collectives.processes_of(mesh)
    share = (processes.here, len(processes.indices)) if processes.several else (0, 1)
    with all_or_none(mesh, 'the files of a step'):
        try:
            wrong = look(share)
        except OSError as error:
            wrong = [f'it cannot be read: {error}']
    if not processes.several:
        return wrong
    every = collectives.gather_bytes(mesh, json.dumps(wrong[:10]).encode())
    return list(dict.fromkeys(line for lines in every for line in json.loads(lines)))
