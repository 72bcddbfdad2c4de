"""Unusual programs with a loop over layers, as users write them: losses of (params, batch, key).

`PROGRAMS` run as pipelines with the results of one device; `REFUSED` mix examples in a layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

import scalax
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    TreePathShardingRule,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P

ROWS, LENGTH, WIDTH, LAYERS = 8, 4, 8, 4
OVER_FSDP = P('fsdp')
RULE = (TreePathShardingRule(('layers', P('stage'))) | P()) & FSDPShardingRule('fsdp', min_fsdp_size=1)

Loss = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and how to run it.

    Attributes:
        loss: the loss, or another function if no gradient is computed.
        parts: the number of microbatches.
        mesh: mesh axis -> size.
        spec: the spec of the batch.
        has_gradient: whether the gradients of the parameters are compared too.
        tolerance: the largest difference, relative to the largest value.
        function: the function to compile, if it is neither the loss nor its `jax.value_and_grad`.
    """

    loss: Loss
    parts: int = 2
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {'stage': 2, 'fsdp': 2})
    spec: P = OVER_FSDP
    has_gradient: bool = True
    tolerance: float = 1e-5
    function: Callable[[Loss], Loss] | None = None

    @property
    def compiled(self) -> Loss:
        """Returns the function to compile."""
        if self.function is not None:
            return self.function(self.loss)
        return jax.value_and_grad(self.loss) if self.has_gradient else self.loss

    def helper(self) -> MeshShardingHelper:
        """Returns the helper of its mesh."""
        devices = jax.devices()[: int(np.prod([*self.mesh.values()]))]
        return MeshShardingHelper([*self.mesh.values()], [*self.mesh], devices=devices)


PROGRAMS: dict[str, Program] = {}
REFUSED: dict[str, Program] = {}


def program(table: dict[str, Program] = PROGRAMS, **how: Any) -> Callable[[Loss], Loss]:
    """Adds a program under the name of its loss."""

    def added(loss: Loss) -> Loss:
        table[loss.__name__] = Program(loss, **how)
        return loss

    return added


refused = functools.partial(program, REFUSED)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    scale = shape[-2] ** -0.5 if len(shape) > 1 else 1.0
    return (scale * np.random.default_rng([seed, *shape]).normal(size=shape)).astype(np.float32)


def arguments() -> tuple[Any, Any, Any]:
    """Returns parameters, a batch of arrays of several ranks, and a key."""
    layers = {
        'up': normal(LAYERS, WIDTH, WIDTH),
        'down': normal(LAYERS, WIDTH, WIDTH, seed=1),
        'bias': normal(LAYERS, WIDTH),
    }
    shared = {name: normal(WIDTH, WIDTH, seed=i) for i, name in enumerate(('inward', 'shared', 'outward'))}
    batch = {
        'x': normal(ROWS, LENGTH, WIDTH, seed=6),
        'y': normal(ROWS, LENGTH, WIDTH, seed=7),
        'mask': np.arange(LENGTH) < 1 + np.arange(ROWS)[:, None] % LENGTH,
        'segments': np.random.default_rng(0).integers(0, 2, (ROWS, LENGTH)).astype(np.int32),
        'numbers': np.arange(ROWS, dtype=np.int32),
    }
    return {'layers': layers, **shared}, batch, jax.random.key(0)


def block(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w['up'] + w['bias']) @ w['down']


def entered(params: Any, batch: Any) -> Any:
    return batch['x'] @ params['inward']


def error(params: Any, x: Any, batch: Any) -> Any:
    return jnp.mean(jnp.square(x @ params['outward'] - batch['y']))


def of_layers(layer: Callable[[Any, Any], Any], params: Any, batch: Any, **scan: Any) -> Any:
    """Returns the loss after a loop over layers that only have carries."""
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), entered(params, batch), params['layers'], **scan)
    return error(params, x, batch)


# Carries ------------------------------------------------------------------------------------------


