"""Named axes: the active mapping, sharding trees with it, and queries."""

import collections.abc
import inspect
import re
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import scalax.axes
from scalax.axes import (
    auto_sharded,
    axis_mapping,
    physical_axis_name,
    physical_axis_size,
    pspec_for,
    round_axis_for_partitioning,
    shard,
    shard_with_axis_mapping,
    sharding_for_axis,
)
from scalax.errors import MeshError, RuleError, ShardingError, UnshardedWarning
from scalax.sharding import LogicalAxisShardingRule, MeshShardingHelper

with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of the pre-release, while it is imported
    hax = pytest.importorskip('haliax', reason='haliax is not installed')
nn = pytest.importorskip('flax.linen', reason='flax is not installed')

MAPPING = {'batch': 'data', 'mlp': 'tp', 'vocab': ('data', 'tp')}
BATCH, EMBED, MLP = hax.Axis('batch', 16), hax.Axis('embed', 8), hax.Axis('mlp', 32)


@pytest.fixture
def helper():
    return MeshShardingHelper([4, 2], ['data', 'tp'])


def exactly(message):
    return f'^{re.escape(message)}$'


# The active mapping ----------------------------------------------------------------------------------


def test_the_innermost_mapping_is_active_and_restored():
    with axis_mapping({'batch': 'data'}):
        with axis_mapping({'batch': 'tp'}):
            assert physical_axis_name('batch') == 'tp'
        assert physical_axis_name('batch') == 'data'
        with pytest.raises(KeyError), axis_mapping({}):
            assert physical_axis_name('batch') is None
            raise KeyError
        assert physical_axis_name('batch') == 'data'
    assert physical_axis_name('batch') is None


def test_the_inner_mapping_takes_precedence_unlike_in_haliax():
    with axis_mapping({'batch': 'data', 'mlp': 'tp'}):
        with axis_mapping({'batch': 'tp', 'embed': 'data'}, merge=True):
            assert [physical_axis_name(n) for n in ('batch', 'mlp', 'embed')] == ['tp', 'tp', 'data']
        with axis_mapping({'batch': 'tp'}):
            assert physical_axis_name('mlp') is None
    with hax.axis_mapping({'batch': 'data'}), hax.axis_mapping({'batch': 'tp'}, merge=True):
        assert hax.partitioning.physical_axis_name('batch') == 'data'


@pytest.mark.parametrize('merge', [False, True])
def test_names_by_keyword_override_the_mapping(merge):
    outer, inner = {'mlp': 'data', 'heads': 'tp'}, {'batch': 'data', 'embed': 'data'}
    with axis_mapping(outer), axis_mapping(inner, merge=merge, embed='tp', mlp=None):
        names = [physical_axis_name(name) for name in ('batch', 'embed', 'mlp', 'heads')]
    assert names == ['data', 'tp', None, 'tp' if merge else None]
    with hax.axis_mapping(inner, merge=merge, embed='tp'):
        assert hax.partitioning.physical_axis_name('embed') == 'tp'


def test_names_by_keyword_keep_the_strictness_of_a_rule(helper):
    rule = LogicalAxisShardingRule({'batch': 'data'})
    with axis_mapping(rule, embed='tp'):
        assert shard(np.ones((4, 2)), 'batch embed', mesh=helper).sharding.spec == P('data', 'tp')
        with pytest.raises(RuleError, match="axis_mapping has no name 'mlp'"):
            shard(np.ones((4, 2)), 'batch mlp', mesh=helper)


def test_merged_rules_keep_their_names(helper):
    outer = LogicalAxisShardingRule({'mlp': 'tp', 'heads': 'tp'}, [('up', '_ mlp')])
    inner = LogicalAxisShardingRule({'embed': 'data'}, [('out', 'embed _')])
    with axis_mapping(outer), axis_mapping(inner, merge=True), helper.get_context():
        tree = shard({'up': jnp.ones((8, 4)), 'out': jnp.ones((8, 4))})
        assert {name: leaf.sharding.spec for name, leaf in tree.items()} == {
            'up': P(None, 'tp'),
            'out': P('data'),
        }
        assert physical_axis_size('heads') == 2


