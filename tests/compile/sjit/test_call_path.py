"""Limits on the length of a call's path through scalax: function calls, files, and changes of file.

A reader of the code has to follow this path. `LIMITS` has the current lengths. A change that shortens a path
lowers its limit. A change that raises a limit has to justify it by what users gain.

Each Python frame counts as a call, and so does each resumption of a generator. Comprehensions do not count. A
change of file is a call into another file than the previous call. The count excludes the partitioner, with
the functions that it calls to read equations and specs, and one-time imports and caches of the first function
of a helper.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalax
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import ROOT

FOLDER = f'{Path(scalax.__file__).parent}/'
GENERATED = '<scalax '  # the "file" of the function that users call
PARTITIONER = tuple(f'{FOLDER}{package}/' for package in ('_spmd', '_jaxpr', '_compile/xla_workarounds'))
READ_BY_IT = (f'{FOLDER}_jax/', f'{FOLDER}_core/pytree/')
COMPREHENSIONS = {'<listcomp>', '<setcomp>', '<dictcomp>'}  # have frames up to Python 3.11
CHECKS_DELETED = jax.__version_info__ < (0, 11, 1)  # deleted arguments crash these versions
RULE = FSDPShardingRule('data', min_fsdp_size=1)


class PathLength(NamedTuple):
    """The length of the path of a call."""

    calls: int
    files: int
    file_changes: int


LIMITS = {
    'made': PathLength(76, 14, 27),
    'first': PathLength(163, 22, 84) if CHECKS_DELETED else PathLength(160, 22, 81),
    'another length': PathLength(171, 20, 86) if CHECKS_DELETED else PathLength(169, 20, 84),
    'again': PathLength(2, 2, 1) if CHECKS_DELETED else PathLength(1, 1, 0),
    'first, not partitioned': PathLength(116, 17, 62) if CHECKS_DELETED else PathLength(114, 17, 60),
    'another length, not partitioned': PathLength(124, 16, 64) if CHECKS_DELETED else PathLength(123, 16, 63),
}


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[tuple[str, str]]]:
    """Records the files and names of the functions that this thread calls in the block."""
    frames: list[tuple[str, str]] = []

    def record(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith((FOLDER, GENERATED))
        if (
            event == 'call'
            and is_ours
            and code.co_name not in COMPREHENSIONS
            and not is_in_partitioner(frame)
        ):
            frames.append((code.co_filename, code.co_name))

    before = sys.getprofile()
    gc.disable()  # finalizers would be counted
    sys.setprofile(record)
    try:
        yield frames
    finally:
        sys.setprofile(before)
        gc.enable()


def is_in_partitioner(frame: FrameType) -> bool:
    """Whether a frame belongs to the partitioner, or to a function that the partitioner calls."""
    caller: FrameType | None = frame
    while caller is not None and not caller.f_code.co_filename.startswith(PARTITIONER):
        outside = caller.f_code.co_filename.startswith((FOLDER, GENERATED))
        if outside and not caller.f_code.co_filename.startswith(READ_BY_IT):
            return False
        caller = caller.f_back
    return caller is not None


def path_length(frames: list[tuple[str, str]]) -> PathLength:
    """Returns the length of a path."""
    files = [file for file, _ in frames]
    return PathLength(len(files), len(set(files)), sum(map(str.__ne__, files, files[1:])))


def compiled(helper: MeshShardingHelper) -> Any:
    """Returns a new training step."""

    def step(params: Any, batch: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(batch @ params['w']) ** 2)

        return jax.tree.map(lambda weight, grad: weight - 0.1 * grad, params, jax.grad(loss)(params))

    return helper.sjit(step, in_shardings=(RULE, P('data')))


@functools.cache
def recorded_paths() -> dict[str, list[tuple[str, str]]]:
    """Returns the path of each call of `LIMITS`, recorded in a separate process.

    In this process, other tests may have imported libraries whose types scalax then checks for.
    """
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return {call: [*map(tuple, frames)] for call, frames in json.loads(done.stdout).items()}


def record_paths() -> dict[str, list[tuple[str, str]]]:
    paths = {}
    for partitioned in (True, False):
        helper = MeshShardingHelper([8], ['data'], partition_batch=partitioned)
        params = helper.shard({'w': np.ones((16, 8), np.float32)}, RULE)
        short, long = (helper.shard(np.ones((size, 16), np.float32), P('data')) for size in (8, 16))
        another = compiled(helper)  # imports everything, and fills the caches of meshes and rules
        for batch in (short, long):
            another(params, batch)
        with recorded_calls() as creation:
            function = compiled(helper)
        with recorded_calls() as first:
            function(params, short)
        with recorded_calls() as again:
            function(params, short)
        with recorded_calls() as longer:
            function(params, long)
        if partitioned:
            paths |= {'made': creation, 'first': first, 'another length': longer, 'again': again}
        else:
            paths |= {'first, not partitioned': first, 'another length, not partitioned': longer}
    return paths


@pytest.mark.parametrize('call', LIMITS)
def test_path_lengths(call):
    frames = recorded_paths()[call]
    length, limit = path_length(frames), LIMITS[call]
    most = collections.Counter(f'{Path(file).name}: {name}' for file, name in frames).most_common(20)
    listed = '\n'.join(f'{count:4} {location}' for location, count in most)
    assert all(map(int.__le__, length, limit)), f'{call}: {length} exceeds {limit}:\n{listed}'


@pytest.mark.slow
def test_all_functions_of_scalax_are_counted():
    with recorded_calls() as frames:
        P('data')
    assert path_length(frames) == PathLength(0, 0, 0)
    helper = MeshShardingHelper([8], ['data'])
    with recorded_calls() as frames:
        assert helper.partition_batch and len(helper.mesh.axis_names) == 1
    assert [name for _, name in frames] == ['partition_batch', 'mesh']
    assert path_length(frames) == PathLength(2, 1, 0)
    names = {name for _, name in recorded_paths()['first']}
    assert {
        'step',
        'dispatch',
        'is_rule',
    } <= names  # generated code, and functions of scalax called by scalax and by JAX


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 8)
    print(json.dumps(record_paths()))