def everything(params: Any, batch: Any, key: Any) -> Any:
    """Two streams of examples, a counter, a key, a sum over examples, and a number."""

    def layer(carried: Any, w: Any) -> tuple[Any, None]:
        x, y, count, key, total, scale = carried
        key, layer_key = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(layer_key, 0.8, x.shape), block(x, w), 0) / 0.8
        return (x, y * 0.9 + x * (1 + count), count + 1, key, total + jnp.sum(x * x), scale * 1.1), None

    x, unit = entered(params, batch), jnp.ones(())
    first = x, x / 2, jnp.int32(0), key, unit, unit
    (x, y, count, key, total, scale), _ = jax.lax.scan(layer, first, params['layers'])
    return error(params, (x + y) / scale, batch) + 1e-3 * total + count + jax.random.normal(key)


PROGRAMS['several_values_carried'] = Program(everything)
PROGRAMS['rows_over_stages_and_others'] = Program(everything, spec=P(('stage', 'fsdp')))
PROGRAMS['rows_over_others_and_stages'] = Program(everything, spec=P(('fsdp', 'stage')))
PROGRAMS['rows_over_stages'] = Program(everything, spec=P('stage'))
PROGRAMS['rows_over_slices'] = Program(
    everything, mesh={'dcn': 2, 'stage': 2, 'fsdp': 2}, spec=P(('dcn', 'fsdp'))
)


@program()
def a_key_for_each_row(params: Any, batch: Any, key: Any) -> Any:
    def of_row(x: Any, key: Any) -> Any:
        def layer(carried: Any, w: Any) -> tuple[Any, None]:
            x, key = carried
            key, layer_key = jax.random.split(key)
            return (block(x, w) * jax.random.bernoulli(layer_key, 0.8, x.shape), key), None

        return jax.lax.scan(layer, (x @ params['inward'], key), params['layers'])[0][0]

    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(batch['numbers'])
    return error(params, jax.vmap(of_row)(batch['x'], keys), batch)


