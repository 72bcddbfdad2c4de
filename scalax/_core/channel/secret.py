"""The shared secret of a run: its sources, and the addresses that require one."""

from __future__ import annotations

import ipaddress
import os
import socket

from scalax.errors import ArgumentError

SECRET_VARIABLE = 'SCALAX_RUN_TOKEN'
COMMAND = "python -c 'import secrets; print(secrets.token_hex())'"
_MIN_LENGTH = 16  # characters: a short secret can be found by brute force from one recorded message


def resolve_secret(caller: str, secret: str | None = None) -> bytes:
    """Returns the secret of an argument, or otherwise of the environment variable; empty without both.

    Surrounding white space is removed: a file has a newline at its end, which most shells drop.

    Raises:
        ArgumentError: the secret is not text, or is too short. The message begins with *caller*.
    """
    name = 'secret'
    if secret is None:
        name, secret = SECRET_VARIABLE, os.environ.get(SECRET_VARIABLE) or None
    if secret is None:
        return b''
    text = secret.strip() if isinstance(secret, str) else ''
    if len(text) < _MIN_LENGTH:
        length = f'{len(text)} characters' if isinstance(secret, str) else type(secret).__name__
        raise ArgumentError(
            f'{caller}: {name} has to be text of at least {_MIN_LENGTH} characters, which nobody can guess, '
            f'got {length}. What to do: {COMMAND} makes one.'
        )
    return text.encode('utf-8', 'surrogatepass')  # a variable may contain bytes that are not UTF-8


def require_secret(caller: str, secret: bytes, address: str) -> None:
    """Raises ArgumentError if an address can be reached from other machines and there is no secret."""
    if not secret and not is_loopback(address.rpartition(':')[0]):
        raise missing_secret_error(caller, address)


def missing_secret_error(caller: str, address: str) -> ArgumentError:
    """Returns the error about a missing secret for an address that other machines can reach."""
    port = address.rpartition(':')[2]
    return ArgumentError(
        f'{caller}: {address} can be reached from other machines, and there is no secret to restrict who may '
        f'connect. What to do: set the environment variable {SECRET_VARIABLE} to the same secret on both '
        f'sides, or give it as secret=...; {COMMAND} makes one. On one machine, localhost:{port} needs none.'
    )


def is_loopback(host: str) -> bool:
    """Returns whether a host has only loopback addresses, which no other machine can reach."""
    if names_loopback(host):
        return True
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the host is not known, or not yet, or is invalid
        return False
    return all(names_loopback(str(address[0])) for *_, address in addresses)


def names_loopback(host: str) -> bool:
    """Returns whether a host is the loopback address on every machine, whatever its hosts file says."""
    if host == 'localhost':
        return True
    try:
        return ipaddress.ip_address(host.strip('[]')).is_loopback
    except ValueError:
        return False
