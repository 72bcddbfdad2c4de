"""Moving arrays between programs that JAX has not joined, by `jax.experimental.transfer`."""

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
    """The transfer server of this process at an address of this machine; its ``address()`` has the port.

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


_LOOK = 0.005  # seconds between two looks


def offer(server: Any, arrays: Sequence[jax.Array]) -> int:
    """Lets another program fetch arrays, of one device each, once. Returns the number to fetch them by.

    The server asks nobody who they are: the number is all that a stranger lacks, so it cannot be guessed.

    Relies on ``await_pull`` returning at once, keeping the arrays until they are fetched and no longer, and
    taking any number of 64 bits.
    """
    number = secrets.randbits(64)
    server.await_pull(number, list(arrays))
    return number


def fetch(connection: Any, number: int, structs: Sequence[tuple[Any, Any, Any]]) -> list[jax.Array]:
    """Fetches what was offered, as (shape, dtype, device); nothing may be empty.

    Relies on ``pull`` returning at once: the arrays become ready, and raise when they are used if the other
    program has ended.
    """
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
        for shape, dtype, device in structs
    ]
    return list(connection.pull(number, shapes))


def wait_ready(arrays: Sequence[jax.Array], seconds: float) -> bool:
    """Whether arrays are there within so many seconds each.

    Relies on ``is_ready`` of an array, because waiting for one of a program that hangs never ends; and on
    that of one that will never come being true.

    Raises:
        RuntimeError: they will not come, because the other program has ended.
    """
    array: Any
    for array in arrays:
        deadline = time.monotonic() + seconds
        while not array.is_ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK)
        array.block_until_ready()
    return True