def test_a_mapping_belongs_to_its_thread(helper):
    seen = {}

    def look(name):
        seen[name] = physical_axis_name('batch')

    with axis_mapping({'batch': 'data'}):
        thread = threading.Thread(target=look, args=('other',))
        thread.start()
        thread.join(timeout=300)
        look('own')
    assert seen == {'other': None, 'own': 'data'}


def test_a_mapping_of_another_form_is_an_error():
    message = (
        "LogicalAxisShardingRule, axis_mapping of 'batch': the value is a mesh axis, a tuple of them or None,"
        ' got 3'
    )
    with pytest.raises(RuleError, match=exactly(message)), axis_mapping({'batch': 3}):
        pass
    with pytest.raises(RuleError, match=exactly(message)), axis_mapping({}, batch=3):
        pass


# shard -----------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('compiled', [False, True])
def test_one_function_outside_and_inside_of_jit(kind, compiled):
    helper = MeshShardingHelper([4, 2], ['data', 'tp'], axis_types=kind)

    def sharded(x):
        return shard(x, 'batch mlp')

    with axis_mapping(MAPPING), helper.get_context():
        x = (helper.sjit(sharded) if compiled else sharded)(jnp.arange(64.0).reshape(8, 8))
    assert x.sharding.spec == P('data', 'tp')
    np.testing.assert_array_equal(x, np.arange(64.0).reshape(8, 8))


@pytest.mark.parametrize('compiled', [False, True])
def test_the_mesh_may_be_active_or_passed(helper, compiled):
    def sharded(x, **mesh):
        return shard(x, 'batch mlp', MAPPING, **mesh)

    run = jax.jit(sharded) if compiled else sharded
    with jax.set_mesh(helper.mesh):
        assert run(jnp.ones((8, 8))).sharding.spec == P('data', 'tp')
    for mesh in (helper, helper.mesh):
        once = jax.jit(lambda x, mesh=mesh: sharded(x, mesh=mesh)) if compiled else sharded
        options = {} if compiled else {'mesh': mesh}
        assert once(jnp.ones((8, 8)), **options).sharding.spec == P('data', 'tp')


@pytest.mark.medium
@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_gradients_and_batches_that_run_at_once_under_the_mesh_of_jax(kind):
    helper = MeshShardingHelper([4, 2], ['data', 'tp'], axis_types=kind)
    x = jnp.arange(64.0).reshape(8, 8)
    with jax.set_mesh(helper.mesh), axis_mapping(MAPPING):
        grad = jax.grad(lambda x: (shard(x, 'batch mlp') ** 2).sum())(x)
        rows = jax.vmap(lambda row: shard(2 * row, 'mlp'))(x)
    assert (grad.sharding.spec, rows.sharding.spec) == (P('data', 'tp'), P(None, 'tp'))
    np.testing.assert_array_equal(grad, 2 * np.arange(64.0).reshape(8, 8))
    np.testing.assert_array_equal(rows, grad)


def test_names_come_from_the_tree_and_haliax_shards_the_same(helper):
    tree = {'x': hax.ones((BATCH, EMBED)), 'w': hax.ones((EMBED, MLP)), 'plain': jnp.ones(8), 'name': 'mlp'}
    with axis_mapping(MAPPING), helper.get_context():
        ours = shard(tree)
    with hax.axis_mapping(MAPPING), jax.set_mesh(helper.mesh):
        expected = hax.shard(tree)
    for name in ('x', 'w'):
        assert ours[name].array.sharding.is_equivalent_to(expected[name].array.sharding, 2)
    assert ours['plain'] is tree['plain']
    assert ours['name'] == 'mlp'


