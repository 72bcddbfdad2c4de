"""Experts that sort all tokens of a batch: each device sorts its own tokens, and only weights move."""

import jax
import jax.numpy as jnp
import pytest

from scalax.sharding import MeshShardingHelper
from tests.support.partition import Program, assert_values_of_one_device, moved_bytes

HELPER = MeshShardingHelper([8], ['fsdp'])
WIDTH, HIDDEN, EXPERTS = 32, 64, 8


def sorted_tokens(w, x):
    flat = x.reshape(-1, WIDTH)
    expert = jnp.argmax(flat @ w['router'], -1)
    order = jnp.argsort(expert)
    counts = jnp.bincount(expert, length=EXPERTS)
    hidden = jax.nn.relu(jax.lax.ragged_dot(flat[order], w['up'], counts))
    return order, jax.lax.ragged_dot(hidden, w['down'], counts)


def put_back_by_scatter(w, x):
    order, y = sorted_tokens(w, x)
    return jnp.mean(jnp.zeros_like(y).at[order].set(y) ** 2 * x.reshape(-1, WIDTH))


def put_back_by_gather(w, x):
    order, y = sorted_tokens(w, x)
    return jnp.mean(y[jnp.argsort(order)] ** 2 * x.reshape(-1, WIDTH))


def program(loss):
    weights = {
        'router': (WIDTH, EXPERTS),
        'up': (EXPERTS, WIDTH, HIDDEN),
        'down': (EXPERTS, HIDDEN, WIDTH),
    }
    return Program(loss, weights, (64, 64, WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize('loss', [put_back_by_gather, put_back_by_scatter])
def test_values_match_one_device(loss):
    experts = program(loss)
    assert_values_of_one_device(experts.compiled_step(HELPER), experts.step, *experts.arguments(examples=16))


@pytest.mark.medium
@pytest.mark.parametrize('loss', [put_back_by_gather, put_back_by_scatter])
def test_a_step_moves_two_gathers_and_one_reduction_of_its_weights(loss):
    experts = program(loss)
    assert moved_bytes(experts.plan(HELPER)) <= experts.training_bytes
