"""Agreement of processes on what to save or restore: they all do the same, or none does anything.

Each process reads its own part of a step, so all have to see the same steps, and none that is damaged. Orbax
alone waits where a process does something else, until the time is up or the job is ended.
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
    'save': 'What to do: save the same step of the same tree on every process; pass what differs between '
    'processes as data=.',
    'restore': 'What to do: restore the same tree and the same step on every process; without step it is '
    'the latest that all of them see.',
}


def barrier(name: str, timeout: float, mesh: Mesh | None = None) -> None:
    """Waits for all processes, or those of a mesh; uses no device.

    Args:
        name: the name of this barrier, the same on every process.
        timeout: how many seconds to wait.
        mesh: whose processes; all by default.

    Raises:
        CheckpointError: some did not come.
    """
    indices = set(
        range(jax.process_count()) if mesh is None else process_collectives.processes_of(mesh).indices
    )
    if len(indices) == 1 or not jax.distributed.is_initialized():
        return
    some = None if len(indices) == jax.process_count() else indices
    try:
        wait_for_processes(f'scalax.checkpoint {name}', some, timeout)
    except Exception as error:
        raise CheckpointError(
            f'some processes did not make this call within {timeout:.0f} seconds; all processes have to make '
            f'it. They are out of step: restart the job. {error}'
        ) from error


def agree(
    what: Literal['save', 'restore'],
    mesh: Mesh,
    call: str,
    leaves: Iterable[tuple[str, str]],
    error: BaseException | None,
) -> None:
    """Returns if all processes ask for the same; raises on every process if not.

    Args:
        what: the name of the call.
        mesh: whose processes have to agree.
        call: the arguments, as text.
        leaves: by path, what has to be the same about each leaf.
        error: why this process cannot go on; raised here, and told to the others.

    Raises:
        CheckpointError: names the processes and leaves that differ.
    """
    agreement.agree(mesh, what, call, leaves, _ADVICE[what], error, kind=CheckpointError)


def name_of_first(mesh: Mesh, name: str) -> str:
    """The name that process 0 has for a save; each process gives its own."""
    return str(process_collectives.gather_json(mesh, name)[0])


def saved_texts(tree: NamedTree | None) -> Iterator[tuple[str, str]]:
    """What has to be the same on every process; for arrays on the host this includes the values."""
    for path, leaf in zip(tree.paths, tree.leaves, strict=True) if tree else ():
        text = agreement.placed_text(leaf)
        if not hasattr(leaf, 'dtype'):
            text += f' {leaf!r}'
        elif not isinstance(leaf, jax.Array):
            crc32 = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
            text += f' with the checksum {crc32:08x}'
        yield path, text


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
    agree('restore', mesh, call, (), error)


def common_steps(mesh: Mesh, steps: Sequence[int]) -> list[int]:
    """The steps that every process sees."""
    return sorted(set.intersection(*map(set, process_collectives.gather_json(mesh, steps))))


def common_damage(mesh: Mesh, look: Callable[[tuple[int, int]], list[str]]) -> list[str]:
    """What is wrong with the files of a step. Each process looks at some of them, and learns about all.

    Args:
        mesh: the mesh of the arrays.
        look: finds what is wrong, given the number of this process and how many there are.

    Raises:
        CheckpointError: a process cannot look.
    """
    processes = process_collectives.processes_of(mesh)
    with all_or_none(mesh, 'the files of a step'):
        try:
            wrong = look((processes.position, len(processes.indices)))
        except OSError as error:
            wrong = [f'it cannot be read: {error}']
    return list(dict.fromkeys(itertools.chain(*process_collectives.gather_json(mesh, wrong[:10]))))
