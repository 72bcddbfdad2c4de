"""Named axes: compiled functions whose arrays are data, and whose other leaves are part of the program."""

import dataclasses
import functools
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import scalax.axes
from scalax.axes import axis_mapping, fsdp, named_jit, physical_axis_name, shard
from scalax.sharding import (
    FSDPShardingRule,
    LogicalAxisShardingRule,
    MeshShardingHelper,
    TreePathShardingRule,
)

with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of the pre-release, while it is imported
    hax = pytest.importorskip('haliax', reason='haliax is not installed')
eqx = pytest.importorskip('equinox', reason='equinox is not installed')

# haliax's operations still use a name that JAX has deprecated.
pytestmark = pytest.mark.filterwarnings('ignore:jax.interpreters.pxla:DeprecationWarning')
BATCH, EMBED, MLP = hax.Axis('batch', 16), hax.Axis('embed', 8), hax.Axis('mlp', 32)
PARAMS = {'embed': 'data', 'mlp': 'tp'}
COMPUTE = {'batch': 'data', 'mlp': 'tp'}


@pytest.fixture
def helper():
    return MeshShardingHelper([4, 2], ['data', 'tp'])


class Block(eqx.Module):
    """The MLP of a transformer, with parameters that name their dimensions."""

    up: hax.NamedArray
    down: hax.NamedArray
    activation: object = eqx.field(static=True)
    scale: float = eqx.field(static=True, default=1.0)

    @staticmethod
    def init(key):
        up, down = (hax.random.normal(k, axes) for k, axes in zip(jax.random.split(key), AXES, strict=True))
        return Block(up, down, jax.nn.relu)

    def __call__(self, x):
        hidden = x.array @ self.up.array * self.scale
        hidden = shard(hax.named(self.activation(hidden), (BATCH, MLP)))
        return hax.named(hidden.array @ self.down.array, (BATCH, EMBED))


AXES = ((EMBED, MLP), (MLP, EMBED))


def train_step(block, x):
    def loss(block):
        return (block(shard(x)).array ** 2).mean()

    value, grads = jax.value_and_grad(loss)(block)
    return jax.tree.map(lambda p, g: p - 0.1 * g, block, grads), value


def shardings(tree):
    return {
        jax.tree_util.keystr(path): (leaf.sharding, leaf.ndim)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if isinstance(leaf, jax.Array) and leaf.ndim
    }


@pytest.mark.slow
def test_haliax_partitions_the_same_program_the_same_way(helper):
    with helper.get_context():
        block = named_jit(Block.init, PARAMS)(jax.random.key(0))
        ours = fsdp(train_step, PARAMS, COMPUTE)(block, hax.ones((BATCH, EMBED)))
    with jax.set_mesh(helper.mesh), warnings.catch_warnings():
        warnings.simplefilter('ignore')  # haliax still uses names that JAX will remove
        haliax_block = hax.named_jit(Block.init, PARAMS)(jax.random.key(0))
        step = hax.fsdp(lambda block, x: train_step(block, hax.shard(x, COMPUTE)), PARAMS, COMPUTE)
        haliax_block = step(
            haliax_block, hax.shard(hax.ones((BATCH, EMBED)), PARAMS)
        )  # it does not move arguments
    expected = shardings(haliax_block)
    assert len(expected) == 2
    for path, (sharding, ndim) in shardings(ours).items():
        assert sharding.is_equivalent_to(expected[path][0], ndim), path
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        jax.tree.leaves(eqx.filter(ours, eqx.is_array)),
        jax.tree.leaves(eqx.filter(haliax_block, eqx.is_array)),
    )


def noisy(w):
    """Sums noise that only haliax's mapping shards."""
    noise = hax.random.normal(jax.random.key(0), (BATCH, EMBED))
    return hax.sum(noise * w, 'batch')


