"""Layers whose features are sharded in place of their examples, where that sends fewer bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from scalax._spmd.placements import feature_regions
from tests.spmd.test_partition import array, sgd
from tests.support.partitioned import FSDP, HSDP, P, assert_equal, collectives, partitioned, state_spec

pytestmark = pytest.mark.medium

LAYERS, WIDTH, FEATURES = 3, 16, 64


@pytest.fixture
def no_latency(monkeypatch):
    """The programs of most tests are small, so that they run quickly."""
    monkeypatch.setattr(feature_regions, '_LATENCY_BYTES', 0)


STACK = {
    'bias': array(LAYERS, FEATURES),
    'down': array(LAYERS, FEATURES, WIDTH) / 8,
    'gate': array(LAYERS, WIDTH, FEATURES) / 8,
    'up': array(LAYERS, WIDTH, FEATURES) / 8,
}


def relu(x, w):
    return x + jax.nn.relu(x @ w['up']) @ w['down']


def gated(x, w):
    hidden = jax.nn.silu(x @ w['gate']) * (x @ w['up'] + w['bias'])
    return x + jax.nn.relu(hidden) @ w['down']


def dropped(x, w):
    """Each device draws the random bits of its examples."""
    keep = jax.random.bernoulli(jax.random.key(0), 0.75, (*x.shape[:-1], FEATURES))
    return x + jnp.where(keep, jnp.tanh(x @ w['up']), 0) @ w['down']


def masked(x, w):
    """One factor of each example: it has no features."""
    return x + (jax.nn.gelu(x @ w['up']) * (x[..., :1] > 0)) @ w['down']


def normalized(x, w):
    """A sum over the features."""
    hidden = jnp.tanh(x @ w['up'])
    return x + (hidden / (1 + jnp.sum(hidden**2, -1, keepdims=True))) @ w['down']


def saved(x, w):
    """All uses of the features are in the backward pass, but for the first."""
    return x + jnp.sin(x @ w['up']) @ w['down']


def model(layer, checkpoint=True):
    body = jax.checkpoint(layer) if checkpoint else layer

    def loss(w, x):
        return jnp.mean(lax.scan(lambda x, w: (body(x, w), None), x, w)[0] ** 2)

    return loss


def specs_of(state, size):
    """As `FSDPShardingRule` shards stacks: along a dimension of the weight of a layer."""
    return [P(None, *state_spec(leaf.shape[1:], size=size)) for leaf in jax.tree.leaves(state)]


def weights(layer):
    names = {'gated': STACK, 'relu': ('down', 'up')}.get(layer.__name__, ('down', 'up'))
    return {name: STACK[name] for name in names}


def step_of(layer, examples, mesh=FSDP, *, checkpoint=True):
    state, loss = weights(layer), model(layer, checkpoint)
    specs = specs_of(state, mesh['fsdp'])
    shape = examples if isinstance(examples, tuple) else (examples, WIDTH)
    batch = array(*shape)
    step, run = partitioned(sgd(loss), state, batch, mesh, specs=specs, result_specs=[*specs, P()])
    return step, run, lambda: jax.jit(sgd(loss))(state, batch)


@pytest.mark.usefixtures('no_latency')
def test_a_backward_pass_shards_features_if_examples_are_as_large_as_a_weight():
    step, run, on_one_device = step_of(relu, 64)
    counts = collectives(step)
    # Forward, the examples that come and go would have the bytes of the two weights.
    assert counts == {
        "all_gather weight ['up'] for dot_general": LAYERS,
        "all_gather weight ['down'] for dot_general": LAYERS,
        "all_gather examples gathered to meet blocks of ['up']": LAYERS,
        "all_gather examples gathered to meet blocks of ['down']": LAYERS,
        "reduce_scatter examples moved to meet blocks of ['up']": LAYERS,
        'all_reduce sum over examples for a result': 1,
    }
    assert_equal(run(), on_one_device())


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.parametrize('examples', [(16, WIDTH), (64, WIDTH), (8, 2, WIDTH)])
@pytest.mark.parametrize('layer', [relu, gated, dropped, masked, normalized, saved])
@pytest.mark.sampled(6)
@pytest.mark.usefixtures('no_latency')
def test_values_are_those_of_one_device(layer, examples, mesh):
    _, run, on_one_device = step_of(layer, examples, mesh)
    assert_equal(run(), on_one_device())


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.parametrize('layer', [relu, gated, saved])
def test_weights_stay_for_few_examples(layer, mesh):
    step, run, on_one_device = step_of(layer, 16, mesh)
    counts = collectives(step)
    assert not [reason for reason in counts if reason.startswith('all_gather weight')], counts
    assert not [reason for reason in counts if reason.startswith('all_to_all')], counts
    assert_equal(run(), on_one_device())


@pytest.mark.parametrize('layer', [relu, gated, masked, normalized])
def test_weights_are_gathered_for_many_examples(layer):
    step, _, _ = step_of(layer, 1024)
    assert not [row.reason for row in step.collective_rows if row.what == 'examples']


@pytest.mark.parametrize('layer', [dropped, masked, normalized])
@pytest.mark.usefixtures('no_latency')
def test_features_that_other_operations_use_stay_with_their_examples(layer):
    step, _, _ = step_of(layer, 64)
    assert not [row.reason for row in step.collective_rows if row.what == 'examples']


@pytest.mark.usefixtures('no_latency')
def test_gathered_examples_are_not_held_from_the_forward_to_the_backward_pass():
    step, _, _ = step_of(relu, 64, checkpoint=False)
    assert not [row.reason for row in step.collective_rows if row.what == 'examples']


@pytest.mark.parametrize(
    ('width', 'examples', 'features_move'),
    [(1024, 4096, False), (2048, 8192, True), (4096, 16384, True), (4096, 18432, False)],
)
def test_a_layer_waits_for_its_examples(width, examples, features_move):
    shapes = {'down': (LAYERS, 4 * width, width), 'up': (LAYERS, width, 4 * width)}
    state = {name: jax.ShapeDtypeStruct(shape, 'bfloat16') for name, shape in shapes.items()}
    specs, batch = specs_of(state, 8), jax.ShapeDtypeStruct((examples, width), 'bfloat16')
    step, _ = partitioned(sgd(model(relu)), state, batch, specs=specs, result_specs=[*specs, P()])
    assert any(row.what == 'examples' for row in step.collective_rows) == features_move
