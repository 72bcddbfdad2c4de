"""Steps that are wrong on a mesh because of mistakes of users."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

from scalax.custom_op import sharded_op
from scalax.sharding import MeshShardingHelper
from tests.verification.fault import (
    FSDP,
    WHOLE,
    Step,
    integers,
    normal,
    user,
)


def mapped(
    helper: MeshShardingHelper, fun: Any, in_specs: tuple[P, ...], out_specs: Any, **options: Any
) -> Any:
    """`jax.shard_map` with check_vma=False, as users write it."""
    return jax.shard_map(
        fun, mesh=helper.mesh, in_specs=in_specs, out_specs=out_specs, **{'check_vma': False, **options}
    )


def _rows(helper: MeshShardingHelper, fun: Any, *args: Any, out: Any = WHOLE) -> Step:
    """Maps a function over the rows of each device: all arguments but the first are sharded by rows."""
    in_specs = (P(), *[P('fsdp')] * (len(args) - 1))
    return helper.sjit(mapped(helper, fun, in_specs, out), in_shardings=in_specs), args


def loss_of_rows(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ params['w']) ** 2)


PARAMS = {'w': normal(8, 4)}


@user(('psum', 'loss'))
def missing_psum(helper: MeshShardingHelper) -> Step:
    """Each device returns its local loss as the replicated result."""

    def step(params: Any, x: Any) -> Any:
        return {'loss': loss_of_rows(params, x), 'rows': lax.psum(x.shape[0], 'fsdp')}

    return _rows(helper, step, PARAMS, normal(16, 8))


@user(('w', 'psum'))
def gradient_without_a_psum(helper: MeshShardingHelper) -> Step:
    """The loss is averaged over devices, but its gradient is not."""

    def step(params: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of_rows)(params, x)
        return {'loss': lax.pmean(loss, 'fsdp'), 'gradient': gradient}

    return _rows(helper, step, PARAMS, normal(16, 8))


@user(('loss', 'psum'))
def sum_of_local_means(helper: MeshShardingHelper) -> Step:
    """The loss is too large by the number of devices."""

    def step(params: Any, x: Any) -> Any:
        return {'loss': lax.psum(loss_of_rows(params, x), 'fsdp')}

    return _rows(helper, step, PARAMS, normal(16, 8))


@user(('loss',))
def mean_of_local_means(helper: MeshShardingHelper) -> Step:
    """Devices have different numbers of tokens, but their means get equal weights."""

    def step(params: Any, x: Any, mask: Any) -> Any:
        losses = jnp.mean(jnp.tanh(x @ params['w']) ** 2, axis=-1)
        return {'loss': lax.pmean(jnp.sum(losses * mask) / jnp.maximum(mask.sum(), 1), 'fsdp')}

    mask = (np.arange(16) % 7 < np.arange(16) / 3).astype(np.float32)
    return _rows(helper, step, PARAMS, normal(16, 8), mask)


@user(('w',))
def gradient_through_a_psum(helper: MeshShardingHelper) -> Step:
    """With `check_vma=False`, the transpose of a `psum` is another `psum`: the gradient is too large."""

    def step(params: Any, x: Any) -> Any:
        gradient = jax.grad(lambda params: lax.pmean(loss_of_rows(params, x), 'fsdp'))(params)
        return lax.psum(gradient, 'fsdp')

    return _rows(helper, step, PARAMS, normal(16, 8))


@user((), source='https://github.com/jax-ml/jax/issues/36886')
def gradient_with_respect_to_a_replicated_value(helper: MeshShardingHelper) -> Step:
    """`jax.grad` inside a `shard_map` sums over devices, but each example needs its own gradient."""

    def step(params: Any, x: Any) -> Any:
        return jax.vmap(lambda row: jax.grad(lambda w: jnp.sum(jnp.sin(row @ w)))(params['w']))(x)

    in_specs = P(), P('fsdp')
    fun = mapped(helper, step, in_specs, P('fsdp'), check_vma=True)
    return helper.sjit(fun, in_shardings=in_specs), (PARAMS, normal(16, 8))


@user(('norm',))
def norm_of_sharded_and_replicated_arrays(helper: MeshShardingHelper) -> Step:
    """The squares of the replicated bias are summed once per device."""

    def step(params: Any) -> Any:
        squares = jax.tree.map(lambda x: jnp.sum(x * x), params)
        norm = jnp.sqrt(lax.psum(squares['w'] + squares['bias'], 'tp'))
        return {'norm': norm, **jax.tree.map(lambda x: x / norm, params)}

    in_specs = ({'w': P(None, 'tp'), 'bias': P()},)
    fun = mapped(helper, step, in_specs, {'norm': P(), **in_specs[0]})
    return helper.sjit(fun, in_shardings=in_specs), ({'w': normal(8, 4), 'bias': 3 * normal(16)},)


@user(('axis_index',))
def positions_from_the_wrong_axis(helper: MeshShardingHelper) -> Step:
    """Rows are sharded over one axis, but their positions are computed from the index along another."""

    def step(scale: Any, x: Any) -> Any:
        first = lax.axis_index('tp') * x.shape[0]
        return x * scale * (first + jnp.arange(x.shape[0]))[:, None]

    return _rows(helper, step, np.float32(0.5), normal(16, 8), out=P('fsdp'))


@user(('w', 'axis_index'))
def weight_decay_on_the_first_device_only(helper: MeshShardingHelper) -> Step:
    """Only the first device decays its copy of the weights, so the copies differ."""

    def step(params: Any, x: Any) -> Any:
        gradient = lax.pmean(jax.grad(loss_of_rows)(params, x), 'fsdp')
        is_first = lax.axis_index('fsdp') == 0
        return jax.tree.map(lambda w, g: w - 0.1 * g - jnp.where(is_first, 0.1 * w, 0), params, gradient)

    return _rows(helper, step, PARAMS, normal(16, 8))


@user(('dot_general',), mesh=FSDP)
def causal_mask_of_local_tokens(helper: MeshShardingHelper) -> Step:
    """Queries are sharded along the sequence, but each device counts its tokens from 0."""

    def step(key: Any, query: Any) -> Any:
        scores = query @ key.T
        is_before = jnp.arange(query.shape[0])[:, None] >= jnp.arange(key.shape[0])
        return jax.nn.softmax(jnp.where(is_before, scores, -jnp.inf)) @ key

    return _rows(helper, step, normal(16, 8), normal(16, 8, seed=1), out=P('fsdp'))


@user(('loss',))
def softmax_over_the_local_vocabulary(helper: MeshShardingHelper) -> Step:
    """The log-sum-exp covers only the device's shard of the vocabulary."""

    def step(table: Any, x: Any, labels: Any) -> Any:
        logits = x @ table.T
        first = lax.axis_index('tp') * table.shape[0]
        is_label = jnp.arange(table.shape[0]) + first == labels[:, None]
        target = lax.psum(jnp.sum(jnp.where(is_label, logits, 0), -1), 'tp')
        return {'loss': lax.pmean(jnp.mean(jax.nn.logsumexp(logits, -1) - target), ('fsdp', 'tp'))}

    in_specs = P('tp'), P('fsdp'), P('fsdp')
    fun = mapped(helper, step, in_specs, P())
    return helper.sjit(fun, in_shardings=in_specs), (normal(16, 8), normal(8, 8), integers(16, 8))


