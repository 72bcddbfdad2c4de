"""How far a reader has to follow one call: the functions of scalax on its way, files, and changes of file.

`LIMITS` has the numbers of today: a change that shortens the way lowers them, and one that raises them says
what users get for it.

A call is a frame of Python, and one more whenever a generator goes on; comprehensions do not count. A change
of file is a call into another file than the call before. Left out is the partitioner, with what it calls to
read equations and specs, and what the first function of a helper imports and caches.
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
PARTITIONER = tuple(f'{FOLDER}{room}/' for room in ('_spmd', '_jaxpr', '_compile/xla_workarounds'))
READ_BY_IT = (f'{FOLDER}_jax/', f'{FOLDER}_core/pytree/')
COMPREHENSIONS = {'<listcomp>', '<setcomp>', '<dictcomp>'}  # frames of their own up to Python 3.11
GUARDED = jax.__version_info__ < (0, 11, 1)  # a deleted argument ends the process there, and is looked for
RULE = FSDPShardingRule('data', min_fsdp_size=1)


class Way(NamedTuple):
    """What a call passes."""

    calls: int
    files: int
    changes: int


LIMITS = {
    'made': Way(76, 14, 27),
    'first': Way(163, 22, 84) if GUARDED else Way(160, 22, 81),
    'another length': Way(171, 20, 86) if GUARDED else Way(169, 20, 84),
    'again': Way(2, 2, 1) if GUARDED else Way(1, 1, 0),
    'first, not partitioned': Way(116, 17, 62) if GUARDED else Way(114, 17, 60),
    'another length, not partitioned': Way(124, 16, 64) if GUARDED else Way(123, 16, 63),
}


@contextlib.contextmanager
def passed() -> Iterator[list[tuple[str, str]]]:
    """The files and names of the functions that this thread calls in the block."""
    frames: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith((FOLDER, GENERATED))
        if (
            event == 'call'
            and ours
            and code.co_name not in COMPREHENSIONS
            and not is_of_the_partitioner(frame)
        ):
            frames.append((code.co_filename, code.co_name))

    before = sys.getprofile()
    gc.disable()  # what is freed when it happens to be is no part of the way
    sys.setprofile(note)
    try:
        yield frames
    finally:
        sys.setprofile(before)
        gc.enable()


def is_of_the_partitioner(frame: FrameType) -> bool:
    """Whether a frame is one of the partitioner, or of what it calls."""
    caller: FrameType | None = frame
    while caller is not None and not caller.f_code.co_filename.startswith(PARTITIONER):
        outside = caller.f_code.co_filename.startswith((FOLDER, GENERATED))
        if outside and not caller.f_code.co_filename.startswith(READ_BY_IT):
            return False
        caller = caller.f_back
    return caller is not None


def way_of(frames: list[tuple[str, str]]) -> Way:
    """The numbers of what was passed."""
    files = [file for file, _ in frames]
    return Way(len(files), len(set(files)), sum(map(str.__ne__, files, files[1:])))


def compiled(helper: MeshShardingHelper) -> Any:
    """A step of training that nobody has called yet."""

    def step(params: Any, batch: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(batch @ params['w']) ** 2)

        return jax.tree.map(lambda weight, grad: weight - 0.1 * grad, params, jax.grad(loss)(params))

    return helper.sjit(step, in_shardings=(RULE, P('data')))


@functools.cache
def found_on_the_way() -> dict[str, list[tuple[str, str]]]:
    """What is passed by each call of `LIMITS`, in a process of its own.

    Here other tests may have imported libraries whose types are looked for since.
    """
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return {call: [*map(tuple, frames)] for call, frames in json.loads(done.stdout).items()}


def measured() -> dict[str, list[tuple[str, str]]]:
    ways = {}
    for partitioned in (True, False):
        helper = MeshShardingHelper([8], ['data'], partition_batch=partitioned)
        params = helper.shard({'w': np.ones((16, 8), np.float32)}, RULE)
        short, long = (helper.shard(np.ones((rows, 16), np.float32), P('data')) for rows in (8, 16))
        another = compiled(helper)  # imports everything, and fills the caches of meshes and rules
        for batch in (short, long):
            another(params, batch)
        with passed() as creation:
            function = compiled(helper)
        with passed() as first:
            function(params, short)
        with passed() as again:
            function(params, short)
        with passed() as longer:
            function(params, long)
        if partitioned:
            ways |= {'made': creation, 'first': first, 'another length': longer, 'again': again}
        else:
            ways |= {'first, not partitioned': first, 'another length, not partitioned': longer}
    return ways


@pytest.mark.parametrize('call', LIMITS)
def test_no_call_passes_more_than_it_did(call):
    frames = found_on_the_way()[call]
    way, limit = way_of(frames), LIMITS[call]
    most = collections.Counter(f'{Path(file).name}: {name}' for file, name in frames).most_common(20)
    listed = '\n'.join(f'{count:4} {location}' for location, count in most)
    assert all(map(int.__le__, way, limit)), f'{call}: {way} passes more than {limit}:\n{listed}'


@pytest.mark.slow
def test_everything_of_ours_on_the_way_is_counted():
    with passed() as frames:
        P('data')
    assert way_of(frames) == Way(0, 0, 0)
    helper = MeshShardingHelper([8], ['data'])
    with passed() as frames:
        assert helper.partition_batch and len(helper.mesh.axis_names) == 1
    assert [name for _, name in frames] == ['partition_batch', 'mesh']
    assert way_of(frames) == Way(2, 1, 0)
    names = {name for _, name in found_on_the_way()['first']}
    assert {'step', 'dispatch', 'is_rule'} <= names  # what is generated, ours, and ours as called by JAX


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 8)
    print(json.dumps(measured()))
