"""Start of the watchdog, and its secret."""

import logging
from typing import Any

import pytest

from scalax import distributed

SECRET, OTHER = b'of this run, and long enough', b'of another run, as long as that'
KNOWN, HERE = 'node-0:1234', 'localhost:1234'


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of the watches that are started: address, process, count, secret, is_user_secret."""
    watches: list[tuple[Any, ...]] = []

    class Watch:
        def __init__(self, address: str, process: int, count: int, *rest: Any) -> None:
            timeout, heartbeat, *secret = rest
            assert (timeout, heartbeat) == (None, 20.0)
            watches.append((address, process, count, *secret))

        def run(self) -> None:
            pass

    monkeypatch.setattr(distributed, 'Watchdog', Watch)
    monkeypatch.setattr(distributed.atexit, 'register', lambda *_: None)
    monkeypatch.setattr(distributed, '_deferred_watchdogs', [])
    return watches


@pytest.mark.parametrize(
    ('options', 'secret', 'starts', 'later', 'warns'),
    [
        ((HERE, 2, 0), b'', True, False, False),
        ((HERE, 2, 1), SECRET, True, False, False),
        ((KNOWN, 2, 1), SECRET, True, True, False),
        ((KNOWN, 2, 0), b'', False, True, True),
        ((KNOWN, 2, 1), b'', False, True, False),
        ((None, None, None), SECRET, False, True, False),
        ((None, None, None), b'', False, True, False),
        ((HERE, None, None), b'', False, True, False),
    ],
)
def test_at_the_start(
    options: tuple[Any, ...],
    secret: bytes,
    starts: bool,
    later: bool,
    warns: bool,
    started: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    distributed._start_or_defer_watchdog(
        distributed._ProcessSettings(*options), distributed._WatchdogSettings(None, 20.0, secret)
    )
    address, count, index = options
    assert started == ([(address, index, count, secret, True)] if starts else [])
    assert len(distributed._deferred_watchdogs) == later
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        'SCALAX_RUN_TOKEN is not set: processes that are stuck are named only from the first call of '
        'should_stop on, and `scalax doctor --run` gets no answer. Set it to one secret for all processes, '
        "such as python -c 'import secrets; print(secrets.token_hex())' makes"
    ] * warns


@pytest.mark.parametrize(
    ('first', 'second', 'is_known'),
    [
        (b'', b'', True),
        (b'', b'', False),
        (SECRET, SECRET, True),
        (SECRET, SECRET, False),
        (SECRET, OTHER, True),
        (SECRET, b'', False),
        (b'', SECRET, True),
    ],
)
def test_at_the_first_step(
    first: bytes,
    second: bytes,
    is_known: bool,
    started: list[Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process 0 and another one have these secrets; if the secrets differ, no process waits."""
    sent: list[bytes] = []

    def broadcast(_: Any, position: int, data: bytes) -> bytes:
        sent.append(data)
        return sent[position]

    monkeypatch.setattr(distributed.process_collectives, 'broadcast_bytes', broadcast)
    monkeypatch.setattr(distributed.jax, 'process_count', lambda: 2)
    monkeypatch.setattr(distributed, 'local_address', lambda: '10.0.0.1:7')
    for process, secret in enumerate((first, second)):
        settings = distributed._ProcessSettings(*((KNOWN, 2, process) if is_known else (None, None, None)))
        distributed._start_or_defer_watchdog(settings, distributed._WatchdogSettings(None, 20.0, secret))
        monkeypatch.setattr(distributed.jax, 'process_index', lambda process=process: process)
        distributed._start_deferred_watchdog(distributed._deferred_watchdogs.pop())
    address = KNOWN if is_known else '10.0.0.1:7'
    warnings = [text for record in caplog.records if 'is not that' in (text := record.getMessage())]
    if first == second:
        assert [watch[:3] for watch in started] == [(address, 0, 2), (address, 1, 2)]
        secrets = {watch[3] for watch in started}
        assert secrets == {first} if first else len(secrets) == 1 and len(secrets.pop()) == 32
        assert {watch[4] for watch in started} == {bool(first)}
        assert not warnings
    else:
        assert warnings == [
            'SCALAX_RUN_TOKEN of process 1 is not that of process 0, or one of the two has none: process 1 '
            'will not be named if it is stuck. Set it to the same secret for all processes'
        ]
    assert SECRET not in sent[0] and SECRET.hex().encode() not in sent[0]


def test_a_secret_that_can_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('SCALAX_RUN_TOKEN', 'secret')
    with pytest.raises(distributed.ArgumentError) as error:
        distributed.initialize(num_processes=1)
    assert str(error.value) == (
        'initialize: SCALAX_RUN_TOKEN has to be text of at least 16 characters, which nobody can guess, got '
        "6 characters. What to do: python -c 'import secrets; print(secrets.token_hex())' makes one."
    )
