"""The objects that sjit keeps alive: bounded in number, and freed with the function."""

from __future__ import annotations

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._core.util import lru_cache
from scalax._core.util.lru_cache import LRUCache
from scalax.sharding import MeshShardingHelper, PolicyShardingRule, ShardingRule, with_sharding_annotation
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['x', 'y'])
X = np.arange(8, dtype=np.float32)


def test_recently_used_entries_are_kept(monkeypatch):
    monkeypatch.setattr(lru_cache, 'SIZE', 3)
    kept = LRUCache()
    for key in 'abc':
        assert kept.add(key, key.upper()) == key.upper()
    assert kept.add('a', 'another') == 'A'
    kept.add('d', 'D')
    assert (kept.get('b'), kept.get('c'), kept.get('a'), kept.get('d')) == (None, 'C', 'A', 'D')
    assert kept.get('c') == 'C'
    kept.add('e', 'E')
    assert (kept.get('a'), kept.get('c'), kept.get('d'), kept.get('e')) == (None, 'C', 'D', 'E')


def test_threads_share_cache_entries():
    kept, agreed, start = LRUCache(), [], threading.Barrier(8)

    def work(number):
        start.wait(timeout=300)
        agreed.append([kept.add(key, (number, key)) for key in range(200)])

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert len(agreed) == 8
    assert all(first == agreed[0] for first in agreed)


@pytest.mark.medium
def test_static_objects_are_freed(monkeypatch):
    monkeypatch.setattr(lru_cache, 'SIZE', 4)

    class Model:
        @HELPER.sjit(static_argnums=0, in_shardings={'x': P('x')})
        def step(self, x):
            return x + 1

    alive = []
    for _ in range(12):
        model = Model()
        alive.append(weakref.ref(model))
        np.testing.assert_array_equal(model.step(X), X + 1)
        np.testing.assert_array_equal(model.step(X), X + 1)
    del model
    jax.clear_caches()
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 8  # of served calls, and of looked-up calls


@pytest.mark.medium
def test_evicted_entries_are_created_again(monkeypatch):
    monkeypatch.setattr(lru_cache, 'SIZE', 2)
    scaled = HELPER.sjit(
        lambda x, n: with_sharding_annotation(x * n, 'h'),
        static_argnums=1,
        in_shardings=PolicyShardingRule(lambda path, leaf: P('x') if leaf.shape[0] % 8 == 0 else P('y')),
        annotation_shardings={'h': P()},
    )
    for _ in range(2):
        for size in (8, 4, 16, 2):
            for n in (1, 2, 3):
                np.testing.assert_array_equal(scaled(np.ones(size), n), n * np.ones(size))


def test_programs_are_freed(monkeypatch):
    monkeypatch.setattr(lru_cache, 'SIZE', 3)
    last = HELPER.sjit(lambda *rows: rows[-1], in_shardings=P('x'))
    for count in range(1, 9):  # each number of arguments has a separate program
        assert last.eval_shape(*[X] * count).shape == X.shape
        assert len(last._dispatcher.programs) <= 3


def test_contexts_are_freed(monkeypatch):
    monkeypatch.setattr(lru_cache, 'SIZE', 4)
    rules = []
    for _ in range(12):
        rule = PolicyShardingRule(lambda path, leaf: P())
        rules.append(weakref.ref(rule))
        with HELPER.get_context({'h': rule}):
            pass
    del rule
    gc.collect()
    assert sum(ref() is not None for ref in rules) <= 4


@pytest.mark.medium
def test_calls_inside_shard_map_leave_no_state():
    class Static:
        """A static argument."""

    compiled = HELPER.sjit(lambda x, static: x * 2, static_argnums=1)
    alive = []
    for n in range(1, 6):
        static = Static()
        alive.append(weakref.ref(static))
        jax.shard_map(
            lambda x, static=static: compiled(x, static), mesh=HELPER.mesh, in_specs=P('x'), out_specs=P('x')
        )(np.ones(4 * n, np.float32))
    del static
    jax.clear_caches()
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0


@pytest.mark.parametrize('deleted', [True, False])
def test_methods_accept_types(deleted):
    step = HELPER.sjit(lambda x: x * 2, in_shardings=P('x'), donate_argnums=0)
    x = HELPER.shard(X, P('x'))
    if deleted:
        step(x)
        assert x.is_deleted()
    assert step.shardings_for(x)[1].spec == P('x')
    assert step.eval_shape(x).shape == X.shape
    assert step.trace(x).jaxpr is not None
    assert step.lower(x).compile() is not None
    assert step.get_jitted_function_by_args(x) is not None


def test_a_users_error_has_no_internal_context():
    error = ValueError('mine')

    @HELPER.sjit
    def broken(x):
        raise error

    broken_again = HELPER.sjit(lambda x: broken(x))
    for call in (broken, broken, broken_again):
        with pytest.raises(ValueError, match='mine') as caught:
            call(jnp.asarray(X))
        assert caught.value is error
    assert set(error.__dict__) <= {'__notes__'}  # which are JAX's


def test_nothing_is_kept_alive_by_the_caches_of_jax():
    kept = []

    class Rule(ShardingRule):
        def apply(self, pytree):
            return jax.tree.map(lambda _: P('x'), pytree)

    @jax.jit
    def shared(x):
        return with_sharding_annotation(x * 2, 'h')

    for _ in range(3):
        helper, rule = MeshShardingHelper([8], ['x']), Rule()
        compiled = helper.sjit(shared, annotation_shardings={'h': rule})
        compiled(X)
        kept += [weakref.ref(helper), weakref.ref(rule)]
        del helper, rule, compiled
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6
