"""Connection of a receiver to a process of the sender, and checks of the arguments of both."""

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
_MAX_SECONDS = 1e8  # clocks cannot represent much longer times
_MAX_PORT = 65535
_RETRY = 0.2  # seconds between two attempts to connect
_MAX_RESPONSE = 1 << 28  # bytes: the layout of a tree of a million leaves
MAX_REQUEST = 1 << 20  # bytes: a request lists a part for each device of a process


def parse_address(function: str, address: str) -> tuple[str, int]:
    """Splits an address into host and port; messages begin with *function*.

    Raises:
        ArgumentError: it is not an address.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        hint = ''
        if isinstance(address, str) and _is_ipv6(address.rpartition(':')[0]):
            hint = '; IPv6 addresses are not supported: give an IPv4 address, or a name that has one'
        raise ArgumentError(f"{function}: address has to be 'host:port', got {address!r}{hint}")
    if int(match['port']) > _MAX_PORT:
        raise ArgumentError(f'{function}: ports go from 0 to {_MAX_PORT}, got {address!r}')
    return match['host'], int(match['port'])


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip('[]')).version == 6
    except ValueError:
        return False


def resolve_host(function: str, host: str) -> str:
    """Returns the IPv4 address of a host; messages begin with *function*.

    Raises:
        ArgumentError: the host stands for all addresses of a machine, such as 0.0.0.0.
        OSError: the host has no IPv4 address.
    """
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise OSError(
            f'{function}: the host {host!r} has no IPv4 address ({reason}). What to do: give the name or the '
            'address by which other hosts reach this one.'
        ) from error
    if ipaddress.ip_address(address).is_unspecified:
        raise ArgumentError(
            f'{function}: {host} stands for all addresses of a host, but receivers need one. What to do: '
            'give the name or the address by which they reach this host, or localhost if they run on it.'
        )
    return address


def check_seconds(function: str, wait: float, timeout: float) -> None:
    """Raises ArgumentError unless both are valid numbers of seconds; *wait* may be 0."""
    for name, value, allowed in (('wait', wait, '0 to 1e8'), ('timeout', timeout, 'more than 0, to 1e8')):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= _MAX_SECONDS or (name == 'timeout' and not value):
            raise ArgumentError(f'{function}: {name} has to be a number of seconds, {allowed}, got {value!r}')


def local_address_towards(host: str) -> str:
    """Returns the address of this machine on the network by which it reaches a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


class SenderConnection:
    """A connection to one process of the sender.

    Args:
        name: the name of the process, for messages.
        address: the address at which it listens.
        secret: the secret of both jobs; empty if the address is on this machine.
        wait: seconds to retry connecting: the sender may start later.
        timeout: seconds that the process may take to prove that it has the secret.

    Raises:
        ArgumentError: *address* is not an address, or needs a secret.
        TransferError: nothing listens there, or has another secret.
    """

    def __init__(self, name: str, address: str, secret: bytes, wait: float, timeout: float) -> None:
        host, port = parse_address('receive', address)
        require_secret('receive', secret, address)
        self._name = f'{name} at {address}'
        deadline = time.monotonic() + wait
        while True:
            cause: Exception
            try:
                self._socket = socket.create_connection((host, port), timeout=max(wait, 1.0))
                try:
                    self._channel = self._authenticate(secret, timeout)
                    break
                except BaseException:
                    self._socket.close()
                    raise
            except lines.ConnectionClosed as error:
                cause, reason = (
                    error,
                    'the connection was closed at once: there are too many, or the Sender ends',
                )
            except OSError as error:
                cause, reason = error, str(error)
            if time.monotonic() > deadline:
                raise TransferError(
                    f'receive: nobody listens at {address} ({reason}). What to do: start the job with the '
                    'Sender, give its address, and a longer wait if it starts later.'
                ) from cause
            time.sleep(_RETRY)

    def _authenticate(self, secret: bytes, timeout: float) -> lines.Channel:
        """Returns the channel, after both sides have proved that they have the same secret."""
        try:
            return lines.client_handshake(self._socket, secret, timeout)
        except TimeoutError:
            raise self._timeout_error(timeout) from None
        except lines.Unauthenticated:
            raise self.fault(
                'has another secret than this job, or one of the two has none. What to do: set '
                f'{SECRET_VARIABLE} (or secret=...) to the same value in both jobs.'
            ) from None
        except lines.InvalidMessage:
            raise self.fault('is no Sender of this version of scalax') from None

    def request(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Sends a request and returns the response.

        Raises:
            TransferError: the process is gone, does not respond in time, or responds with a fault.
        """
        try:
            self._channel.send(message, seconds)
            response = self._channel.read(_MAX_RESPONSE, seconds)
        except TimeoutError:
            raise self._timeout_error(seconds) from None
        except lines.ConnectionClosed:
            raise self.fault('is gone: it ended, or closed its Sender') from None
        except lines.InvalidMessage:
            raise self.fault(
                'sent an answer that is too long, or not signed with the secret of both jobs'
            ) from None
        except OSError as error:
            raise self.fault(f'is gone ({error})') from error
        if 'fault' in response:
            raise self.fault(f'answered: {response["fault"]}')
        return cast(dict[str, Any], response)

    def _timeout_error(self, seconds: float) -> TransferError:
        return self.fault(f'did not answer within {seconds:.0f} s: it hangs, or is stopped')

    def fault(self, text: str) -> TransferError:
        """Returns an error that names the process."""
        return TransferError(f'receive: {self._name} {text}')

    @property
    def local_address(self) -> str:
        """The address of this machine on the network of the connection."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()