@program()
def tokens_in_one_dimension(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        y = x.reshape(ROWS, LENGTH, WIDTH)
        y = y + jax.nn.softmax(jnp.einsum('bqd,bkd->bqk', y, y)) @ y
        return block(y.reshape(x.shape), w), None

    x, _ = jax.lax.scan(layer, entered(params, batch).reshape(-1, WIDTH), params['layers'])
    return error(params, x.reshape(ROWS, LENGTH, WIDTH), batch)


@program()
def time_before_rows(params: Any, batch: Any, key: Any) -> Any:
    x = entered(params, batch).swapaxes(0, 1)
    x, _ = jax.lax.scan(lambda x, w: (block(x, w) + jnp.cumsum(x, 0), None), x, params['layers'])
    return error(params, x.swapaxes(0, 1), batch)


@program(tolerance=4e-2)
def in_bfloat16(params: Any, batch: Any, key: Any) -> Any:
    params, batch = jax.tree.map(lambda x: x.astype('bfloat16'), (params, {k: batch[k] for k in 'xy'}))
    return of_layers(block, params, batch).astype('float32')


@program(tolerance=1e-2)
def in_float16_with_a_scaled_loss(params: Any, batch: Any, key: Any) -> Any:
    params, batch = jax.tree.map(lambda x: x.astype('float16'), (params, {k: batch[k] for k in 'xy'}))
    return 1024 * of_layers(block, params, batch).astype('float32')


# Inputs and outputs of layers ---------------------------------------------------------------------


@program()
def constants_with_rows(params: Any, batch: Any, key: Any) -> Any:
    """Masks, segments, outputs of an encoder with a gradient, and weights shared by layers."""
    encoded = jnp.tanh(batch['x'] @ params['shared'])
    same = batch['segments'][:, :, None] == batch['segments'][:, None, :]

    def layer(x: Any, w: Any) -> Any:
        scores = jnp.einsum('bqd,bkd->bqk', x @ w['up'], encoded)
        scores = jnp.where(same & batch['mask'][:, None], scores, -1e9)
        return x + jax.nn.softmax(scores) @ encoded @ w['down'] + jnp.tanh(x @ params['shared'])

    return of_layers(layer, params, batch)


@program()
def outputs_of_layers(params: Any, batch: Any, key: Any) -> Any:
    """Layers output per-example values, sums over examples, functions of weights only, and sums of both."""

    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        x = block(x, w)
        total = jnp.pad(
            jnp.concatenate([jnp.sum(x, (0, 1)) + 3 * w['bias'], w['bias']]), 1, constant_values=2
        )
        return x, (x, jnp.mean(x, (0, 1)), jnp.sum(w['up'] ** 2), total)

    x, (hidden, means, norms, totals) = jax.lax.scan(layer, entered(params, batch), params['layers'])
    return (
        error(params, x, batch)
        + jnp.mean(jnp.max(hidden, 0))
        + jnp.sum(means**3)
        + 1e-2 * jnp.sum(norms)
        + jnp.mean(totals**2)
    )


PROGRAMS['fewer_microbatches_than_stages'] = Program(outputs_of_layers, mesh={'stage': 4, 'fsdp': 2})
PROGRAMS['one_microbatch'] = Program(outputs_of_layers, parts=1)
PROGRAMS['microbatches_that_do_not_divide_by_stages'] = Program(
    outputs_of_layers, parts=4, mesh={'stage': 4, 'fsdp': 2}
)


@program(has_gradient=False)
def evaluation(params: Any, batch: Any, key: Any) -> Any:
    """Forward only: integers, keys, and counts."""

    def layer(carried: Any, w: Any) -> tuple[Any, Any]:
        x, key = carried
        x, key = block(x, w), jax.random.fold_in(key, 1)
        chosen = jnp.argmax(x, -1)
        counts = jnp.bincount(chosen.reshape(-1), length=WIDTH), jnp.ones(WIDTH).at[chosen].add(x[..., 0])
        return (x, key), (chosen, jnp.sum(x > 0), counts, key)

    (x, key), (chosen, positive, counts, keys) = jax.lax.scan(
        layer, (entered(params, batch), key), params['layers']
    )
    hits = jnp.sum(jnp.argmax(x, -1) == batch['segments'])
    return hits, chosen, positive, counts, jax.random.key_data(keys), jax.random.key_data(key)


@program(has_gradient=False)
def caches(params: Any, batch: Any, key: Any) -> Any:
    """Decodes a token: layers read and write stacked caches of the examples."""
    cache = jnp.zeros((LAYERS, ROWS, LENGTH, WIDTH)).at[:, :, 0].set(batch['x'][:, 0])

    def layer(x: Any, layer_inputs: Any) -> tuple[Any, Any]:
        w, cache = layer_inputs
        cache = jax.lax.dynamic_update_slice(cache, (x @ w['up'])[:, None], (0, 1, 0))
        weights = jax.nn.softmax(jnp.einsum('bd,bsd->bs', x, cache))
        return x + jnp.einsum('bs,bsd->bd', weights, cache) @ w['down'], cache

    return jax.lax.scan(layer, batch['x'][:, 1] @ params['inward'], (params['layers'], cache))


@program()
def stacks_that_are_computed(params: Any, batch: Any, key: Any) -> Any:
    layers = jax.tree.map(lambda w: (1.5 * w).astype('bfloat16').astype('float32'), params['layers'])
    layers['both'] = jnp.concatenate([layers['up'], layers['down']], -1)
    more = jax.random.split(key, LAYERS), jnp.arange(LAYERS)

    def layer(x: Any, layer_inputs: Any) -> tuple[Any, None]:
        w, key, number = layer_inputs
        x = block(x, w) + (x @ w['both'])[..., :WIDTH] * number
        return x * jax.random.bernoulli(key, 0.8, x.shape), None

    x, _ = jax.lax.scan(layer, entered(params, batch), (layers, *more))
    return error(params, x, batch)


# Contents of layers -------------------------------------------------------------------------------


@program()
def loops_in_layers(params: Any, batch: Any, key: Any) -> Any:
    """A cell over time, attention in chunks, and a fixed number of iterations."""

    def layer(x: Any, w: Any) -> Any:
        def cell(h: Any, x: Any) -> tuple[Any, Any]:
            h = jnp.tanh(x @ w['up'] + h @ w['down'] + w['bias'])
            return h, h

        _, out = jax.lax.scan(cell, jnp.zeros((ROWS, WIDTH)), x.swapaxes(0, 1))

        def chunk(carried: Any, keys: Any) -> tuple[Any, None]:
            total, sums = carried
            weights = jnp.exp(jnp.einsum('bqd,bkd->bqk', x, keys) / WIDTH)
            return (total + weights @ keys, sums + weights.sum(-1, keepdims=True)), None

        chunks = jnp.moveaxis((x @ w['up']).reshape(ROWS, 2, -1, WIDTH), 1, 0)
        start = jnp.zeros_like(x), jnp.zeros((ROWS, LENGTH, 1))
        (total, sums), _ = jax.lax.scan(jax.checkpoint(chunk), start, chunks)
        x = x + out.swapaxes(0, 1) + total / sums
        return jax.lax.fori_loop(0, 2, lambda i, x: jnp.sin(x) * (1 + i), x)

    return of_layers(layer, params, batch)


@program()
def branches_in_layers(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, layer_inputs: Any) -> tuple[Any, None]:
        w, i = layer_inputs
        x = jax.lax.cond(i % 2 == 0, lambda x: block(x, w), lambda x: x * 0.5 + w['bias'], x)
        ways = [lambda x: x, lambda x: x @ w['up'], lambda x: x + jnp.mean(x, -1, keepdims=True)]
        return jax.lax.switch(i % 3, ways, x), None

    x, _ = jax.lax.scan(layer, entered(params, batch), (params['layers'], jnp.arange(LAYERS)))
    return error(params, x, batch)


@program()
def branches_that_keep_nothing(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, layer_inputs: Any) -> tuple[Any, None]:
        w, is_doubled = layer_inputs
        return jax.lax.cond(is_doubled, lambda x: 2 * x, lambda x: x, block(x, w)), None

    flags = np.arange(LAYERS) % 2 == 0
    x, _ = jax.lax.scan(jax.checkpoint(layer), entered(params, batch), (params['layers'], flags))
    return error(params, x, batch)


@program(has_gradient=False)
def loops_that_layers_end(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, layer_inputs: Any) -> tuple[Any, Any]:
        w, i = layer_inputs
        return jax.lax.while_loop(
            lambda state: state[1] < 1 + i % 2, lambda state: (block(state[0], w), state[1] + 1), (x, 0)
        )

    return jax.lax.scan(layer, entered(params, batch), (params['layers'], jnp.arange(LAYERS)))


@program()
def derivatives_of_their_own(params: Any, batch: Any, key: Any) -> Any:
    @jax.custom_vjp
    def wave(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w)

    def back(saved: Any, grad: Any) -> tuple[Any, Any]:
        x, w = saved
        grad = grad * jnp.cos(x @ w)
        return grad @ w.T, jnp.einsum('bsd,bse->de', x, grad)

    wave.defvjp(lambda x, w: (wave(x, w), (x, w)), back)

    @jax.custom_jvp
    def bell(x: Any) -> Any:
        return jnp.exp(-x * x)

    @bell.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return bell(*primals), -2 * primals[0] * bell(*primals) * tangents[0]

    return of_layers(
        lambda x, w: x + jax.nn.relu(wave(x, w['up'])) @ w['down'] + bell(x) + jax.nn.gelu(x), params, batch
    )


@program()
def numbers_of_rows(params: Any, batch: Any, key: Any) -> Any:
    """Values that only depend on the index of an example, and tables indexed by it or by tokens."""

    def layer(x: Any, w: Any) -> Any:
        numbers = jnp.arange(len(x))
        x = x * (1 + numbers[:, None, None] / ROWS) + jnp.sin(batch['x'])[numbers]
        return block(x, w) + w['down'][batch['segments']] + w['bias'][batch['numbers']][:, None, None]

    return of_layers(layer, params, batch)


@program()
def orders_in_rows(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        y = jnp.take_along_axis(x, jnp.argsort(x, 1), 1)
        top, _ = jax.lax.top_k(y, 2)
        return block(y, w).at[:, 0, :2].add(top[:, 0]) + jnp.sort(x, -1)

    return of_layers(layer, params, batch)


@program()
def windows_and_convolutions(params: Any, batch: Any, key: Any) -> Any:
    numbers = ('NHC', 'HIO', 'NHC')

    def layer(x: Any, w: Any) -> Any:
        most = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), 'SAME')
        kernel = jnp.stack([w['up'], w['down']])
        y = jax.lax.conv_general_dilated(most, kernel, (1,), 'SAME', dimension_numbers=numbers)
        depthwise_kernel = w['down'][:3, None]
        z = jax.lax.conv_general_dilated(
            x, depthwise_kernel, (1,), 'SAME', dimension_numbers=numbers, feature_group_count=WIDTH
        )
        return x + jnp.tanh(y + z) + jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(w['bias']), n=WIDTH)

    return of_layers(layer, params, batch)


