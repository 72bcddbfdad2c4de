"""A compiled program in a file: what a plan saves, for another machine to load (`executable`).

JAX turns a program into bytes (``jax.experimental.serialize_executable``), which hold pickled Python and
machine code. A file is a line that names its format, a line with a length, JSON of that length, and these
bytes. The JSON is read first, so that what does not fit is named before anything is unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import os
import pickle
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from scalax._report import saved
from scalax._trace.threads import in_a_thread
from scalax._util import strict_json
from scalax._version import __version__
from scalax.errors import ArgumentError, DataError, PlanError

if TYPE_CHECKING:
    from scalax._plan.plan import Plan

_FIRST_LINE = b'scalax executable 1\n'
_LONGEST_HEAD = 1 << 28  # bytes of JSON: a plan of a million leaves
_DIGITS = 12
_CUDA = ('jax-cuda12-plugin', 'jax-cuda13-plugin')
_COMPILERS = {'tpu': ('libtpu',), 'cuda': _CUDA, 'gpu': _CUDA}
# The program of a plan has options with which the compiler writes files, and so has the one that a persistent
# compilation cache then holds. This option, at a value that is not its default, changes only the key there.
_OWN_KEY: dict[str, Any] = {'xla_debug_buffer_assignment_show_max': 16}


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What a plan was made of, to be compiled once more.

    Attributes:
        lowered: the ``jax.stages.Lowered``.
        mesh: the mesh that it is for.
    """

    lowered: Any
    mesh: Mesh


@dataclasses.dataclass(frozen=True)
class Head:
    """What a file says before its program.

    Attributes:
        versions: the packages that compiled it -> their versions.
        device_ids: the ids of the devices, in the order of the mesh.
        axis_types: those of the mesh axes.
        plan: the plan, as JSON.
        tree_bytes: the bytes of the pickled trees of arguments and outputs.
        program_bytes: the bytes of the program, after the trees.
        sha256: the digest of both.
    """

    versions: Mapping[str, str]
    device_ids: tuple[int, ...]
    axis_types: tuple[str, ...]
    plan: str
    tree_bytes: int
    program_bytes: int
    sha256: str


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Compiles the program of a plan and writes it; see `Plan.save_executable`."""
    program, target = plan.program, Path(os.path.realpath(path))  # a link stays one
    if program is None:
        raise PlanError(
            'this plan has no program to save: it was read from a file, or made by a search; '
            'helper.plan(step, *arguments) makes one that has'
        )
    if plan.simulates:
        raise PlanError(f'{plan.name!r} has no program for {plan.simulates} to save: {plan.not_compiled_for}')
    if plan.fits is False and not plan.quick:
        raise PlanError(f'{plan.name!r} does not fit into memory, so that there is no program to save')
    if plan.devices != program.mesh.size:
        raise PlanError(
            f'{plan.name!r} runs on {plan.devices} of {program.mesh.size} devices, because no argument or '
            'output has a sharding on the mesh: give it in_shardings'
        )
    if target.is_dir() or not target.parent.is_dir():
        raise ArgumentError(
            f'{os.fspath(path)!r} cannot be written: it is a folder, or its parent directory does not exist'
        )
    trees, code = _bytes_of(plan.name, program)
    head = Head(
        versions_for(plan.platform),
        tuple(device.id for device in program.mesh.devices.flat),
        tuple(kind.name for kind in program.mesh.axis_types),
        plan.to_json(),
        len(trees),
        len(code),
        hashlib.sha256(trees + code).hexdigest(),
    )
    text = saved.write(saved.plain(head)).encode()
    whole = target.with_name(f'.{target.name}.{secrets.token_hex(8)}')
    try:  # whoever reads it sees the old file or the new one
        with open(whole, 'xb') as file:
            file.writelines([_FIRST_LINE, b'%d\n' % len(text), text, trees, code])
        os.replace(whole, target)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        whole.unlink(missing_ok=True)


def _bytes_of(name: str, program: Program) -> tuple[bytes, bytes]:
    """The pickled trees of arguments and outputs, and the program as JAX writes it."""
    try:
        # As for plans: Ctrl-C does not interrupt a compiler in the main thread.
        compiled = in_a_thread('scalax-save', lambda: program.lowered.compile(compiler_options=_OWN_KEY))
    except jax.errors.JaxRuntimeError as error:
        raise PlanError(f'{name!r} has no program to save: {str(error).partition(chr(10))[0]}') from error
    try:
        code, *trees = serialize_executable.serialize(compiled)
    except Exception as error:  # pickle raises errors of many kinds
        raise PlanError(
            f'JAX cannot save the program of {name!r}: {error}\n'
            'What to do: take out what calls back into Python, such as jax.debug.print and pure_callback, '
            'which stay in this process'
        ) from error
    try:
        return pickle.dumps(tuple(trees)), code
    except Exception as error:
        raise PlanError(
            f'the arguments or outputs of {name!r} hold a class that cannot be pickled: {error}\n'
            'What to do: define it at the top of a module that is there where the program is loaded'
        ) from error


def versions_for(platform: str) -> dict[str, str]:
    """The versions that a program depends on."""
    packages = ['jax', 'jaxlib', *_COMPILERS.get(platform, ())]
    versions = {'scalax': __version__}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def read(path: str | os.PathLike[str], name: str) -> tuple[Head, bytes]:
    """What a file says of its program, and the program."""
    try:
        with strict_json.opened(path) as raw, io.BufferedReader(raw) as file:
            first, length = file.readline(len(_FIRST_LINE)), file.readline(_DIGITS)
            if first != _FIRST_LINE:
                raise ValueError(f'it begins with {first!r}, and not with {_FIRST_LINE!r}')
            if not length.strip().isdigit() or int(length) > _LONGEST_HEAD:
                raise ValueError('the length of its description is invalid')
            head = saved.read(Head, file.read(int(length)).decode(), 'program')
            data = file.read()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(
            f'{name} is not a program that Plan.save_executable wrote: {strict_json.reason(error)}'
        ) from error
    if len(data) != head.tree_bytes + head.program_bytes:
        raise DataError(
            f'{name} is damaged: {len(data):,} bytes of program, and it says '
            f'{head.tree_bytes + head.program_bytes:,}'
        )
    return head, data
