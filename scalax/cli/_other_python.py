"""Verifies a step once more with another interpreter, which has another JAX."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
from collections.abc import Mapping
from typing import Any

from scalax._util.progress import progress
from scalax._verify.verified import Retry, Verified
from scalax.cli._exit_codes import ExitCode

_SECONDS = 900  # that the other one may take
_log = logging.getLogger('scalax.verify')


def with_other_python(found: Verified, python: str, function: str, given: Mapping[str, Any]) -> Verified:
    """The result of a verification, with whether it differs with another JAX too.

    Args:
        found: the result of this interpreter.
        python: the path of the other one.
        function: ``FILE.py:make_step``.
        given: the options, by name, as the command has read them.
    """
    command = [python, '-m', 'scalax', 'verify', function, '--json', *map(_option, given, given.values())]
    try:
        with progress(f'verifying with {python}', _log):
            retry = _retried(f'with {python}', [*filter(None, command)])
    except KeyboardInterrupt:
        return dataclasses.replace(found, ended='stopped')
    return dataclasses.replace(found, retries=(*found.retries, retry))


def _option(name: str, value: Any) -> str:
    """An option of the command line; empty if it was not given."""
    if isinstance(value, Mapping):
        value = ','.join(f'{axis}={size}' for axis, size in value.items())
    return f'--{name}' if value is True else f'--{name}={value}' if value else ''


def _retried(change: str, command: list[str]) -> Retry:
    """What the other interpreter found; it is ended when it takes too long, and at Ctrl-C."""
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        ) as process:
            try:
                out, said = process.communicate(timeout=_SECONDS)
            finally:
                process.kill()
                process.wait()
    except OSError as error:
        return Retry(change, None, str(error.strerror or error))
    except subprocess.TimeoutExpired:
        return Retry(change, None, f'it did not end within {_SECONDS} s')
    if process.returncode not in (ExitCode.DONE, ExitCode.FOUND):
        last = said.strip().splitlines() or [f'exit code {process.returncode}']
        return Retry(change, None, last[-1])
    other = json.loads(out)
    change, differs = f'with JAX {other["jax"]}', bool(other['differences'] or other['first'])
    if differs or other['ok']:
        return Retry(change, differs)
    return Retry(change, None, 'not all results were compared')
