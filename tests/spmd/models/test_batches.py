"""The batch is recognized wherever it comes from, and only its axes shard it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.sharding import (
    MeshShardingHelper,
    TreePathShardingRule,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P
from tests.support.partition import FSDP, Program, assert_values_of_one_device, moved_bytes

HELPER = MeshShardingHelper([8], ['fsdp'])


def loss(params, tokens):
    def block(x, w):
        return x + jax.nn.relu(x @ w['up']) @ w['down'], None

    x, _ = jax.lax.scan(jax.checkpoint(block), params['embed'][tokens], params['blocks'])
    log_probs = jax.nn.log_softmax(x @ params['output'])
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[..., None], -1))


MODEL = Program(loss, {}, (64, 32), 'int32')
PARAMS = {
    'embed': (64, 64),
    'blocks': {'up': (2, 64, 256), 'down': (2, 256, 64)},
    'output': (64, 64),
}


def params():
    random = np.random.default_rng(0)
    shapes, structure = jax.tree.flatten(PARAMS, is_leaf=lambda shape: isinstance(shape, tuple))
    leaves = [random.normal(size=shape).astype('float32') / np.sqrt(shape[-2]) for shape in shapes]
    return jax.tree.unflatten(structure, leaves)


def training_bytes():
    """Returns the bytes of two gathers and one reduction of the parameters."""
    return 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(params())) + 4096


def made_inside(params, key):
    return MODEL.step(params, jax.random.randint(key, MODEL.batch, 0, 64))


def constrained_inside(params, key):
    tokens = jax.random.randint(key, MODEL.batch, 0, 64)
    return MODEL.step(params, with_sharding_constraint(tokens, P('fsdp')))


def annotated_inside(params, key):
    tokens = jax.random.randint(key, MODEL.batch, 0, 64)
    return MODEL.step(params, with_sharding_annotation(tokens, 'tokens'))


def from_key(function):
    return HELPER.sjit(
        function,
        in_shardings=(FSDP, P()),
        out_shardings=(FSDP, P()),
        annotation_shardings={'tokens': P('fsdp')} if function is annotated_inside else {},
    )


def from_donated_tokens():
    return HELPER.sjit(
        MODEL.step, in_shardings=(FSDP, P('fsdp')), out_shardings=(FSDP, P()), donate_argnums=(0, 1)
    )


# No result has the shape of the integer batch, so its donated buffer cannot be reused.
unused_donation = pytest.mark.filterwarnings('ignore:Some donated buffers were not usable:UserWarning')
TOKENS = np.random.default_rng(1).integers(0, 64, MODEL.batch).astype('int32')


@pytest.mark.slow
@pytest.mark.parametrize('function', [constrained_inside, annotated_inside])
def test_values_of_a_step_that_makes_its_batch(function):
    assert_values_of_one_device(from_key(function), made_inside, params(), jax.random.key(0))


@pytest.mark.medium
@pytest.mark.parametrize('function', [constrained_inside, annotated_inside])
def test_a_batch_created_inside_is_recognized_if_it_is_constrained(function):
    plan = HELPER.plan(from_key(function), params(), jax.random.key(0))
    assert moved_bytes(plan) <= training_bytes()


@pytest.mark.slow
@unused_donation
def test_values_of_a_step_that_donates_its_batch():
    assert_values_of_one_device(from_donated_tokens(), MODEL.step, params(), TOKENS)


@pytest.mark.medium
@unused_donation
def test_a_donated_batch_is_the_batch():
    plan = HELPER.plan(from_donated_tokens(), params(), TOKENS)
    assert moved_bytes(plan) <= training_bytes()


@pytest.mark.medium
def test_a_batch_argument_moves_only_weights():
    step = HELPER.sjit(MODEL.step, in_shardings=(FSDP, P('fsdp')), out_shardings=(FSDP, P()))
    assert moved_bytes(HELPER.plan(step, params(), TOKENS)) <= training_bytes()


# --- Decoding one token on a mesh with tensor parallelism -------------------------------------------

GRID = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
WIDTH, HEADS, HEAD_WIDTH, VOCABULARY, LENGTH, EXAMPLES = 64, 4, 16, 1024, 32, 16
CACHE = P('fsdp', None, 'tp')
ATTENTION = TreePathShardingRule(
    ('^(q|k|up|head)$', P('fsdp', 'tp')), ('^o$', P('tp', None, 'fsdp')), ('down', P('tp', 'fsdp'))
)


def next_token(w, cache, x, position):
    """Computes one token with an attention layer, an MLP, and the largest logit."""
    q = jnp.einsum('bd,dhk->bhk', x, w['q'])
    key = jnp.einsum('bd,dhk->bhk', x, w['k'])
    cache = jax.lax.dynamic_update_slice(cache, key[:, None], (0, position, 0, 0))
    weights = jax.nn.softmax(jnp.einsum('bhk,bshk->bhs', q, cache))
    x = x + jnp.einsum('bhs,bshk,hkd->bd', weights, cache, w['o'])
    x = x + jax.nn.relu(x @ w['up']) @ w['down']
    return cache, jnp.argmax(x @ w['head'], -1)


def decoding_arguments():
    random = np.random.default_rng(0)
    heads = WIDTH, HEADS, HEAD_WIDTH
    shapes = {
        'q': heads,
        'k': heads,
        'o': (HEADS, HEAD_WIDTH, WIDTH),
        'up': (WIDTH, 4 * WIDTH),
        'down': (4 * WIDTH, WIDTH),
        'head': (WIDTH, VOCABULARY),
    }
    w = {name: random.normal(size=shape).astype('float32') / 8 for name, shape in shapes.items()}
    cache = random.normal(size=(EXAMPLES, LENGTH, HEADS, HEAD_WIDTH)).astype('float32')
    return w, cache, random.normal(size=(EXAMPLES, WIDTH)).astype('float32'), np.int32(3)


def decoding(**options):
    return GRID.sjit(
        next_token,
        in_shardings=(ATTENTION, CACHE, P('fsdp'), P()),
        out_shardings=(CACHE, P('fsdp')),
        **options,
    )


BATCHES = {'default': {}, 'cache and token': {'batch_argnums': (1, 2)}}


@pytest.mark.slow
@pytest.mark.parametrize('options', BATCHES.values(), ids=BATCHES)
def test_values_of_decoding(options):
    assert_values_of_one_device(decoding(**options), next_token, *decoding_arguments())


@pytest.mark.parametrize('options', BATCHES.values(), ids=BATCHES)
def test_the_axes_of_a_batch_shard_the_dimension_that_its_arrays_share(options):
    assert decoding(**options).explain_propagation(*decoding_arguments()).axes == ('fsdp',)


@pytest.mark.medium
@pytest.mark.parametrize('options', BATCHES.values(), ids=BATCHES)
def test_features_are_not_gathered_along_the_axis_of_heads(options):
    args = decoding_arguments()
    plan, of_token = GRID.plan(decoding(**options), *args), GRID.plan(decoding(batch_argnums=2), *args)
    assert moved_bytes(plan, 'tp') <= moved_bytes(of_token, 'tp')


def gated_mlp(w, x):
    return (jax.nn.silu(x @ w['gate']) * (x @ w['up'])) @ w['down']


def mlp(w, x):
    return jax.nn.relu(x @ w['up']) @ w['down']


def logits(w, x):
    return jnp.argmax(x @ w['head'], -1)


def layers_and_logits(w, x):
    for _ in range(2):
        x = x + gated_mlp(w, x)
    return logits(w, x)


ONE_TOKEN = {'gate': P('fsdp', 'tp'), 'up': P('fsdp', 'tp'), 'down': P('tp', 'fsdp'), 'head': P('fsdp', 'tp')}
SHAPES = {'gate': (64, 192), 'up': (64, 192), 'down': (192, 64), 'head': (64, 2048)}


@pytest.mark.slow
@pytest.mark.parametrize(
    'function, names',
    [
        (mlp, ['up', 'down']),
        (gated_mlp, ['gate', 'up', 'down']),
        (logits, ['head']),
        (layers_and_logits, ['gate', 'up', 'down', 'head']),
    ],
)
def test_decoding_one_token_moves_no_more_than_without_partitioning(function, names):
    random = np.random.default_rng(0)
    w = {name: random.normal(size=SHAPES[name]).astype('float32') / 8 for name in names}
    x = random.normal(size=(8, 1, 64)).astype('float32')
    rules = {name: ONE_TOKEN[name] for name in names}
    step, alone = (
        GRID.sjit(function, in_shardings=(rules, P('fsdp')), out_shardings=P('fsdp'), batch_argnums=batch)
        for batch in (1, ())
    )
    assert moved_bytes(GRID.plan(step, w, x)) <= moved_bytes(GRID.plan(alone, w, x))
    assert_values_of_one_device(step, function, w, x)
