"""The job that has a state, and sends it to another one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from scalax._core.channel.lines import Channel, ConnectionClosed
from scalax._core.channel.listener import Listener
from scalax._core.channel.secret import require_secret, resolve_secret
from scalax._core.context import resharding
from scalax._core.pytree.paths import NamedTree, describe_leaf, is_prng_key, is_weakly_typed
from scalax._data.host import process_collectives
from scalax._data.reshard.block_schedule import boxes_of
from scalax._data.reshard.leaf_mapping import put
from scalax._jax import transfer
from scalax.errors import ArgumentError, TransferError, shown_leaves
from scalax.jobs._lines import LONGEST_QUESTION, checked_seconds, host_and_port, own_address_towards, resolved
from scalax.jobs._questions import checked

_LOOK = 1.0  # seconds between two looks whether a receiver that waits has left


class Sender:
    """The side of a connection between two jobs that has the state.

    Every process of the job makes one, and all of them make each call of `send`.

    Args:
        address: ``'host:port'`` where the receiver finds process 0 of this job; the port is free. Other
            processes listen at ports of their own, on the network on which they reach that host.
        wait: seconds that `send` waits for a receiver to ask.
        timeout: seconds that it then waits for each of its questions.
        secret: who has the same one receives what is sent: text that nobody can guess. Default: the
            environment variable ``SCALAX_RUN_TOKEN``. Needed unless the address is of this machine alone.

    Raises:
        ArgumentError: *address* is no address, or a number of seconds is invalid; or there is no secret, and
            other machines can reach the address.
        MissingDependencyError: this JAX cannot send to other jobs.
        OSError: the port is taken, or the host has no address.
        TransferError: another process of this job has failed.

    Example:
        >>> from scalax.jobs import Sender
        >>> with Sender('localhost:0') as sender:  # port 0: one that is free
        ...     sender.address.split(':')[0]
        '127.0.0.1'
    """

    def __init__(
        self, address: str, *, wait: float = 600.0, timeout: float = 60.0, secret: str | None = None
    ) -> None:
        self._wait, self._timeout = wait, timeout
        self._sent = 0
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._closed = False
        mine, error = '', None
        first = jax.process_index() == 0
        try:
            checked_seconds('Sender', wait, timeout)
            host, port = host_and_port('Sender', address)
            here = resolved('Sender', host)
            if not first:
                here = own_address_towards(here)
            token = resolve_secret('Sender', secret)
            require_secret('Sender', token, f'{here}:{port}')  # before anything listens
            self._server = _listener((here, port if first else 0), token, self._serve)
            try:
                self._transfer = transfer.server(here)
            except BaseException:
                self._server.server_close()
                raise
            mine = f'{here}:{self._server.server_address[1]}'
        except Exception as fault:  # noqa: BLE001 - raised once all processes know
            error = fault
        self._addresses: list[str] = process_collectives.gather_json(
            process_collectives.all_processes(), mine
        )
        if error is not None:
            raise error
        if '' in self._addresses:
            self._server.server_close()
            raise TransferError(f'Sender: process {self._addresses.index("")} failed; its error says why')
        threading.Thread(target=self._server.serve_forever, name='scalax-sender', daemon=True).start()

    @property
    def address(self) -> str:
        """Where process 0 listens: what `receive` takes."""
        return self._addresses[0]

    def send(self, tree: Any) -> None:
        """Sends arrays to the job that asks first, and returns when all of its processes have them.

        Args:
            tree: any pytree of jax.Arrays; its structure is not sent, and its leaf paths are.

        Raises:
            ArgumentError: some leaves are not jax.Arrays, or are deleted.
            TransferError: no job asked in time, or the one that did is gone, has failed, or is silent.
        """
        with self._changed:
            self._sent += 1  # also of a call that fails: the processes count alike
        named = NamedTree.of(tree)
        wrong = [
            describe_leaf(path, leaf)
            for path, leaf in zip(named.paths, named.leaves, strict=True)
            if not isinstance(leaf, jax.Array) or leaf.is_deleted()
        ]
        if wrong:
            raise ArgumentError(
                f'Sender.send: these leaves are not jax.Arrays, or are deleted:\n{shown_leaves(wrong)}\n'
                'What to do: place them with helper.shard, and send them before they are donated.'
            )
        nested: dict[str, Any] = {}
        if twice := [
            path
            for path, leaf in zip(named.paths, named.leaves, strict=True)
            if not put(nested, path, object())
        ]:
            raise ArgumentError(
                f'Sender.send: the paths of these leaves overlap those of others:\n{shown_leaves(twice)}\n'
                'What to do: rename them; keys are sent as a path, separated by slashes.'
            )
        with self._changed:
            if self._closed or self._offer is not None:
                why = 'the Sender is closed' if self._closed else 'another thread is sending'
                raise ArgumentError(f'Sender.send: {why}')
            offer = self._offer = _Offer(self._sent, named)
            self._changed.notify_all()
            try:
                while offer.missing is None or offer.missing:
                    patience = self._wait if offer.missing is None else self._timeout
                    left = offer.heard + patience - time.monotonic()
                    if offer.fault or left <= 0:
                        raise TransferError(f'Sender.send: {offer.fault or offer.silence(patience)}')
                    self._changed.wait(left)
            finally:
                self._offer = None

    def close(self) -> None:
        """Stops listening. Those who wait, here and in other jobs, are told."""
        with self._changed:
            self._closed = True
            if self._offer is not None:
                self._offer.fault = 'the Sender was closed'
            self._changed.notify_all()
        self._server.close()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, line: Channel) -> None:
        """Answers a process of a receiver until it leaves. Threads of the server call this."""
        try:
            while True:
                while not line.wait_readable(self._timeout):
                    if not self._needs(line):  # it waits for nothing here
                        return
                question = checked(line.read(LONGEST_QUESTION, self._timeout))
                try:
                    answer = self._answer(line, question)
                except ConnectionClosed:
                    raise
                except Exception as error:  # noqa: BLE001 - told to who asked, who raises it
                    answer = {'fault': f'{type(error).__name__}: {error}'}
                line.send(answer, self._timeout)
        finally:
            self._left(line)

    def _needs(self, line: Channel) -> bool:
        """Whether a process of a receiver takes part in what is being sent: `send` bounds how long."""
        with self._changed:
            return self._offer is not None and line in self._offer.lines

    def _answer(self, line: Channel, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a process of a receiver is told."""
        with self._changed:
            if question['asks'] == 'join':
                job, seconds = question['job'], question['seconds']
                number = question.get('number', 0)

                def ready() -> bool:
                    if self._offer is not None and self._offer.number < number and not self._offer.fault:
                        self._offer.fault = f'process 0 of this job has gone on to its call {number} of send'
                        self._changed.notify_all()
                        return False
                    return self._offer is not None and not self._offer.fault and self._offer.is_for(job)

                end = time.monotonic() + seconds
                while not self._closed and not ready() and (left := end - time.monotonic()) > 0:
                    if line.is_closed():
                        raise ConnectionClosed  # so that its slot is free at once
                    self._changed.wait(min(left, _LOOK))
                if self._closed:
                    return {'fault': 'its Sender was closed'}
                if line.is_closed():  # the next one may have the offer
                    raise ConnectionClosed
                if self._offer is None or not ready():
                    return {'fault': f'nothing was sent to it within {seconds:g} s'}
                self._offer.join(line, question)
                self._changed.notify_all()
                layout = self._offer.layout
                return {**layout, 'others': self._addresses[1:], 'transfer': self._transfer.address()}
            offer = self._offer
            if offer is None or line not in offer.lines:
                return {'fault': 'send has given up; its error says why'}
            offer.heard = time.monotonic()
            if question['asks'] == 'alive':
                return {}
            if question['asks'] == 'done':
                offer.done(line)
                self._changed.notify_all()
                return {}
            offer.begun = True
        parts = [offer.part(question, *part) for part in question['parts']]
        return {'number': transfer.offer(self._transfer, parts)}

    def _left(self, line: object) -> None:
        with self._changed:
            if self._offer is not None:
                self._offer.leave(line)
                self._changed.notify_all()


