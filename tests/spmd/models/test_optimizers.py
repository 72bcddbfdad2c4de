"""Optimizers that decompose matrices, and norms of flattened gradients, on shards."""

import re

import jax
import jax.numpy as jnp
import pytest

from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.partition import FSDP, Program, assert_values_of_one_device, moved_bytes

HELPER = MeshShardingHelper([8], ['fsdp'])
WIDTH, LAYERS = 16, 8


def inverse_root(matrix):
    """Shampoo: the inverse fourth root of a preconditioner."""
    values, vectors = jnp.linalg.eigh(matrix)
    return (vectors * (jnp.maximum(values, 0) + 1e-3)[..., None, :] ** -0.25) @ vectors.mT


def basis(matrix):
    """SOAP: one step of the power iteration for the eigenvectors of a preconditioner."""
    return jnp.linalg.qr(matrix + jnp.eye(matrix.shape[-1]))[0]


def preconditioned(decompose):
    """A training step of stacked layers whose gradients are multiplied by decomposed preconditioners."""

    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w['layers'])[0] ** 2)

    def step(w, x):
        value, gradients = jax.value_and_grad(loss)(w, x)
        gradient = gradients['layers']
        return {'layers': w['layers'] - 0.1 * decompose(gradient @ gradient.mT) @ gradient}, value

    return step


# The LAPACK routines in programs for CPUs.
DECOMPOSITIONS = {'eigh': (inverse_root, 'syevd'), 'qr': (basis, 'geqrf')}


def arguments():
    layers = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 4
    return {'layers': layers}, jax.random.normal(jax.random.key(1), (64, WIDTH))


def optimizer_step(decompose):
    return HELPER.sjit(preconditioned(decompose), in_shardings=(FSDP, P('fsdp')), out_shardings=(FSDP, P()))


@pytest.mark.slow
@pytest.mark.parametrize('decompose', [inverse_root, basis])
def test_values_of_preconditioned_gradients(decompose):
    assert_values_of_one_device(optimizer_step(decompose), preconditioned(decompose), *arguments())


@pytest.mark.medium
@pytest.mark.parametrize('decompose, routine', DECOMPOSITIONS.values(), ids=DECOMPOSITIONS)
def test_each_device_decomposes_some_of_the_matrices(decompose, routine):
    program = optimizer_step(decompose).lower(*arguments()).compile().as_text()
    calls = re.findall(rf'f32\[([\d,]*){WIDTH},{WIDTH}\][^\n]*custom_call_target="[^"]*{routine}', program)
    matrices = [int(batch.strip(',') or 1) for batch in calls]
    if not matrices:
        pytest.fail(f'the program has no call of {routine}', pytrace=False)
    assert sum(matrices) <= LAYERS // 8


def clipped(norm):
    """A training step that clips each gradient by its norm (AGC, LARS)."""

    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w['up']) @ w['down']) ** 2)

    def clip(weight, gradient):
        return gradient / jnp.maximum(1.0, norm(gradient) / (0.3 * jnp.maximum(1e-3, norm(weight))))

    def step(w, x):
        value, gradients = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * clip(w, g), w, gradients), value

    return loss, step


def flat_norm(array):
    return jnp.linalg.norm(array.reshape(-1))


def squared_norm(array):
    return jnp.sqrt(jnp.sum(array**2))


MLP = Program(clipped(flat_norm)[0], {'up': (64, 256), 'down': (256, 64)}, (1024, 64))


def clipping_step(norm):
    return HELPER.sjit(clipped(norm)[1], in_shardings=(FSDP, P('fsdp')), out_shardings=(FSDP, P()))


@pytest.mark.slow
@pytest.mark.parametrize('norm', [flat_norm, squared_norm])
def test_values_of_clipped_gradients(norm):
    assert_values_of_one_device(clipping_step(norm), clipped(norm)[1], *MLP.arguments(examples=64))


@pytest.mark.medium
def test_a_norm_of_a_flattened_gradient_sends_as_much_as_a_sum_of_squares():
    flat, squared = (HELPER.plan(clipping_step(norm), *MLP.types()) for norm in (flat_norm, squared_norm))
    assert moved_bytes(flat) <= moved_bytes(squared)