def test_names_of_flax_boxes(helper):
    box = nn.Partitioned(jnp.ones((8, 8)), names=('batch', 'mlp'))
    with axis_mapping(MAPPING), helper.get_context():
        assert shard({'kernel': box})['kernel'].value.sharding.spec == P('data', 'tp')
        assert helper.sjit(shard)({'kernel': box})['kernel'].value.sharding.spec == P('data', 'tp')


@pytest.mark.parametrize(
    'arguments',
    [
        ('batch mlp', MAPPING),
        ((BATCH, MLP), MAPPING),
        (('batch', MLP), MAPPING),
        (['batch', 'mlp'], list(MAPPING.items())),
        ('batch mlp', LogicalAxisShardingRule(MAPPING)),
        (LogicalAxisShardingRule(MAPPING, [('', 'batch mlp')]),),
    ],
    ids=str,
)
def test_names_and_mappings_in_all_their_forms(helper, arguments):
    assert shard(np.ones((8, 8)), *arguments, mesh=helper).sharding.spec == P('data', 'tp')


def test_fused_dimensions(helper):
    assert shard(np.ones((8, 8)), '(batch mlp) ...', MAPPING, mesh=helper).sharding.spec == P(('data', 'tp'))


def test_the_old_names(helper):
    x = hax.ones((BATCH, EMBED))
    assert shard(x, MAPPING, mesh=helper).array.sharding.spec == P('data')
    assert shard_with_axis_mapping(x, MAPPING, helper).array.sharding.spec == P('data')
    with axis_mapping(MAPPING):
        assert auto_sharded(x, mesh=helper).array.sharding.spec == P('data')


def test_without_mapping_mesh_or_names_shard_warns(helper):
    x = jnp.ones((8, 8))
    named = hax.ones((BATCH, EMBED))
    tail = ' (auto_sharded does not warn)'
    cases = [
        (
            x,
            lambda: shard(x, 'batch mlp', mesh=helper),
            'no axis mapping is active: write `with axis_mapping({...}):` or `mapping={...}`',
        ),
        (
            named,
            lambda: shard(named, MAPPING),
            'no mesh is active: write `with helper.get_context():` or `mesh=helper.mesh`',
        ),
        (
            x,
            lambda: shard(x, MAPPING, mesh=helper),
            "no array names its dimensions: write `shard(x, 'batch embed')` or a rule with axis_names",
        ),
    ]
    for argument, call, reason in cases:
        with pytest.warns(
            UnshardedWarning, match=exactly(f'shard did nothing, because {reason}{tail}')
        ) as record:
            assert call() is argument
        assert record[0].filename == __file__
    assert auto_sharded(named) is named
    with axis_mapping(MAPPING):
        assert auto_sharded(named) is named
        assert auto_sharded({'x': x}, mesh=helper)['x'] is x


@pytest.mark.medium
def test_a_function_that_jax_has_cached_sees_the_mapping_of_its_caller(helper):
    traced = []

    @jax.jit
    def shared(x):
        traced.append(1)
        return shard(x, 'batch mlp')

    def sharding(mapping):
        with axis_mapping(mapping), helper.get_context():
            return shared(jnp.ones((8, 8))).sharding.spec

    assert sharding({'batch': 'data'}) == P('data')
    assert sharding({'mlp': 'tp'}) == P(None, 'tp')
    assert sharding({'batch': 'data'}) == P('data')
    assert len(traced) == 2  # equal mappings share a trace


def test_shapes_may_depend_on_the_mapping(helper):
    @helper.sjit(out_shardings=P('data'))
    def table():
        return jnp.zeros((round_axis_for_partitioning('vocab', size=12), 2))

    for mapping, rows in (({'vocab': 'data'}, 12), ({'vocab': ('data', 'tp')}, 16), ({'vocab': 'data'}, 12)):
        with axis_mapping(mapping):
            assert table().shape == (rows, 2)
            assert table.eval_shape().shape == (rows, 2)


