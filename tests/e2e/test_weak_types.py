"""Weak types: state keeps the types that its step was compiled for through every call.

A counter that starts as the Python number 0 is an array with a weak type. If a call returned it with a strong
type, the next step would be compiled again, and values could get other dtypes.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from scalax import microbatch
from scalax.axes import auto_sharded
from scalax.checkpoint import Checkpointer
from scalax.jobs import Sender, receive
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, with_sharding_constraint
from scalax.sharding import PartitionSpec as P
from scalax.testing import assert_no_recompile
from scalax.utils import flatten_tree

RULE = FSDPShardingRule(min_fsdp_size=64)
OPTIMIZER = optax.adam(1e-3)
X = np.ones((16, 8), np.float32)


def init() -> dict[str, Any]:
    params = {'w': jnp.ones((8, 8)), 'scale': jnp.ones(())}
    return {
        'params': params,
        'opt_state': OPTIMIZER.init(params),
        'step': 0,
        'decay': jnp.broadcast_to(0.5, (8,)),
        'key': jax.random.key(0),
    }


def train_step(state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
    grads = jax.grad(lambda p: jnp.mean((x @ p['w'] * p['scale']) ** 2))(state['params'])
    updates, opt_state = OPTIMIZER.update(grads, state['opt_state'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {**state, 'params': params, 'opt_state': opt_state, 'step': state['step'] + 1}


def types(tree: Any) -> Any:
    # Typed keys have no attribute for it.
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype), getattr(leaf, 'weak_type', False)), tree)


def restored(folder: Path, helper: MeshShardingHelper, state: Any, like: Any) -> Any:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        return checkpointer.restore(helper, RULE, like)


def received(helper: MeshShardingHelper, state: Any) -> Any:
    with Sender('localhost:0') as sender:
        sending = threading.Thread(target=sender.send, args=[state])
        sending.start()
        leaves = receive(helper, sender.address, RULE)
        sending.join()
    by_path = flatten_tree(leaves, sep='/')  # of nested dicts
    return jax.tree.unflatten(
        jax.tree.structure(state), [by_path[path] for path in flatten_tree(state, sep='/')]
    )


@pytest.fixture(scope='module', params=[AxisType.Auto, AxisType.Explicit], ids=str)
def training(request: pytest.FixtureRequest) -> tuple[MeshShardingHelper, Any, Any]:
    """Returns a helper, the state after two training steps, and the compiled step."""
    helper = MeshShardingHelper([8], ['fsdp'], axis_types=request.param)
    step = helper.sjit(train_step, in_shardings=(RULE, P('fsdp')), out_shardings=RULE)
    state = helper.sjit(init, out_shardings=RULE)()
    return helper, step(step(state, X), X), step


CALLS: dict[str, Callable[[Path, MeshShardingHelper, Any], Any]] = {
    'restore like a function': lambda folder, helper, state: restored(folder, helper, state, init),
    'restore like structs': lambda folder, helper, state: restored(
        folder, helper, state, helper.abstract(state, RULE)
    ),
    'restore like eval_shape': lambda folder, helper, state: restored(
        folder, helper, state, jax.eval_shape(init)
    ),
    'restore like arrays': lambda folder, helper, state: restored(folder, helper, state, state),
    'reshard': lambda _, helper, state: helper.reshard(state, RULE),
    'reshard with donation': lambda _, helper, state: helper.reshard(
        jax.tree.map(jnp.copy, state), RULE, donate=True
    ),
    'reshard there and back': lambda _, helper, state: helper.reshard(
        MeshShardingHelper([2], ['fsdp'], devices=jax.devices()[:2]).reshard(state, RULE), RULE
    ),
    'receive': lambda _, helper, state: received(helper, state),
    'shard': lambda _, helper, state: helper.shard(state, RULE),
    'shard functions': lambda _, helper, state: helper.apply_shard_and_gather_fns(
        helper.make_shard_and_gather_fns(state, RULE)[0], state
    ),
    'sjit': lambda _, helper, state: helper.sjit(lambda x: x, in_shardings=RULE, out_shardings=RULE)(state),
    'with_sharding_constraint': lambda _, helper, state: helper.sjit(
        lambda x: with_sharding_constraint(x, RULE), out_shardings=RULE
    )(state),
    'auto_sharded': lambda _, helper, state: auto_sharded(state, mesh=helper),
}


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('call', CALLS)
def test_a_state_keeps_its_types(tmp_path: Path, training: Any, call: str) -> None:
    helper, state, step = training
    assert types(state)['step'] == ((), 'int32', True)
    assert types(state)['decay'] == ((8,), 'float32', True)
    returned = CALLS[call](tmp_path, helper, state)
    assert types(returned) == types(state)
    with assert_no_recompile(step):
        step(returned, X)


@pytest.mark.parametrize('value', [0, 0.5, 1j, True, np.float32(0.5), np.ones(8, np.float32)], ids=repr)
def test_structs_and_batches_have_the_types_of_placed_arrays(value: Any) -> None:
    helper = MeshShardingHelper([8], ['data'])
    placed = helper.shard(value, P())
    assert types(helper.abstract(value, P())) == types(placed) == types(helper.abstract(placed, P()))
    assert types(helper.local_data_to_global_array(value)) == types(placed)
    with helper.prefetch([value, placed]) as batches:
        assert [*map(types, batches)] == [types(placed)] * 2


def test_a_cast_makes_types_strong_and_a_stack_is_weak_if_all_its_layers_are() -> None:
    helper = MeshShardingHelper([8], ['data'])
    tree = helper.shard({'a': 0.5, 'b': 1.5, 'c': np.float32(1), 'n': 3}, P())
    cast = helper.reshard(tree, P(), dtype='bfloat16')
    assert [cast[name].weak_type for name in 'abcn'] == [False, False, False, True]
    stacks = {'a': 'weak[0]', 'b': 'weak[1]', 'c': 'strong', 'n': 'n'}
    weak = helper.reshard(tree, P(), mapping=stacks)
    assert [weak[name].weak_type for name in ('weak', 'strong', 'n')] == [True, False, True]
    mixed = helper.reshard(tree, P(), mapping={'a': 'x[0]', 'c': 'x[1]', 'b': None, 'n': None})
    assert not mixed['x'].weak_type


@pytest.mark.medium
@pytest.mark.parametrize('reduce', ['mean', 'sum'])
def test_microbatches_return_the_types_of_the_function(reduce: Any) -> None:
    def fun(p: Any, x: jax.Array) -> Any:
        weak = {'w': p * 2, 'row': jnp.broadcast_to(p, (8,))}
        strong = {'mean': x.mean(), 'product': x.mean() * p, 'narrow': x.astype('bfloat16').mean()}
        return weak, strong

    assert types(microbatch(fun, 2, reduce=reduce)(1.5, X)) == types(jax.jit(fun)(1.5, X))
