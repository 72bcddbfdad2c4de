"""Per-example operations run on the device of the example: only weights move."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import gpu_compiler, tpu_compiler
from tests.support.partition import (
    Program,
    assert_values_of_one_device,
    moved_bytes,
)

HELPER = MeshShardingHelper([8], ['fsdp'])


def conv(x, kernel, groups, padding='SAME'):
    names = ('NWC', 'WIO', 'NWC') if x.ndim == 3 else ('NHWC', 'HWIO', 'NHWC')
    ones = (1,) * (x.ndim - 2)
    return lax.conv_general_dilated(
        x, kernel, ones, padding, dimension_numbers=names, feature_group_count=groups
    )


def squares(y):
    return jnp.mean(y**2)


def router(w, x):
    gates, experts = lax.top_k(jax.nn.softmax(x @ w['router']), 2)
    return jnp.mean(jnp.tanh(gates) * experts)


def router_in_a_scan(w, x):
    def layer(x, w):
        gates, experts = lax.top_k(jax.nn.softmax(x @ w['router']), 2)
        return x + jnp.sum(gates * experts, -1, keepdims=True), None

    return squares(lax.scan(layer, x, w)[0])


def depthwise(w, x):
    def layer(x, w):
        y = conv(x @ w['up'], w['kernel'], x.shape[-1], [(3, 0)])
        return x + jax.nn.silu(y) @ w['down'], None

    return squares(lax.scan(jax.checkpoint(layer), x, w)[0])


def grouped(w, x):
    return squares(jnp.tanh(conv(jnp.sin(x), w['kernel'], 8)))


def linear_loss(w, x, reduce=jnp.sum):
    return reduce(jnp.tanh(x @ w['up']) @ w['down'])


def codebook(w, x):
    distances = jnp.sum((jnp.sin(x)[:, None] - w['codes']) ** 2, -1)
    return jnp.mean(jnp.tanh(jnp.min(distances, -1)))


def block_diagonal(w, x):
    """A recurrent cell that multiplies each block of its state by a separate matrix."""

    def cell(h, _):
        return jnp.tanh(jnp.einsum('bki,kio->bko', h, w['blocks'])), None

    return squares(lax.scan(cell, x, None, length=8)[0])


def sort(w, x):
    return squares(jnp.sort(x @ w['up'], -1)[:, ::2] @ w['down'])


def cumulative_sum(w, x):
    return squares(jnp.cumsum(jnp.tanh(x @ w['up']), 1) @ w['down'])


def fft(w, x):
    return squares(jnp.abs(jnp.fft.rfft(x @ w['up'], axis=-1)) @ w['down'])


def cholesky(w, x):
    y = (x @ w['up']).reshape(-1, 8, 8)
    factor = jnp.linalg.cholesky(y @ y.mT + 8 * jnp.eye(8))
    return squares(factor.reshape(-1, 64) @ w['down'])


def convnext(w, x):
    y = conv(x, w['kernel'], x.shape[-1])
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6) * w['scale']
    return squares(x + jax.nn.gelu(y @ w['up']) @ w['down'])


def resnext(w, x):
    y = jax.nn.relu(conv(jax.nn.relu(x @ w['up']), w['kernel'], 8))
    return squares(x + y @ w['down'])


def batch_norm(w, x):
    y = x @ w['up']
    y = (y - y.mean(0)) * lax.rsqrt(y.var(0) + 1e-5) * w['scale']
    return squares(jax.nn.relu(y) @ w['down'])


def dropout(w, x):
    y = jax.nn.relu(x @ w['up'])
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, y.shape)
    return squares(jnp.where(kept, y / 0.9, 0) @ w['down'])


def max_pooling(w, x):
    y = conv(x, w['kernel'], 1)
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID')
    return squares(y @ w['down'])


def embeddings(w, tokens):
    x = w['table'][tokens] + w['positions']
    return squares(jnp.tanh(x @ w['up']) @ w['down'])


MLP = {'up': (64, 256), 'down': (256, 64)}
ROUTER = Program(router, {'router': (64, 32)}, (4096, 64))
DEPTHWISE = Program(
    depthwise, {'kernel': (2, 4, 1, 64), 'up': (2, 64, 64), 'down': (2, 64, 64)}, (64, 32, 64)
)
GROUPED = Program(grouped, {'kernel': (3, 3, 4, 32)}, (256, 8, 8, 32))
LINEAR = Program(linear_loss, {'up': (64, 64), 'down': (64, 256)}, (4096, 64))
CODEBOOK = Program(codebook, {'codes': (64, 32)}, (4096, 32))
BLOCKS = Program(block_diagonal, {'blocks': (8, 32, 32)}, (2048, 8, 32))
PROGRAMS = {
    'top_k': ROUTER,
    'depthwise': DEPTHWISE,
    'grouped': GROUPED,
    'linear loss': LINEAR,
    'linear mean': Program(functools.partial(linear_loss, reduce=jnp.mean), LINEAR.weights, LINEAR.batch),
    'codebook': CODEBOOK,
    'block-diagonal': BLOCKS,
    'top_k in a scan': Program(router_in_a_scan, {'router': (2, 64, 32)}, (4096, 64)),
    'sort': Program(sort, {'up': (64, 256), 'down': (128, 64)}, (4096, 64)),
    'cumulative sum': Program(cumulative_sum, MLP, (256, 32, 64)),
    'FFT': Program(fft, {'up': (64, 256), 'down': (129, 64)}, (4096, 64)),
    'Cholesky': Program(cholesky, {'up': (64, 64), 'down': (64, 64)}, (4096, 64)),
    'ConvNeXt': Program(
        convnext,
        {'kernel': (7, 7, 1, 32), 'scale': (32,), 'up': (32, 128), 'down': (128, 32)},
        (64, 16, 16, 32),
    ),
    'ResNeXt': Program(
        resnext, {'kernel': (3, 3, 4, 32), 'up': (64, 32), 'down': (32, 64)}, (64, 16, 16, 64)
    ),
    'batch norm': Program(batch_norm, {**MLP, 'scale': (256,)}, (4096, 64)),
    'dropout': Program(dropout, MLP, (4096, 64)),
    'max pooling': Program(max_pooling, {'kernel': (3, 3, 16, 32), 'down': (32, 16)}, (64, 16, 16, 16)),
    'embeddings': Program(embeddings, {**MLP, 'table': (512, 64), 'positions': (32, 64)}, (256, 32), 'int32'),
}


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('name', PROGRAMS)
def test_values_match_one_device(name):
    program = PROGRAMS[name]
    assert_values_of_one_device(program.compiled_step(HELPER), program.step, *program.arguments(examples=16))


@pytest.mark.medium
@pytest.mark.parametrize('name', PROGRAMS)
def test_a_step_moves_two_gathers_and_one_reduction_of_its_weights(name):
    program = PROGRAMS[name]
    assert moved_bytes(program.plan(HELPER)) <= program.training_bytes


@pytest.mark.parametrize('dims', [[8], [4, 2]], ids=str)
def test_a_router_moves_one_gather_of_its_weight(dims):
    helper = MeshShardingHelper(dims, ['fsdp', 'tp'][: len(dims)])

    def forward(w, x):
        return lax.top_k(jax.nn.softmax(x @ w['router']), 2)

    step = helper.sjit(forward, in_shardings=(ROUTER.rule, P('fsdp')), batch_argnums=1)
    assert moved_bytes(helper.plan(step, *ROUTER.types())) <= ROUTER.weight_bytes


def test_a_grouped_convolution_with_a_replicated_kernel_moves_and_keeps_no_other_examples():
    step = HELPER.sjit(jax.grad(grouped), in_shardings=(P(), P('fsdp')), batch_argnums=1)
    plan = HELPER.plan(step, *GROUPED.types())
    images = 4 * math.prod(GROUPED.batch)
    assert moved_bytes(plan) <= GROUPED.training_bytes
    assert plan.memory.peak < images  # the examples of all devices; one device holds an eighth of them


@pytest.mark.medium
def test_block_diagonal_weights_are_gathered_once_before_a_loop_and_once_for_its_gradient():
    gathered = sum(kinds.get('all-gather', 0) for kinds in BLOCKS.plan(HELPER).totals.values())
    assert gathered <= 2 * BLOCKS.weight_bytes


GPUS = (
    *('top_k', 'top_k in a scan', 'depthwise', 'grouped', 'linear loss', 'codebook', 'block-diagonal'),
    'embeddings',
)


@pytest.mark.medium
@pytest.mark.sampled(5)
@gpu_compiler.needed
@pytest.mark.parametrize('name', GPUS)
def test_a_step_for_gpus_with_a_second_mesh_axis(name):
    node = MeshShardingHelper.from_topology('h100:8', [4, 2], ['fsdp', 'tp'])
    assert moved_bytes(PROGRAMS[name].plan(node, quick=True)) <= PROGRAMS[name].training_bytes


@pytest.mark.medium
@pytest.mark.sampled(5)
@tpu_compiler.newest
@pytest.mark.parametrize(
    'name', ['top_k', 'linear loss', 'depthwise', 'ConvNeXt', 'codebook', 'block-diagonal']
)
def test_a_step_for_tpus(name):
    pod = MeshShardingHelper.from_topology('v5e:2x4', [-1], ['fsdp'])
    assert moved_bytes(PROGRAMS[name].plan(pod, quick=True)) <= PROGRAMS[name].training_bytes


@tpu_compiler.newest
def test_a_router_for_tpus_that_chooses_many_experts():
    def forward(w, x):
        return lax.top_k(jax.nn.softmax(x @ w['router']), 32)

    pod = MeshShardingHelper.from_topology('v5e:4x2', [-1], ['fsdp'])
    program = Program(forward, {'router': (64, 128)}, (16384, 64))
    step = pod.sjit(forward, in_shardings=(program.rule, P('fsdp')), batch_argnums=1)
    assert moved_bytes(pod.plan(step, *program.types(), quick=True)) <= program.training_bytes


@jax.vmap
def combine(left, right):
    return right[0] * left[0], right[0] * left[1] + right[1]


def state_space_layer(decay, into, out, x):
    """A layer with a diagonal complex recurrence over time (S5, LRU), for one example."""
    decay = jnp.exp(-jnp.exp(decay[0]) + 1j * decay[1])
    into, out = into[0] + 1j * into[1], out[0] + 1j * out[1]
    y = jax.vmap(lambda x: into @ x)(x.astype('complex64'))
    _, y = lax.associative_scan(combine, (decay * jnp.ones(y.shape, y.dtype), y))
    return x + jax.nn.gelu(jax.vmap(lambda y: (out @ y).real)(y))


def state_space(w, x):
    for i in range(2):
        x = jax.vmap(lambda x, i=i: state_space_layer(w['decay'][i], w['into'][i], w['out'][i], x))(x)
    return x


STATE_SPACE = Program(
    lambda w, x: squares(state_space(w, x)),
    {'decay': (2, 2, 128), 'into': (2, 2, 128, 128), 'out': (2, 2, 128, 128)},
    (64, 128, 128),
)


@pytest.mark.slow
def test_values_of_state_space_layers():
    step = STATE_SPACE.compiled_step(HELPER)
    assert_values_of_one_device(step, STATE_SPACE.step, *STATE_SPACE.arguments(examples=16))


@pytest.mark.slow
def test_state_space_layers_move_their_weights():
    assert moved_bytes(STATE_SPACE.plan(HELPER)) <= STATE_SPACE.training_bytes


@pytest.mark.slow
@tpu_compiler.newest
def test_state_space_layers_for_tpus_move_what_a_shard_map_moves():
    pod = MeshShardingHelper.from_topology('v5e:2x4', [-1], ['fsdp'])

    def by_hand(w, x):
        return squares(pod.shard_map(state_space, in_specs=(P(), P('fsdp')), out_specs=P('fsdp'))(w, x))

    manual = Program(by_hand, STATE_SPACE.weights, STATE_SPACE.batch)
    assert moved_bytes(STATE_SPACE.plan(pod, quick=True)) <= 1.1 * moved_bytes(manual.plan(pod, quick=True))
