"""`scalax._verification.downscale` shrinks a step for a large mesh, and names the caveats."""

import dataclasses
import enum
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

from scalax._verification.downscale.downscale import downscale as reduced_within
from scalax._verification.downscale.downscale import small_meshes
from scalax.errors import ArgumentError, MeshError
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, PartitionSpec, TreePathShardingRule

P = PartitionSpec
# A time limit that is never reached.
reduced = functools.partial(reduced_within, seconds=1e4)


def reduced_args(step_over, args, helper, devices):
    """Downscales a step without a configuration."""
    return reduced(lambda small_helper, _: (step_over(small_helper), args), None, helper, devices)


def helper_of(**sizes):
    """Returns a helper over a large mesh without devices."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return MeshShardingHelper.from_mesh(mesh)


def array(*shape, dtype='float32'):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def smallest(monkeypatch):
    """Downscaling always searches for smaller steps, however small the step already is."""
    monkeypatch.setattr('scalax._verification.downscale.shrink._SMALL', 0)


# --- Meshes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('large', 'devices', 'small'),
    [
        ({'fsdp': 64, 'tp': 8}, 8, {'fsdp': 4, 'tp': 2}),
        ({'data': 4, 'fsdp': 256, 'tp': 8}, 8, {'data': 2, 'fsdp': 2, 'tp': 2}),
        ({'data': 1, 'fsdp': 512}, 8, {'data': 1, 'fsdp': 8}),
        ({'fsdp': 64, 'tp': 8}, 32, {'fsdp': 16, 'tp': 2}),
        ({'fsdp': 2, 'tp': 2}, 8, {'fsdp': 2, 'tp': 2}),
        ({'fsdp': 15}, 8, {'fsdp': 5}),
        ({'fsdp': 6}, 8, {'fsdp': 6}),
        ({'fsdp': 9, 'tp': 2}, 4, {'fsdp': 2, 'tp': 2}),
    ],
)
def test_small_meshes(large, devices, small):
    assert small_meshes(large, devices)[0] == small


def test_too_few_devices_for_a_small_mesh():
    with pytest.raises(MeshError) as caught:
        small_meshes({'data': 4, 'fsdp': 8, 'one': 1, 'tp': 2}, 4)
    assert str(caught.value) == (
        'a mesh with the axes of (data=4, fsdp=8, one=1, tp=2) needs at least 8 devices, 2 along each of '
        "data, fsdp, tp, but there are 4: simulate them with jax.config.update('jax_num_cpu_devices', 8) "
        'before JAX is used'
    )


# --- Configurations ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int = 4096
    heads: int = 32
    kv_heads: int = 16
    hidden: int = 11_008


@dataclasses.dataclass(frozen=True)
class Config:
    sizes: Sizes = Sizes()
    layers: int = 24
    vocabulary: int = 50_257
    sequence: int = 1024
    rows: int = 128
    eos: int = 50_256
    seed: int = 1234
    is_causal: bool = True


RULE = TreePathShardingRule(
    ('embed', P(None, 'fsdp')), ('query|key|up', P(None, 'fsdp', 'tp')), ('down', P(None, 'tp', 'fsdp'))
)


def decoder(config):
    """Returns parameters and loss of a decoder with grouped heads and a scan over layers."""
    s = config.sizes
    size = s.width // s.heads
    params = {
        'embed': array(config.vocabulary, s.width),
        'layers': {
            'query': array(config.layers, s.width, s.heads * size),
            'key': array(config.layers, s.width, s.kv_heads * size),
            'up': array(config.layers, s.width, s.hidden),
            'down': array(config.layers, s.hidden, s.width),
        },
    }

    def layer(x, w):
        rows, length, _ = x.shape
        q = (x @ w['query']).reshape(rows, length, s.kv_heads, s.heads // s.kv_heads, size)
        k = (x @ w['key']).reshape(rows, length, s.kv_heads, size)
        scores = jnp.einsum('bqghk,btgk->bghqt', q, k) / math.sqrt(size)
        if config.is_causal:
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        x = x + jnp.einsum('bghqt,btgk->bqghk', jax.nn.softmax(scores), k).reshape(x.shape)
        return x + jax.nn.relu(x @ w['up']) @ w['down'], None

    def loss(params, tokens):
        x, _ = jax.lax.scan(layer, params['embed'][tokens], params['layers'])
        logits = x @ params['embed'].T
        x = jnp.mean(jnp.where(tokens == config.eos, 0, jax.nn.logsumexp(logits, -1)))
        return x + jax.random.uniform(jax.random.key(config.seed))

    return params, loss


def make_decoder(helper, config):
    params, loss = decoder(config)
    step = helper.sjit(jax.value_and_grad(loss), in_shardings=(RULE, P('fsdp')), out_shardings=(P(), RULE))
    return step, (params, array(config.rows, config.sequence, dtype='int32'))


@pytest.mark.slow
def test_a_decoder():
    result = reduced(make_decoder, Config(), helper_of(fsdp=64, tp=8), jax.devices())
    small, sizes = result.config, result.config.sizes
    assert result.helper.mesh.shape == {'fsdp': 4, 'tp': 2} and result.is_faithful
    assert (small.seed, small.is_causal) == (1234, True) and small.eos == small.vocabulary - 1
    assert sizes.width // sizes.heads > 1 and sizes.width % 4 == 0 and sizes.hidden % 2 == 0
    assert sizes.heads % sizes.kv_heads == 0 and sizes.heads // sizes.kv_heads > 1  # heads are grouped
    assert small.vocabulary % 4 and small.vocabulary % 2  # as it was
    assert small.layers > 1 and small.sequence > 1 and small.rows % 4 == 0
    assert result.sizes['sizes.width'] == (4096, sizes.width) and 'seed' not in result.sizes
    assert sum(leaf.size for leaf in jax.tree.leaves(result.args)) < 1_000_000
    loss, grads = result.step(*jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), result.args))
    assert jnp.isfinite(loss) and grads['layers']['up'].sharding.spec == P(None, 'fsdp', 'tp')


@dataclasses.dataclass(frozen=True)
class Unrolled:
    layers: int = 60
    every: int = 3
    width: int = 512


def make_unrolled(helper, config):
    """A model with unrolled layers, every third of another kind."""

    def loss(params, x):
        for i, w in enumerate(params['layers']):
            if i % config.every == config.every - 1:
                x = x + jnp.sin(x @ w['other'])
            else:
                x = x + jnp.tanh(x @ w['w'])
        return jnp.mean(x)

    names = ['other' if i % config.every == config.every - 1 else 'w' for i in range(config.layers)]
    params = {'layers': [{name: array(config.width, config.width)} for name in names]}
    step = helper.sjit(jax.grad(loss), in_shardings=(P('fsdp'), P('fsdp')), out_shardings=P('fsdp'))
    return step, (params, array(256, config.width))


@pytest.mark.medium
def test_unrolled_layers(smallest):
    result = reduced(make_unrolled, Unrolled(), helper_of(fsdp=64), jax.devices())
    kinds = [next(iter(layer)) for layer in result.args[0]['layers']]
    assert result.is_faithful and len(kinds) < 20
    # Both kinds of layers, and all pairs of neighbours.
    expected = {('w', 'w'), ('w', 'other'), ('other', 'w')}
    assert {*itertools.pairwise(kinds)} == expected


def make_dict(helper, config):
    params = {'w': array(config['width'], config['width']), 'b': array(config['width'])}

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params['w'] + params['b']))

    step = helper.sjit(
        jax.grad(loss), in_shardings=(FSDPShardingRule(), P('fsdp')), out_shardings=FSDPShardingRule()
    )
    return step, (params, array(config['rows'][0], config['width']))


@pytest.mark.medium
def test_sharded_parameters_stay_sharded_when_downscaled():
    result = reduced(make_dict, {'width': 2048, 'rows': [512, 3]}, helper_of(fsdp=64), jax.devices())
    assert result.config['width'] <= 64 and result.config['rows'][1] == 3
    arg_shardings, result_shardings = result.step.shardings_for(*result.args)
    assert (
        arg_shardings[0]['w'].spec == result_shardings['w'].spec == P('fsdp')
        and arg_shardings[0]['b'].spec == P()
    )


@pytest.mark.medium
def test_configuration_values_that_are_not_sizes(smallest):
    class Kind(enum.IntEnum):
        GATED = 5

    def make(helper, config):
        assert config['kind'] is Kind.GATED
        return make_dict(helper, config)

    config = {'kind': Kind.GATED, 'tokens': 15 * 10**12, 'seed': 2**31 - 1, 'width': 512, 'rows': [512]}
    result = reduced(make, config, helper_of(fsdp=64), jax.devices())
    assert {**result.config, 'width': 0, 'rows': 0} == {**config, 'width': 0, 'rows': 0}
    assert result.config['width'] < 512


@pytest.mark.medium
def test_a_mesh_of_another_divisor():
    result = reduced(make_dict, {'width': 7 * 256, 'rows': [7 * 64]}, helper_of(fsdp=7), jax.devices())
    assert result.helper.mesh.shape == {'fsdp': 7} and result.config['width'] % 7 == 0 and result.is_faithful


def test_relations_of_a_configuration_that_are_checked():
    def make(helper, config):
        assert config['width'] == config['heads'] * config['size']
        w = array(config['width'], config['heads'], config['size'])
        step = helper.sjit(
            lambda w, x: jnp.einsum('bd,dhk->bhk', x, w), in_shardings=(P(None, 'tp'), P('fsdp'))
        )
        return step, (w, array(4096, config['width']))

    result = reduced(make, {'width': 8192, 'heads': 64, 'size': 128}, helper_of(fsdp=64, tp=8), jax.devices())
    assert result.config['width'] == result.config['heads'] * result.config['size'] <= 1024


@pytest.mark.medium
def test_sizes_that_the_code_checks_are_kept(smallest):
    def make(helper, config):
        def loss(w, x):
            y = x @ w
            return jnp.mean(jnp.tanh(y) if config['hidden'] > 100 else y)

        step = helper.sjit(jax.grad(loss), in_shardings=(P(None, 'tp'), P('fsdp')))
        return step, (array(4096, config['hidden']), array(config['rows'], 4096))

    result = reduced(make, {'hidden': 4096, 'rows': 512}, helper_of(fsdp=64, tp=8), jax.devices())
    assert result.is_faithful and 100 < result.config['hidden'] < 4096 and result.config['rows'] < 64


def test_a_device_with_one_head_each():
    def make(helper, config):
        heads, size = config['heads'], config['size']

        def scores(q, x):
            return jnp.sum(jnp.einsum('bd,dhk->bhk', x, q), 0)

        step = helper.sjit(scores, in_shardings=(P(None, 'tp'), P('fsdp')), out_shardings=P('tp'))
        return step, (array(2048, heads, size), array(2**16, 2048))

    config = {'heads': 8, 'size': 4096}
    result = reduced(make, config, helper_of(fsdp=64, tp=8), jax.devices())
    assert result.config['heads'] == result.helper.mesh.shape['tp'] == 2


@pytest.mark.medium
def test_another_mesh_where_two_devices_are_too_few():
    def make(helper, config):
        heads, groups, size = config['heads'], config['groups'], config['size']

        def scores(q, k, x):
            x = jnp.einsum('bd,dgk->bgk', x, q.reshape(2048, groups, heads // groups * size))
            return jnp.sum(x @ k, 0)

        step = helper.sjit(
            scores, in_shardings=(P(None, 'tp'), P(), P('fsdp')), out_shardings=P(None, 'fsdp')
        )
        args = array(2048, heads, size), array(heads // groups * size, size), array(2**16, 2048)
        return step, args

    # Each device has a head, and key-value heads do not divide evenly: tp must be larger than 2.
    config = {'heads': 8, 'groups': 4, 'size': 4096}
    result = reduced(make, config, helper_of(fsdp=64, tp=8), jax.devices())
    assert result.is_faithful and result.helper.mesh.shape == {'fsdp': 2, 'tp': 4}
    assert (result.config['heads'], result.config['groups']) == (4, 2)


def make_module(helper, config):
    flax_nnx = pytest.importorskip('flax.nnx')
    from scalax.interop import nnx

    def make():
        return flax_nnx.Linear(config['width'], config['hidden'], rngs=flax_nnx.Rngs(0))

    def step(model, x):
        model.kernel[...] = model.kernel[...] * 2
        return model(x)

    step = nnx.sjit(helper, step, in_shardings=(FSDPShardingRule(), P('fsdp')))
    return step, (flax_nnx.eval_shape(make), array(config['rows'], config['width']))


@pytest.mark.medium
def test_a_module_of_nnx():
    config = {'width': 4096, 'hidden': 8192, 'rows': 1024}
    result = reduced(make_module, config, helper_of(fsdp=64), jax.devices())
    assert result.is_faithful and result.config['width'] * result.config['hidden'] <= 2**17
    kernels = [leaf.spec for leaf in jax.tree.leaves(result.step.shardings_for(*result.args)[0]) if leaf.spec]
    assert kernels == [P(None, 'fsdp'), P('fsdp')]


# --- Arguments ---------------------------------------------------------------------------------------


def mlp(params, x):
    return x + jax.nn.relu(x @ params['up']) @ params['down']


def step_of(function, **options):
    options = {'in_shardings': (P(None, 'tp'), P('fsdp')), 'out_shardings': P('fsdp')} | options
    return lambda helper: helper.sjit(function, **options)


@pytest.mark.medium
def test_dimensions_of_arguments(smallest):
    rules = TreePathShardingRule(('up', P('fsdp', 'tp')), ('down', P('tp', 'fsdp')))
    args = {'up': array(1024, 4096), 'down': array(4096, 1024)}, array(2048, 1024)
    step_over = step_of(mlp, in_shardings=(rules, P('fsdp')), out_shardings=None)
    result = reduced_args(step_over, args, helper_of(fsdp=64, tp=8), jax.devices())
    params, x = result.args
    (width, hidden), rows = params['up'].shape, x.shape[0]
    assert params['down'].shape == (hidden, width) and x.shape[1] == width
    assert width % 4 == hidden % 2 == rows % 4 == 0 and max(width, hidden, rows) < 64
    assert result.caveats == () and result.config is None and result.sizes['dimension 0 of x'] == (2048, rows)
    assert result.step.shardings_for(*result.args)[0][0]['up'].spec == P('fsdp', 'tp')


@pytest.mark.slow
def test_stacked_layers_and_slices_of_a_batch(smallest):
    def loss(params, tokens):
        x, _ = jax.lax.scan(lambda x, w: (mlp(w, x), None), params['embed'][tokens[:, :-1]], params['layers'])
        x = x + params['position']
        return jnp.mean(jnp.take_along_axis(x @ params['embed'].T, tokens[:, 1:, None], -1))

    layers = {'up': array(48, 512, 2048), 'down': array(48, 2048, 512)}
    params = {'embed': array(1000, 512), 'layers': layers, 'position': array(256, 512)}
    optimizer = optax.adam(1e-3)

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return value, *optimizer.update(grads, state, params)

    args = params, jax.eval_shape(optimizer.init, params), array(512, 257, dtype='int32')
    over_mesh = step_of(step, in_shardings=(P(), P(), P('fsdp')), out_shardings=None)
    result = reduced_args(over_mesh, args, helper_of(fsdp=64), jax.devices())
    params, _, tokens = result.args
    assert result.is_faithful
    assert params['position'].shape[0] == tokens.shape[1] - 1 < 32
    assert params['layers']['up'].shape[0] == params['layers']['down'].shape[0] < 48
    assert params['embed'].shape[0] % 8  # 1000 is not divisible by 64


def heads_in_code(w, x):
    y = x @ w
    return y.reshape(x.shape[0], 16, 64)


@pytest.mark.medium
def test_hardcoded_sizes_are_kept(smallest):
    args = array(512, 1024), array(2048, 512)
    result = reduced_args(step_of(heads_in_code), args, helper_of(fsdp=64, tp=8), jax.devices())
    assert result.args[0].shape[1] == 1024 and result.args[1].shape[0] < 64


def test_a_step_that_cannot_be_traced():
    def wrong(w, x):
        return w @ x.reshape(3, -1)

    with pytest.raises(TypeError, match='cannot reshape'):
        reduced_args(step_of(wrong), (array(64, 64), array(64, 64)), helper_of(fsdp=64, tp=8), jax.devices())


def test_code_that_needs_the_large_mesh():
    def code(helper):
        def step(w, x):
            assert helper.mesh.size == 512, 'for 512 devices'
            return x @ w

        return helper.sjit(step, in_shardings=(P(None, 'tp'), P('fsdp')))

    with pytest.raises(ArgumentError) as caught:
        reduced_args(code, (array(64, 64), array(64, 64)), helper_of(fsdp=64, tp=8), jax.devices())
    line = test_code_that_needs_the_large_mesh.__code__.co_firstlineno + 3
    assert str(caught.value).startswith(
        'the step cannot be traced for a mesh of (fsdp=4, tp=2): '
        f'test_downscale.py:{line} step: AssertionError'
        ': for 512 devices'
    )
