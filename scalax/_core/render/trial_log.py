"""Log of trials: one line of JSON per trial, from which an interrupted search continues."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from scalax._version import __version__
from scalax.errors import ArgumentError, DataError

_START = b'{"of": "'
_COMPILERS = ('jaxlib', 'libtpu', 'jax-cuda12-pjrt', 'jax-cuda13-pjrt')
# Prefixes of environment variables that compilers read.
_FLAGS = ('XLA_', 'LIBTPU_')


class TrialLog:
    """The trials of searches, each under the fingerprint of its inputs. Lines are only appended.

    An incomplete line, which a killed search may leave, is skipped.

    Args:
        path: the file, which is created if it does not exist. None stores nothing.

    Attributes:
        path: the file, or None.

    Raises:
        ArgumentError: there cannot be a file at this path.
        DataError: the file holds something else, or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        if not isinstance(path, str | os.PathLike | None):
            raise ArgumentError(f'file has to be the path of a file of trials, got {path!r}')
        self.path = None if path is None else Path(path)
        self._trials: dict[str, dict[str, Any]] = {}
        self._is_last_line_incomplete = False
        if self.path is None:
            return
        if self.path.exists() and not self.path.is_dir():
            self._read(self.path)
        try:
            self.path.open('ab').close()  # fail now: minutes of compiling come before the first line
        except OSError as error:
            raise ArgumentError(
                f'the file of trials {os.fspath(self.path)!r} cannot be written: {error.strerror or error}'
            ) from error

    def get(self, fingerprint: str) -> dict[str, Any] | None:
        """Returns the trial that the file held under a fingerprint when it was opened."""
        return self._trials.get(fingerprint)

    def add(self, fingerprint: str, values: Mapping[str, Any]) -> None:
        """Appends a trial, whose values are ready for ``json.dumps``."""
        if self.path is None:
            return
        line = json.dumps({'of': fingerprint, **values}, allow_nan=False)
        with self.path.open('a', encoding='ascii') as out:
            out.write('\n' * self._is_last_line_incomplete + line + '\n')
        self._is_last_line_incomplete = False

    def _read(self, path: Path) -> None:
        if not path.is_file():  # reading a pipe would block
            raise _not_trials(path, 'it is not a regular file')
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _not_trials(path, error.strerror or str(error)) from error
        for line in data.split(b'\n'):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):  # incomplete or damaged
                continue
            if isinstance(values, dict) and isinstance(values.get('of'), str):
                self._trials[values.pop('of')] = values
        if not self._trials and not data.startswith(_START[: len(data)]):
            raise _not_trials(path, f'it begins with {data[:40].decode("utf-8", "replace")!r}')
        self._is_last_line_incomplete = bool(data) and not data.endswith(b'\n')


def _not_trials(path: Path, why: str) -> DataError:
    return DataError(
        f'{os.fspath(path)!r} is not a file of trials: {why}. Give the file of an earlier search, or a path '
        'where there is no file'
    )


def fingerprint(parts: Iterable[str]) -> str:
    """Returns a text that differs for trials whose results may differ.

    Args:
        parts: the inputs of the trial. The versions of scalax, JAX and the compilers are added, and the
            environment variables with compiler flags.
    """
    flags = sorted(f'{name}={value}' for name, value in os.environ.items() if name.startswith(_FLAGS))
    versions = [f'{name} {_version(name)}' for name in _COMPILERS]
    lines = [__version__, jax.__version__, *versions, *flags, *parts]
    # Addresses of functions differ between processes. Shapes such as 80x128 contain 0x too.
    text = re.sub(' at 0x[0-9a-f]+', '', '\n'.join(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ''
