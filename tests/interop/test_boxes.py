"""Dimension names in trees of flax and haliax, and rules for such trees."""

import functools
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from scalax import interop
from scalax.errors import ShardingError
from scalax.sharding import (
    FSDPShardingRule,
    LogicalAxisShardingRule,
    MeshShardingHelper,
    TreePathShardingRule,
)
from scalax.utils import flatten_tree

RULE = LogicalAxisShardingRule({'embed': 'fsdp', 'mlp': 'tp', 'layers': None})


@pytest.fixture
def helper():
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def import_or_skip(name):
    return pytest.importorskip(name, reason=f'{name} is not installed')


def specs(helper, rule, tree):
    shardings = helper.match_sharding_rule(rule, tree)
    return {path: sharding.spec for path, sharding in flatten_tree(shardings, sep='/').items()}


# --- flax linen -----------------------------------------------------------------------------------


@functools.cache
def linen_variables():
    nn = import_or_skip('flax.linen')

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.lecun_normal()
            up = nn.with_partitioning(init, ('embed', 'mlp'))
            x = nn.Dense(32, kernel_init=up, name='up')(x)
            down = nn.with_logical_partitioning(init, ('mlp', 'embed'))
            return nn.Dense(16, kernel_init=down, name='down')(x)

    return jax.jit(Block().init)(jax.random.key(0), jnp.zeros((2, 16)))


def test_linen_names():
    assert interop.axis_names(linen_variables()) == {
        'params/down/kernel/value': ('mlp', 'embed'),
        'params/up/kernel/value': ('embed', 'mlp'),
    }


def test_linen_unboxed():
    nn = import_or_skip('flax.linen')
    variables = linen_variables()
    plain = interop.unbox(variables)
    assert list(flatten_tree(plain, sep='/')) == [
        *('params/down/bias', 'params/down/kernel', 'params/up/bias', 'params/up/kernel'),
    ]
    assert plain['params']['up']['kernel'] is variables['params']['up']['kernel'].value
    assert jax.tree.structure(plain) == jax.tree.structure(nn.unbox(variables))
    assert interop.axis_names(plain) == {}
    assert interop.unbox(plain)['params']['up']['bias'] is variables['params']['up']['bias']


def test_linen_boxes_are_named_by_a_rule(helper):
    rule = RULE | P()
    assert specs(helper, rule, linen_variables()) == {
        'params/down/bias': P(),
        'params/down/kernel/value': P('tp', 'fsdp'),
        'params/up/bias': P(),
        'params/up/kernel/value': P('fsdp', 'tp'),
    }
    sharded = helper.shard(linen_variables(), rule)
    assert sharded['params']['up']['kernel'].names == ('embed', 'mlp')
    assert sharded['params']['up']['kernel'].value.sharding.spec == P('fsdp', 'tp')


def test_a_regex_sees_the_key_of_the_box(helper):
    rule = TreePathShardingRule(('up/kernel/value$', P('tp')), ('.*', P()))
    assert specs(helper, rule, linen_variables())['params/up/kernel/value'] == P('tp')


def test_names_of_the_leaf_take_precedence_over_axis_names(helper):
    rule = LogicalAxisShardingRule({'embed': 'fsdp', 'mlp': 'tp'}, [('kernel', '_ _'), ('bias', 'mlp')])
    assert specs(helper, rule, linen_variables()) == {
        'params/down/bias': P('tp'),
        'params/down/kernel/value': P('tp', 'fsdp'),
        'params/up/bias': P('tp'),
        'params/up/kernel/value': P('fsdp', 'tp'),
    }


@pytest.mark.medium
def test_init_and_optimizer_state_through_sjit(helper):
    import_or_skip('flax')
    rule = RULE | P()
    optimizer = optax.adam(1e-3)
    init = helper.sjit(optimizer.init, in_shardings=rule, out_shardings=rule)
    state = init(helper.shard(linen_variables(), rule))
    moment = state[0].mu['params']['up']['kernel']
    assert moment.names == ('embed', 'mlp')
    assert moment.value.sharding.spec == P('fsdp', 'tp')
    assert state[0].count.sharding.spec == P()


