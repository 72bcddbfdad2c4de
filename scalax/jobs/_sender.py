"""Sender of a tree to another job."""

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
from scalax._data.host.boxes import boxes_of
from scalax._data.reshard.leaf_mapping import insert_leaf
from scalax._jax import transfer
from scalax.errors import ArgumentError, TransferError, shown_leaves
from scalax.jobs._connection import (
    MAX_REQUEST,
    check_seconds,
    local_address_towards,
    parse_address,
    resolve_host,
)
from scalax.jobs._requests import validated

_POLL = 1.0  # seconds between two checks whether a waiting receiver has left


class Sender:
    """Sends trees of arrays to another job, which calls `receive`.

    Every process of the job makes a Sender, and every process makes each call of `send`.

    Args:
        address: ``'host:port'`` at which process 0 of this job listens; the port has to be free. The other
            processes listen at free ports, on the network by which they reach that host.
        wait: seconds that `send` waits for a receiver to join.
        timeout: seconds that `send` then waits for each request of the receiver.
        secret: text that nobody can guess; a receiver needs the same one. Default: the environment variable
            ``SCALAX_RUN_TOKEN``. Required if other machines can reach the address.

    Raises:
        ArgumentError: *address* is not an address; a number of seconds is invalid; or there is no secret, and
            other machines can reach the address.
        MissingDependencyError: this JAX cannot send to other jobs.
        OSError: the port is taken, or the host has no address.
        TransferError: another process of this job has failed.

    Example:
        >>> from scalax.jobs import Sender
        >>> with Sender('localhost:0') as sender:  # port 0: any free port
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
        local_address, error = '', None
        is_first = jax.process_index() == 0
        try:
            check_seconds('Sender', wait, timeout)
            host, port = parse_address('Sender', address)
            local_host = resolve_host('Sender', host)
            if not is_first:
                local_host = local_address_towards(local_host)
            token = resolve_secret('Sender', secret)
            require_secret('Sender', token, f'{local_host}:{port}')  # before anything listens
            self._server = _listener((local_host, port if is_first else 0), token, self._serve)
            try:
                self._transfer = transfer.server(local_host)
            except BaseException:
                self._server.server_close()
                raise
            local_address = f'{local_host}:{self._server.server_address[1]}'
        except Exception as fault:  # noqa: BLE001 - raised once all processes know
            error = fault
        self._addresses: list[str] = process_collectives.gather_json(
            process_collectives.all_processes(), local_address
        )
        if error is not None:
            raise error
        if '' in self._addresses:
            self._server.server_close()
            raise TransferError(f'Sender: process {self._addresses.index("")} failed; its error says why')
        threading.Thread(target=self._server.serve_forever, name='scalax-sender', daemon=True).start()

    @property
    def address(self) -> str:
        """The address at which process 0 listens: the argument of `receive`."""
        return self._addresses[0]

    def send(self, tree: Any) -> None:
        """Sends arrays to the first job that joins, and returns when all of its processes have them.

        Args:
            tree: any pytree of jax.Arrays. Its leaf paths are sent, but not its structure.

        Raises:
            ArgumentError: some leaves are not jax.Arrays, or are deleted.
            TransferError: no job joined in time, or the job that did is gone, has failed, or is silent.
        """
        with self._changed:
            self._sent += 1  # even if the call fails, so that all processes count the same calls
        named = NamedTree.of(tree)
        not_sendable = [
            describe_leaf(path, leaf)
            for path, leaf in zip(named.paths, named.leaves, strict=True)
            if not isinstance(leaf, jax.Array) or leaf.is_deleted()
        ]
        if not_sendable:
            raise ArgumentError(
                'Sender.send: these leaves are not jax.Arrays, or are deleted:\n'
                f'{shown_leaves(not_sendable)}\n'
                'What to do: place them with helper.shard, and send them before they are donated.'
            )
        nested: dict[str, Any] = {}
        if overlapping := [
            path
            for path, leaf in zip(named.paths, named.leaves, strict=True)
            if not insert_leaf(nested, path, object())
        ]:
            raise ArgumentError(
                'Sender.send: the paths of these leaves overlap those of others:\n'
                f'{shown_leaves(overlapping)}\n'
                'What to do: rename them; keys are sent as a path, separated by slashes.'
            )
        with self._changed:
            if self._closed or self._offer is not None:
                reason = 'the Sender is closed' if self._closed else 'another thread is sending'
                raise ArgumentError(f'Sender.send: {reason}')
            offer = self._offer = _Offer(self._sent, named)
            self._changed.notify_all()
            try:
                while offer.missing is None or offer.missing:
                    seconds = self._wait if offer.missing is None else self._timeout
                    remaining = offer.last_request + seconds - time.monotonic()
                    if offer.fault or remaining <= 0:
                        raise TransferError(f'Sender.send: {offer.fault or offer.timeout_text(seconds)}')
                    self._changed.wait(remaining)
            finally:
                self._offer = None

    def close(self) -> None:
        """Stops listening. A waiting `send`, and waiting receivers, raise an error."""
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

    def _serve(self, channel: Channel) -> None:
        """Serves a process of a receiver until it leaves. Threads of the server call this."""
        try:
            while True:
                while not channel.wait_readable(self._timeout):
                    if not self._has_joined(channel):  # so it does not wait for anything
                        return
                request = validated(channel.read(MAX_REQUEST, self._timeout))
                try:
                    response = self._respond(channel, request)
                except ConnectionClosed:
                    raise
                except Exception as error:  # noqa: BLE001 - the receiver raises it
                    response = {'fault': f'{type(error).__name__}: {error}'}
                channel.send(response, self._timeout)
        finally:
            self._leave(channel)

    def _has_joined(self, channel: Channel) -> bool:
        """Returns whether a process of a receiver has joined the current offer: `send` bounds how long."""
        with self._changed:
            return self._offer is not None and channel in self._offer.processes

    def _respond(self, channel: Channel, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the response to a request of a process of a receiver."""
        with self._changed:
            if request['asks'] == 'join':
                job, seconds = request['job'], request['seconds']
                number = request.get('number', 0)

                def is_ready() -> bool:
                    if self._offer is not None and self._offer.number < number and not self._offer.fault:
                        self._offer.fault = f'process 0 of this job has gone on to its call {number} of send'
                        self._changed.notify_all()
                        return False
                    return self._offer is not None and not self._offer.fault and self._offer.is_for(job)

                end = time.monotonic() + seconds
                while not self._closed and not is_ready() and (remaining := end - time.monotonic()) > 0:
                    if channel.is_closed():
                        raise ConnectionClosed  # frees the connection for others
                    self._changed.wait(min(remaining, _POLL))
                if self._closed:
                    return {'fault': 'its Sender was closed'}
                if channel.is_closed():  # the next receiver may have the offer
                    raise ConnectionClosed
                if self._offer is None or not is_ready():
                    return {'fault': f'nothing was sent to it within {seconds:g} s'}
                self._offer.join(channel, request)
                self._changed.notify_all()
                layout = self._offer.layout
                return {**layout, 'others': self._addresses[1:], 'transfer': self._transfer.address()}
            offer = self._offer
            if offer is None or channel not in offer.processes:
                return {'fault': 'send has given up; its error says why'}
            offer.last_request = time.monotonic()
            if request['asks'] == 'alive':
                return {}
            if request['asks'] == 'done':
                offer.done(channel)
                self._changed.notify_all()
                return {}
            offer.has_started = True
        parts = [offer.part(request, *part) for part in request['parts']]
        return {'number': transfer.offer(self._transfer, parts)}

    def _leave(self, channel: object) -> None:
        with self._changed:
            if self._offer is not None:
                self._offer.leave(channel)
                self._changed.notify_all()