@program()
def code_of_one_example(params: Any, batch: Any, key: Any) -> Any:
    def of_example(x: Any) -> Any:
        x, _ = jax.lax.scan(
            lambda x, w: (jax.vmap(lambda token: block(token, w))(x), None),
            x @ params['inward'],
            params['layers'],
        )
        return x

    return error(params, jax.vmap(of_example)(batch['x']), batch)


@program()
def other_generators(params: Any, batch: Any, key: Any) -> Any:
    """With one key for all examples, other generators draw the same bits as threefry."""
    keys = jax.random.split(jax.random.key(3, impl='rbg'), LAYERS)

    def layer(x: Any, layer_inputs: Any) -> tuple[Any, None]:
        w, key = layer_inputs
        return block(x, w) * jax.random.bernoulli(key, 0.8, x.shape), None

    x, _ = jax.lax.scan(layer, entered(params, batch), (params['layers'], keys))
    return error(params, x, batch)


@program()
def places_that_users_say(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return with_sharding_constraint(block(with_sharding_constraint(x, P('fsdp')), w), P(('fsdp',), None))

    return of_layers(layer, params, batch)


# Around the loop ----------------------------------------------------------------------------------


@program(mesh={'stage': 4, 'fsdp': 2})
def checkpoints_by_name(params: Any, batch: Any, key: Any) -> Any:
    """A checkpoint around the entire loop."""

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names('hidden'))
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return x + checkpoint_name(jnp.tanh(x @ w['up'] + w['bias']), 'hidden') @ w['down'], None

    @jax.checkpoint
    def all_layers(x: Any, layers: Any) -> Any:
        return jax.lax.scan(layer, x, layers)[0]

    return error(params, all_layers(entered(params, batch), params['layers']), batch)


