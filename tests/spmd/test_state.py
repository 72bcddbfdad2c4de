"""State that is not used once per layer: its gathers, and its reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import P, assert_equal, partitioned, state_spec

pytestmark = pytest.mark.medium

LAYERS, WIDTH, WORDS, RANK = 2, 16, 32, 4
EXAMPLES, TOKENS, HEADS = 64, 12, 2


def array(*shape, dtype='float32'):
    seed = sum(size * 7**i for i, size in enumerate(shape))
    return np.asarray(np.random.default_rng(seed).normal(size=shape) / 4, dtype)


def sgd(loss):
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, g: a - g.astype(a.dtype) * 0.1, w, gradient), value

    return step


def adapters(w, x):
    """Frozen weights with low-rank adapters."""
    frozen, trained = w

    def loss(trained):
        def layer(x, w):
            return jnp.tanh(x @ w['w'] + x @ w['a'] @ w['b']), None

        return jnp.mean(lax.scan(layer, x, {**frozen, **trained})[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(trained)
    return (frozen, jax.tree.map(lambda a, g: a - 0.1 * g, trained, gradient)), value


def merged_adapters(w, x):
    frozen, trained = w

    def loss(trained):
        def layer(x, w):
            return jnp.tanh(x @ (w['w'] + w['a'] @ w['b'])), None

        return jnp.mean(lax.scan(layer, x, {**frozen, **trained})[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(trained)
    return (frozen, jax.tree.map(lambda a, g: a - 0.1 * g, trained, gradient)), value


ADAPTERS = (
    {'w': array(LAYERS, WIDTH, WIDTH)},
    {'a': array(LAYERS, WIDTH, RANK), 'b': array(LAYERS, RANK, WIDTH)},
)


@sgd
def narrow(w, x):
    """Weights that are cast once, before the layers."""
    w = jax.tree.map(lambda a: a.astype('bfloat16'), w)
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    return jnp.mean(lax.scan(layer, x.astype('bfloat16'), w['w'])[0].astype('float32') ** 2)


@sgd
def shared(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w['w'])
    return jnp.mean(x**2)


@sgd
def tied(w, x):
    tokens = jnp.int32(jnp.abs(x[:, 0]) * 20) % WORDS
    logits = jnp.tanh(w['embed'][tokens]) @ w['embed'].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], 1))


@sgd
def weight_norm(w, x):
    weight = w['direction'] / jnp.linalg.norm(w['direction'], axis=0) * w['scale']
    return jnp.mean(jnp.tanh(x @ weight) ** 2)


@sgd
def spectral_norm(w, x):
    u = jnp.ones(WIDTH)
    for _ in range(2):
        v = w['w'].T @ u
        u = w['w'] @ (v / jnp.linalg.norm(v))
        u = u / jnp.linalg.norm(u)
    u, v = lax.stop_gradient((u, v / jnp.linalg.norm(v)))
    return jnp.mean(jnp.tanh(x @ (w['w'] / (u @ w['w'] @ v))) ** 2)


def quantized(w, x):
    weight = w['int8'].astype('float32') * w['scale']
    return jnp.tanh(x @ weight)


def averaged(w, x):
    """A step that keeps a moving average of its weights."""
    params, average = w
    params, value = shared(params, x)
    return (params, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, average, params)), value


@sgd
def complex_weights(w, x):
    """A complex weight whose real and imaginary parts are stored in a stack."""
    weight = w['parts'][0] + 1j * w['parts'][1]
    return jnp.mean(jnp.real(jnp.tanh(x @ weight)) ** 2)


@sgd
def block_diagonal(w, x):
    """A loop over time uses all blocks, so they are gathered before the loop."""
    x = jnp.tile(x[:, None], (1, 4, 1))
    cell = lambda h, _: (jnp.tanh(jnp.einsum('bki,kio->bko', h, w['blocks'])), None)  # noqa: E731
    return jnp.mean(lax.scan(cell, x, None, length=3)[0] ** 2)


MATRIX = 4 * WIDTH * WIDTH
X = array(16, WIDTH)
# The bytes and the counts of each program's gathers, and of its reductions of arrays.
CASES = {
    'adapters': (
        *(adapters, ADAPTERS, X),
        # The frozen weights twice, and each adapter twice.
        {('all_gather', MATRIX): 2 * LAYERS, ('all_gather', MATRIX // 4): 4 * LAYERS},
        {('reduce_scatter', MATRIX // 4): 2 * LAYERS},
    ),
    'merged adapters': (
        *(merged_adapters, ADAPTERS, X),
        {('all_gather', MATRIX): 2 * LAYERS, ('all_gather', MATRIX // 4): 4 * LAYERS},
        {('reduce_scatter', MATRIX // 4): 2 * LAYERS},
    ),
    'narrow': (
        *(narrow, {'w': array(LAYERS, WIDTH, WIDTH)}, X),
        {('all_gather', MATRIX // 2): 2 * LAYERS},
        {('reduce_scatter', MATRIX // 2): LAYERS},
    ),
    'shared': (
        *(shared, {'w': array(WIDTH, WIDTH)}, X),
        {('all_gather', MATRIX): 1},
        {('reduce_scatter', MATRIX): 1},
    ),
    # For the lookup, and for the matmuls in both passes.
    'tied': (
        *(tied, {'embed': array(WORDS, WIDTH)}, X),
        {('all_gather', 2 * MATRIX): 1},
        {('reduce_scatter', 2 * MATRIX): 1},
    ),
    'weight norm': (
        *(weight_norm, {'direction': array(WIDTH, WORDS), 'scale': array(WORDS)}, X),
        {('all_gather', 2 * MATRIX): 1},
        {('reduce_scatter', 2 * MATRIX): 1},
    ),
    'spectral norm': (
        *(spectral_norm, {'w': array(WIDTH, WIDTH)}, X),
        {('all_gather', MATRIX): 1},
        {('reduce_scatter', MATRIX): 1, ('all_reduce', 4 * WIDTH): 2},
    ),
    'quantized': (
        *(quantized, {'int8': np.arange(512).astype('int8').reshape(WIDTH, WORDS), 'scale': array(WORDS)}, X),
        {('all_gather', MATRIX // 2): 1, ('all_gather', 4 * WORDS): 1},
        {},
    ),
    'averaged': (
        *(averaged, ({'w': array(WIDTH, WIDTH)}, {'w': array(WIDTH, WIDTH)}), X),
        {('all_gather', MATRIX): 1},
        {('reduce_scatter', MATRIX): 1},
    ),
    'complex weights': (
        *(complex_weights, {'parts': array(2, WIDTH, WIDTH)}, X),
        {('all_gather', 2 * MATRIX): 1},
        {('reduce_scatter', 2 * MATRIX): 1},
    ),
    'block diagonal': (
        *(block_diagonal, {'blocks': array(4, WIDTH, WIDTH)}, X),
        {('all_gather', 4 * MATRIX): 1},
        {('reduce_scatter', 4 * MATRIX): 1},
    ),
}


def partitioned_case(name):
    step, state, x, *_ = CASES[name]
    leaves, results = jax.tree.leaves(state), jax.tree.leaves(jax.eval_shape(step, state, x))
    specs = [state_spec(leaf.shape) for leaf in leaves] + [P()]
    return partitioned(step, state, x, result_specs=specs if len(results) == len(specs) else None)


def counted(step, reductions):
    counts = {}
    for row in step.collective_rows:
        if row.bytes > 8 and ('reduce' in row.kind) == reductions:
            counts[row.kind, row.bytes] = counts.get((row.kind, row.bytes), 0) + row.count
    return counts


@pytest.mark.parametrize('name', CASES)
def test_collectives(name):
    *_, gathers, reductions = CASES[name]
    step, _ = partitioned_case(name)
    assert counted(step, reductions=False) == gathers
    assert counted(step, reductions=True) == reductions


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_values_match_one_device(name):
    step, state, x, *_ = CASES[name]
    _, run = partitioned_case(name)
    assert_equal(run(), jax.jit(step)(state, x), 1e-2 if name == 'narrow' else 1e-5)


# Forward passes ---------------------------------------------------------------------------------------

DECODER = {
    'embed': array(WORDS, WIDTH),
    **{name: array(WIDTH, WIDTH) for name in ('query', 'key', 'value', 'output')},
}
CACHE = EXAMPLES, TOKENS, HEADS, WIDTH // HEADS


def decoded(state, batch):
    """One token of each example, sampled from the top four, and the caches with its key and value."""
    w, position, key = state
    keys, values, tokens = batch
    x = w['embed'][tokens]
    query, new_key, new_value = [(x @ w[n]).reshape(-1, 1, *CACHE[2:]) for n in ('query', 'key', 'value')]
    keys = lax.dynamic_update_slice(keys, new_key, (0, position, 0, 0))
    values = lax.dynamic_update_slice(values, new_value, (0, position, 0, 0))
    scores = jnp.where(jnp.arange(TOKENS) <= position, jnp.einsum('bqhd,bkhd->bhk', query, keys), -1e9)
    x = jnp.einsum('bhk,bkhd->bhd', jax.nn.softmax(scores), values).reshape(-1, WIDTH) @ w['output']
    logits, places = lax.top_k(x @ w['embed'].T, 4)
    drawn = jax.random.categorical(key, logits)
    return jnp.take_along_axis(places, drawn[:, None], 1)[:, 0], keys, values


def generated(state, batch):
    w, position, key = state

    def step(carry, i):
        (keys, values, tokens), key = carry
        key, drawn = jax.random.split(key)
        tokens, keys, values = decoded((w, position + i, drawn), (keys, values, tokens))
        return ((keys, values, tokens), key), tokens

    return lax.scan(step, (batch, key), jnp.arange(3))[1]


def evaluated(state, batch):
    """An accuracy, a top-five accuracy, a cost, and a confusion matrix."""
    w, *_ = state
    tokens = batch[2]
    logits = jnp.tanh(w['embed'][tokens] @ w['query']) @ w['embed'].T
    best = jnp.argmax(logits, -1)
    among = jnp.any(lax.top_k(logits, 5)[1] == tokens[:, None], -1)
    cost = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], 1))
    return jnp.mean(best == tokens), among.mean(), cost, jnp.zeros((WORDS, WORDS)).at[tokens, best].add(1)


@pytest.mark.parametrize('fun', [decoded, generated, evaluated])
@pytest.mark.sampled(2)
def test_forward_passes_gather_weights_alone(fun):
    state = DECODER, np.int32(3), jax.random.PRNGKey(0)
    tokens = np.random.default_rng(0).integers(0, WORDS, EXAMPLES).astype('int32')
    batch = array(*CACHE), array(*CACHE) * 2, tokens
    step, run = partitioned(fun, state, batch)
    gathers = [row for row in step.collective_rows if row.kind == 'all_gather']
    assert gathers
    assert all(row.reason.startswith("weight [0]['") for row in gathers)
    # The lookup and the matmul of the embedding share a gather; a loop uses weights gathered before it.
    assert sum(row.count for row in gathers) == {decoded: 5, generated: 5, evaluated: 2}[fun]
    assert {row.kind for row in step.collective_rows} <= {'all_gather', 'all_reduce'}
    assert_equal(run(), jax.jit(fun)(state, batch))