@pytest.mark.medium
@pytest.mark.parametrize(
    'mapping',
    [
        {'batch': 'data', 'embed': 'tp', 'pod': 'x'},
        {'batch': ('tp', 'data')},
        {'batch': 'data', 'mlp': 'data', 'embed': 'tp', 'heads': 'tp'},  # but no array has both
    ],
    ids=str,
)
def test_the_operations_of_haliax_read_the_mapping(helper, mapping):
    w = hax.ones((EMBED,))
    scalax_step = named_jit(noisy, mapping, mesh=helper)
    haliax_mapping = {name: axes for name, axes in mapping.items() if axes != 'x'}  # it skips no mesh axis
    with jax.set_mesh(helper.mesh), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        haliax_program = hax.named_jit(noisy, haliax_mapping).lower(w).compile()
    scalax_program = scalax_step.lower(w).compile()
    temp_sizes = [
        program.memory_analysis().temp_size_in_bytes for program in (scalax_program, haliax_program)
    ]
    assert temp_sizes[0] == temp_sizes[1]
    np.testing.assert_allclose(scalax_step(w).array, noisy(w).array, rtol=1e-4, atol=1e-4)
    assert hax.partitioning.current_thread_local_mapping() is None


def test_the_shapes_that_haliax_derives_follow_the_mapping(helper):
    """Code that queries haliax for mesh axes, and would compute on every device without the mapping."""

    @named_jit(axis_resources={'batch': ('pod', 'data')}, mesh=helper)
    def size():
        assert hax.partitioning.pspec_for_axis((BATCH, EMBED)) == P('data', None)
        return hax.partitioning.physical_axis_size('batch')

    assert size() == 4