def test_errors_of_shard_name_the_array_and_its_names(helper, snapshot):
    with snapshot.raises(ShardingError):
        shard({'w': np.ones((4, 4), np.float32)}, 'batch', MAPPING, mesh=helper)
    with pytest.raises(ShardingError, match='dimension 0 of size 3 is not divisible by 4'):
        shard(np.ones((3, 4)), 'batch mlp', MAPPING, mesh=helper)
    message = r'  b/w: float32\[8, 8\]\n    a ShapeDtypeStruct has no value that could be placed'
    with pytest.raises(ShardingError, match=message):
        tree = {'a': np.ones((8, 8)), 'b': {'w': jax.ShapeDtypeStruct((8, 8), 'float32')}}
        shard(tree, 'batch mlp', MAPPING, mesh=helper)
    with pytest.raises(RuleError, match=r"'\(' is never closed\n  batch \(mlp\n        \^"):
        shard(np.ones((8, 8)), 'batch (mlp', MAPPING, mesh=helper)
    with pytest.raises(RuleError, match=r'^shard got two mappings, '):
        shard(np.ones((8, 8)), MAPPING, MAPPING, mesh=helper)
    with pytest.raises(
        MeshError, match=exactly('mesh is a Mesh, an AbstractMesh or a MeshShardingHelper, got 3')
    ):
        shard(np.ones((8, 8)), 'batch mlp', MAPPING, mesh=3)
    message = (
        "dimensions are named by a string such as 'batch embed', by haliax axes, by a sequence of these, or "
        'by a dict of names and sizes, got 5'
    )
    with pytest.raises(RuleError, match=exactly(message)):
        shard(np.ones(8), 5)


def test_calls_as_haliax_has_them(helper):
    x, mesh, placed = (
        hax.ones((BATCH, EMBED)),
        helper.mesh,
        jax.sharding.NamedSharding(helper.mesh, P('data')),
    )
    with hax.axis_mapping({'batch': 'data'}), axis_mapping({'batch': 'data'}):
        for partitioning in (hax.partitioning, scalax.axes):
            for sharded in (
                partitioning.shard(x, {'batch': 'data'}, mesh),
                partitioning.shard(x, None, mesh),
                partitioning.shard(x, {'batch': 'data'}, mesh=mesh),
                partitioning.shard(x=x, mapping={'batch': 'data'}, mesh=mesh),
                partitioning.shard_with_axis_mapping(x, {'batch': 'data'}, mesh),
                partitioning.auto_sharded(x, mesh),
            ):
                assert sharded.array.sharding.is_equivalent_to(placed, 2)
            assert partitioning.sharding_for_axis(BATCH, {'batch': 'data'}, mesh).spec == P('data')
    assert shard(x, {'batch': 'data'}, helper).array.sharding.spec == P('data')


SHARED = sorted(
    {*scalax.axes.__all__} & {*hax.partitioning.__all__, 'physical_axis_size', 'sharding_for_axis'}
)


@pytest.mark.parametrize('name', [name for name in SHARED if name not in ('ResourceMapping', 'fsdp')])
def test_signatures_match_haliax(name):
    parameters = inspect.signature(getattr(hax.partitioning, name)).parameters.values()
    ours = inspect.signature(getattr(scalax.axes, name))
    named = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    positional = [
        parameter.name for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD
    ]
    if name == 'pspec_for':  # it has a row in docs/axes.md
        named, positional = ['mapping'], ['axes', 'mapping']
    # Their second argument may be the mapping, or names followed by the mapping.
    if name == 'shard':
        positional = ['x']
    if name == 'round_axis_for_partitioning':
        positional = ['axis']
    ours.bind_partial(**dict.fromkeys(named))
    assert list(ours.bind_partial(*positional).arguments) == positional
    assert list(ours.bind_partial(*positional).arguments.values()) == positional


