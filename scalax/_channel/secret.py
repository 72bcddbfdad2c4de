"""The secret of a run: where it comes from, and who has to have one."""

from __future__ import annotations

import ipaddress
import os
import socket

from scalax.errors import ArgumentError

VARIABLE = 'SCALAX_RUN_TOKEN'
COMMAND = "python -c 'import secrets; print(secrets.token_hex())'"
_LEAST = 16  # characters: whoever sees one message can try short secrets until one fits


def secret_of(what: str, secret: str | None = None) -> bytes:
    """The secret of an argument, or else of the environment variable; empty if there is none.

    Raises:
        ArgumentError: the secret is not text, or is too short; the message begins with *what*.
    """
    name = 'secret'
    if secret is None:
        name, secret = VARIABLE, os.environ.get(VARIABLE) or None
    if secret is None:
        return b''
    if not isinstance(secret, str) or len(secret) < _LEAST:
        length = f'{len(secret)} characters' if isinstance(secret, str) else type(secret).__name__
        raise ArgumentError(
            f'{what}: {name} has to be text of at least {_LEAST} characters, which nobody can guess, got '
            f'{length}. What to do: {COMMAND} makes one.'
        )
    return secret.encode()


def require_secret(what: str, secret: bytes, address: str) -> None:
    """Raises ArgumentError if an address can be reached from other machines and there is no secret."""
    if not secret and not is_loopback(address.rpartition(':')[0]):
        raise lacks_secret(what, address)


def lacks_secret(what: str, address: str) -> ArgumentError:
    """The error about an address that can be reached from other machines, and no secret."""
    port = address.rpartition(':')[2]
    return ArgumentError(
        f'{what}: {address} can be reached from other machines, and there is no secret to tell who may '
        f'connect. What to do: set the environment variable {VARIABLE} to the same secret on both sides, '
        f'or give it as secret=...; {COMMAND} makes one. On one machine, localhost:{port} needs none.'
    )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine under an address that no other machine can reach."""
    if names_loopback(host):
        return True
    try:
        return names_loopback(socket.gethostbyname(host))
    except OSError:  # nobody knows the host, or not yet
        return False


def names_loopback(host: str) -> bool:
    """Whether a host names the loopback address on every machine, whatever its tables of names say."""
    if host == 'localhost':
        return True
    try:
        return ipaddress.ip_address(host.strip('[]')).is_loopback
    except ValueError:
        return False