@pytest.mark.medium
@pytest.mark.parametrize('types', [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_arrays_that_haliax_cannot_shard_are_unchanged(types):
    """A mapping that uses a mesh axis twice in an array, and Explicit axes."""
    helper = MeshShardingHelper([4, 2], ['data', 'tp'], axis_types=types)
    mapping = {'batch': 'data', 'embed': 'data' if types == jax.sharding.AxisType.Auto else 'tp'}
    w = hax.ones((EMBED,))
    out = named_jit(noisy, mapping, mesh=helper)(w)
    np.testing.assert_allclose(out.array, noisy(w).array, rtol=1e-4, atol=1e-4)


def test_an_error_of_the_function_is_raised_under_a_mapping_of_two_names_to_one_axis(helper):
    def wrong(w):
        raise KeyError('of the user')

    with pytest.raises(KeyError, match='of the user'):
        named_jit(wrong, {'mlp': 'tp', 'heads': 'tp'}, mesh=helper)(np.ones(2))


def test_arguments_may_change_in_a_function_that_is_traced_once_more(helper):
    @named_jit(axis_resources={'mlp': 'tp', 'heads': 'tp'}, mesh=helper)
    def increment(tree):
        tree['count'] += 1
        return tree

    assert increment({'count': np.zeros(2)})['count'].tolist() == [1, 1]


@pytest.mark.filterwarnings('ignore::DeprecationWarning')  # of hax.dot
def test_layers_of_haliax_constrain_their_results_as_by_haliax(helper):
    """Linear layers read the mapping, in which heads and mlp share a mesh axis, as in Levanter."""
    if not hasattr(jax.core, 'is_constant_dim'):
        pytest.skip('haliax uses what newer JAX lacks')
    mapping = {'batch': 'data', 'mlp': 'tp', 'heads': 'tp'}
    layer = hax.nn.Linear.init(EMBED, MLP, key=jax.random.key(0))
    x = hax.ones((BATCH, EMBED))

    def apply(layer, x):
        return layer(x)

    with jax.set_mesh(helper.mesh):
        programs = [api.named_jit(apply, mapping).lower(layer, x) for api in (scalax.axes, hax)]
    constraints = [program.as_text().count('sdy.sharding_constraint') for program in programs]
    assert constraints[0] == constraints[1] > 0


def test_manual_axes_are_left_to_shard_map(helper):
    @named_jit(axis_resources=COMPUTE)
    def body(x):
        assert hax.partitioning.current_thread_local_mapping() is None
        return hax.auto_sharded(hax.named(x * 2, ('batch', 'mlp'))).array

    spec = P('data', 'tp')
    with jax.set_mesh(helper.mesh):
        out = jax.jit(jax.shard_map(body, in_specs=spec, out_specs=spec))(jnp.ones((8, 8)))
    np.testing.assert_array_equal(out, np.full((8, 8), 2.0))


@pytest.mark.medium
def test_fsdp_keeps_parameters_as_they_are_stored(helper):
    traced = []

    @fsdp(PARAMS, COMPUTE)
    def step(block, x):
        traced.append(physical_axis_name('batch'))
        return train_step(block, x)

    with helper.get_context():
        block = named_jit(Block.init, PARAMS)(jax.random.key(0))
        for _ in range(3):
            block, value = step(block, hax.ones((BATCH, EMBED)))
    assert block.up.array.sharding.spec == P('data', 'tp')
    assert block.down.array.sharding.spec == P('tp', 'data')
    assert block.scale == 1.0
    assert value.shape == ()
    assert traced == ['data']


def same(x):
    return x


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    'form',
    [
        lambda: fsdp(same, PARAMS, COMPUTE),
        lambda: fsdp(same, PARAMS, compute_mapping=COMPUTE),
        lambda: fsdp(same, parameter_mapping=PARAMS, compute_mapping=COMPUTE),
        lambda: fsdp(fn=same, parameter_mapping=PARAMS, compute_mapping=COMPUTE),
        lambda: fsdp(same, param_mapping=PARAMS, compute_mapping=COMPUTE),
        lambda: fsdp(PARAMS, COMPUTE)(same),
        lambda: fsdp(None, PARAMS, COMPUTE)(same),
        lambda: fsdp(PARAMS, compute_mapping=COMPUTE)(same),
        lambda: fsdp(parameter_mapping=PARAMS, compute_mapping=COMPUTE)(same),
        lambda: fsdp(LogicalAxisShardingRule(PARAMS), COMPUTE, keep_unused=True)(same),
        lambda: fsdp(list(PARAMS.items()), None)(same),
    ],
)
def test_the_forms_of_fsdp(helper, form):
    compiled = form()
    assert compiled.__name__ == 'same'
    with helper.get_context():
        assert compiled(hax.ones((EMBED, MLP))).array.sharding.spec == P('data', 'tp')


def test_leaves_that_are_not_arrays_are_part_of_the_program(helper):
    traced = []

    @named_jit(mesh=helper)
    def scaled(x, by, fn=None, *, tags=()):
        traced.append(by)
        return {'y': fn(x) * by, 'by': by, 'fn': fn, 'tags': tags}

    x = np.ones(3, np.float32)
    for by in (1, True, 1.0, 1, True, 1.0):
        out = scaled(x, by, fn=jnp.sin, tags=('a', None))
        assert type(out['by']) is type(by)
        assert out['fn'] is jnp.sin
        assert out['tags'] == ('a', None)
    assert list(map(type, traced)) == [int, bool, float]
    scaled(np.ones(4, np.float32), 1, fn=jnp.sin)
    assert len(traced) == 4


def test_a_module_is_a_function_whose_arrays_are_data(helper):
    linear = eqx.nn.Linear(8, 4, key=jax.random.key(0))
    compiled = named_jit(linear, mesh=helper)
    x = jnp.arange(8.0)
    np.testing.assert_allclose(compiled(x), linear(x), rtol=1e-6)
    jaxpr = compiled.lower(x).as_text()
    assert 'tensor<4x8xf32>' in jaxpr.split('{')[1] or '4x8xf32' in jaxpr.partition('->')[0]
    method = named_jit(linear.__call__, mesh=helper)
    np.testing.assert_allclose(method(x), linear(x), rtol=1e-6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Scale:
    by: jax.Array

    def apply(self, x):
        return self.by * x


def test_arrays_of_the_object_of_a_method_are_data(helper):
    scale = Scale(jnp.float32(2))
    compiled = named_jit(scale.apply, mesh=helper)
    assert float(compiled(jnp.float32(3))) == 6
    scale.by = jnp.float32(5)
    assert float(compiled(jnp.float32(3))) == 15
    assert (compiled.__name__, 'apply' in compiled.lower(jnp.float32(3)).as_text()) == ('apply', True)


def test_zeros_of_both_signs_are_distinguished(helper):
    compiled = named_jit(lambda x, by: x * by, mesh=helper)
    for by in (0.0, -0.0, 0.0):
        assert str(float(compiled(jnp.float32(1), by))) == str(by)
    with_sign = named_jit(lambda x, by: (x, by), mesh=helper)
    assert [str(with_sign(jnp.ones(2), by)[1]) for by in (0.0, -0.0)] == ['0.0', '-0.0']


def test_arguments_keep_their_sharding_without_resources(helper):
    x = helper.shard(jnp.ones((8, 8)), P('tp'))
    seen = named_jit(lambda x: x + 1, mesh=helper)(x)
    assert seen.sharding.is_equivalent_to(x.sharding, 2)


def test_arguments_with_another_sharding_are_moved(helper):
    x = hax.named(helper.shard(jnp.ones((8, 32)), P('tp')), (EMBED, MLP))
    compiled = named_jit(lambda x: x, in_axis_resources=PARAMS, out_axis_resources=PARAMS, mesh=helper)
    assert compiled(x).array.sharding.spec == P('data', 'tp')


def test_resources_may_be_any_rule(helper):
    rule = FSDPShardingRule('data', min_fsdp_size=1)
    compiled = named_jit(lambda w: w * 2, in_axis_resources=rule, out_axis_resources=rule, mesh=helper)
    assert compiled(np.ones((3, 8), np.float32)).sharding.spec == P(None, 'data')


def test_paths_start_inside_each_argument(helper):
    rule = TreePathShardingRule(('^w$', P('data')), ('^$', P('tp')), ('.*', P()))
    compiled = named_jit(lambda a, n, x, *, k: (a, x, k), in_axis_resources=rule, mesh=helper)
    a, x, k = compiled({'w': np.ones(8), 'b': np.ones(8)}, 3, np.ones(8), k={'w': np.ones(8)})
    assert [v.sharding.spec for v in (a['w'], a['b'], x, k['w'])] == [P('data'), P(), P('tp'), P('data')]


def test_paths_start_inside_each_argument_under_the_mesh_of_jax_too(helper):
    rule = TreePathShardingRule(('^w$', P('data')), ('^$', P('tp')))
    compiled = named_jit(lambda a, x: (a, x), in_axis_resources=rule)
    with jax.set_mesh(helper.mesh):
        for call in (compiled, jax.jit(compiled)):
            a, x = call({'w': jnp.ones(8)}, jnp.ones(8))
            assert (a['w'].sharding.spec, x.sharding.spec) == (P('data'), P('tp'))


def test_the_active_mapping_is_the_default(helper):
    def same(x):
        return x

    compiled = named_jit(same)
    x = hax.ones((EMBED, MLP))
    with helper.get_context():
        for mapping, spec in (
            (PARAMS, P('data', 'tp')),
            ({'mlp': 'data'}, P(None, 'data')),
            (PARAMS, P('data', 'tp')),
        ):
            with axis_mapping(mapping):
                assert compiled(x).array.sharding.spec == spec
    assert compiled(x).array.shape == (8, 32)  # neither mesh nor mapping: plain jax.jit


@pytest.mark.medium
@pytest.mark.parametrize('donate', [True, (True,), (True, False), ({'a': True, 'b': False}, False)], ids=str)
def test_donation(helper, donate):
    tree = jax.tree.map(lambda x: helper.shard(x, P('data')), {'a': jnp.ones(8), 'b': jnp.ones(16)})
    other = helper.shard(jnp.ones(4), P())
    compiled = named_jit(
        lambda tree, other: (jax.tree.map(lambda x: x + other[0], tree), other + 1),
        donate_args=donate,
        mesh=helper,
    )
    compiled(tree, other)
    assert tree['a'].is_deleted()
    assert tree['b'].is_deleted() == (not isinstance(donate, tuple) or donate[0] is True)
    assert other.is_deleted() == (donate is True)


def is_large(leaf):
    return leaf.size > 8


@pytest.mark.medium
@pytest.mark.parametrize(
    ('donate', 'expected'),
    [
        (is_large, [True, False, True]),
        ((is_large,), [True, False, False]),
        ([is_large], [True, False, False]),
        ((is_large, None), [True, False, False]),
        ((False, is_large), [False, False, True]),
        (({'arrays': [True, False], 'name': False},), [True, False, False]),
        (({'arrays': [is_large, is_large], 'name': is_large}, True), [True, False, True]),
        (({'arrays': is_large, 'name': True},), [True, False, False]),
        ((), [False, False, False]),
    ],
)
def test_functions_and_shorter_prefixes_donate(helper, donate, expected):
    arrays = [helper.shard(np.ones(size, np.float32), P()) for size in (64, 8, 64)]
    step = named_jit(
        lambda tree, y: (jax.tree.map(lambda x: x + 1, tree['arrays']), y + 1),
        donate_args=donate,
        mesh=helper,
    )
    step({'arrays': arrays[:2], 'name': 'a'}, arrays[2])
    assert [array.is_deleted() for array in arrays] == expected


def test_arguments_are_not_donated_by_default(helper):
    x, y = (helper.shard(jnp.ones(8), P('data')) for _ in range(2))
    named_jit(lambda x, y: (x + 1, y + 1), donate_args=(None, True), mesh=helper)(x, y)
    assert (x.is_deleted(), y.is_deleted()) == (False, True)


def test_donated_keywords(helper):
    x, y = (helper.shard(jnp.ones(8), P('data')) for _ in range(2))
    donate = {'x': lambda leaf: leaf.ndim == 1, 'absent': True}
    named_jit(lambda **k: {n: v + 1 for n, v in k.items()}, donate_kwargs=donate, mesh=helper)(x=x, y=y)
    assert x.is_deleted()
    assert not y.is_deleted()


def test_it_looks_like_the_function(helper):
    @named_jit(mesh=helper)
    def documented(x):
        """What it does."""
        return x

    assert (documented.__name__, documented.__doc__) == ('documented', 'What it does.')
    lowered = documented.lower(jax.ShapeDtypeStruct((8,), 'float32'))
    assert 'documented' in lowered.as_text()
    partial = named_jit(functools.partial(documented.__wrapped__), mesh=helper)
    assert 'documented' in partial.lower(jax.ShapeDtypeStruct((8,), 'float32')).as_text()


def test_options_of_jit_pass_through(helper):
    x = np.ones(8, np.float32)
    for keep, operands in ((True, 2), (False, 1)):
        lowered = named_jit(lambda x, y: x, keep_unused=keep, mesh=helper).lower(x, x)
        assert lowered.as_text().partition('->')[0].count('tensor<8xf32>') == operands
    # Options that haliax has; None is JAX's default.
    named_jit(lambda x: x, keep_unused=False, backend=None, inline=None, mesh=helper)(x)


@pytest.mark.medium
def test_inside_other_transformations(helper):
    with helper.get_context(), axis_mapping(COMPUTE):
        double = named_jit(lambda x: shard(x * 2, 'batch ...'))
        x = jnp.ones((16, 3))
        assert helper.sjit(double)(x).sharding.spec == P('data')
        np.testing.assert_allclose(jax.grad(lambda x: double(x).sum())(x), np.full((16, 3), 2.0))
        np.testing.assert_allclose(jax.vmap(double)(x[None]), np.full((1, 16, 3), 2.0))


def test_inside_jit_under_the_mesh_of_jax(helper):
    compiled = named_jit(lambda x: x * 2, in_axis_resources=PARAMS, out_axis_resources=PARAMS)
    with jax.set_mesh(helper.mesh):
        out = jax.jit(compiled)(hax.ones((EMBED, MLP)))
    assert out.array.sharding.spec == P('data', 'tp')
    np.testing.assert_array_equal(out.array, np.full((8, 32), 2.0))


def test_inside_shard_map_under_the_mesh_of_jax(helper):
    double = named_jit(lambda x: shard(x * 2, 'batch mlp'), COMPUTE)
    spec = P('data', 'tp')
    with jax.set_mesh(helper.mesh):
        out = jax.jit(jax.shard_map(double, in_specs=spec, out_specs=spec))(jnp.ones((8, 8)))
    assert out.sharding.spec == spec
    np.testing.assert_array_equal(out, np.full((8, 8), 2.0))


@pytest.mark.medium
def test_threads_have_their_own_mappings(helper):
    compiled = named_jit(lambda x: x, mesh=helper)
    x = hax.ones((EMBED, MLP))
    mappings = [
        ({'mlp': 'tp'}, P(None, 'tp')),
        ({'mlp': 'data'}, P(None, 'data')),
        ({'embed': 'tp'}, P('tp')),
    ]
    wrong = []

    def work(mapping, spec):
        for _ in range(20):
            with axis_mapping(mapping):
                if compiled(x).array.sharding.spec != spec:
                    wrong.append(spec)

    threads = [threading.Thread(target=work, args=pair) for pair in mappings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
