"""Agreement of processes on what to save or restore: all do the same, or none does anything.

Each process reads its part of a step, so all of them have to see the same undamaged steps. Without agreement,
Orbax waits for a process that does something else until a timeout, or until the job is ended.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from scalax._core.pytree.paths import NamedTree
from scalax._data.host import agreement, process_collectives
from scalax._jax.orbax import wait_for_processes
from scalax.errors import CheckpointError

_ADVICE = {
    'save': 'What to do: save the same step of the same tree on every process; pass state that differs '
    'between processes as data=.',
    'restore': 'What to do: restore the same tree and the same step on every process; without step it is '
    'the latest step that all of them see.',
}


def barrier(name: str, timeout: float, mesh: Mesh | None = None) -> None:
    """Waits for all processes, or for the processes of a mesh, without using devices.

    Args:
        name: the name of this barrier, the same on every process.
        timeout: the maximum seconds to wait.
        mesh: the mesh of the processes; all processes by default.

    Raises:
        CheckpointError: some processes did not reach the barrier.
    """
    indices = set(
        range(jax.process_count()) if mesh is None else process_collectives.processes_of(mesh).indices
    )
    if len(indices) == 1 or not jax.distributed.is_initialized():
        return
    subset = None if len(indices) == jax.process_count() else indices
    try:
        wait_for_processes(f'scalax.checkpoint {name}', subset, timeout)
    except Exception as error:
        raise CheckpointError(
            f'some processes did not make this call within {timeout:.0f} seconds; all processes have to make '
            f'it. They are out of step: restart the job. {error}'
        ) from error


def agree(
    function: Literal['save', 'restore'],
    mesh: Mesh,
    options: str,
    leaves: Iterable[tuple[str, str]],
    error: BaseException | None,
) -> None:
    """Returns if all processes make the same call; otherwise raises on every process.

    Args:
        function: the function that was called.
        mesh: the mesh whose processes have to agree.
        options: the options of the call, as text.
        leaves: (leaf path, text that must be the same on every process) for each leaf.
        error: why this process cannot take part. It is raised here, and reported to the other processes.

    Raises:
        CheckpointError: lists the processes and leaves that differ.
    """
    agreement.agree(mesh, function, options, leaves, _ADVICE[function], error, kind=CheckpointError)


def save_name_of_process_0(mesh: Mesh, name: str) -> str:
    """Returns the name of a save on process 0; each process passes its own."""
    return str(process_collectives.gather_json(mesh, name)[0])


def saved_texts(tree: NamedTree | None) -> Iterator[tuple[str, str]]:
    """Yields (leaf path, text that must be the same on every process), with the values of host arrays."""
    for path, leaf in zip(tree.paths, tree.leaves, strict=True) if tree else ():
        text = agreement.placed_text(leaf)
        if not hasattr(leaf, 'dtype'):
            text += f' {leaf!r}'
        elif not isinstance(leaf, jax.Array):
            crc32 = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
            text += f' with the checksum {crc32:08x}'
        yield path, text


@contextlib.contextmanager
def all_or_none(mesh: Mesh, options: str) -> Iterator[None]:
    """Makes all processes of a mesh raise if a part of a restore fails on one of them.

    Raises:
        CheckpointError: it failed on another process. If it failed on this process, its error is raised.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as fault:  # noqa: BLE001 - raised once all processes know
        error = fault
    agree('restore', mesh, options, (), error)


def common_steps(mesh: Mesh, steps: Sequence[int]) -> list[int]:
    """Returns the steps that every process sees."""
    return sorted(set.intersection(*map(set, process_collectives.gather_json(mesh, steps))))


def common_damage(mesh: Mesh, find_damage: Callable[[tuple[int, int]], list[str]]) -> list[str]:
    """Returns the damage of the files of a step. Each process checks a share of them, and gets all results.

    Args:
        mesh: the mesh of the arrays.
        find_damage: checks a share of the files, given the position of this process and the number of
            processes.

    Raises:
        CheckpointError: a process cannot check its share.
    """
    processes = process_collectives.processes_of(mesh)
    with all_or_none(mesh, 'the files of a step'):
        try:
            damage = find_damage((processes.position, len(processes.indices)))
        except OSError as error:
            damage = [f'it cannot be read: {error}']
    return list(dict.fromkeys(itertools.chain(*process_collectives.gather_json(mesh, damage[:10]))))
