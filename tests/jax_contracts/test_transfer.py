"""Tests of `jax.experimental.transfer`, with one process as sender and receiver."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._jax import transfer
from tests.support.contracts import contract

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4, jnp.bool_, jnp.uint32, jnp.complex64]


@pytest.mark.medium
def test_arrays_are_fetched_from_a_program_that_offers_them() -> None:
    server = transfer.server('127.0.0.1')
    first, second, *_ = jax.local_devices()
    with contract('sends arrays by jax.experimental.transfer', 'between two jobs'):
        connection = server.connect(server.address())
        sent = [jax.device_put(jnp.arange(12).reshape(3, 4).astype(dtype), first) for dtype in DTYPES]
        sent.append(jax.device_put(jnp.float32(3), second))
        structs = [(array.shape, array.dtype, second) for array in sent]
        fetched = transfer.fetch(connection, transfer.offer(server, sent), structs)
        assert transfer.wait_ready(fetched, 200)
        for actual, expected in zip(fetched, sent, strict=True):
            assert actual.devices() == {second}
            np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_arrays_that_were_not_offered_are_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    server = transfer.server('127.0.0.1')
    device = jax.local_devices()[0]
    sent = jax.device_put(jnp.arange(3.0), device)
    with contract('says whether an array has come', 'to end a wait for a program that hangs'):
        connection = server.connect(server.address())
        number = (1 << 64) - 1
        coming = transfer.fetch(connection, number, [(sent.shape, sent.dtype, device)])
        assert not transfer.wait_ready(coming, 0.2)
        monkeypatch.setattr(transfer.secrets, 'randbits', lambda bits: (1 << bits) - 1)
        assert transfer.offer(server, [sent]) == number
        assert transfer.wait_ready(coming, 200)
        np.testing.assert_array_equal(np.asarray(coming[0]), [0, 1, 2])


def test_arrays_are_fetched_once() -> None:
    server = transfer.server('127.0.0.1')
    device = jax.local_devices()[0]
    sent = jax.device_put(jnp.arange(3.0), device)
    with contract('lets arrays be fetched once', 'so that a number that was overheard is worth nothing'):
        connection = server.connect(server.address())
        number = transfer.offer(server, [sent])
        structs = [(sent.shape, sent.dtype, device)]
        assert transfer.wait_ready(transfer.fetch(connection, number, structs), 200)
        assert not transfer.wait_ready(transfer.fetch(connection, number, structs), 0.2)


def test_offer_numbers_are_random() -> None:
    server = transfer.server('127.0.0.1')
    sent = jax.device_put(jnp.arange(3.0), jax.local_devices()[0])
    numbers = [transfer.offer(server, [sent]) for _ in range(8)]
    assert len({number >> 32 for number in numbers}) == 8
