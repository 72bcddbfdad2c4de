"""A file of trials: a line of JSON for each, so that a search that was stopped goes on from there."""

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

from scalax._util import strict_json
from scalax._version import __version__
from scalax.errors import ArgumentError, DataError

_BEGIN = b'{"of": "'
# Variables of the environment that compilers read beside a program and its options.
_FLAGS = ('XLA_', 'LIBTPU_')


class TrialFile:
    """The trials of searches, each under the identity of what was tried. Lines are only ever added.

    A line that was cut off, because its search was killed, is passed over.

    Args:
        path: the file, which is made if there is none. None keeps nothing.

    Attributes:
        path: the file; None if nothing is kept.

    Raises:
        ArgumentError: there cannot be a file at this path.
        DataError: the file holds something else, or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        if not isinstance(path, str | os.PathLike | None):
            raise ArgumentError(f'a file of trials is given by its path, got {path!r}')
        self.path = None if path is None else Path(path)
        self._known: dict[str, dict[str, Any]] = {}
        self._cut_off = False
        if self.path is None:
            return
        if self.path.exists() and not self.path.is_dir():
            self._read(self.path)
        try:
            self.path.open('ab').close()  # minutes of compiling come before the first line
        except OSError as error:
            raise ArgumentError(
                f'{os.fspath(self.path)!r} cannot be written: {strict_json.reason(error)}'
            ) from error

    def get(self, identity: str) -> dict[str, Any] | None:
        """The values of the last trial with this identity that was there from the start; None if none was."""
        return self._known.get(identity)

    def add(self, identity: str, values: Mapping[str, Any]) -> None:
        """Writes a trial; its values are ready for ``json.dumps``."""
        if self.path is None:
            return
        line = json.dumps({'of': identity, **values}, allow_nan=False)
        with self.path.open('a', encoding='ascii') as out:
            out.write('\n' * self._cut_off + line + '\n')
        self._cut_off = False

    def _read(self, path: Path) -> None:
        try:
            data = strict_json.read(path)
        except (OSError, ValueError) as error:
            raise _not_one(path, strict_json.reason(error)) from error
        for line in data.split(b'\n'):
            try:
                values = strict_json.parse(line)
            except ValueError:
                continue
            if isinstance(values, dict) and isinstance(values.get('of'), str):
                self._known[values.pop('of')] = values
        if not self._known and not data.startswith(_BEGIN[: len(data)]):
            start = data[:40].decode('utf-8', 'replace')
            raise _not_one(path, f'it begins with {strict_json.brief(start)}')
        self._cut_off = bool(data) and not data.endswith(b'\n')


def _not_one(path: Path, why: str) -> DataError:
    return DataError(
        f'{os.fspath(path)!r} is not a file of trials: {why}. Give the file of an earlier search, or a path '
        'where there is no file'
    )


def identity(parts: Iterable[str]) -> str:
    """What a trial has in common with one that can be used in its place.

    Args:
        parts: what was tried; versions of the compiler and its flags are added.
    """
    try:
        compiler = importlib.metadata.version('libtpu')
    except importlib.metadata.PackageNotFoundError:
        compiler = ''
    flags = sorted(f'{name}={value}' for name, value in os.environ.items() if name.startswith(_FLAGS))
    # Addresses of functions differ from process to process. Shapes such as 80x128 have a 0x too.
    text = re.sub(' at 0x[0-9a-f]+', '', '\n'.join([__version__, jax.__version__, compiler, *flags, *parts]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
