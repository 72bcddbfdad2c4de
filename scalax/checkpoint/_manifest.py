"""Manifest of a step: its files with their sizes and checksums, written after all other files.

Orbax has no such list. It restores wrong values if a byte has changed, and detects a missing or truncated
file only when it reads that file. Each process measures the files that it wrote, in the background. A
checksum covers the bytes on the disk, so it is the same on every mesh. It is a CRC-32, which detects every
changed byte, but does not protect against an adversary.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from scalax._core.render.html_pages import visible
from scalax._jax.orbax import Path
from scalax.checkpoint._files import read_json, sync

_CHUNK = 1 << 22  # bytes read at a time
_THREADS = 4


class File(NamedTuple):
    """The size of a file in bytes, and its CRC-32 if one was computed."""

    size: int
    crc32: int | None


def file_names(root: Path, folder: str = '') -> Iterator[str]:
    """Yields the paths, relative to *root*, of all files in a folder below it, in a fixed order.

    The folder may not exist: a process without arrays to write does not create one.
    """
    top = root / folder if folder else root
    for path in sorted(top.iterdir()) if top.exists() else ():
        name = f'{folder}/{path.name}' if folder else path.name
        if path.is_dir():
            yield from file_names(root, name)
        else:
            yield name


def measure(root: Path, names: Iterable[str], checksums: bool) -> dict[str, File]:
    """Syncs files below *root* to the disk, and returns their sizes and checksums by name."""

    def measure_file(name: str) -> File:
        sync(root / name)
        return File((root / name).stat().length, _crc32(root / name) if checksums else None)

    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(measure_file, names), strict=True))


def write_manifest(path: Path, files: Mapping[str, File]) -> None:
    """Writes the files of a step with their sizes and checksums."""
    path.write_text(json.dumps(dict(sorted(files.items()))))
    sync(path)


def read_manifest(path: Path) -> dict[str, File]:
    """Reads a manifest.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a manifest, or lists a file outside of its folder.
    """
    try:
        files = {name: File(*entry) for name, entry in read_json(path).items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f'it is not a list of files: {error}') from error
    for name, (size, crc32) in files.items():
        if '\0' in name or not {'', '.', '..'}.isdisjoint(name.split('/')):
            raise ValueError(f'{name[:80]!r} is not a file of this checkpoint')
        if type(size) is not int or size < 0 or type(crc32) not in (int, type(None)):
            raise ValueError(f'{name[:80]!r} has no size and checksum in it')
    return files


def differences(root: Path, files: Mapping[str, File], checksums: bool) -> list[str]:
    """Returns the differences between the files below *root* and their manifest; empty if there are none.

    Args:
        root: the folder of the files.
        files: the manifest.
        checksums: whether to read all files and compare their checksums, besides their sizes.
    """

    def difference(name: str) -> str:
        try:
            size, expected = (root / name).stat().length, files[name]
            if size != expected.size:
                return f'{name} has {size} bytes, but {expected.size} were written'
            if checksums and not _is_regular(root / name):
                return f'{name} is not a regular file'
            crc32 = _crc32(root / name) if checksums else expected.crc32
        except OSError as error:
            return f'{name} cannot be read: {error.strerror or error}'
        if crc32 != expected.crc32:
            return (
                f'{name} has changed since it was written: its CRC-32 is {crc32:08x}, not '
                f'{expected.crc32:08x}'
            )
        return ''

    with ThreadPoolExecutor(_THREADS) as pool:
        return [visible(text) for text in pool.map(difference, files) if text]


def _is_regular(path: Path) -> bool:
    """Returns whether a path is a regular file, which unlike a pipe or a device has an end."""
    return '://' in str(path) or stat.S_ISREG(os.stat(path).st_mode)


def _crc32(path: Path) -> int:
    crc32 = 0
    with path.open('rb') as file:
        while chunk := file.read(_CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32