def _listener(address: tuple[str, int], secret: bytes, serve: Callable[[Channel], None]) -> Listener:
    """The listener of a sender.

    Raises:
        OSError: as for `Listener`, with the address.
    """
    try:
        return Listener('Sender', address, secret, serve)
    except OSError as error:
        host, port = address
        raise OSError(
            error.errno,
            f'Sender cannot listen at {host}:{port}: {error.strerror or error}. What to do: give an address '
            'of this host, and a port that is free; port 0 is any that is free.',
        ) from error


class _Offer:
    """A tree that is being sent, and the job that receives it.

    Attributes:
        layout: what a receiver is told about the tree: its number, its leaves, and the sets of blocks of
            which each leaf has one.
        missing: the processes of the receiver that do not have everything; None before one has asked.
        lines: by connection, the process of the receiver.
        begun: whether any piece has been asked for.
        heard: when the last question came.
        fault: why nothing more will come.
    """

    def __init__(self, number: int, named: NamedTree) -> None:
        self.missing: set[int] | None = None
        self.lines: dict[object, int] = {}
        self.begun, self.heard, self.fault = False, time.monotonic(), ''
        self._job, self._made, self.number = '', self.heard, number
        self._arrays: list[jax.Array] = []
        blocks: dict[str, int] = {}
        leaves = []
        for path, leaf in zip(named.paths, named.leaves, strict=True):
            array = jax.random.key_data(leaf) if is_prng_key(leaf) else resharding.reduce_partial_sums(leaf)
            self._arrays.append(array)
            boxes = boxes_of(array.shape, array.sharding.devices_indices_map(array.shape))
            text = json.dumps([[device.process_index, device.id, box] for device, box in boxes.items()])
            place = blocks.setdefault(text, len(blocks))
            impl = str(jax.random.key_impl(leaf)) if is_prng_key(leaf) else ''
            leaves.append([path, leaf.shape, str(leaf.dtype), impl, place, is_weakly_typed(leaf)])
        self.layout = {'number': number, 'leaves': leaves, 'blocks': [*map(json.loads, blocks)]}

    def is_for(self, job: str) -> bool:
        """Whether a job may have it: the first that asks."""
        return self._job in ('', job)

    def join(self, line: object, question: Mapping[str, Any]) -> None:
        """A process of the receiver has come."""
        if self.missing is None:
            self._job, self.missing = question['job'], set(range(question['receivers']))
        self.lines[line] = question['receiver']
        self.heard = time.monotonic()

    def done(self, line: object) -> None:
        """A process of the receiver has everything."""
        assert self.missing is not None
        self.missing.discard(self.lines[line])

    def leave(self, line: object) -> None:
        """A connection has ended. A job that has taken nothing yet leaves the tree to the next one."""
        process = self.lines.pop(line, None)
        if process is None or not self.missing or process not in self.missing:
            return
        if self.begun:
            self.fault = f'process {process} of the receiver left before all processes had everything'
        elif not self.lines:
            self._job, self.missing, self.heard = '', None, self._made

    def silence(self, seconds: float) -> str:
        """Who has kept it waiting."""
        if self.missing is None:
            return f'no job asked for the arrays within {seconds:.0f} s'
        processes = ', '.join(map(str, sorted(self.missing)))
        return f'nothing was heard from these processes of the receiver for {seconds:.0f} s: {processes}'

    def part(self, question: Mapping[str, Any], device: int, start: Sequence[int]) -> jax.Array:
        """A part of the block of an array that a device of this process has, in the dtype asked for."""
        shards = self._arrays[question['leaf']].addressable_shards
        data = next(shard.data for shard in shards if shard.device.id == device)
        if data.shape != tuple(question['sizes']):
            data = jax.lax.dynamic_slice(data, start, question['sizes'])
        return jax.device_put(data.astype(question['dtype']), SingleDeviceSharding(*data.devices()))
