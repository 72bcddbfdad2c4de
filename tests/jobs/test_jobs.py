"""Two jobs of real processes, which JAX has not joined: one sends a state to the other."""

import contextlib
import errno
import re
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from examples.launch.ports import held_port
from scalax.errors import ArgumentError, TransferError
from scalax.jobs import Sender, _receive, _sender, receive
from scalax.sharding import MeshShardingHelper, PartitionSpec
from scalax.utils import flatten_tree
from tests.support.processes import Running, started

PROGRAM = ['-m', 'tests.support.jobs_program']
MANY, FEW = '1GiB', '128'
ADDRESS = re.compile(r'^at (\S+)\.$', re.MULTILINE)
LONG, SHORT = 200, 5  # seconds to wait for expected, and for unexpected events
SILENCE = 15  # seconds without a response after which a process counts as stopped, even on a busy machine


def job(port: int, processes: int, devices: int) -> list[dict[str, str]]:
    """Returns the environment variables of the processes of a job."""
    common = {'JAX_COORDINATOR_ADDRESS': f'localhost:{port}', 'JAX_NUM_PROCESSES': str(processes)}
    common['JAX_NUM_CPU_DEVICES'] = str(devices)
    return [{**common, 'JAX_PROCESS_ID': str(index)} for index in range(processes)]


@contextlib.contextmanager
def two_jobs(
    senders: tuple[int, int] = (1, 4),
    receivers: tuple[int, int] = (1, 4),
    *,
    times: int = 1,
    waits: tuple[int, int] = (LONG, LONG),
    timeouts: tuple[int, int] = (LONG, LONG),
    memory: str = MANY,
    faults: tuple[str, str] = ('', ''),
) -> Iterator[tuple[Running, Running]]:
    """Starts a sender and a receiver, each given as (processes, devices per process)."""
    with held_port() as port, held_port() as other, contextlib.ExitStack() as stack:
        sending = [*PROGRAM, 'send', str(times), str(waits[0]), str(timeouts[0]), memory, faults[0]]
        first = stack.enter_context(started(*[sending] * senders[0], env=job(port, *senders)))
        first.wait_for(ADDRESS)
        match = ADDRESS.search(first.output())
        assert match is not None
        receiving = [*PROGRAM, 'receive', str(times), str(waits[1]), str(timeouts[1]), memory]
        receiving += [faults[1], match[1]]
        yield first, stack.enter_context(started(*[receiving] * receivers[0], env=job(other, *receivers)))


def outputs(running: Running) -> list[str]:
    return [running.output(index) for index in range(len(running.processes))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('senders', 'receivers', 'memory'),
    [
        ((1, 4), (1, 2), MANY),
        ((1, 4), (1, 4), FEW),
        pytest.param((2, 2), (1, 4), '400', marks=pytest.mark.slow),
        pytest.param((1, 2), (2, 4), FEW, marks=pytest.mark.slow),
        ((2, 4), (2, 2), MANY),
    ],
)
def test_send_and_receive(senders: tuple[int, int], receivers: tuple[int, int], memory: str) -> None:
    with two_jobs(senders, receivers, times=2, memory=memory) as (first, second):
        assert set(second.wait() + first.wait()) == {0}, outputs(first) + outputs(second)
        assert all('received 1' in text for text in outputs(second))
        assert all('sent 1' in text for text in outputs(first))


KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
GONE = 'receive: process 0 of the sender at ADDRESS is gone: it ended, or closed its Sender'
SILENT = 'receive: process 0 of the sender at ADDRESS did not answer within {} s: it hangs, or is stopped'
LEFT = 'Sender.send: process 0 of the receiver left before all processes had everything'
UNHEARD = f'Sender.send: nothing was heard from these processes of the receiver for {SILENCE} s: 0'
FAULTS_OF_THE_SENDER = {
    f'0 {KILL} join 1': GONE,
    f'0 {STOP} join 1': SILENT.format(10),
    f'0 {KILL} parts 3': GONE,
    f'0 {STOP} parts 3': SILENT.format(SILENCE),
}
FAULTS_OF_THE_RECEIVER = {
    f'0 {KILL} parts 3': LEFT,
    f'0 {STOP} parts 3': UNHEARD,
    f'0 {KILL} done 1': LEFT,
    f'0 {STOP} done 1': UNHEARD,
}


def rare(faults: Iterable[str]) -> list[Any]:
    """Faults before and after the parts are for `make test-all`."""
    return [line if 'parts' in line else pytest.param(line, marks=pytest.mark.slow) for line in faults]


