"""Weights that a model uses in several forms: each pass gathers them once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import FSDP, HSDP, TP, assert_equal, partitioned

pytestmark = pytest.mark.medium

RNG = np.random.default_rng(0)
# The layers are larger than the table, so that the table is not kept between the passes.
TABLE, LAYERS = (np.asarray(RNG.normal(size=shape) / 4, 'f') for shape in ((16, 8), (4, 8, 64)))
TOKENS = RNG.integers(0, 16, (16, 3), 'int32')


def layers(x, weights):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w @ w.T), None), x, weights)[0]


def cross_entropy(logits, tokens):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def transposed(table, weights, tokens):
    return cross_entropy(layers(table[tokens], weights) @ table.T, tokens)


def by_einsum(table, weights, tokens):
    x = layers(jnp.take(table, tokens, axis=0), weights)
    return cross_entropy(jnp.einsum('btd,vd->btv', x, table), tokens)


def by_functions(table, weights, tokens):
    """Each use casts the table in a separate function, as in modules."""
    x = layers(jax.jit(lambda t: jnp.take(t, tokens, axis=0))(table), weights)
    return cross_entropy(jax.jit(lambda t, x: x @ t.T)(table, x), tokens)


def by_casts(table, weights, tokens):
    x = layers(table.astype('bfloat16')[tokens].astype('f'), weights)
    return cross_entropy(x.astype('bfloat16') @ table.astype('bfloat16').T, tokens).astype('f')


def decoded(table, weights, tokens):
    """An autoencoder, which multiplies by the transpose last."""
    x = layers(jnp.tanh(jax.nn.one_hot(tokens, 16) @ table), weights)
    return jnp.mean((x @ table.T) ** 2)


def encoded(table, weights, tokens):
    """The same, which multiplies by the transpose first."""
    x = jnp.tanh(jax.nn.one_hot(tokens, 16)[..., :8] @ table.T)
    return jnp.mean((layers(x @ table, weights)) ** 2)


PROGRAMS = [transposed, by_einsum, by_functions, by_casts, decoded, encoded]


def updated(loss):
    def step(state, tokens):
        value, gradients = jax.value_and_grad(lambda state: loss(*state, tokens))(state)
        return *jax.tree.map(lambda w, g: w - g / 10, state, gradients), value

    return step


@pytest.mark.parametrize('loss', PROGRAMS, ids=lambda fun: fun.__name__)
@pytest.mark.parametrize('mesh', [FSDP, HSDP, TP], ids=['fsdp', 'hsdp', 'tp'])
@pytest.mark.sampled(3)
def test_each_pass_gathers_a_table_once(loss, mesh):
    step, run = partitioned(updated(loss), (TABLE, LAYERS), TOKENS, mesh)
    gathers = [row for row in step.collective_rows if row.path == '[0]' and row.kind == 'all_gather']
    passes = [sum(row.count for row in gathers if row.is_backward == backward) for backward in (False, True)]
    assert passes[0] == 1, passes
    assert passes[1] <= 1, passes
    reduced = [row.count for row in step.collective_rows if (row.kind, row.path) == ('reduce_scatter', '[0]')]
    assert sum(reduced) == (2 if loss is by_casts else 1)  # the model adds both in float32, after the casts
    assert_equal(run(), jax.jit(updated(loss))((TABLE, LAYERS), TOKENS), 2e-3 if loss is by_casts else 1e-5)