@program()
def from_the_last_layer(params: Any, batch: Any, key: Any) -> Any:
    return of_layers(block, params, batch, reverse=True, unroll=2)


@program()
def groups_of_layers(params: Any, batch: Any, key: Any) -> Any:
    groups = jax.tree.map(lambda w: w.reshape(2, -1, *w.shape[1:]), params['layers'])

    @jax.checkpoint
    def group(x: Any, layers: Any) -> tuple[Any, None]:
        return jax.lax.scan(lambda x, w: (block(x, w), None), x, layers)

    x, _ = jax.lax.scan(group, entered(params, batch), groups)
    return error(params, x, batch)


@program()
def two_loops(params: Any, batch: Any, key: Any) -> Any:
    """Loops of two depths (the layers, the layers twice), and a loop over norms of weights."""
    both = jax.tree.map(lambda w: jnp.concatenate([w, w]), params['layers'])
    x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), entered(params, batch), params['layers'])
    x, _ = jax.lax.scan(lambda x, w: (jnp.sin(block(x, w)), None), x, both)
    norms, _ = jax.lax.scan(lambda total, w: (total + jnp.sum(w['up'] ** 2), None), 0.0, params['layers'])
    return error(params, x, batch) + 1e-3 * norms


@program()
def in_a_branch(params: Any, batch: Any, key: Any) -> Any:
    x = entered(params, batch)
    run = lambda x: jax.lax.scan(lambda x, w: (block(x, w), None), x, params['layers'])[0]  # noqa: E731
    return error(params, jax.lax.cond(jnp.sum(params['outward']) < 1e6, run, jnp.sin, x), batch)


