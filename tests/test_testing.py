"""`scalax.testing`: the assertions, and their messages when they fail."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax import testing
from scalax.errors import ArgumentError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])


@HELPER.sjit(in_shardings=P('fsdp'), out_shardings=P())
def total(x):
    return x.sum(0) @ np.ones((8, 8), np.float32)


X = np.ones((16, 8), np.float32)


def test_expected_collectives_pass():
    testing.assert_collectives(total, X, all_reduce=1, all_gather=0)
    testing.assert_collectives(total, X, all_reduce={'fsdp': 1, 'tp': 0, ('fsdp', 'tp'): 0})
    jitted = jax.jit(lambda x: x.sum(), in_shardings=HELPER.match_sharding_rule(P('tp'), X))
    testing.assert_collectives(jitted, X, helper=HELPER, all_reduce={'tp': 1})


def test_unexpected_collectives_fail():
    with pytest.raises(AssertionError) as error:
        testing.assert_collectives(total, X, all_reduce={'tp': 1}, all_gather=2)
    lines = str(error.value).splitlines()
    line = total.__wrapped__.__code__.co_firstlineno + 2
    assert lines[:5] == [
        'total runs other collectives than expected:',
        '  all-reduce along tp: 0, expected 1',
        '  all-gather: 0, expected 2',
        'All of its collectives:',
        f'  1 x all-reduce along fsdp, 32 bytes: test_testing.py:{line} total',
    ]


def test_collectives_of_a_program_without_any(snapshot):
    with snapshot.raises(AssertionError):
        testing.assert_collectives(HELPER.sjit(lambda x: 2 * x, in_shardings=P('fsdp')), X, all_reduce=1)


def test_collectives_misused(snapshot):
    with snapshot.raises(ArgumentError):
        testing.assert_collectives(total, X, all_reduse=1)
    with pytest.raises(ArgumentError) as error:
        testing.assert_collectives(jax.jit(lambda x: x), X, all_reduce=1)
    assert str(error.value) == 'assert_collectives: give helper=..., because sjit did not make the function'


def test_collectives_of_a_call_by_keyword():
    @HELPER.sjit(in_shardings={'all_gather': P('fsdp')}, out_shardings=P(), static_argnames='times')
    def summed(all_gather, *, times=1):
        for _ in range(times):
            all_gather = jnp.tanh(all_gather + all_gather.sum())
        return all_gather.sum()

    testing.assert_collectives(summed, kwargs={'all_gather': X}, all_reduce=2)
    testing.assert_collectives(summed, X, kwargs={'times': 2}, all_reduce=3)
    with pytest.raises(AssertionError, match='all-reduce: 3, expected 2'):
        testing.assert_collectives(summed, X, kwargs={'times': 2}, all_reduce=2)


@pytest.mark.medium
def test_collectives_on_one_device_fail():
    with pytest.raises(ArgumentError, match='nothing is expected; name some of all_gather, all_reduce'):
        testing.assert_collectives(total, X)
    with pytest.raises(AssertionError, match='runs on 1 of 8 devices, so nothing is sent'):
        testing.assert_collectives(HELPER.sjit(lambda x: x.sum()), X, all_reduce=0)

    def until(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: jax.nn.softmax(x, 0), x)

    fun = HELPER.sjit(until, in_shardings=P('fsdp'), out_shardings=P('fsdp'))
    count = HELPER.plan(fun, X).count('all-reduce')
    with pytest.raises(AssertionError, match=r'all-reduce: \d+ \(known: at least\), expected'):
        testing.assert_collectives(fun, X, all_reduce=count)


def test_no_recompile_of_functions_without_programs():
    with pytest.raises(ArgumentError) as error, testing.assert_no_recompile(len):
        pass
    assert str(error.value) == (
        'assert_no_recompile: neither sjit nor jax.jit made len; what it calls has names of its own'
    )


def test_a_partial_has_the_name_of_its_function():
    def step(x, scale):
        return x * scale

    part = functools.partial(step, scale=2)
    with pytest.raises(ArgumentError) as error, testing.assert_no_recompile(part):
        pass
    assert 'neither sjit nor jax.jit made step;' in str(error.value)
    with pytest.raises(AssertionError, match=r'^step runs on 1 of 8 devices'):
        testing.assert_collectives(part, np.ones(8), helper=HELPER, all_reduce=0)
    assert HELPER.plan(part, np.ones(8)).name == 'step'


def test_sharded_like_shows_device_orders(snapshot):
    turned = MeshShardingHelper([4, 2], ['fsdp', 'tp'], devices=jax.devices()[::-1])
    with snapshot.raises(AssertionError):
        testing.assert_sharded_like(HELPER.shard(X, P('fsdp')), P('fsdp'), turned)


@pytest.mark.parametrize('compiler', [jax.jit, HELPER.sjit], ids=['jit', 'sjit'])
def test_no_recompile(compiler, snapshot):
    def triple(x):
        return 3 * x

    fun = compiler(triple)
    fun(X)
    with testing.assert_no_recompile(fun):
        fun(X + 1)
    with pytest.raises(AssertionError) as error, testing.assert_no_recompile(fun):
        fun(X[:4])
        fun(X[:5])
    snapshot(error.value)


def test_no_recompile_ignores_other_functions_and_threads():
    def checked(x):
        return x + 1

    def unchecked(x):
        return x + 2

    fun = jax.jit(checked)
    fun(X)
    thread = threading.Thread(target=lambda: jax.jit(checked)(X[:3]))
    with testing.assert_no_recompile(fun):
        jax.jit(unchecked)(X)
        thread.start()
        thread.join(200)
    assert not thread.is_alive()


def test_an_error_inside_is_not_hidden():
    with pytest.raises(ZeroDivisionError), testing.assert_no_recompile(total):
        total(np.ones((32, 8), np.float32))
        _ = 1 / 0


def test_sharded_like(snapshot):
    tree = HELPER.shard({'w': X, 'b': X[0]}, {'w': P('fsdp', 'tp'), 'b': P()})
    testing.assert_sharded_like(tree, {'w': P('fsdp', 'tp'), 'b': P()})
    testing.assert_sharded_like(tree, {'w': P('fsdp', 'tp'), 'b': P(None)}, HELPER)
    testing.assert_sharded_like({}, P('fsdp'))
    with snapshot.raises(AssertionError):
        testing.assert_sharded_like({**tree, 'c': X}, P('fsdp'))
    with pytest.raises(AssertionError) as error:
        testing.assert_sharded_like({'w': X}, P('fsdp'))
    assert str(error.value) == 'no leaf is on a mesh:\n  w: float32[16, 8]'
