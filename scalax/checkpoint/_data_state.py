"""What is kept of a data iterator? Its state as bytes, one for each process."""

from __future__ import annotations

import json
from typing import Any

import jax

from scalax.checkpoint._json_file import parsed
from scalax.checkpoint._saved import MOST_DATA, Saved
from scalax.errors import ArgumentError, CheckpointError

_BYTES, _JSON = b'B', b'J'


def encode(data: Any) -> bytes:
    """The state of an iterator that has ``get_state``, or a value, as bytes.

    Raises:
        CheckpointError: it is neither bytes nor JSON, or too large.
    """
    state = data.get_state() if hasattr(data, 'get_state') else data
    try:
        encoded = _BYTES + state if isinstance(state, bytes) else _JSON + json.dumps(state).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f'data={type(data).__name__}: its state, a {type(state).__name__}, is neither bytes nor JSON '
            f'({error}). Give an iterator with get_state() and set_state(), bytes, or what json.dumps takes'
        ) from error
    if len(encoded) > MOST_DATA:
        raise CheckpointError(f'data: its state has {len(encoded)} bytes, and at most {MOST_DATA} are kept')
    return encoded


def require_settable(data: Any) -> None:
    """Raises ArgumentError if *data* is something that cannot be given a state."""
    if data is not None and not hasattr(data, 'set_state'):
        raise ArgumentError(
            f'restore: data is the iterator to set to what was saved, with set_state(), got {data!r}. What '
            'was saved as bytes or as a value, Checkpointer.data() returns'
        )


def decode(encoded: bytes) -> Any:
    """The inverse of `encode`, as far as JSON keeps what it is given (tuples become lists).

    Raises:
        ValueError: `encode` has not made it.
    """
    kind, state = encoded[:1], encoded[1:]
    if kind not in (_BYTES, _JSON):
        raise ValueError('it is neither bytes nor JSON')
    return state if kind == _BYTES else parsed(state)


def restored(saved: Saved, processes: int) -> Any:
    """The state that this process saved.

    Args:
        saved: the step.
        processes: how many saved it.

    Raises:
        CheckpointError: there is none, or another number of processes saved it.
    """
    if processes != jax.process_count():
        raise CheckpointError(
            f'{saved.where} holds the data states of {processes} processes, and these are '
            f'{jax.process_count()}: each process reads other data now. Restore without data=, and set the '
            'iterator yourself'
        )
    try:
        encoded = saved.data(jax.process_index())
        state = None if encoded is None else decode(encoded)
    except (OSError, ValueError) as error:
        name = f'scalax/data.{jax.process_index()}'
        raise CheckpointError(f'{saved.where} cannot be read: {name}: {error}') from error
    if encoded is None:
        raise CheckpointError(f'{saved.where} has no data state: save(..., data=iterator) keeps one')
    return state


def damage(saved: Saved) -> list[str]:
    """What is wrong with the state that this process saved, if it saved one."""
    try:
        encoded = saved.data(jax.process_index())
        if encoded is not None:
            decode(encoded)
    except (OSError, ValueError) as error:
        return [f'scalax/data.{jax.process_index()} cannot be read: {error}']
    return []