def sent_to_itself(tree: Any, **options: Any) -> Any:
    """Sends a tree to this process, and returns the received tree."""
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    with Sender('localhost:0') as sender:
        sending = threading.Thread(target=sender.send, args=[helper.shard(tree, PartitionSpec())])
        sending.start()
        got = receive(helper, sender.address, PartitionSpec(), timeout=LONG, **options)
        sending.join(LONG)
    return got


class Step(NamedTuple):
    step: Any
    params: Any
    opt: Any


@pytest.mark.medium
@pytest.mark.parametrize(
    'tree', [[np.full(4, i) for i in range(12)], Step(0.0, np.ones(3), {'b': 2.0, 'a': 3})]
)
def test_leaf_paths_of_the_result(tree: Any) -> None:
    got = flatten_tree(sent_to_itself(tree))
    assert set(got) == set(flatten_tree(tree))
    for path, value in flatten_tree(tree).items():
        np.testing.assert_array_equal(got[path], value)


@pytest.mark.parametrize(
    ('often', 'requests'),
    [
        (LONG, ['join', 'parts', 'parts', 'done']),
        (-1, ['join', 'parts', 'alive', 'parts', 'alive', 'done']),
    ],
    ids=['soon', 'late'],
)
def test_keepalives(often: int, requests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    questions = []

    def checked(question: Any) -> Any:
        questions.append(question['asks'])
        return question

    monkeypatch.setattr(_sender, 'validated', checked)
    monkeypatch.setattr(_receive, '_KEEPALIVE', often)
    sent_to_itself({'a': np.ones(8), 'b': np.zeros(8)})
    assert questions == requests


def test_processes_that_send_different_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = MeshShardingHelper([8], ['fsdp'])

    def send(sender: Sender) -> None:
        with contextlib.suppress(TransferError):  # it was closed
            sender.send({'w': jax.device_put(np.arange(8))})

    with contextlib.ExitStack() as stack:
        other = stack.enter_context(Sender('localhost:0'))
        with monkeypatch.context() as patch:  # the other one as process 1 of the same job
            patch.setattr(_sender.process_collectives, 'gather_json', lambda _, tree: [tree, other.address])
            first = stack.enter_context(Sender('localhost:0'))
        with pytest.raises(ArgumentError):
            other.send({'w': 1.0})  # a call that process 0 does not make
        threads = [threading.Thread(target=send, args=[sender]) for sender in (first, other)]
        for thread in threads:
            thread.start()
        with pytest.raises(TransferError) as error:
            receive(helper, first.address, PartitionSpec(), timeout=LONG)
        assert str(error.value) == (
            f'receive: process 1 of the sender at {other.address} sends another tree than process 0: all '
            'processes have to call send'
        )
    for thread in threads:
        thread.join(LONG)


def test_leaves_that_cannot_be_sent() -> None:
    leaf = jax.device_put(np.ones(2))
    deleted = jax.device_put(np.ones(2))
    deleted.delete()
    with Sender('localhost:0', wait=SHORT) as sender:
        with pytest.raises(ArgumentError) as error:
            sender.send({'a/b': leaf, 'a': {'b': leaf, 'c': leaf}})
        assert str(error.value) == (
            'Sender.send: the paths of these leaves overlap those of others:\n  a/b\n'
            'What to do: rename them; keys are sent as a path, separated by slashes.'
        )
        with pytest.raises(ArgumentError) as error:
            sender.send({'w': deleted, 'n': 3.0, 'fine': leaf})
        assert str(error.value) == (
            'Sender.send: these leaves are not jax.Arrays, or are deleted:\n  n: Python float\n  '
            'w: float32[2]\nWhat to do: place them with helper.shard, and send them before they are donated.'
        )
    with pytest.raises(ArgumentError, match=r'^Sender\.send: the Sender is closed$'):
        sender.send({'w': leaf})


@pytest.mark.parametrize('address', ['', 'host', 'http://host:1', 7])
def test_invalid_addresses(address: Any) -> None:
    with pytest.raises(ArgumentError) as error:
        Sender(address)
    assert str(error.value) == f"Sender: address has to be 'host:port', got {address!r}"


@pytest.mark.parametrize(
    ('address', 'text'),
    [
        (
            '[::1]:7117',
            "Sender: address has to be 'host:port', got '[::1]:7117'; IPv6 addresses are not supported: give "
            'an IPv4 address, or a name that has one',
        ),
        ('localhost:65536', "Sender: ports go from 0 to 65535, got 'localhost:65536'"),
        (
            '0.0.0.0:7117',
            'Sender: 0.0.0.0 stands for all addresses of a host, but receivers need one. What to do: '
            'give the name or the address by which they reach this host, or localhost if they run on it.',
        ),
    ],
)
def test_addresses_that_receivers_cannot_reach(address: str, text: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Sender(address, secret='long enough for a secret')
    assert str(error.value) == text


@pytest.mark.parametrize('name', ['trainer.invalid', 'x' * 64])
def test_a_host_without_an_address(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> str:
        raise OSError(-2, 'Name or service not known')

    monkeypatch.setattr(socket, 'gethostbyname', unknown)
    with pytest.raises(OSError) as error:
        Sender(f'{name}:7117')
    assert str(error.value) == (
        f'Sender: the host {name!r} has no IPv4 address (Name or service not known). What to do: give the '
        'name or the address by which other hosts reach this one.'
    )


def test_port_in_use() -> None:
    with socket.create_server(('127.0.0.1', 0)) as server, pytest.raises(OSError) as error:
        port = server.getsockname()[1]
        Sender(f'localhost:{port}')
    assert error.value.errno == errno.EADDRINUSE
    assert error.value.strerror == (
        f'Sender cannot listen at 127.0.0.1:{port}: Address already in use. What to do: give an address of '
        'this host, and a port that is free; port 0 is any that is free.'
    )


@pytest.mark.parametrize(
    ('name', 'value', 'allowed'),
    [
        ('wait', -1, '0 to 1e8'),
        ('wait', '5', '0 to 1e8'),
        ('wait', 1e9, '0 to 1e8'),
        ('timeout', 0, 'more than 0, to 1e8'),
    ],
)
def test_invalid_seconds(name: str, value: Any, allowed: str) -> None:
    helper = MeshShardingHelper([8], ['fsdp'])
    text = f'{name} has to be a number of seconds, {allowed}, got {value!r}'
    with pytest.raises(ArgumentError) as error:
        Sender('localhost:0', **{name: value})
    assert str(error.value) == f'Sender: {text}'
    with pytest.raises(ArgumentError) as error:
        receive(helper, 'localhost:1', PartitionSpec(), **{name: value})
    assert str(error.value) == f'receive: {text}'


def test_receive_without_waiting() -> None:
    helper = MeshShardingHelper([8], ['fsdp'])
    with Sender('localhost:0') as sender:
        with pytest.raises(TransferError, match='answered: nothing was sent to it within 0 s'):
            receive(helper, sender.address, PartitionSpec(), wait=0)
        with contextlib.ExitStack() as stack:
            sending = threading.Thread(target=sender.send, args=[{'w': jax.device_put(np.arange(8))}])
            sending.start()
            stack.callback(sending.join, LONG)
            for _ in range(LONG):
                with contextlib.suppress(TransferError):
                    got = receive(helper, sender.address, PartitionSpec(), wait=0)
                    break
                time.sleep(0.1)
    np.testing.assert_array_equal(got['w'], np.arange(8))


def test_no_sender_listens() -> None:
    helper = MeshShardingHelper([8], ['fsdp'])
    with held_port() as port, pytest.raises(TransferError) as error:
        receive(helper, f'127.0.0.1:{port}', PartitionSpec(), wait=1)
    text = re.sub(r'\(.*?\)', '(...)', str(error.value), flags=re.DOTALL)
    assert text == (
        f'receive: nobody listens at 127.0.0.1:{port} (...). What to do: start the job with the Sender, give '
        'its address, and a longer wait if it starts later.'
    )


def fault_of(running: Running) -> str:
    """Returns the error of the only process of a job."""
    assert running.wait() == (3,), outputs(running)
    lines = [line for line in running.output().splitlines() if line.startswith('TransferError: ')]
    assert len(lines) == 1, outputs(running)
    return re.sub(r'at 127\.0\.0\.1:\d+', 'at ADDRESS', lines[0].removeprefix('TransferError: '))


@pytest.mark.medium
@pytest.mark.parametrize('fault', rare(FAULTS_OF_THE_SENDER))
def test_a_sender_fails(fault: str) -> None:
    waits = LONG, SHORT if fault == f'0 {STOP} join 1' else LONG
    with two_jobs(waits=waits, timeouts=(LONG, SILENCE), memory=FEW, faults=(fault, '')) as (_, second):
        assert fault_of(second) == FAULTS_OF_THE_SENDER[fault]
        assert 'received' not in second.output()


@pytest.mark.slow
@pytest.mark.parametrize('fault', rare(FAULTS_OF_THE_RECEIVER))
def test_a_receiver_fails(fault: str) -> None:
    with two_jobs(timeouts=(SILENCE, LONG), memory=FEW, faults=('', fault)) as (first, _):
        assert fault_of(first) == FAULTS_OF_THE_RECEIVER[fault]
        assert 'sent' not in first.output()
