"""Files of a checkpoint, also in object stores: bounded reads, durable writes, and the manifest.

Orbax is imported where it is used: without it, an error gives the command that installs it.

The manifest lists the files of a step with their sizes and checksums. Each process measures the files that
it wrote, in the background, before the checkpoint counts as complete. A checksum covers the bytes on the
disk, so it is the same on every mesh. It is a CRC-32, which finds every flipped byte and is no protection
against an adversary.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scalax._report.pages import visible
from scalax._util import strict_json
from scalax.errors import ArgumentError, MissingDependencyError

Path = Any
"""An ``etils.epath.Path``: a path as in pathlib, also in object stores."""


def orbax() -> Any:
    """The module ``orbax.checkpoint``.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        if error.name not in ('orbax', 'orbax.checkpoint'):  # of what Orbax needs itself
            raise
        raise MissingDependencyError(
            'checkpoints are written and read by Orbax: pip install orbax-checkpoint'
        ) from error
    return orbax.checkpoint


def as_path(directory: str | os.PathLike[str]) -> Path:
    """A directory as Orbax takes it: absolute, possibly in an object store (``gs://...``).

    Raises:
        ArgumentError: it is not a path.
    """
    orbax()
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        raise ArgumentError(f'Checkpointer: directory has to be a path, got {directory!r}')
    from etils import epath  # a dependency of Orbax

    return epath.Path(directory).absolute()


_MOST = 1 << 28
"""The most bytes of JSON that are read; the description of a million leaves has fewer."""


def read_json(path: Path, most: int = _MOST) -> Any:
    """The value in a JSON file.

    Args:
        path: the file.
        most: the most bytes to read.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more than *most* bytes, or is not a regular file of JSON.
    """
    return strict_json.parse(read_bytes(path, most))


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more than *most* bytes, or is not a regular file.
    """
    if '://' not in str(path):
        return bytes(strict_json.read(path, most))
    with path.open('rb') as file:
        data: bytes = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f'it has more than {most:,} bytes, the most that are read')
    return data


def require_size(path: Path) -> None:
    """Raises ValueError if the file is larger than `read_json` reads; it may be missing."""
    if path.exists() and (size := file_size(path)) > _MOST:
        raise ValueError(f'{path.name} has {size} bytes, and at most {_MOST} are read')


def file_size(path: Path) -> int:
    """The size of a file in bytes.

    Raises:
        OSError: there is no such file, or it is not a regular one, such as a pipe.
    """
    if '://' in str(path):
        return int(path.stat().length)
    status = os.stat(path)  # epath looks up the name of the owner, which a container may not have
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f'{path.name} is no regular file')
    return status.st_size


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file and syncs it to the disk."""
    path.write_bytes(data)
    sync(path)


def sync(path: Path) -> None:
    """Syncs a file or folder to the disk; does nothing in an object store."""
    if '://' in str(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync folders.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_folders(root: Path) -> None:
    """Syncs a folder and all folders below it, which hold the names of the files."""
    for folder, _, _ in os.walk(root) if '://' not in str(root) else ():
        sync(folder)


def write_json(path: Path, value: Any) -> None:
    """Writes a file that `read_json` can read.

    Raises:
        ValueError: it would be larger than `read_json` reads.
    """
    data = json.dumps(value).encode()
    if len(data) > _MOST:
        raise ValueError(f'{path.name} would have {len(data)} bytes, and at most {_MOST} are read')
    write_bytes(path, data)


FOLDER = 'scalax'  # holds what scalax writes beside the arrays
_MANIFEST = 'files.json'
_CHUNK = 1 << 22  # bytes read at a time
_THREADS = 4
_LONGEST = 4096  # characters of a path


@dataclasses.dataclass(frozen=True)
class File:
    """The size of a file in bytes, and its CRC-32 if one was computed."""

    size: int
    crc32: int | None


def measure(root: Path, names: Iterable[str], checksums: bool) -> dict[str, File]:
    """Syncs the files called *names* below *root* to the disk and measures them."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        files = pool.map(lambda name: _measure_one(root / name, checksums), names)
        return dict(zip(names, files, strict=True))


def file_names(root: Path, folder: str = '') -> Iterator[str]:
    """The paths, relative to *root*, of all files in a folder below it, in a fixed order.

    There are none if the folder does not exist: a process without arrays to write does not make one.
    """
    top = root / folder if folder else root
    for path in sorted(top.iterdir()) if top.exists() else ():
        name = f'{folder}/{path.name}' if folder else path.name
        if path.is_dir():
            yield from file_names(root, name)
        else:
            yield name


def write_manifest(path: Path, files: Mapping[str, File]) -> None:
    """Writes the files of a step with their sizes and checksums."""
    write_json(path, {name: [file.size, file.crc32] for name, file in sorted(files.items())})


def read_manifest(path: Path) -> dict[str, File]:
    """Reads what `write_manifest` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a list of files, or names one outside its folder.
    """
    table = read_json(path)
    if not isinstance(table, dict):
        raise ValueError('it is not a list of files')
    return {name: _parse_file(name, entry) for name, entry in table.items()}


def _parse_file(name: str, entry: Any) -> File:
    if len(name) > _LONGEST or '\0' in name or not {'', '.', '..'}.isdisjoint(name.split('/')):
        raise ValueError(f'{name[:80]!r} is not a file of this checkpoint')
    if isinstance(entry, list) and len(entry) == 2:
        size, crc32 = entry
        if type(size) is int and size >= 0 and (crc32 is None or type(crc32) is int):
            return File(size, crc32)
    raise ValueError(f'{name[:80]!r} has no size and checksum in it')


def manifest_path(root: Path) -> Path:
    """The path of the manifest of the files below *root*."""
    return root / FOLDER / _MANIFEST


def differences(root: Path, files: Mapping[str, File], checksums: bool) -> list[str]:
    """How the files below *root* differ from their manifest; empty if they do not.

    Args:
        root: their folder.
        files: the manifest.
        checksums: whether to read all files and compare checksums. Sizes are always compared.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        texts = pool.map(lambda name: _difference(root, name, files[name], checksums), files)
        return [visible(text) for text in texts if text]


def _difference(root: Path, name: str, file: File, checksums: bool) -> str:
    try:
        size = file_size(root / name)
        if size != file.size:
            return f'{name} has {size} bytes, and {file.size} were written'
        crc32 = _crc32(root / name, size) if checksums else file.crc32
    except OSError as error:
        return f'{name} cannot be read: {error.strerror or error}'
    if crc32 != file.crc32:
        return f'{name} has other bytes than were written: its CRC-32 is {crc32:08x}, not {file.crc32:08x}'
    return ''


def _measure_one(path: Path, checksum: bool) -> File:
    size = file_size(path)
    sync(path)
    return File(size, _crc32(path, size) if checksum else None)


def _crc32(path: Path, size: int) -> int:
    """The checksum of the first *size* bytes: a file that grows meanwhile is not read forever."""
    crc32 = 0
    with path.open('rb') as file:
        while size > 0 and (chunk := file.read(min(_CHUNK, size))):
            crc32 = zlib.crc32(chunk, crc32)
            size -= len(chunk)
    return crc32
