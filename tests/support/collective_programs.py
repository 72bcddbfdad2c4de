"""Programs with known collectives, whose counts and bytes were computed by hand."""

import functools

import jax
import jax.numpy as jnp

from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    OptimizerStateShardingRule,
    TreePathShardingRule,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P
from tests.support.leaves import leaf

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
CUBE = MeshShardingHelper([2, 2, 2], ['a', 'b', 'c'])
F32 = 4


def rows(plan):
    """Returns the collectives of a plan: (kind, axes) -> (count, bytes of all executions)."""
    totals = {}
    for row in plan.collectives:
        count, moved = totals.get((row.kind, row.axes), (0, 0))
        totals[row.kind, row.axes] = count + row.count, moved + row.count * row.bytes
    return totals


# --- Programs: (function of a helper's sjit, arguments, {(kind, axes): (count, bytes)}) --------------------


def data_parallel():
    """The gradient of replicated parameters is summed over the batch."""

    def step(w, x):
        return jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    # With this few examples, they would be gathered.
    fun = HELPER.sjit(step, in_shardings=(P(), P('fsdp')), out_shardings=P(), batch_argnums=())
    return HELPER, fun, (leaf(64, 32), leaf(16, 64)), {('all-reduce', ('fsdp',)): (1, 64 * 32 * F32)}


def fsdp_forward():
    """Each weight is gathered once."""

    def forward(ws, x):
        return x @ ws['a'] @ ws['b']

    rule = FSDPShardingRule('fsdp', min_fsdp_size=1)
    fun = HELPER.sjit(forward, in_shardings=(rule, P('fsdp')), out_shardings=P('fsdp'))
    expected = {('all-gather', ('fsdp',)): (2, (64 * 32 + 32 * 128) * F32)}
    return HELPER, fun, ({'a': leaf(64, 32), 'b': leaf(32, 128)}, leaf(512, 64)), expected


