"""Calls in another thread with the JAX settings of this one, and objects that threads share."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from scalax._core.context.thread_state import run_in_thread
from scalax._jax.tracing import THREAD_SETTINGS as SETTINGS
from scalax.errors import MeshError
from scalax.sharding import (
    MeshShardingHelper,
    PartitionSpec,
    TreePathShardingRule,
    get_global_annotation_shardings,
    get_global_mesh_helper,
    with_sharding_annotation,
)
from tests.support.threads import COUNT, in_threads

HELPER = MeshShardingHelper([4, 2], ['data', 'tp'])

# A value other than the default. Other settings are negated.
VALUES = {
    'array_garbage_collection_guard': 'log',
    'default_matmul_precision': 'float32',
    'default_prng_impl': 'rbg',
    'legacy_prng_key': 'warn',
    'numpy_dtype_promotion': 'strict',
    'numpy_rank_promotion': 'raise',
    'transfer_guard_device_to_device': 'log_explicit',
    'transfer_guard_device_to_host': 'log_explicit',
    'transfer_guard_host_to_device': 'log_explicit',
}


def current(setting: str) -> Any:
    return getattr(jax.config, f'jax_{setting}')


def test_the_settings_are_all_thread_local_settings() -> None:
    settings = {
        *(
            'check_tracer_leaks',
            'debug_infs',
            'debug_key_reuse',
            'debug_nans',
            'default_device',
            'disable_jit',
        ),
        *('enable_x64', 'explain_cache_misses', 'log_compiles', 'threefry_partitionable', *VALUES),
    }
    assert settings <= set(SETTINGS)
    for setting in SETTINGS:
        assert callable(getattr(jax, setting))


@pytest.mark.parametrize('setting', SETTINGS)
def test_a_setting_is_passed_on(setting: str) -> None:
    value = VALUES.get(setting)
    if setting == 'default_device':
        value = jax.devices()[3]
    elif value is None:
        value = not current(setting)
    before = current(setting)
    with getattr(jax, setting)(value):
        assert run_in_thread('other', lambda: current(setting)) == current(setting) == value
    assert run_in_thread('other', lambda: current(setting)) == current(setting) == before


def test_the_transfer_guard_is_passed_on() -> None:
    with jax.transfer_guard('disallow'):
        run_in_thread('other', lambda: jax.device_put(np.zeros(2)))
        with pytest.raises(Exception, match='Disallowed host-to-device transfer'):
            run_in_thread('other', lambda: jax.jit(lambda x: x)(np.zeros(2)))


def test_a_mesh_is_not_passed_on() -> None:
    with jax.set_mesh(HELPER.mesh), HELPER.get_context():
        assert run_in_thread('other', jax.sharding.get_mesh).empty
        assert run_in_thread('other', get_global_mesh_helper) is None


def test_errors_are_raised_in_the_caller() -> None:
    def fails() -> None:
        raise KeyError('x')

    with pytest.raises(KeyError, match='x'):
        run_in_thread('other', fails)


# --- Objects that threads share -------------------------------------------------------------------


def test_threads_share_a_helper() -> None:
    tree = {'w': np.arange(64.0, dtype=np.float32).reshape(8, 8), 'b': np.zeros(8, np.float32)}
    rule = TreePathShardingRule(('w', PartitionSpec('data', 'tp')), ('b', PartitionSpec()))
    expected = HELPER.match_sharding_rule(rule, tree)

    def work(number: int) -> int:
        for _ in range(5):
            placed = HELPER.shard(tree, rule)
            assert jax.tree.map(lambda leaf: leaf.sharding, placed) == expected
            np.testing.assert_array_equal(HELPER.gather(placed)['w'], tree['w'])
            batch = HELPER.local_data_to_global_array(np.full(8, number))
            assert np.asarray(batch).tolist() == [number] * 8
            name = f'act{number}'
            with HELPER.get_context({name: PartitionSpec('tp')}):
                assert list(get_global_annotation_shardings()) == [name]
            assert HELPER.explain(tree, rule).to_text()
        return number

    assert in_threads(work) == list(range(COUNT))


@pytest.mark.medium
def test_threads_share_a_compiled_function() -> None:
    traces = []

    @HELPER.sjit(
        in_shardings=(PartitionSpec('data'), None),
        out_shardings=PartitionSpec('tp'),
        static_argnames='power',
        annotation_shardings={'inside': PartitionSpec('tp')},
    )
    def step(x: jax.Array, scale: jax.Array, *, power: int) -> jax.Array:
        traces.append(power)
        return with_sharding_annotation(x * scale, 'inside') ** power

    x = np.arange(8.0, dtype=np.float32)

    def work(number: int) -> None:
        for turn in range(6):
            power = 1 + (number + turn) % 3
            result = step(x, np.float32(number), power=power)
            assert result.sharding.spec == PartitionSpec('tp')
            np.testing.assert_allclose(result, (x * number) ** power, rtol=1e-5)
            if turn == 3 and number == 0:
                step.clear_cache()

    in_threads(work)
    assert set(traces) == {1, 2, 3}


@pytest.mark.medium
@pytest.mark.parametrize('how', ['call', 'lower', 'inside jax.jit', 'sjit again'])
def test_threads_trace_a_new_signature_once(how: str) -> None:
    traces = []

    def double(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        time.sleep(0.05)  # lets the other threads catch up
        return 2 * x

    compiled = HELPER.sjit(double, in_shardings=PartitionSpec('data'))
    x = np.arange(8.0, dtype=np.float32)
    work: dict[str, Callable[[], Any]] = {
        'call': lambda: compiled(x),
        'lower': lambda: compiled.lower(x).compile()(x),
        'inside jax.jit': lambda: jax.jit(lambda x: compiled(x))(x),
        'sjit again': lambda: HELPER.sjit(double, in_shardings=PartitionSpec('data'))(x),
    }
    for result in in_threads(lambda _: work[how]()):
        np.testing.assert_array_equal(result, 2 * x)
    assert traces == [(8,)]


def test_after_a_failed_trace_the_next_thread_traces() -> None:
    traces = []

    @HELPER.sjit
    def double(x: jax.Array) -> jax.Array:
        traces.append(threading.current_thread().name)
        time.sleep(0.01)
        if len(traces) < 3:
            raise KeyError('not yet')
        return 2 * x

    def work(_: int) -> bool:
        try:
            return bool((double(np.ones(4, np.float32)) == 2).all())
        except KeyError:
            return False

    assert sorted(in_threads(work)) == [False, False] + [True] * (COUNT - 2)
    assert len(set(traces)) == len(traces) == 3


# --- Contexts in interleaved code -----------------------------------------------------------------

OTHER = MeshShardingHelper([8], ['all'])
LEFT_TOO_EARLY = (
    'a get_context() is exited before one that was entered after it, or in another thread, so '
    'its code has run with another active helper. Interleaved generators or asyncio tasks cause '
    'this: enter the context again between two yields or awaits, or use one helper for all'
)


def test_interleaved_tasks_inside_contexts_are_an_error() -> None:
    async def work(helper: MeshShardingHelper, turns: int) -> str:
        try:
            with helper.get_context():
                for _ in range(turns):
                    await asyncio.sleep(0)
        except MeshError as error:
            return str(error)
        return ''

    async def both() -> list[str]:
        return await asyncio.gather(work(HELPER, 1), work(OTHER, 3))

    assert asyncio.run(both()) == [LEFT_TOO_EARLY, '']
    assert get_global_mesh_helper() is None


def test_interleaved_generators_inside_contexts_are_an_error() -> None:
    def work(helper: MeshShardingHelper) -> Iterator[None]:
        with helper.get_context():
            yield

    first, second = work(HELPER), work(OTHER)
    next(first)
    next(second)
    with pytest.raises(MeshError) as error:
        next(first)
    assert str(error.value) == LEFT_TOO_EARLY
    assert get_global_mesh_helper() is OTHER
    assert next(second, 'the end') == 'the end'
    assert get_global_mesh_helper() is None


def test_a_generator_that_is_dropped_leaves_no_context_behind() -> None:
    def work() -> Iterator[None]:
        with HELPER.get_context():
            yield

    generator = work()
    next(generator)
    with OTHER.get_context():
        del generator
        assert get_global_mesh_helper() is OTHER
    assert get_global_mesh_helper() is None


def test_an_error_is_not_hidden_by_the_order_of_contexts() -> None:
    first, second = HELPER.get_context(), OTHER.get_context()
    first.__enter__()
    second.__enter__()
    error = KeyError('x')
    first.__exit__(KeyError, error, None)
    second.__exit__(None, None, None)
    assert get_global_mesh_helper() is None


def test_a_context_that_another_thread_exits_is_an_error() -> None:
    context = HELPER.get_context()
    with context:
        with pytest.raises(MeshError, match='or in another thread'):
            run_in_thread('other', lambda: context.__exit__(None, None, None))
        assert get_global_mesh_helper() is HELPER
    assert get_global_mesh_helper() is None