def _listener(address: tuple[str, int], secret: bytes, serve: Callable[[Channel], None]) -> Listener:
    """Makes the listener of a sender.

    Raises:
        OSError: as for `Listener`, with the address in the message.
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
        number: the number of the call of `Sender.send`.
        layout: the description of the tree for the receiver: its number; its leaves; and the distinct
            layouts of blocks, to which the leaves refer by index.
        missing: the processes of the receiver that have not received everything; None before one has joined.
        processes: connection -> the process of the receiver.
        has_started: whether any piece has been requested.
        last_request: the time of the last request.
        fault: why the transfer has failed; empty if it has not.
    """

    def __init__(self, number: int, named: NamedTree) -> None:
        self.missing: set[int] | None = None
        self.processes: dict[object, int] = {}
        self.has_started, self.last_request, self.fault = False, time.monotonic(), ''
        self._job, self._start, self.number = '', self.last_request, number
        self._arrays: list[jax.Array] = []
        index_of_blocks: dict[str, int] = {}
        leaves = []
        for path, leaf in zip(named.paths, named.leaves, strict=True):
            array = jax.random.key_data(leaf) if is_prng_key(leaf) else resharding.reduce_partial_sums(leaf)
            self._arrays.append(array)
            boxes = boxes_of(array.shape, array.sharding.devices_indices_map(array.shape))
            text = json.dumps([[device.process_index, device.id, box] for device, box in boxes.items()])
            index = index_of_blocks.setdefault(text, len(index_of_blocks))
            impl = str(jax.random.key_impl(leaf)) if is_prng_key(leaf) else ''
            leaves.append([path, leaf.shape, str(leaf.dtype), impl, index, is_weakly_typed(leaf)])
        self.layout = {'number': number, 'leaves': leaves, 'blocks': [*map(json.loads, index_of_blocks)]}

    def is_for(self, job: str) -> bool:
        """Returns whether a job may receive the tree: the first that joins."""
        return self._job in ('', job)

    def join(self, channel: object, request: Mapping[str, Any]) -> None:
        """Adds a process of the receiver."""
        if self.missing is None:
            self._job, self.missing = request['job'], set(range(request['receivers']))
        self.processes[channel] = request['receiver']
        self.last_request = time.monotonic()

    def done(self, channel: object) -> None:
        """Records that a process of the receiver has received everything."""
        assert self.missing is not None
        self.missing.discard(self.processes[channel])

    def leave(self, channel: object) -> None:
        """Removes a process of the receiver. If nothing was requested yet, another job may join instead."""
        process = self.processes.pop(channel, None)
        if process is None or not self.missing or process not in self.missing:
            return
        if self.has_started:
            self.fault = f'process {process} of the receiver left before all processes had everything'
        elif not self.processes:
            self._job, self.missing, self.last_request = '', None, self._start

    def timeout_text(self, seconds: float) -> str:
        """Returns the message of a timeout, which lists the processes that sent no request."""
        if self.missing is None:
            return f'no job asked for the arrays within {seconds:.0f} s'
        processes = ', '.join(map(str, sorted(self.missing)))
        return f'nothing was heard from these processes of the receiver for {seconds:.0f} s: {processes}'

    def part(self, request: Mapping[str, Any], device: int, start: Sequence[int]) -> jax.Array:
        """Returns a part of the block that a device of this process holds, in the requested dtype."""
        shards = self._arrays[request['leaf']].addressable_shards
        data = next(shard.data for shard in shards if shard.device.id == device)
        if data.shape != tuple(request['sizes']):
            data = jax.lax.dynamic_slice(data, start, request['sizes'])
        return jax.device_put(data.astype(request['dtype']), SingleDeviceSharding(*data.devices()))
