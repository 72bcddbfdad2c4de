"""Compilations for TPUs and GPUs that `scripts/record_programs.py` has recorded, for tests."""

from __future__ import annotations

import dataclasses
import functools
import json
import lzma
from pathlib import Path
from typing import Any

import jax

from scalax._core.mesh.gpu_topologies import GPU_KINDS

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / 'tests' / 'recorded'
# The memory tables that the compiler writes.
TABLES = ('memory-usage-report', 'buffer-assignment', 'live-range')
# Placeholders in recordings for folders of the machine that recorded them.
PLACES = {'{packages}': str(Path(jax.__file__).resolve().parents[1]), '{repository}': str(REPOSITORY)}


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One compilation of one program.

    Attributes:
        name: the name of the program in `tests.support.tpu_programs.PROGRAMS`, or in that of GPUs.
        topology: the hardware of each slice, such as ``'v5e:2x4'``.
        mesh: mesh axis name -> size. Slices are blocks of the first axis.
        slices: the number of slices.
        versions: the versions of ``jax`` and the compiler.
        partitioned: the program after the partitioner.
        optimized: the program after all optimizations.
        tables: the texts of `TABLES`.
        memory: ``memory_analysis()``, name -> bytes.
        executable: the text of ``Compiled.as_text()``, or *optimized* if a second reader found no difference
            between them.
        seconds: CPU seconds of the compilation.
    """

    name: str
    topology: str
    mesh: dict[str, int]
    slices: int
    versions: dict[str, str]
    partitioned: str
    optimized: str
    tables: tuple[str, str, str]
    memory: dict[str, int]
    executable: str
    seconds: float


def names() -> list[str]:
    """Returns the recorded programs for TPUs."""
    return _names(FOLDER)


def gpu_names() -> list[str]:
    """Returns the recorded programs for GPUs."""
    return _names(FOLDER / 'gpus')


def _names(folder: Path) -> list[str]:
    return sorted(path.name.partition('.')[0].replace('-', ' ') for path in folder.glob('*.json.xz'))


def file_of(name: str) -> Path:
    folder = FOLDER / 'gpus' if name.split()[-1] in GPU_KINDS else FOLDER
    return folder / f'{name.replace(" ", "-")}.json.xz'


@functools.lru_cache(maxsize=4)
def recorded(name: str) -> Recorded:
    """Returns the recorded compilation of a program."""
    packed = file_of(name).read_bytes()
    content = {key: here(value) for key, value in json.loads(lzma.decompress(packed)).items()}
    content['executable'] = content['executable'] or content['optimized']
    return Recorded(name, **content)


def write(recording: Recorded) -> int:
    """Writes a recording, and returns its size in bytes."""
    content = {key: anywhere(value) for key, value in dataclasses.asdict(recording).items() if key != 'name'}
    if content['executable'] == content['optimized']:
        content['executable'] = ''
    packed = lzma.compress(json.dumps(content).encode(), preset=9 | lzma.PRESET_EXTREME)
    file_of(recording.name).parent.mkdir(exist_ok=True)
    file_of(recording.name).write_bytes(packed)
    return len(packed)


def here(value: Any) -> Any:
    """Returns a value with the folders of this machine in place of their placeholders."""
    return _replaced(value, PLACES)


def anywhere(value: Any) -> Any:
    """Returns a value with placeholders in place of the folders of this machine."""
    return _replaced(value, {folder: placeholder for placeholder, folder in PLACES.items()})


def _replaced(value: Any, words: dict[str, str]) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_replaced(part, words) for part in value)
    if isinstance(value, str):
        for old, new in words.items():
            value = value.replace(old, new)
    return value