def test_inside_other_rules(helper):
    names = RULE.stacked(1) | P()
    nn = import_or_skip('flax.linen')
    tree = {
        'a': {'named': nn.Partitioned(jnp.zeros((3, 16, 8)), names=('layers', 'embed', 'mlp'))},
        'b': {'layer': nn.Partitioned(jnp.zeros((3, 16, 8)), names=('embed', 'mlp')), 'no': jnp.zeros(3)},
    }
    rule = TreePathShardingRule(('^a/', RULE), ('^b/', names))
    assert specs(helper, rule, tree) == {
        'a/named/value': P(None, 'fsdp', 'tp'),
        'b/layer/value': P(None, 'fsdp', 'tp'),
        'b/no': P(),
    }
    # A leaf may name its stack of layers too, as scans of linen and haliax do.
    assert specs(helper, names, tree)['a/named/value'] == P(None, 'fsdp', 'tp')
    only_embed = LogicalAxisShardingRule({'embed': 'fsdp', 'mlp': None, 'layers': None})
    over = only_embed & FSDPShardingRule('tp', min_fsdp_size=0)
    assert specs(helper, over, {'a': tree['a']}) == {'a/named/value': P(None, 'fsdp', 'tp')}


@pytest.mark.medium
def test_names_count_as_structure(helper):
    """Equal shapes with other names must not share cached shardings or programs."""
    nn = import_or_skip('flax.linen')
    value = jnp.zeros((8, 8))
    trees = [nn.Partitioned(value, names=n) for n in [('embed', 'mlp'), ('mlp', 'embed'), ('embed', None)]]
    expected = [P('fsdp', 'tp'), P('tp', 'fsdp'), P('fsdp')]
    double = helper.sjit(lambda x: jax.tree.map(lambda y: y * 2, x), RULE, RULE)
    for _ in range(2):
        assert [helper.match_sharding_rule(RULE, tree).value.spec for tree in trees] == expected
        assert [double(helper.shard(tree, RULE)).value.sharding.spec for tree in trees] == expected


def test_a_fused_dimension_of_a_box(helper):
    nn = import_or_skip('flax.linen')
    box = nn.Partitioned(jnp.zeros((16, 3)), names=(('mlp', 'embed'), None))
    assert interop.axis_names(box) == {'value': (('mlp', 'embed'), None)}
    assert helper.match_sharding_rule(RULE, box).value.spec == P(('tp', 'fsdp'))


def test_a_box_of_several_arrays_and_a_box_in_a_box(helper):
    nn = import_or_skip('flax.linen')
    quantised = nn.Partitioned({'q': jnp.zeros((8, 8)), 'scale': jnp.zeros((1, 1))}, names=('embed', 'mlp'))
    assert specs(helper, RULE, quantised) == {'value/q': P('fsdp', 'tp'), 'value/scale': P()}
    nested = nn.Partitioned(nn.Partitioned(1.0, names=('mlp',)), names=('embed',))
    assert interop.axis_names(nested) == {'value/value': ('mlp',)}
    assert interop.unbox({'a': nested, 'b': quantised})['a'] == 1.0
    assert interop.unbox(nn.Partitioned(None, names=())) is None


def test_names_of_boxes_that_a_rule_cannot_use(helper, snapshot):
    nn = import_or_skip('flax.linen')
    tree = {
        'rank': nn.Partitioned(jnp.zeros(8), names=('embed', 'mlp')),
        'twice': nn.Partitioned(jnp.zeros((8, 8)), names=('embed', 'embed')),
        'unknown': nn.Partitioned(jnp.zeros((8, 8)), names=('embd', 'mlp')),
        'both': nn.Partitioned(jnp.zeros((8, 8)), names=('x', 'mpl')),
        'fine': nn.Partitioned(jnp.zeros((8, 8)), names=('embed', None)),
    }
    with snapshot.raises(ShardingError):
        helper.match_sharding_rule(RULE, tree)