def test_haliaxs_name_of_a_mapping():
    mapping: scalax.axes.ResourceMapping = {'batch': 'data'}
    assert (
        scalax.axes.ResourceMapping
        == collections.abc.Mapping[str, str | collections.abc.Sequence[str] | None]
    )
    assert physical_axis_name('batch', mapping) == 'data'


def test_specs_of_trees():
    """Like haliax, replicates arrays whose dimensions have no names."""
    tree = {'a': hax.ones((BATCH, MLP)), 'b': np.ones((3, 4)), 'c': 2}
    mapping = {'batch': 'data', 'mlp': 'tp'}
    haliax_specs = hax.partitioning.pspec_for(tree, mapping, preserve_existing_shardings=False)
    assert pspec_for(tree, mapping) == {'a': P('data', 'tp'), 'b': P(), 'c': P()}
    assert haliax_specs['a'] == pspec_for(tree['a'], mapping) == P('data', 'tp')
    shapes = jax.eval_shape(lambda: tree['a'])
    with axis_mapping(mapping):
        assert pspec_for(shapes) == P('data', 'tp')
    assert pspec_for([tree['a']]) == [P(None, None)]  # no mapping is active


# Queries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'axes',
    [
        *(BATCH, 'mlp', (BATCH, 'mlp')),
        *({'batch': 8}, {'batch': 8, 'embed': None, 'mlp': 2}, {'batch': np.int64(8)}, {}),
    ],
    ids=['axis', 'name', 'mixed', 'shape', 'partial shape', 'sizes of numpy', 'shape of a scalar'],
)
def test_haliax_takes_the_same_axes(helper, axes):
    mapping = {'batch': 'data', 'mlp': 'tp'}
    ours = sharding_for_axis(axis=axes, mapping=mapping, mesh=helper.mesh)
    haliax_mapping = hax.partitioning.sharding_for_axis(axis=axes, mapping=mapping, mesh=helper.mesh)
    assert ours.is_equivalent_to(haliax_mapping, 3)
    assert isinstance(axes, str) or ours.spec[:1] == (('data',) if axes else ())


@pytest.mark.parametrize('wrong', [{'w': 'embed mlp'}, {3: 8}], ids=str)
def test_plain_dicts_name_no_dimensions(helper, wrong):
    text = (
        "dimensions are named by a string such as 'batch embed', by haliax axes, by a sequence of these, or "
        f'by a dict of names and sizes, got {wrong!r}'
    )
    with pytest.raises(RuleError, match=exactly(text)):
        sharding_for_axis(wrong, MAPPING, helper.mesh)


def test_a_tree_of_arrays_has_several_shardings(helper):
    text = (
        'sharding_for_axis is for the dimensions of one array, got a dict with arrays: pspec_for returns the '
        'spec of each array'
    )
    with pytest.raises(RuleError, match=exactly(text)):
        sharding_for_axis({'w': np.ones((8, 4))}, MAPPING, helper.mesh)


def test_sizes_are_rounded_in_each_form(helper):
    one_name = {'vocab': ('data', 'tp')}
    with helper.get_context():
        for rounded in (
            round_axis_for_partitioning(50257, 'vocab', MAPPING),
            round_axis_for_partitioning(50257, 'vocab', mapping=MAPPING),
            round_axis_for_partitioning(np.int64(50257), 'vocab', MAPPING),
            round_axis_for_partitioning('vocab', MAPPING, size=50257),
            round_axis_for_partitioning(axis='vocab', mapping=MAPPING, size=50257),
            round_axis_for_partitioning(50257, one_name),
            round_axis_for_partitioning(50257, mapping=one_name),
            round_axis_for_partitioning(50257, {'vocab size (padded)': ('data', 'tp')}),
        ):
            assert (type(rounded), rounded) == (int, 50264)
        with axis_mapping(MAPPING):
            assert round_axis_for_partitioning(50257, 'vocab') == 50264
            assert round_axis_for_partitioning(50257, 'embed') == 50257
        with axis_mapping(one_name):
            assert round_axis_for_partitioning(50257) == 50264