@program(has_gradient=False)
def in_a_loop(params: Any, batch: Any, key: Any) -> Any:
    def again(_: Any, x: Any) -> Any:
        return jnp.tanh(jax.lax.scan(lambda x, w: (block(x, w), None), x, params['layers'])[0])

    return jax.lax.fori_loop(0, 3, again, entered(params, batch))


@program()
def parts_of_the_batch(params: Any, batch: Any, key: Any) -> Any:
    """The mean loss of slices of the batch, one after the other."""
    parts = {name: batch[name].reshape(2, -1, LENGTH, WIDTH) for name in 'xy'}

    @jax.checkpoint
    def add(total: Any, part: Any) -> tuple[Any, None]:
        return total + of_layers(block, params, part), None

    return jax.lax.scan(add, 0.0, parts)[0] / 2


def plain(params: Any, batch: Any, key: Any) -> Any:
    return of_layers(jax.checkpoint(block), params, batch)


PROGRAMS['parts_of_the_batch_by_microbatch'] = Program(
    plain, function=lambda loss: scalax.microbatch(jax.value_and_grad(loss), 2)
)
PROGRAMS['many_microbatches'] = Program(plain, parts=4, mesh={'stage': 4, 'fsdp': 2})


# Sums over the batch that do not affect examples -------------------------------------------------


def unevenness(x: Any, w: Any) -> Any:
    """A load-balancing loss: a product of two means over all tokens."""
    probs = jax.nn.softmax(x @ w['up'])
    return WIDTH * jnp.mean(probs, (0, 1)) @ jnp.mean(probs > 0.1, (0, 1))


@program()
def balance_losses(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        return block(x, w), unevenness(x, w)

    x, uneven = jax.lax.scan(layer, entered(params, batch), params['layers'])
    return error(params, x, batch) + jnp.mean(uneven)


@program()
def balance_losses_computed_again(params: Any, batch: Any, key: Any) -> Any:
    """Layers with dropout, and nested checkpoints."""

    @jax.checkpoint
    def layer(x: Any, layer_inputs: Any) -> tuple[Any, Any]:
        w, number = layer_inputs
        x = jax.checkpoint(block)(x, w)
        kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape)
        return jnp.where(kept, x / 0.9, 0), unevenness(x, w) ** 2

    layers = params['layers'], jnp.arange(LAYERS)
    x, uneven = jax.lax.scan(layer, entered(params, batch), layers)
    return error(params, x, batch) + jnp.mean(uneven)


@program()
def balance_losses_of_a_loop(params: Any, batch: Any, key: Any) -> Any:
    """One loop outputs examples and a sum over them."""

    @jax.checkpoint
    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        def expert(total: Any, column: Any) -> tuple[Any, Any]:
            score = jax.nn.sigmoid(x @ column)
            return total + score[..., None] * x, jnp.mean(score)

        y, used = jax.lax.scan(expert, jnp.zeros_like(x), w['up'].T)
        return block(y, w), used @ used

    x, uneven = jax.lax.scan(layer, entered(params, batch), params['layers'])
    return error(params, x, batch) + jnp.mean(uneven)


@program()
def balance_losses_saved_by_name(params: Any, batch: Any, key: Any) -> Any:
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names('used'))
    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        probs = jax.nn.softmax(x @ w['up'])
        used = checkpoint_name(jnp.mean(probs > 0.1, (0, 1)), 'used')
        return block(x, w), jnp.mean(probs, (0, 1)) @ used

    x, uneven = jax.lax.scan(layer, entered(params, batch), params['layers'])
    return error(params, x, batch) + jnp.mean(uneven)


def with_a_balance_that_is_carried(layer_of: Callable[[Any], Any], params: Any, batch: Any) -> Any:
    def layer(carried: Any, w: Any) -> tuple[Any, None]:
        x, total, number = carried
        return (block(x, w), total + unevenness(x, w) / number, number + 1), None

    begun = entered(params, batch), jnp.sum(params['layers']['up']), 1
    (x, total, _), _ = jax.lax.scan(layer_of(layer), begun, params['layers'])
    return error(params, x, batch) + total


