"""`scalax.interop.nnx`: functions that change the modules that they are given."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec as P

from scalax.errors import ArgumentError, ShardingError
from scalax.interop import nnx
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule

FSDP = FSDPShardingRule(min_fsdp_size=1)
TP = TreePathShardingRule(('up/kernel', P('fsdp', 'tp')), ('down/kernel', P('tp', 'fsdp')), ('.*', P()))


class Block(flax_nnx.Module):
    """It has all that changes in training: running means, keys of dropout, and two names for one layer."""

    def __init__(self, rngs):
        self.up = flax_nnx.Linear(16, 32, rngs=rngs)
        self.down = flax_nnx.Linear(32, 16, rngs=rngs)
        self.norm = flax_nnx.BatchNorm(16, rngs=rngs)
        self.dropout = flax_nnx.Dropout(0.5, rngs=rngs)
        self.up_again = self.up

    def __call__(self, x):
        x = self.norm(x + self.down(self.dropout(flax_nnx.relu(self.up(x)))))
        return self.down(self.up_again(x))


def make(key):
    model = Block(flax_nnx.Rngs(key))
    return model, flax_nnx.Optimizer(model, optax.adamw(1e-2), wrt=flax_nnx.Param)


def train_step(model, optimizer, x):
    loss, grads = flax_nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def rows(count=64):
    return np.random.default_rng(0).normal(size=(count, 16)).astype('float32')


def helper():
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


@pytest.mark.parametrize('rule', [FSDP, TP], ids=['fsdp', 'tp'])
@pytest.mark.parametrize('donated', [(), (0, 1)])
def test_a_training_is_that_of_one_device(rule, donated):
    model, optimizer = make(jax.random.key(0))
    one = flax_nnx.jit(train_step)
    wanted = [float(one(model, optimizer, rows())) for _ in range(4)]
    sharded = nnx.sjit(helper(), make, out_shardings=rule)(jax.random.key(0))
    many = nnx.sjit(
        helper(), train_step, in_shardings=(rule, rule, P('fsdp')), donate_argnums=donated, batch_argnums=-1
    )
    np.testing.assert_allclose([many(*sharded, rows()) for _ in range(4)], wanted, rtol=2e-4)
    assert sharded[0].up is sharded[0].up_again
    for mine, theirs in zip(jax.tree.leaves(sharded), jax.tree.leaves((model, optimizer)), strict=True):
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-5)
    assert 'fsdp' in sharded[0].up.kernel[...].sharding.spec
    assert int(sharded[1].step[...]) == 4


def test_the_batch_is_followed_and_the_step_is_planned():
    mesh = helper()
    model, optimizer = nnx.sjit(mesh, make, out_shardings=FSDP)(jax.random.key(0))
    step = nnx.sjit(mesh, train_step, in_shardings=(FSDP, FSDP, P('fsdp')))
    arguments = step.arguments(model, optimizer, rows(4096))
    assert step.pure.followed(*arguments).kept
    assert 'train_step' in str(mesh.plan(step.pure, *arguments))


def test_one_rule_for_all_and_arguments_without_modules():
    step = nnx.sjit(helper(), lambda model, scale: model(jnp.ones((8, 16))) * scale['by'], in_shardings=FSDP)
    model, _ = make(jax.random.key(0))
    assert step(model, {'by': 2.0}).shape == (8, 16)
    assert int(model.dropout.rngs.count[...]) == 1


def test_modules_within_a_tree():
    def double(tree, x):
        tree['block'][0].down.bias[...] += 1
        return x * 2

    model, _ = make(jax.random.key(0))
    out = nnx.sjit(helper(), double, in_shardings=(FSDP, P('fsdp')))({'block': [model]}, rows())
    np.testing.assert_array_equal(out, rows() * 2)
    np.testing.assert_array_equal(model.down.bias[...], 1)


def refused(function, *args, **options):
    with pytest.raises(ArgumentError) as caught:
        nnx.sjit(helper(), function, **options)(*args)
    return str(caught.value)


def test_what_is_refused():
    model, optimizer = make(jax.random.key(0))

    def adds(model):
        model.bias = flax_nnx.Param(jnp.ones(3))

    assert refused(adds, model) == (
        'adds adds or removes variables of its arguments: 0/bias. Make them before, as in the constructor of '
        'the module'
    )
    assert 'returns a module that it was given' in refused(lambda model: [model.up], model)
    assert 'MeshShardingHelper.sjit' in refused(lambda state: state, flax_nnx.state(model))
    assert refused(train_step, model, optimizer, in_shardings=(FSDP, FSDP, P('fsdp'))) == (
        'train_step was called with 2 arguments, and in_shardings are for 3'
    )


def test_errors_name_the_arguments_of_the_function():
    model, optimizer = make(jax.random.key(0))
    step = nnx.sjit(helper(), train_step, in_shardings=(FSDP, FSDP, P('fsdp')))
    with pytest.raises(ShardingError, match=r"(?s)'train_step'.*x: float32\[9, 16\]"):
        step(model, optimizer, rows(9))