@pytest.mark.parametrize('axes', [(BATCH,), (BATCH, EMBED), (EMBED, MLP), (MLP, BATCH, EMBED)])
def test_haliax_answers_the_same(helper, axes):
    mapping = {'batch': 'data', 'mlp': ('tp',), 'embed': None}
    expected = {k: v for k, v in mapping.items() if v is not None}
    with jax.set_mesh(helper.mesh), axis_mapping(mapping), hax.axis_mapping(expected):
        partitioning = hax.partitioning
        ours = sharding_for_axis(axes)
        assert ours.is_equivalent_to(partitioning.sharding_for_axis(axes), len(axes))
        for axis in axes:
            assert physical_axis_size(axis) == partitioning.physical_axis_size(axis)
            assert round_axis_for_partitioning(axis) == partitioning.round_axis_for_partitioning(axis)
            odd = axis.resize(axis.size + 1)
            assert round_axis_for_partitioning(axis=odd) == partitioning.round_axis_for_partitioning(axis=odd)
            assert (
                round_axis_for_partitioning(axis.name, size=odd.size) == round_axis_for_partitioning(odd).size
            )


@pytest.mark.medium
@pytest.mark.parametrize('name', ['head dim', 'a-b', '3', '1', '_', '_x', '...', '(x'])
def test_names_of_haliax_axes_may_be_any_text(helper, name):
    axis, mapping = hax.Axis(name, 15), {'batch': 'data', name: 'tp'}
    with jax.set_mesh(helper.mesh), axis_mapping(mapping), hax.axis_mapping(mapping):
        partitioning = hax.partitioning
        assert physical_axis_name(axis) == partitioning.physical_axis_name(axis) == 'tp'
        assert physical_axis_size(axis) == partitioning.physical_axis_size(axis) == 2
        assert pspec_for([BATCH, axis]) == partitioning.pspec_for_axis((BATCH, axis)) == P('data', 'tp')
        assert sharding_for_axis(axis).spec == P('tp')
        assert round_axis_for_partitioning(axis) == partitioning.round_axis_for_partitioning(axis)
        assert pspec_for(['batch', axis, 'embed mlp']) == P('data', 'tp', None, None)
        assert shard(np.ones((8, 2)), (BATCH, axis)).sharding.spec == P('data', 'tp')
        named = hax.named(jnp.ones((BATCH.size, 16)), (BATCH, axis.resize(16)))
        assert shard(named).array.sharding.spec == P('data', 'tp')


def test_queries_by_name(helper):
    with helper.get_context(), axis_mapping(MAPPING):
        assert physical_axis_name('vocab') == ('data', 'tp')
        assert physical_axis_name('embed') is None
        assert [physical_axis_size(name) for name in ('batch', 'vocab', 'embed')] == [4, 8, None]
        assert pspec_for('batch embed') == P('data', None)
        assert pspec_for('(batch mlp) embed') == P(('data', 'tp'), None)
        assert pspec_for('(batch 3) _ 1') == P('data', None, None)
        assert sharding_for_axis('batch embed') == jax.sharding.NamedSharding(helper.mesh, P('data'))
        assert round_axis_for_partitioning('vocab', size=50257) == 50264
        assert round_axis_for_partitioning('embed', size=50257) == 50257
        assert round_axis_for_partitioning('vocab', size=50264) == 50264
        assert round_axis_for_partitioning('vocab', size=0) == 0
        assert round_axis_for_partitioning('vocab', size=np.int64(50257)) == 50264
        assert round_axis_for_partitioning(hax.Axis('batch', 5), {'batch': 'tp'}).size == 6
    assert pspec_for('batch embed', mesh=helper) == P(None, None)  # no mapping: nothing is mapped