def tensor_parallel():
    """Column-parallel, then row-parallel: one all-reduce of the output."""
    rule = TreePathShardingRule(('up', P(None, 'tp')), ('down', P('tp', None)))
    fun = HELPER.sjit(
        lambda p, x: jax.nn.relu(x @ p['up']) @ p['down'],
        in_shardings=(rule, P('fsdp')),
        out_shardings=P('fsdp'),
    )
    arguments = {'up': leaf(64, 256), 'down': leaf(256, 64)}, leaf(16, 64)
    return HELPER, fun, arguments, {('all-reduce', ('tp',)): (1, 16 // 4 * 64 * F32)}


def scanned(layers=6, rounds=1):
    """FSDP over stacked layers: one gather per layer, in a loop (inside a loop)."""

    def forward(w, x):
        def once(x, _):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], None

        return once(x, None)[0] if rounds == 1 else jax.lax.scan(once, x, length=rounds)[0]

    fun = HELPER.sjit(forward, in_shardings=(P(None, 'fsdp'), P('fsdp')), out_shardings=P('fsdp'))
    count = layers * rounds
    expected = {('all-gather', ('fsdp',)): (count, count * 64 * 64 * F32)}
    return HELPER, fun, (leaf(layers, 64, 64), leaf(16, 64)), expected


def rematerialised():
    """A checkpointed loop gathers each weight in the forward pass, and again in the backward pass."""

    def loss(w, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return (jax.lax.scan(layer, x, w)[0] ** 2).sum()

    fun = HELPER.sjit(
        jax.grad(loss), in_shardings=(P(None, 'fsdp'), P('fsdp')), out_shardings=P(None, 'fsdp')
    )
    weight_bytes = 64 * 64 * F32
    expected = {
        ('all-gather', ('fsdp',)): (2 * 5, 2 * 5 * weight_bytes),
        ('all-reduce', ('fsdp',)): (5, 5 * weight_bytes),  # the partitioner's form of a reduce-scatter
    }
    return HELPER, fun, (leaf(5, 64, 64), leaf(16, 64)), expected


def zero_1():
    """Gradients are summed, each device updates its shard of the state, and parameters are gathered."""
    params = {'w': leaf(64, 32)}
    state = OptimizerStateShardingRule(P('fsdp'), params)

    def update(params, momentum, grads):
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(jnp.subtract, params, momentum), momentum

    fun = HELPER.sjit(update, in_shardings=(P(), state, P()), out_shardings=(P(), state))
    return HELPER, fun, (params, params, params), {('all-gather', ('fsdp',)): (1, 64 * 32 * F32)}


def resharded():
    """Sharding by rows becomes sharding by columns."""
    fun = HELPER.sjit(lambda x: x, in_shardings=P('fsdp'), out_shardings=P(None, 'fsdp'))
    return HELPER, fun, (leaf(64, 64),), {('all-to-all', ('fsdp',)): (1, 64 * 64 * F32)}


def rolled():
    """Each device sends three rows to the next device."""
    fun = HELPER.sjit(lambda x: jnp.roll(x, 3, 0), in_shardings=P('fsdp'), out_shardings=P('fsdp'))
    return HELPER, fun, (leaf(64, 64),), {('collective-permute', ('fsdp',)): (1, 4 * 3 * 64 * F32)}


def experts():
    """Tokens move to the devices of their experts, and back."""

    def dispatch(x):  # (groups, experts, capacity, embed)
        there = with_sharding_constraint(x, P(None, 'fsdp'))
        return with_sharding_constraint(2 * there, P('fsdp'))

    fun = HELPER.sjit(dispatch, in_shardings=P('fsdp'), out_shardings=P('fsdp'))
    array_bytes = 8 * 4 * 2 * 16 * F32
    return HELPER, fun, (leaf(8, 4, 2, 16),), {('all-to-all', ('fsdp',)): (2, 2 * array_bytes)}


def by_hand():
    """All collectives available in shard_map; a block is 8 x 64 of 64 x 64."""

    def block(x):
        x = jax.lax.all_gather(x, 'b', tiled=True)  # 16 x 64
        x = jax.lax.ppermute(x, 'a', [(0, 1), (1, 0)])
        x = jax.lax.psum_scatter(x, 'c', tiled=True)  # 8 x 64
        x = jax.lax.all_to_all(x, ('b', 'c'), 1, 0, tiled=True)  # 32 x 16
        return jax.lax.psum(x, ('a', 'c'))

    fun = jax.jit(CUBE.shard_map(block, P(('a', 'b', 'c')), P('b'), check_vma=False))
    expected = {
        ('all-gather', ('b',)): (1, 16 * 64 * F32),
        ('collective-permute', ('a',)): (1, 2 * 16 * 64 * F32),
        ('reduce-scatter', ('c',)): (1, 16 * 64 * F32),
        ('all-to-all', ('b', 'c')): (1, 4 * 8 * 64 * F32),
        ('all-reduce', ('a', 'c')): (1, 32 * 16 * F32),
    }
    return CUBE, fun, (leaf(64, 64),), expected


def some_axes():
    """A dimension sharded over two axes is gathered along one."""
    fun = CUBE.sjit(lambda x: x, in_shardings=P(('c', 'a'), 'b'), out_shardings=P(None, 'b'))
    return CUBE, fun, (leaf(64, 64),), {('all-gather', ('a', 'c')): (1, 64 * 32 * F32)}


def nothing():
    """A function that does not mix examples sends nothing."""
    fun = HELPER.sjit(lambda x: jnp.tanh(x) * 2, in_shardings=P('fsdp', 'tp'))
    return HELPER, fun, (leaf(64, 64),), {}


PROGRAMS = {
    program.__name__: program
    for program in (
        *(data_parallel, fsdp_forward, tensor_parallel, scanned, rematerialised, zero_1, resharded),
        *(rolled, experts, by_hand, some_axes, nothing),
    )
}
PROGRAMS['scan of one layer'] = functools.partial(scanned, 1)
PROGRAMS['scan in scan'] = functools.partial(scanned, 3, 4)
