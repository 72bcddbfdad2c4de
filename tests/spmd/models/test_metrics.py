"""Metrics of a training step do not send logits: one number per example is enough."""

import jax
import jax.numpy as jnp
import pytest

from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import tpu_compiler
from tests.support.partition import FSDP, assert_values_of_one_device, moved_bytes

HELPER = MeshShardingHelper([8], ['fsdp'])


def step_with(accuracy):
    def step(params, tokens):
        def loss(params):
            hidden = jnp.tanh(params['embed'][tokens] @ params['hidden'])
            logits = jnp.einsum('bld,vd->blv', hidden, params['embed'])
            log_probs = jax.nn.log_softmax(logits)
            cost = -jnp.mean(jnp.take_along_axis(log_probs, tokens[..., None], -1))
            return cost, jnp.mean(jnp.argmax(logits, -1) == tokens) if accuracy else jnp.zeros(())

        (value, hits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, hits

    return step


def compiled(helper, accuracy):
    step = step_with(accuracy)
    return helper.sjit(step, in_shardings=(FSDP, P('fsdp')), out_shardings=(FSDP, P(), P()))


def arguments(vocabulary, width, batch):
    embed, hidden, tokens = jax.random.split(jax.random.key(0), 3)
    params = {
        'embed': jax.random.normal(embed, (vocabulary, width)) / 8,
        'hidden': jax.random.normal(hidden, (width, width)) / 8,
    }
    return params, jax.random.randint(tokens, batch, 0, vocabulary)


def moved_for_accuracy(helper, *args, **options):
    """Returns the additional bytes that a step with an accuracy moves."""
    with_accuracy, without = (
        moved_bytes(helper.plan(compiled(helper, accuracy), *args, **options)) for accuracy in (True, False)
    )
    return with_accuracy - without


@pytest.mark.slow
def test_values_match_one_device():
    args = arguments(512, 16, (8, 8))
    assert_values_of_one_device(compiled(HELPER, True), step_with(True), *args)


@pytest.mark.medium
def test_an_accuracy_sends_no_logits():
    args = jax.eval_shape(lambda: arguments(4096, 64, (8, 64)))
    tokens = 8 * 64
    # Each device sends one logit and its index per token.
    assert moved_for_accuracy(HELPER, *args) <= 8 * 8 * tokens


@pytest.mark.medium
@tpu_compiler.newest
def test_an_accuracy_on_tpus_sends_no_logits():
    pod = MeshShardingHelper.from_topology('v5e:2x4', [-1], ['fsdp'])
    args = jax.eval_shape(lambda: arguments(8192, 128, (64, 64)))
    tokens = 64 * 64
    assert moved_for_accuracy(pod, *args, quick=True) <= 8 * 8 * tokens