@user(('all_gather',))
def all_gather_in_the_wrong_order(helper: MeshShardingHelper) -> Step:
    """Rows are sharded over `('fsdp', 'tp')` and gathered over `('tp', 'fsdp')`."""

    def step(x: Any) -> Any:
        return lax.all_gather(x, ('tp', 'fsdp'), tiled=True)

    in_specs = (P(('fsdp', 'tp')),)
    return helper.sjit(mapped(helper, step, in_specs, P()), in_shardings=in_specs), (normal(16, 4),)


@user(('mean',))
def batch_statistics_of_local_examples(helper: MeshShardingHelper) -> Step:
    """Batch normalization uses the mean and variance of the local rows."""

    def step(scale: Any, x: Any) -> Any:
        return {'normed': scale * (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5), 'mean': x.mean(0)}

    return _rows(helper, step, normal(8), normal(16, 8), out={'normed': P('fsdp'), 'mean': P()})


@user(('random',))
def dropout_keys_by_device(helper: MeshShardingHelper) -> Step:
    """The dropout mask of an example depends on the device that holds it."""

    def step(key: Any, x: Any) -> Any:
        key = jax.random.fold_in(key, lax.axis_index('fsdp'))
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)

    return _rows(helper, step, jax.random.key(0), normal(16, 8), out=P('fsdp'))


