"""The secret of a run: where it comes from, and who has to have one."""

from __future__ import annotations

import ipaddress
import os
import socket

from scalax.errors import ArgumentError

SECRET_VARIABLE = 'SCALAX_RUN_TOKEN'
COMMAND = "python -c 'import secrets; print(secrets.token_hex())'"
_LEAST = 16  # characters: whoever sees one message can try short secrets until one fits


def resolve_secret(what: str, secret: str | None = None) -> bytes:
    """The secret of an argument, or else of the environment variable; empty if there is none.

    White space around it does not count: a file has a newline at its end, and most shells drop it.

    Raises:
        ArgumentError: the secret is not text, or is too short; the message begins with *what*.
    """
    name = 'secret'
    if secret is None:
        name, secret = SECRET_VARIABLE, os.environ.get(SECRET_VARIABLE) or None
    if secret is None:
        return b''
    text = secret.strip() if isinstance(secret, str) else ''
    if len(text) < _LEAST:
        length = f'{len(text)} characters' if isinstance(secret, str) else type(secret).__name__
        raise ArgumentError(
            f'{what}: {name} has to be text of at least {_LEAST} characters, which nobody can guess, got '
            f'{length}. What to do: {COMMAND} makes one.'
        )
    return text.encode('utf-8', 'surrogatepass')  # a variable may have bytes that are no UTF-8


def require_secret(what: str, secret: bytes, address: str) -> None:
    """Raises ArgumentError if an address can be reached from other machines and there is no secret."""
    if not secret and not is_loopback(address.rpartition(':')[0]):
        raise missing_secret_error(what, address)


def missing_secret_error(what: str, address: str) -> ArgumentError:
    """The error about an address that can be reached from other machines, and no secret."""
    port = address.rpartition(':')[2]
    return ArgumentError(
        f'{what}: {address} can be reached from other machines, and there is no secret to tell who may '
        f'connect. What to do: set the environment variable {SECRET_VARIABLE} to the same secret on both '
        f'sides, or give it as secret=...; {COMMAND} makes one. On one machine, localhost:{port} needs none.'
    )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, and each of its addresses one that no other machine can reach."""
    if names_loopback(host):
        return True
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # nobody knows the host, or not yet; or it is no name
        return False
    return all(names_loopback(str(address[0])) for *_, address in addresses)


def names_loopback(host: str) -> bool:
    """Whether a host names the loopback address on every machine, whatever its tables of names say."""
    if host == 'localhost':
        return True
    try:
        return ipaddress.ip_address(host.strip('[]')).is_loopback
    except ValueError:
        return False