def test_queries_skip_axes_that_the_mesh_lacks(helper):
    mapping = {'batch': ('pod', 'data')}
    assert physical_axis_name('batch', mapping) == ('pod', 'data')
    assert physical_axis_name('batch', mapping, mesh=helper) == 'data'
    assert physical_axis_size('batch', mapping, mesh=helper) == 4


@pytest.mark.parametrize(
    ('ask', 'message'),
    [
        (lambda: physical_axis_size('batch', MAPPING), 'physical_axis_size needs a mesh'),
        (lambda: sharding_for_axis('batch', MAPPING), 'sharding_for_axis needs a mesh'),
        (
            lambda: round_axis_for_partitioning('batch', MAPPING, size=5),
            'round_axis_for_partitioning needs a mesh',
        ),
    ],
)
def test_queries_of_sizes_need_a_mesh(ask, message):
    tail = (
        ', and none is active: call it inside sjit or `with helper.get_context():`, or pass mesh=helper.mesh'
    )
    with pytest.raises(MeshError, match=exactly(message + tail)):
        ask()


@pytest.mark.parametrize(
    ('ask', 'message'),
    [
        (
            lambda: physical_axis_name('a b'),
            "expected the name of one dimension, got 'a b': pspec_for takes several",
        ),
        (
            lambda: physical_axis_name('...'),
            "expected the name of one dimension, got '...': pspec_for takes several",
        ),
        *[
            (
                call,
                "round_axis_for_partitioning takes a haliax Axis, a name and its size ('vocab', size=50257), "
                f"or a size and its name (50257, 'vocab'), got {shown}",
            )
            for call, shown in (
                (
                    lambda: round_axis_for_partitioning('vocab', MAPPING),
                    f"'vocab', {MAPPING!r} and size=None",
                ),
                (
                    lambda: round_axis_for_partitioning('vocab', MAPPING, size=-5),
                    f"'vocab', {MAPPING!r} and size=-5",
                ),
                (lambda: round_axis_for_partitioning(5, 'vocab', size=6), "5, 'vocab' and size=6"),
                (lambda: round_axis_for_partitioning(True, 'vocab'), "True, 'vocab' and size=None"),
                (lambda: round_axis_for_partitioning(BATCH, 'vocab'), f"{BATCH!r}, 'vocab' and size=None"),
            )
        ],
        (
            lambda: round_axis_for_partitioning(5, MAPPING),
            'round_axis_for_partitioning got the size 5 without the name of its dimension, which is clear '
            "only if the mapping has one name (its names: 'batch', 'mlp', 'vocab'): pass the name, "
            "round_axis_for_partitioning(5, 'vocab', ...)",
        ),
        (
            lambda: round_axis_for_partitioning(5),
            'round_axis_for_partitioning got the size 5 without the name of its dimension, which is clear '
            'only if the mapping has one name (its names: none): pass the name, '
            "round_axis_for_partitioning(5, 'vocab', ...)",
        ),
        (
            lambda: round_axis_for_partitioning(5, MAPPING, MAPPING),
            f'round_axis_for_partitioning got two mappings, {MAPPING!r} and {MAPPING!r}: pass one',
        ),
        (
            lambda: pspec_for('batch ...', MAPPING),
            "'batch ...' names any number of dimensions ('...'): name each of them",
        ),
        (
            lambda: pspec_for([BATCH, '... embed'], MAPPING),
            f"'...' and haliax axes cannot be combined, got {[BATCH, '... embed']!r}",
        ),
        (
            lambda: pspec_for('batch emb', LogicalAxisShardingRule({'batch': 'data', 'embed': 'tp'})),
            "'batch emb': axis_mapping has no name 'emb' of dimension 1 (did you mean 'embed'?)",
        ),
    ],
)
def test_invalid_queries(ask, message):
    with pytest.raises(RuleError, match=exactly(message)):
        ask()
