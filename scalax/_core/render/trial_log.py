"""A file of trials: a line of JSON for each, so that a search that was stopped continues from there."""

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

_BEGIN = b'{"of": "'
_COMPILERS = ('jaxlib', 'libtpu', 'jax-cuda12-pjrt', 'jax-cuda13-pjrt')
# Variables of the environment that compilers read beside a program and its options.
_FLAGS = ('XLA_', 'LIBTPU_')


class TrialFile:
    """The trials of searches, each under the fingerprint of what was tried. Lines are only ever appended.

    A line that was cut off, because its search was killed, is passed over.

    Args:
        path: the file, which is created if it does not exist. None keeps nothing.

    Attributes:
        path: the file; None if nothing is kept.

    Raises:
        ArgumentError: there cannot be a file at this path.
        DataError: the file holds something else, or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        if not isinstance(path, str | os.PathLike | None):
            raise ArgumentError(f'file has to be the path of a file of trials, got {path!r}')
        self.path = None if path is None else Path(path)
        self._trials: dict[str, dict[str, Any]] = {}
        self._is_cut_off = False
        if self.path is None:
            return
        if self.path.exists() and not self.path.is_dir():
            self._read(self.path)
        try:
            self.path.open('ab').close()  # minutes of compiling come before the first line
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
            out.write('\n' * self._is_cut_off + line + '\n')
        self._is_cut_off = False

    def _read(self, path: Path) -> None:
        if not path.is_file():  # a pipe would be waited for
            raise _not_trials(path, 'it is not a regular file')
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _not_trials(path, error.strerror or str(error)) from error
        for line in data.split(b'\n'):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):  # cut off, or damaged
                continue
            if isinstance(values, dict) and isinstance(values.get('of'), str):
                self._trials[values.pop('of')] = values
        if not self._trials and not data.startswith(_BEGIN[: len(data)]):
            raise _not_trials(path, f'it begins with {data[:40].decode("utf-8", "replace")!r}')
        self._is_cut_off = bool(data) and not data.endswith(b'\n')


def _not_trials(path: Path, why: str) -> DataError:
    return DataError(
        f'{os.fspath(path)!r} is not a file of trials: {why}. Give the file of an earlier search, or a path '
        'where there is no file'
    )


def fingerprint(parts: Iterable[str]) -> str:
    """Returns a text that differs for trials of which one cannot take the place of the other.

    Args:
        parts: what was tried. The versions of scalax, JAX and the compilers are added, and the variables
            in which compilers find flags.
    """
    flags = sorted(f'{name}={value}' for name, value in os.environ.items() if name.startswith(_FLAGS))
    versions = [f'{name} {_version(name)}' for name in _COMPILERS]
    lines = [__version__, jax.__version__, *versions, *flags, *parts]
    # Addresses of functions differ from process to process. Shapes such as 80x128 have a 0x too.
    text = re.sub(' at 0x[0-9a-f]+', '', '\n'.join(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ''
