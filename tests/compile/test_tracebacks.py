"""Tracebacks of errors that a user's function raises during compilation."""

from __future__ import annotations

import traceback
from pathlib import Path

import jax
import numpy as np
import pytest

import scalax
from scalax import microbatch
from scalax.errors import ScalaxError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['data', 'model'])
X = np.ones((8, 8), np.float32)


def files(error):
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]


def of_sjit(names):
    return [name for name in names if '_compile' in Path(name).parts]


def of_scalax(names):
    return [name for name in names if Path(scalax.__file__).parent in Path(name).parents]


TRACEBACKS = {
    'a call': lambda compiled, _: compiled(X),
    'a call of another shape': lambda compiled, called_before: called_before(X),
    'under grad': lambda compiled, _: jax.grad(compiled)(X),
    'under jit': lambda compiled, _: jax.jit(compiled)(X),
    'nested': lambda compiled, _: HELPER.sjit(lambda x: compiled(x))(X),
    'lower': lambda compiled, _: compiled.lower(X),
    'not compiled': lambda compiled, _: without_jit(compiled),
    'inline': lambda compiled, _: HELPER.shard_map(lambda x: compiled(x), P('data'), P('data'))(X),
}


def without_jit(compiled):
    with jax.disable_jit():
        return compiled(X)


def failing(x):
    if x.ndim == 2:
        raise KeyError('mine')
    return x


@pytest.mark.parametrize('call', TRACEBACKS)
def test_tracebacks_show_the_users_lines(call):
    compiled, called_before = HELPER.sjit(failing), HELPER.sjit(failing)
    called_before(X[0])
    with pytest.raises(KeyError) as error:
        TRACEBACKS[call](compiled, called_before)
    names = files(error.value)
    assert names[-1] == __file__
    assert len(of_sjit(names)) == 2 * (call == 'lower')


WRAPPED = {
    'shard_map': HELPER.shard_map(failing, P('data'), P('data')),
    'microbatch': microbatch(failing, 2, batch=0),
    'shard_map of microbatch': HELPER.shard_map(
        microbatch(failing, 2, batch=0), P('data'), P('data'), check_vma=False
    ),
}


@pytest.mark.parametrize('wrapped', WRAPPED)
@pytest.mark.parametrize('compiled', [True, False], ids=['sjit', 'eager'])
def test_tracebacks_skip_internal_frames(wrapped, compiled):
    with pytest.raises(KeyError) as error:
        (HELPER.sjit(WRAPPED[wrapped]) if compiled else WRAPPED[wrapped])(X)
    names = files(error.value)
    assert names[-1] == __file__
    assert not of_scalax(names)


def test_errors_of_scalax_keep_their_frames():
    with pytest.raises(ScalaxError) as error:
        HELPER.shard_map(failing, P('data'), P('data'))(X[:3])
    assert of_scalax(files(error.value))


def test_tracebacks_show_all_lines_where_jax_shows_its_own():
    filtering = jax.config.jax_traceback_filtering
    jax.config.update('jax_traceback_filtering', 'off')
    try:
        with pytest.raises(KeyError) as error:
            HELPER.sjit(failing)(X)
    finally:
        jax.config.update('jax_traceback_filtering', filtering)
    assert of_sjit(files(error.value))