@pytest.mark.parametrize('box', ['with_partitioning', 'with_logical_partitioning'])
def test_axis_names_count_where_flax_names_too_few_dimensions(helper, box):
    """Attention kernels: flax reshapes the array in the box, and keeps the names."""
    nn = import_or_skip('flax.linen')
    init = getattr(nn, box)(nn.initializers.lecun_normal(), ('embed', 'kv'))

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(4, kernel_init=init, use_bias=False, name='a')(x, x)

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={'params': 0},
                split_rngs={'params': True},
                length=3,
                metadata_params={nn.PARTITION_NAME: 'layers'},
            )(Attention(name='layer'), x, None)[0]

    mapping = {'embed': 'fsdp', 'heads': 'tp', 'head_dim': None, 'kv': 'tp', 'layers': None}
    pairs = [('out/kernel', 'heads head_dim embed'), ('kernel', 'embed heads head_dim')]
    rule = LogicalAxisShardingRule(mapping, pairs)
    expected = {
        'key': P('fsdp', 'tp'),
        'out': P('tp', None, 'fsdp'),
        'query': P('fsdp', 'tp'),
        'value': P('fsdp', 'tp'),
    }
    x = jax.ShapeDtypeStruct((2, 4, 16), jnp.float32)
    layer = jax.eval_shape(Attention().init, jax.random.key(0), x)
    assert interop.axis_names(layer)['params/a/out/kernel/value'] == ('embed', 'kv')
    assert specs(helper, rule, layer) == {
        f'params/a/{name}/kernel/value': spec for name, spec in expected.items()
    }
    stack = jax.eval_shape(Layers().init, jax.random.key(0), x)
    assert interop.axis_names(stack)['params/layer/a/out/kernel/value'] == ('layers', 'embed', 'kv')
    with_layers = LogicalAxisShardingRule(mapping, [(regex, f'layers {names}') for regex, names in pairs])
    for stack_rule in (with_layers, rule.stacked(1)):
        assert specs(helper, stack_rule, stack) == {
            f'params/layer/a/{name}/kernel/value': P(None, *spec) for name, spec in expected.items()
        }


def test_only_pairs_that_name_every_dimension_count_before_a_box(helper):
    nn = import_or_skip('flax.linen')
    few = nn.Partitioned(jnp.zeros((16, 4, 4)), names=('embed', 'mlp'))
    for names in ('...', '... mlp', 'embed _ _ _'):
        with pytest.raises(ShardingError, match=r"'embed mlp' names 2 dimensions, the array has 3"):
            helper.match_sharding_rule(
                LogicalAxisShardingRule({'embed': 'fsdp', 'mlp': 'tp'}, [('', names)]), few
            )
    rest = LogicalAxisShardingRule({'embed': 'fsdp', 'mlp': 'tp'}, [('', '...')])
    assert helper.match_sharding_rule(rest.stacked(1), few).value.spec == P(None, 'fsdp', 'tp')
    many = nn.Partitioned(
        jnp.zeros(16), names=('embed', 'mlp')
    )  # a statistic with the names of its parameter
    named = LogicalAxisShardingRule({'embed': 'fsdp', 'mlp': 'tp'}, [('', 'mlp')])
    assert helper.match_sharding_rule(named, many).value.spec == P('tp')


# --- flax nnx -------------------------------------------------------------------------------------


def nnx_model():
    nnx = import_or_skip('flax.nnx')

    class Block(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ('embed', 'mlp'))
            self.up = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    with nnx.use_eager_sharding(False):  # or flax reads the names as axes of a mesh
        return nnx, Block(nnx.Rngs(0))


@pytest.mark.medium
@pytest.mark.parametrize('form', ['state', 'module'])
def test_nnx(helper, form):
    nnx, model = nnx_model()
    tree = nnx.state(model) if form == 'state' else model
    assert interop.axis_names(tree) == {'up/kernel/value': ('embed', 'mlp')}
    assert {path: spec for path, spec in specs(helper, RULE | P(), tree).items() if spec} == {
        'up/kernel/value': P('fsdp', 'tp')
    }
    plain = interop.unbox(tree)
    assert 'up/kernel' in flatten_tree(plain, sep='/')
    np.testing.assert_array_equal(flatten_tree(plain, sep='/')['up/kernel'], model.up.kernel[...])