@user(('random',))
def one_dropout_mask_on_all_devices(helper: MeshShardingHelper) -> Step:
    """All devices draw the same mask, although they hold different examples."""

    def step(key: Any, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)

    return _rows(helper, step, jax.random.key(0), normal(16, 8), out=P('fsdp'))


@user('w')
def custom_gradient_without_a_psum(helper: MeshShardingHelper) -> Step:
    """The gradient of a column-parallel matmul is not summed over the devices that share its input."""

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    def backward(kept: Any, g: Any) -> Any:
        x, w = kept
        return g @ w.T, x.T @ g  # the first one lacks a psum over tp

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = jnp.tanh(x @ params['first'])
            return jnp.sum(jnp.sin(product(hidden, params['w'])))

        return jax.tree.map(lambda g: lax.psum(g, 'fsdp'), jax.grad(loss)(params))

    specs = {'first': P(), 'w': P(None, 'tp')}
    fun = mapped(helper, step, (specs, P('fsdp')), specs)
    args = {'first': normal(8, 6), 'w': normal(6, 4)}, normal(16, 8)
    return helper.sjit(fun, in_shardings=(specs, P('fsdp'))), args


@user(('callback',))
def callback_on_local_examples(helper: MeshShardingHelper) -> Step:
    """A NumPy callback normalizes over the local rows instead of the full batch."""

    def standardized(x: Any) -> Any:
        x = np.asarray(x)
        return ((x - x.mean(0)) / (x.std(0) + 1e-3)).astype(np.float32)

    def step(scale: Any, x: Any) -> Any:
        return scale * jax.pure_callback(standardized, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return _rows(helper, step, np.float32(2), normal(16, 8), out=P('fsdp'))


@user(('custom_partitioning',))
def custom_partitioning_with_a_wrong_rule(helper: MeshShardingHelper) -> Step:
    """The sharding rule declares columns independent, but the function is a softmax over them."""

    def columns(x: Any) -> Any:
        return jax.nn.softmax(x)

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        return mesh, columns, args[0].sharding, (args[0].sharding,)

    softmax = custom_partitioning(columns)
    softmax.def_partition(partition=partition, sharding_rule='b c -> b c')

    def step(w: Any, x: Any) -> Any:
        return softmax(x @ w)

    return helper.sjit(step, in_shardings=(P(None, 'tp'), P('fsdp'))), (normal(8, 6), normal(16, 8))


@user(('normed',))
def sharded_op_with_a_wrong_rule(helper: MeshShardingHelper) -> Step:
    """The rule declares columns independent, but the function normalizes over them."""

    @sharded_op('b c -> b c')
    def normed(ctx: Any, x: Any) -> Any:
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))

    def step(w: Any, x: Any) -> Any:
        return {'normed': normed(x @ w)}

    return helper.sjit(step, in_shardings=(P(None, 'tp'), P('fsdp'))), (normal(8, 6), normal(16, 8))


@user(('psum',))
def sharded_op_that_sums_twice(helper: MeshShardingHelper) -> Step:
    """Partial matmuls are summed over devices twice."""

    @sharded_op('b c, c d -> b d', reduction_factors=('c',), check_vma=False)
    def product(ctx: Any, x: Any, w: Any) -> Any:
        return ctx.psum(ctx.psum(x @ w, 'c'), 'c')

    return helper.sjit(product, in_shardings=(P(None, 'tp'), P('tp'))), (normal(16, 8), normal(8, 6))


@user(('deleted',), raises='deleted')
def donated_buffer_read_later(helper: MeshShardingHelper) -> Step:
    """The step reads a state after donating it to an inner function."""
    update = helper.sjit(lambda w: 0.5 * w, in_shardings=P('fsdp'), out_shardings=P('fsdp'), donate_argnums=0)
    state = helper.shard(normal(16, 4), P('fsdp'))

    def step(x: Any) -> Any:
        return x + update(state) - state

    return step, (normal(16, 4),)
