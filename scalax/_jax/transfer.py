"""Transfers of arrays between programs that JAX has not connected, by `jax.experimental.transfer`."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from scalax.errors import MissingDependencyError


@functools.cache
def server(host: str) -> Any:
    """Returns the transfer server of this process at an address; its ``address()`` has the port.

    Relies on `jax.experimental.transfer`, which no documentation describes, and on ``client`` of a device.

    Raises:
        MissingDependencyError: this JAX, or its jaxlib for these devices, has no such server.
    """
    try:
        from jax.experimental import transfer

        return transfer.start_transfer_server(jax.local_devices()[0].client, f'{host}:0', [f'{host}:0'])
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f'JAX {jax.__version__} has no jax.experimental.transfer.start_transfer_server, by which jobs '
            'send arrays to one another. Save a checkpoint in one job, and restore it in the other'
        ) from error


_POLL_SECONDS = 0.005


def offer(server: Any, arrays: Sequence[jax.Array]) -> int:
    """Lets another program fetch arrays, of one device each, once. Returns the id to fetch them by.

    The server does not authenticate its clients, so the id is random: nobody can guess it.

    Relies on ``await_pull`` returning at once, keeping the arrays only until they are fetched, and accepting
    any integer of 64 bits.
    """
    offer_id = secrets.randbits(64)
    server.await_pull(offer_id, list(arrays))
    return offer_id


def fetch(connection: Any, offer_id: int, structs: Sequence[tuple[Any, Any, Any]]) -> list[jax.Array]:
    """Fetches offered arrays, described as (shape, dtype, device); none may be empty.

    Relies on ``pull`` returning at once. The arrays become ready later, or raise an error when they are used
    if the other program has ended.
    """
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
        for shape, dtype, device in structs
    ]
    return list(connection.pull(offer_id, shapes))


def wait_ready(arrays: Sequence[jax.Array], seconds: float) -> bool:
    """Returns whether all arrays are ready, after waiting for each of them for at most *seconds*.

    Relies on ``is_ready`` of an array, because waiting for an array of a program that hangs never ends; and
    on it being true for an array that will never arrive.

    Raises:
        RuntimeError: the arrays will not arrive, because the other program has ended.
    """
    array: Any
    for array in arrays:
        deadline = time.monotonic() + seconds
        while not array.is_ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        array.block_until_ready()
    return True