@program()
def carried_balance_losses(params: Any, batch: Any, key: Any) -> Any:
    return with_a_balance_that_is_carried(lambda layer: layer, params, batch)


@program(mesh={'stage': 4, 'fsdp': 2}, parts=4)
def carried_balance_losses_computed_again(params: Any, batch: Any, key: Any) -> Any:
    return with_a_balance_that_is_carried(jax.checkpoint, params, batch)


@program(has_gradient=False)
def sums_of_layers_in_a_call(params: Any, batch: Any, key: Any) -> Any:
    """In an evaluation a checkpoint is a call."""

    @jax.checkpoint
    def layer(carried: Any, w: Any) -> tuple[Any, None]:
        x, total = carried
        return (block(x, w), total + jnp.sum(x, (0, 1))), None

    begun = entered(params, batch), jnp.ones(WIDTH)
    (x, total), _ = jax.lax.scan(layer, begun, params['layers'])
    return error(params, x, batch), total


@program()
def running_means(params: Any, batch: Any, key: Any) -> Any:
    """A layer reads sums over the batch from earlier layers."""

    def layer(carried: Any, w: Any) -> tuple[Any, Any]:
        x, mean = carried
        x = block(x, w)
        return (x, 0.9 * mean + 0.1 * jnp.mean(x, (0, 1))), mean

    (x, mean), means = jax.lax.scan(layer, (entered(params, batch), jnp.zeros(WIDTH)), params['layers'])
    return error(params, x, batch) + jnp.sum(mean**2) + jnp.mean(means)


@program()
def means_of_the_layer_before(params: Any, batch: Any, key: Any) -> Any:
    def layer(carried: Any, w: Any) -> tuple[Any, Any]:
        x, mean = carried
        return (block(x, w), jnp.mean(x, (0, 1))), 2 * mean

    (x, mean), means = jax.lax.scan(layer, (entered(params, batch), jnp.ones(WIDTH)), params['layers'])
    return error(params, x, batch) + jnp.sum(mean**2) + jnp.sum(means**2)


def of_masks(params: Any, batch: Any) -> Any:
    """Layers use constants that depend on the entire batch."""
    mask = jnp.abs(batch['x'][..., :1]) > 0.5
    lengths = jnp.sum(mask, (1, 2))

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        x = x + block(x, w) * mask / jnp.sum(mask) * ROWS + x[:, :1] * jnp.argsort(lengths)[-1]
        return x * lengths[:, None, None] / lengths.max() + jnp.sort(lengths)[-2] / ROWS

    return of_layers(layer, params, batch)


@program()
def masks_of_the_batch(params: Any, batch: Any, key: Any) -> Any:
    return of_masks(params, batch)


@program(has_gradient=False)
def masks_of_the_batch_in_evaluation(params: Any, batch: Any, key: Any) -> Any:
    return of_masks(params, batch)


# Layers that mix examples -------------------------------------------------------------------------