def test_nnx_without_values(helper):
    nnx, model = nnx_model()
    abstract = nnx.state(nnx.eval_shape(lambda: nnx.merge(*nnx.split(model))))
    assert interop.axis_names(abstract) == {'up/kernel/value': ('embed', 'mlp')}


def test_nnx_optimizer_state_through_sjit(helper):
    nnx, model = nnx_model()
    rule = RULE | P()
    with nnx.use_eager_sharding(False):
        state = nnx.state(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    placed = helper.sjit(lambda s: s, in_shardings=rule, out_shardings=rule)(helper.shard(state, rule))
    assert placed['opt_state'][0]['mu']['up']['kernel'][...].sharding.spec == P('fsdp', 'tp')


@pytest.mark.parametrize('sharding', [P('embed', None), ('embed', None)], ids=['spec', 'tuple'])
def test_nnx_names_may_be_a_spec(sharding):
    nnx, _ = nnx_model()
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.zeros((8, 8)), out_sharding=sharding)
    assert interop.axis_names({'w': variable}) == {'w/value': ('embed', None)}
    assert interop.axis_names({'w': nnx.Param(jnp.zeros((8, 8)))}) == {}


# --- haliax ---------------------------------------------------------------------------------------


def test_haliax(helper):
    haliax = import_or_skip('haliax')
    embed, mlp, layers = haliax.make_axes(embed=16, mlp=8, layers=3)
    tree = {'w': haliax.zeros((embed, mlp)), 's': haliax.zeros((layers, mlp)), 'b': jnp.zeros(8)}
    assert interop.axis_names(tree) == {'s/0': ('layers', 'mlp'), 'w/0': ('embed', 'mlp')}
    assert specs(helper, RULE | P(), tree) == {'b': P(), 's/0': P(None, 'tp'), 'w/0': P('fsdp', 'tp')}
    assert (RULE.stacked(1) | P()).apply(tree)['s'].array == P(None, 'tp')
    assert helper.shard(tree, RULE | P())['w'].array.sharding.spec == P('fsdp', 'tp')
    assert interop.unbox(tree)['w'] is tree['w'].array


def test_haliax_module_in_sjit(helper):
    haliax = import_or_skip('haliax')
    nn = import_or_skip('haliax.nn')
    embed, mlp = haliax.make_axes(embed=16, mlp=8)
    rule = RULE | P()
    init = helper.sjit(lambda key: nn.Linear.init(embed, mlp, key=key), out_shardings=rule)
    layer = init(jax.random.key(0))
    assert layer.weight.axes == (mlp, embed)
    assert layer.weight.array.sharding.spec == P('tp', 'fsdp')
    assert layer.bias.array.sharding.spec == P('tp')


# --- Without any of them --------------------------------------------------------------------------


class Box:
    """A node that resembles a box, but is not from a library."""

    def __init__(self, value, names):
        self.value, self.names = value, names


def test_boxes_of_others_are_left_alone():
    jax.tree_util.register_pytree_node(Box, lambda b: ((b.value,), b.names), lambda n, v: Box(v[0], n))
    tree = {'w': Box(jnp.zeros((8, 8)), ('embed', 'mlp')), 'none': None}
    assert interop.axis_names(tree) == {}
    assert isinstance(interop.unbox(tree)['w'], Box)
    assert interop.unbox(tree)['none'] is None


@pytest.mark.slow
def test_reading_names_imports_no_library():
    code = """
import sys
import jax.numpy as jnp
from scalax import interop
from scalax.sharding import LogicalAxisShardingRule
tree = {'w': jnp.zeros((8, 8))}
interop.axis_names(tree), interop.unbox(tree)
LogicalAxisShardingRule({'a': 'x'}, [('w', 'a _')]).apply(tree)
print(sorted({'flax', 'haliax', 'equinox'} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=500)
    assert (done.stdout.strip(), done.stderr) == ('[]', '')


def test_rules_on_boxes_survive_pickling(helper):
    variables = linen_variables()
    again = pickle.loads(pickle.dumps(RULE | P()))
    assert specs(helper, again, variables) == specs(helper, RULE | P(), variables)
