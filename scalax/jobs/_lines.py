"""Questions and answers between processes of two jobs: a line of JSON each, over TCP."""

from __future__ import annotations

import json
import re
import socket
import socketserver
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from scalax.errors import ArgumentError, TransferError

_ADDRESS = re.compile(r'(?P<host>[^/\s:]+):(?P<port>\d+)')
_LONGEST = 1e8  # seconds; clocks have no room for much more
_RETRY = 0.2  # seconds between two attempts to connect


def host_and_port(what: str, address: str) -> tuple[str, int]:
    """The parts of an address.

    Raises:
        ArgumentError: it is no address; the message begins with *what*.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        raise ArgumentError(f"{what}: address has to be 'host:port', got {address!r}")
    return match['host'], int(match['port'])


def checked_seconds(what: str, wait: float, timeout: float) -> None:
    """Raises ArgumentError unless both are numbers of seconds; without a *wait*, nothing is waited for."""
    for name, value, allowed in (('wait', wait, '0 to 1e8'), ('timeout', timeout, 'more than 0, to 1e8')):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= _LONGEST or (name == 'timeout' and not value):
            raise ArgumentError(f'{what}: {name} has to be a number of seconds, {allowed}, got {value!r}')


def own_address_towards(host: str) -> str:
    """The address of this machine on the network on which it reaches a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


class Server(socketserver.ThreadingTCPServer):
    """Answers questions, each connection in a thread of its own.

    Args:
        address: host and port to listen at; port 0 is any that is free.
        answer: from the connection and its question to the answer.
        left: called when a connection ends.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        answer: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
        left: Callable[[Any], None],
    ) -> None:
        self.answer, self.left = answer, left
        super().__init__(address, _Connection)


class _Connection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = cast(Server, self.server)
        try:
            for text in self.rfile:
                try:
                    answer = server.answer(self, json.loads(text))
                except Exception as error:  # noqa: BLE001 - told to who asked, who raises it
                    answer = {'fault': f'{type(error).__name__}: {error}'}
                self.wfile.write(json.dumps(answer).encode() + b'\n')
        except OSError:
            pass  # the other side has gone
        finally:
            server.left(self)


class Line:
    """A connection to a process of the sender.

    Args:
        name: of the process, for messages.
        address: where it listens.
        seconds: how long to try to connect: the sender may start later.

    Raises:
        ArgumentError: *address* is no address.
        TransferError: nobody listens there.
    """

    def __init__(self, name: str, address: str, seconds: float) -> None:
        host, port = host_and_port('receive', address)
        self._name = f'{name} at {address}'
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._socket = socket.create_connection((host, port), timeout=max(seconds, 1.0))
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TransferError(
                        f'receive: nobody listens at {address} ({error}). What to do: start the job with the '
                        'Sender, give its address, and a longer wait if it starts later.'
                    ) from error
                time.sleep(_RETRY)
        self._answers = self._socket.makefile('rb')

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a question.

        Raises:
            TransferError: the process is gone, or silent for so many seconds, or answers with a fault.
        """
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(json.dumps(question).encode() + b'\n')
            text = self._answers.readline()
        except TimeoutError:
            raise self.fault(f'did not answer within {seconds:.0f} s: it hangs, or is stopped') from None
        except OSError as error:
            raise self.fault(f'is gone ({error})') from error
        if not text:
            raise self.fault('is gone: it ended, or closed its Sender')
        answer = json.loads(text)
        if 'fault' in answer:
            raise self.fault(f'answered: {answer["fault"]}')
        return cast(dict[str, Any], answer)

    def fault(self, text: str) -> TransferError:
        """An error that names the process."""
        return TransferError(f'receive: {self._name} {text}')

    @property
    def own_address(self) -> str:
        """The address of this machine on the network of the connection."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        """Hangs up."""
        self._answers.close()
        self._socket.close()
