"""Are the files of a checkpoint what was written? A list of them, with sizes and checksums.

The checksums are those of the files as they lie on the disk, so that they mean the same on every mesh. They
are computed behind a save, by each process of the files that it wrote itself, and are there before the
checkpoint counts as complete. The checksum is CRC-32: it finds every flipped byte, and is no protection
against an adversary.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scalax._report.pages import visible
from scalax.checkpoint._json_file import json_of, size_of, sync, write_json
from scalax.checkpoint._orbax import Path

FOLDER = 'scalax'  # what scalax writes beside the arrays
_FILES = 'files.json'
_CHUNK = 1 << 22
_THREADS = 4
_LONGEST = 4096  # characters of a path


@dataclasses.dataclass(frozen=True)
class File:
    """One file: its size in bytes, and its CRC-32 where one was computed."""

    size: int
    crc32: int | None


def measured(root: Path, names: Iterable[str], checksums: bool) -> dict[str, File]:
    """The files called *names* below *root* as they are now, once they would outlast a loss of power."""
    with ThreadPoolExecutor(_THREADS) as pool:
        names = list(names)
        found = pool.map(lambda name: _measured(root / name, checksums), names)
        return dict(zip(names, found, strict=True))


def names_below(root: Path, folder: str = '') -> Iterator[str]:
    """The paths, relative to *root*, of all files in a folder below it, in a fixed order.

    None where there is no such folder: a process that has no array to write makes none.
    """
    top = root / folder if folder else root
    for path in sorted(top.iterdir()) if top.exists() else ():
        name = f'{folder}/{path.name}' if folder else path.name
        if path.is_dir():
            yield from names_below(root, name)
        else:
            yield name


def write(path: Path, files: Mapping[str, File]) -> None:
    """Writes a list of files."""
    write_json(path, {name: [file.size, file.crc32] for name, file in sorted(files.items())})


def read(path: Path) -> dict[str, File]:
    """The inverse of `write`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no list of files, or names one outside of the folder that it is about.
    """
    table = json_of(path)
    if not isinstance(table, dict):
        raise ValueError('it is no list of files')
    return {_inside(name): _file(name, entry) for name, entry in table.items()}


def _inside(name: str) -> str:
    parts = name.split('/')
    if len(name) > _LONGEST or '\0' in name or not {'', '.', '..'}.isdisjoint(parts):
        raise ValueError(f'{name[:80]!r} is no file of this checkpoint')
    return name


def _file(name: str, entry: Any) -> File:
    if isinstance(entry, list) and len(entry) == 2:
        size, crc32 = entry
        if type(size) is int and size >= 0 and (crc32 is None or type(crc32) is int):
            return File(size, crc32)
    raise ValueError(f'{name[:80]!r} has no size and checksum in it')


def manifest_of(root: Path) -> Path:
    """Where the list of the files below *root* is."""
    return root / FOLDER / _FILES


def differences(root: Path, files: Mapping[str, File], checksums: bool) -> list[str]:
    """How the files below *root* differ from the list; empty where they do not.

    Args:
        root: where they lie.
        files: what they were when they were written.
        checksums: whether to read them all and compare checksums. Sizes are compared in any case.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: _difference(root, name, files[name], checksums), files)
        return [visible(text) for text in found if text]


def _difference(root: Path, name: str, file: File, checksums: bool) -> str:
    try:
        size = size_of(root / name)
        if size != file.size:
            return f'{name} has {size} bytes, and {file.size} were written'
        crc32 = _crc32(root / name, size) if checksums else file.crc32
    except OSError as error:
        return f'{name} cannot be read: {error.strerror or error}'
    if crc32 != file.crc32:
        return f'{name} has other bytes than were written: its CRC-32 is {crc32:08x}, not {file.crc32:08x}'
    return ''


def _measured(path: Path, checksum: bool) -> File:
    size = size_of(path)
    sync(path)
    return File(size, _crc32(path, size) if checksum else None)


def _crc32(path: Path, size: int) -> int:
    """Of the first *size* bytes: a file that grows meanwhile is not read for ever."""
    crc32 = 0
    with path.open('rb') as file:
        while size > 0 and (chunk := file.read(min(_CHUNK, size))):
            crc32 = zlib.crc32(chunk, crc32)
            size -= len(chunk)
    return crc32
