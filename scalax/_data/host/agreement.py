"""Agreement: all processes check that they make the same call before their data is joined.

Processes that disagree about a shape do not fail: they compile different programs, which wait for one
another for ever. So each process makes a statement about its call, and a digest of it is gathered. If digests
differ, text is exchanged, and every process raises an error that names the processes that differ.
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

_MOST = 400  # characters of one difference
_SHOWN = 10  # differences of one process


@dataclasses.dataclass(frozen=True)
class Statement:
    """What one process says about its call.

    Attributes:
        call: the options that must be the same everywhere, as text.
        leaves: (leaf path, what must be the same about the leaf) for each leaf.
        state: the progress of this process in words, where it can differ.
        trouble: why this process cannot take part, if it cannot.
        order: where in the mesh each device is.
    """

    call: str
    leaves: Sequence[tuple[str, str]] = ()
    state: str = ''
    trouble: str = ''
    order: str = ''


def agree(
    mesh: Mesh,
    what: str,
    call: str,
    leaves: Iterable[tuple[str, str]],
    advice: str,
    error: BaseException | None = None,
    *,
    state: str = '',
    kind: type[ScalaxError] = DataError,
) -> None:
    """Returns on every process if all make the same statement, and raises on every process if not.

    One all-gather of 20 bytes for each process. It waits for what the devices have been given to do. One
    process agrees with itself, and communicates nothing.

    Args:
        mesh: whose processes have to agree.
        what: the name of the call, for the message.
        call: the options that must be the same everywhere, as text.
        leaves: what must be the same about each leaf, as in `Statement`.
        advice: what to do, for the message.
        error: why this process cannot take part; raised here, and told to the others.
        state: the progress of this process, as in `Statement`.
        kind: the class of the error.

    Raises:
        ScalaxError: names the processes and leaves that differ.
    """
    processes = process_collectives.processes_of(mesh)
    if not processes.is_multiprocess:
        if error is not None:
            raise error
        return
    if error is None:
        try:
            statement = Statement(call, [*leaves], state, order=processes.order)
        except Exception as fault:  # noqa: BLE001 - raised once all processes know
            error = fault
    if error is not None:
        statement = Statement(call, trouble=f'{type(error).__name__}: {error}', order=processes.order)
    encoded = json.dumps(vars(statement)).encode()
    digest = hashlib.blake2b(encoded, digest_size=16).digest()
    mine = np.asarray([*np.frombuffer(digest, np.uint32), bool(statement.trouble)], np.uint32)
    rows = [tuple(row) for row in process_collectives.gather(mesh, mine).tolist()]
    found = _disagreement(mesh, statement, encoded, rows) if len(set(rows)) > 1 else []
    if error is not None:
        raise error
    if found:
        raise kind(f'{what}: the processes disagree ({call}):\n{shown(found)}\n{advice}')


def prepare_and_agree(
    mesh: Mesh,
    what: str,
    call: str,
    advice: str,
    prepare: Callable[[], tuple[Iterable[tuple[str, str]], Value]],
) -> Value:
    """Runs *prepare*, and returns its value once every process has made the same statement.

    Args:
        mesh: as for `agree`.
        what: as for `agree`.
        call: as for `agree`.
        advice: as for `agree`.
        prepare: all that may fail on one process alone; it communicates nothing. Returns what must be the
            same about each leaf, and the value.

    Raises:
        ScalaxError: as for `agree`. What *prepare* raises is raised here, and told to the others.
    """
    try:
        leaves, value = prepare()
    except Exception as error:
        agree(mesh, what, call, (), advice, error)
        raise
    agree(mesh, what, call, leaves, advice)
    return value


def _disagreement(mesh: Mesh, statement: Statement, encoded: bytes, rows: list[tuple[int, ...]]) -> list[str]:
    """Who differs and how, the same list on every process.

    Each process compares its statement with the most common one of those that can take part, so that only
    short texts are gathered, however large the trees are.
    """
    processes = process_collectives.processes_of(mesh)
    lines = [statement.trouble] if statement.trouble else []
    able = [row for row in rows if not row[-1]]
    if able:
        position = rows.index(Counter(able).most_common(1)[0][0])
        theirs = Statement(**json.loads(process_collectives.broadcast_bytes(mesh, position, encoded)))
        if not statement.trouble:
            lines = list(_differences(statement, theirs, f'process {processes.indices[position]}'))
    texts = [line if len(line) <= _MOST else f'{line[:_MOST]} ...' for line in lines]
    if len(texts) > _SHOWN:
        texts[_SHOWN:] = [f'... and {len(texts) - _SHOWN} more differences']
    return [
        f'process {index}: {line}'.replace('\n', '\n    ')
        for index, lines in zip(processes.indices, process_collectives.gather_json(mesh, texts), strict=True)
        for line in lines
    ]


def scalar_text(leaf: Any, dtype: Any) -> str:
    """A scalar with its exact value, which has to be the same on every process."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return f'{dtype} {np.asarray(jax.random.key_data(leaf)).tolist()}'
    return f'{weak_text(leaf)}{dtype} {np.asarray(leaf).astype(dtype)!s}'


def placed_text(leaf: Any) -> str:
    """An array, a struct, a number or its type, without values; with the spec where processes share it."""
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
    """What is put in front of a weak type: processes whose types differ would compile different programs."""
    return 'weakly typed ' if is_weakly_typed(leaf) else ''


def _differences(mine: Statement, theirs: Statement, other: str) -> Iterable[str]:
    """How one statement differs from that of the process named *other*."""
    if mine.call != theirs.call:
        yield f'calls it with {mine.call}, and {other} with {theirs.call}'
    if mine.order != theirs.order:
        yield f'has the devices of the mesh in another order than {other}'
    if mine.state != theirs.state:
        yield f'{mine.state}, and {other} {theirs.state}'
        return
    mine_by_path, by_path = dict(mine.leaves), dict(theirs.leaves)
    for path in dict.fromkeys([*by_path, *mine_by_path]):
        name = path or '(the leaf itself)'
        if path not in mine_by_path:
            yield f'{name} is missing, and {by_path[path]} on {other}'
        elif path not in by_path:
            yield f'{name} is {mine_by_path[path]}, and missing on {other}'
        elif mine_by_path[path] != by_path[path]:
            yield f'{name} is {mine_by_path[path]}, and {by_path[path]} on {other}'
    if mine_by_path == by_path and [*map(tuple, mine.leaves)] != [*map(tuple, theirs.leaves)]:
        yield f'has its leaves in another order than {other}'