@refused()
def norm_of_the_batch(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        y = x @ w['up']
        y = y - jnp.mean(y, (0, 1))
        return x + y / jnp.sqrt(jnp.mean(y * y, (0, 1)) + 1e-3)

    return of_layers(layer, params, batch)


@refused()
def largest_of_the_batch(params: Any, batch: Any, key: Any) -> Any:
    return of_layers(lambda x, w: block(x / jnp.max(jnp.abs(x)), w), params, batch)


@refused()
def sorted_rows(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return block(x[jnp.argsort(x[:, 0, 0])], w)

    return of_layers(layer, params, batch)


@refused()
def capacity_of_the_batch(params: Any, batch: Any, key: Any) -> Any:
    """Experts process the first tokens of all examples."""

    def layer(x: Any, w: Any) -> Any:
        tokens = x.reshape(-1, WIDTH)
        chosen = jax.nn.one_hot(jnp.argmax(tokens @ w['up'], -1), WIDTH)
        is_taken = jnp.sum(jnp.cumsum(chosen, 0) * chosen, -1, keepdims=True) < 4
        return block((tokens * is_taken).reshape(x.shape), w)

    return of_layers(layer, params, batch)


@refused()
def balance_that_scales_rows(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        uneven = unevenness(x, w)
        return x + uneven * block(x, w), uneven

    x, uneven = jax.lax.scan(layer, entered(params, batch), params['layers'])
    return error(params, x, batch) + jnp.mean(uneven)


@refused()
def one_row_after_the_other(params: Any, batch: Any, key: Any) -> Any:
    return of_layers(lambda x, w: jax.lax.map(lambda row: block(row, w), x), params, batch)


@refused(has_gradient=False)
def until_all_rows_are_small(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jax.lax.while_loop(lambda x: jnp.sum(x * x) > 1, lambda x: x / 2, block(x, w))

    return of_layers(layer, params, batch)


@refused(has_gradient=False)
def branch_by_the_batch(params: Any, batch: Any, key: Any) -> Any:
    return of_layers(lambda x, w: jax.lax.cond(jnp.mean(x) > 0, jnp.sin, jnp.cos, block(x, w)), params, batch)


@program()
def rows_by_number(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        selected_tokens = x[jnp.arange(ROWS), batch['segments'][:, 0]]
        return block(x, w) + selected_tokens[:, None]

    return of_layers(layer, params, batch)


@refused()
def rows_in_another_order(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        y = x.swapaxes(0, 1).reshape(-1, WIDTH)
        return block(y, w).reshape(LENGTH, ROWS, WIDTH).swapaxes(0, 1)

    return of_layers(layer, params, batch)


@refused()
def keys_of_rows_of_another_generator(params: Any, batch: Any, key: Any) -> Any:
    key = jax.random.key(3, impl='rbg')
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(batch['numbers'])

    def layer(x: Any, layer_inputs: Any) -> tuple[Any, None]:
        w, number = layer_inputs
        row_keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
        return block(x, w) + jax.vmap(lambda key: jax.random.normal(key, (LENGTH, WIDTH)))(row_keys), None

    x, _ = jax.lax.scan(layer, entered(params, batch), (params['layers'], jnp.arange(LAYERS)))
    return error(params, x, batch)


@program()
def draws_of_gamma(params: Any, batch: Any, key: Any) -> Any:
    """One key draws all elements: drawing fewer elements gives other values."""
    before = jax.random.gamma(key, 2.0, (ROWS, 1, 1))

    def layer(x: Any, w: Any) -> Any:
        return block(x, w) * before * jax.random.dirichlet(key, jnp.ones(WIDTH), (ROWS, LENGTH))

    return of_layers(layer, params, batch)


@refused()
def gamma_of_rows(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return block(x, w) * jax.lax.stop_gradient(jax.random.gamma(key, jnp.exp(x)))

    return of_layers(layer, params, batch)


@refused()
def offloaded(params: Any, batch: Any, key: Any) -> Any:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=['up'],
        offload_src='device',
        offload_dst='pinned_host',
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return x + jnp.tanh(checkpoint_name(x @ w['up'], 'up')) @ w['down'], None

    x, _ = jax.lax.scan(layer, entered(params, batch), params['layers'])
    return error(params, x, batch)


@refused()
def kernel(params: Any, batch: Any, key: Any) -> Any:
    def doubled(x: Any, out: Any) -> None:
        out[...] = 2 * x[...]

    def layer(x: Any, w: Any) -> Any:
        call = pl.pallas_call(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
        return block(call(jax.lax.stop_gradient(x)), w)

    return of_layers(layer, params, batch)


@refused(has_gradient=False)
def callback(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return block(jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), w)

    return of_layers(layer, params, batch)


@refused(has_gradient=False)
def print_of_weights(params: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        jax.debug.print('{}', jnp.max(w['up']))
        return block(x, w)

    return of_layers(layer, params, batch)


@refused()
def layers_in_a_python_loop(params: Any, batch: Any, key: Any) -> Any:
    x = entered(params, batch)
    for i in range(LAYERS):
        x = block(x, jax.tree.map(lambda w, i=i: w[i], params['layers']))
    return error(params, x, batch)
