"""The connection of a receiver to a process of the sender, and what both check of their arguments."""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Mapping
from typing import Any, cast

from scalax._core.channel import lines
from scalax._core.channel.secret import SECRET_VARIABLE, require_secret
from scalax.errors import ArgumentError, TransferError

_ADDRESS = re.compile(r'(?P<host>[^/\s:]+):(?P<port>\d+)')
_LONGEST = 1e8  # seconds; clocks have no room for much more
_LAST_PORT = 65535
_RETRY = 0.2  # seconds between two attempts to connect
_LONGEST_ANSWER = 1 << 28  # bytes: the layout of a tree of a million leaves
LONGEST_QUESTION = 1 << 20  # bytes: of a question, which names a part for each device of a process


def host_and_port(what: str, address: str) -> tuple[str, int]:
    """The parts of an address.

    Raises:
        ArgumentError: it is no address; the message begins with *what*.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        hint = ''
        if isinstance(address, str) and _is_ipv6(address.rpartition(':')[0]):
            hint = '; IPv6 addresses are not supported: give an IPv4 address, or a name that has one'
        raise ArgumentError(f"{what}: address has to be 'host:port', got {address!r}{hint}")
    if int(match['port']) > _LAST_PORT:
        raise ArgumentError(f'{what}: ports go from 0 to {_LAST_PORT}, got {address!r}')
    return match['host'], int(match['port'])


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip('[]')).version == 6
    except ValueError:
        return False


def resolved(what: str, host: str) -> str:
    """The IPv4 address of a host, which has to be one by which others can reach it.

    Raises:
        ArgumentError: it stands for all addresses of a machine; the message begins with *what*.
        OSError: the host has no address.
    """
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise OSError(
            f'{what}: the host {host!r} has no IPv4 address ({reason}). What to do: give the name or the '
            'address by which other hosts reach this one.'
        ) from error
    if ipaddress.ip_address(address).is_unspecified:
        raise ArgumentError(
            f'{what}: {host} stands for all addresses of a host, and receivers are told one. What to do: '
            'give the name or the address by which they reach this host; localhost, if they run on it.'
        )
    return address


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


class Line:
    """A connection to a process of the sender.

    Args:
        name: of the process, for messages.
        address: where it listens.
        secret: of both jobs; empty if the address is of this machine.
        wait: seconds to try to connect: the sender may start later.
        timeout: seconds that it may take to prove that it has the secret.

    Raises:
        ArgumentError: *address* is no address, or needs a secret.
        TransferError: nobody listens there, or who does has another secret.
    """

    def __init__(self, name: str, address: str, secret: bytes, wait: float, timeout: float) -> None:
        host, port = host_and_port('receive', address)
        require_secret('receive', secret, address)
        self._name = f'{name} at {address}'
        deadline = time.monotonic() + wait
        while True:
            why: Exception
            try:
                self._socket = socket.create_connection((host, port), timeout=max(wait, 1.0))
                try:
                    self._channel = self._proved(secret, timeout)
                    break
                except BaseException:
                    self._socket.close()
                    raise
            except lines.ConnectionClosed as error:
                why, reason = (
                    error,
                    'the connection was closed at once: there are too many, or the Sender ends',
                )
            except OSError as error:
                why, reason = error, str(error)
            if time.monotonic() > deadline:
                raise TransferError(
                    f'receive: nobody listens at {address} ({reason}). What to do: start the job with the '
                    'Sender, give its address, and a longer wait if it starts later.'
                ) from why
            time.sleep(_RETRY)

    def _proved(self, secret: bytes, timeout: float) -> lines.Channel:
        """The channel, once both sides have proved that they have one secret."""
        try:
            return lines.client_handshake(self._socket, secret, timeout)
        except TimeoutError:
            raise self._silent(timeout) from None
        except lines.Unauthenticated:
            raise self.fault(
                'has another secret than this job, or one of the two has none. What to do: set '
                f'{SECRET_VARIABLE} (or secret=...) to the same value in both jobs.'
            ) from None
        except lines.InvalidMessage:
            raise self.fault('is no Sender of this version of scalax') from None

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a question.

        Raises:
            TransferError: the process is gone, or silent for so many seconds, or answers with a fault.
        """
        try:
            self._channel.send(question, seconds)
            answer = self._channel.read(_LONGEST_ANSWER, seconds)
        except TimeoutError:
            raise self._silent(seconds) from None
        except lines.ConnectionClosed:
            raise self.fault('is gone: it ended, or closed its Sender') from None
        except lines.InvalidMessage:
            raise self.fault(
                'sent an answer that is too long, or not signed with the secret of both jobs'
            ) from None
        except OSError as error:
            raise self.fault(f'is gone ({error})') from error
        if 'fault' in answer:
            raise self.fault(f'answered: {answer["fault"]}')
        return cast(dict[str, Any], answer)

    def _silent(self, seconds: float) -> TransferError:
        return self.fault(f'did not answer within {seconds:.0f} s: it hangs, or is stopped')

    def fault(self, text: str) -> TransferError:
        """An error that names the process."""
        return TransferError(f'receive: {self._name} {text}')

    @property
    def own_address(self) -> str:
        """The address of this machine on the network of the connection."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()
