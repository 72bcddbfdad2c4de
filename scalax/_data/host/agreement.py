"""Agreement of processes: all check that they make the same call before their data are joined.

Processes that disagree about a shape do not fail: they compile different programs, which wait for one another
forever. So each process makes a statement about its call, and a digest of it is gathered. If the digests
differ, the processes exchange text, and every process raises an error that lists the processes that differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from scalax._core.pytree import partition_specs
from scalax._core.pytree.paths import dtype_on_devices, is_weakly_typed, type_text
from scalax._data.host import process_collectives
from scalax.errors import DataError, ScalaxError, shown

Value = TypeVar('Value')

_MAX_CHARACTERS = 400  # per difference
_MAX_DIFFERENCES = 10  # per process


@dataclasses.dataclass(frozen=True)
class Statement:
    """The statement of one process about its call.

    Attributes:
        options: the options of the call, as text.
        leaves: (leaf path, text that must be the same on every process) for each leaf.
        state: the progress of this process, such as whether its data have ended.
        error: why this process cannot take part; empty if it can.
        device_order: a digest of the positions of the devices in the mesh.
    """

    options: str
    leaves: Sequence[tuple[str, str]] = ()
    state: str = ''
    error: str = ''
    device_order: str = ''


def agree(
    mesh: Mesh,
    function: str,
    options: str,
    leaves: Iterable[tuple[str, str]],
    advice: str,
    error: BaseException | None = None,
    *,
    state: str = '',
    kind: type[ScalaxError] = DataError,
) -> None:
    """Returns on every process if all make the same statement; otherwise raises on every process.

    It costs one all-gather of 20 bytes per process, which waits for the programs that the devices have
    queued. A single process communicates nothing.

    Args:
        mesh: the mesh whose processes have to agree.
        function: the name of the function that was called, for the message.
        options: the options of the call, as text.
        leaves: as in `Statement`.
        advice: what to do, for the message.
        error: why this process cannot take part. It is raised here, and reported to the other processes.
        state: as in `Statement`.
        kind: the class of the error.

    Raises:
        ScalaxError: lists the processes and leaves that differ.
    """
    processes = process_collectives.processes_of(mesh)
    if not processes.is_multiprocess:
        if error is not None:
            raise error
        return
    if error is None:
        try:
            statement = Statement(options, [*leaves], state, device_order=processes.order)
        except Exception as fault:  # noqa: BLE001 - raised once all processes know
            error = fault
    if error is not None:
        text = f'{type(error).__name__}: {error}'
        statement = Statement(options, error=text, device_order=processes.order)
    encoded = json.dumps(vars(statement)).encode()
    digest = hashlib.blake2b(encoded, digest_size=16).digest()
    words = np.asarray([*np.frombuffer(digest, np.uint32), bool(statement.error)], np.uint32)
    digests = [tuple(words) for words in process_collectives.gather(mesh, words).tolist()]
    differences = _all_differences(mesh, statement, encoded, digests) if len(set(digests)) > 1 else []
    if error is not None:
        raise error
    if differences:
        raise kind(f'{function}: the processes disagree ({options}):\n{shown(differences)}\n{advice}')


def prepare_and_agree(
    mesh: Mesh,
    function: str,
    options: str,
    advice: str,
    prepare: Callable[[], tuple[Iterable[tuple[str, str]], Value]],
) -> Value:
    """Calls *prepare*, and returns its value once every process has made the same statement.

    Args:
        mesh: as for `agree`.
        function: as for `agree`.
        options: as for `agree`.
        advice: as for `agree`.
        prepare: the work that may fail on one process alone; it must not communicate. It returns the leaves
            of the statement, and a value.

    Raises:
        ScalaxError: as for `agree`. An error of *prepare* is raised here, and reported to the others.
    """
    try:
        leaves, value = prepare()
    except Exception as error:
        agree(mesh, function, options, (), advice, error)
        raise
    agree(mesh, function, options, leaves, advice)
    return value


def _all_differences(
    mesh: Mesh, statement: Statement, encoded: bytes, digests: list[tuple[int, ...]]
) -> list[str]:
    """Returns the differences between the statements of all processes: the same list on every process.

    Each process compares its statement with the most common statement without an error, so that only short
    texts are gathered, even for large trees.
    """
    processes = process_collectives.processes_of(mesh)
    lines = [statement.error] if statement.error else []
    without_error = [digest for digest in digests if not digest[-1]]
    if without_error:
        position = digests.index(Counter(without_error).most_common(1)[0][0])
        common = Statement(**json.loads(process_collectives.broadcast_bytes(mesh, position, encoded)))
        if not statement.error:
            lines = list(_differences(statement, common, f'process {processes.indices[position]}'))
    texts = [line if len(line) <= _MAX_CHARACTERS else f'{line[:_MAX_CHARACTERS]} ...' for line in lines]
    if len(texts) > _MAX_DIFFERENCES:
        texts[_MAX_DIFFERENCES:] = [f'... and {len(texts) - _MAX_DIFFERENCES} more differences']
    return [
        f'process {index}: {line}'.replace('\n', '\n    ')
        for index, lines in zip(processes.indices, process_collectives.gather_json(mesh, texts), strict=True)
        for line in lines
    ]


def scalar_text(leaf: Any, dtype: Any) -> str:
    """Describes a scalar with its exact value, which must be the same on every process."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return f'{dtype} {np.asarray(jax.random.key_data(leaf)).tolist()}'
    return f'{weak_text(leaf)}{dtype} {np.asarray(leaf).astype(dtype)!s}'


def placed_text(leaf: Any) -> str:
    """Describes an array, struct, Python number or type without its values.

    It includes the spec if the sharding spans several processes.
    """
    if not hasattr(leaf, 'dtype'):
        return f'Python {(leaf if isinstance(leaf, type) else type(leaf)).__name__}'
    text = weak_text(leaf) + type_text(dtype_on_devices(leaf), np.shape(leaf))
    sharding = getattr(leaf, 'sharding', None)
    if sharding is not None and not sharding.is_fully_addressable:
        text += (
            f' as {partition_specs.text(sharding.spec) if isinstance(sharding, NamedSharding) else sharding}'
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        text += ', deleted'
    return text


def weak_text(leaf: Any) -> str:
    """Returns the prefix of a weak type: processes with different types would compile different programs."""
    return 'weakly typed ' if is_weakly_typed(leaf) else ''


def _differences(statement: Statement, other: Statement, name: str) -> Iterable[str]:
    """Yields the differences between a statement and that of the process *name*."""
    if statement.options != other.options:
        yield f'calls it with {statement.options}, and {name} with {other.options}'
    if statement.device_order != other.device_order:
        yield f'has the devices of the mesh in another order than {name}'
    if statement.state != other.state:
        yield f'{statement.state}, and {name} {other.state}'
        return
    texts, other_texts = dict(statement.leaves), dict(other.leaves)
    for path in dict.fromkeys([*other_texts, *texts]):
        leaf = path or '(the leaf itself)'
        if path not in texts:
            yield f'{leaf} is missing, and {other_texts[path]} on {name}'
        elif path not in other_texts:
            yield f'{leaf} is {texts[path]}, and missing on {name}'
        elif texts[path] != other_texts[path]:
            yield f'{leaf} is {texts[path]}, and {other_texts[path]} on {name}'
    if texts == other_texts and [*map(tuple, statement.leaves)] != [*map(tuple, other.leaves)]:
        yield f'has its leaves in another order than {name}'
