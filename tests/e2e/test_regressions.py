"""Defects of scalax 0.2.5 that must not come back, each test named after its defect.

Those of sjit are in its own tests.
"""

import inspect
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import scalax.sharding
import scalax.utils
from scalax.errors import ShardingError
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    TreePathShardingRule,
    get_global_annotation_shardings,
    get_global_mesh,
    get_global_mesh_helper,
    with_sharding_annotation,
    with_sharding_constraint,
)

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, 'float32')


# --- Rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('size', [None, 4])
def test_fsdp_looped_for_ever_on_a_dimension_of_size_zero(size):
    assert FSDPShardingRule('fsdp', size, 0).apply({'a': leaf(0), 'b': leaf(0, 8)}) == {
        'a': P(),
        'b': P(None, 'fsdp'),
    }


def test_fsdp_without_a_size_sharded_dimensions_that_do_not_divide():
    rule = FSDPShardingRule(min_fsdp_size=0)
    assert rule.apply([leaf(3, 5), leaf(7)]) == [P(), P()]
    # With a mesh it knows better: 12 divides by 4, 6 has the same factor of two and does not.
    placed = HELPER.shard({'w': np.zeros((6, 12)), 'v': np.zeros((10, 6))}, rule)
    assert (placed['w'].sharding.spec, placed['v'].sharding.spec) == (P(None, 'fsdp'), P())


@pytest.mark.parametrize('scalar', [1, 0.5, True, np.float32(2)])
def test_rules_crashed_on_python_scalars(scalar):
    tree = {'step': scalar, 'w': leaf(8)}
    for rule in (
        FSDPShardingRule('fsdp', min_fsdp_size=0),
        TreePathShardingRule(('', P('fsdp'))),
        PolicyShardingRule(lambda path, x: P('fsdp') if x.shape else P()),
    ):
        assert rule.apply(tree)['step'] == P()
        assert HELPER.match_sharding_rule(rule, tree)['w'].spec == P('fsdp')


def test_fsdp_chose_among_equal_dimensions_by_the_processor():
    """It sorted with an unstable sort, so that hosts of different kinds could disagree."""
    for size in (None, 4):
        for rank in range(2, 9):
            assert FSDPShardingRule('fsdp', size, 0).apply(leaf(*[16] * rank))[0] == 'fsdp'


def test_an_axis_size_unlike_the_mesh_was_used_in_silence():
    with pytest.raises(ValueError, match="fsdp_axis_size is 8, but the mesh has 4 devices along 'fsdp'"):
        HELPER.match_sharding_rule(FSDPShardingRule('fsdp', 8, 0), leaf(8))


def test_invalid_regexes_failed_only_when_a_leaf_met_them():
    with pytest.raises(ValueError, match='invalid regex'):
        TreePathShardingRule(('(', P()))


def test_only_the_first_unmatched_leaf_was_named():
    with pytest.raises(ShardingError) as error:
        HELPER.match_sharding_rule(TreePathShardingRule(), {'a': leaf(8), 'b': leaf(8)})
    assert len(error.value.problems) == 2


def test_unused_rules_were_silent():
    report = HELPER.explain({'kernel': leaf(8)}, TreePathShardingRule(('kernal', P('tp')), ('', P())))
    assert report.unused_rules == ('kernal',)
    with pytest.raises(ShardingError, match="'kernal' matches nothing"):
        report.check(no_unused_rules=True)


# --- Resolving ------------------------------------------------------------------------------------


def test_named_shardings_were_not_accepted():
    sharding = NamedSharding(HELPER.mesh, P('tp'))
    tree = {'a': leaf(8), 'b': [leaf(4), leaf(2)]}
    assert HELPER.match_sharding_rule({'a': P(), 'b': sharding}, tree)['b'] == [sharding, sharding]
    with HELPER.get_context():
        assert with_sharding_constraint(np.zeros(8), sharding).sharding == sharding
    assert with_sharding_constraint(np.zeros(8), sharding).sharding == sharding


def test_indivisible_dimensions_failed_without_naming_the_leaf():
    with pytest.raises(ShardingError, match='layer/w: float32'):
        HELPER.match_sharding_rule(P('fsdp'), {'layer': {'w': leaf(6)}})


def test_trailing_none_made_unequal_shardings():
    """P('x') and P('x', None) cost a user of jax.jit two compilations."""
    fsdp = HELPER.match_sharding_rule(FSDPShardingRule(min_fsdp_size=0), leaf(8, 3))
    assert fsdp is HELPER.match_sharding_rule(P('fsdp'), leaf(8, 3))


# --- Meshes ---------------------------------------------------------------------------------------


def test_meshes_had_to_use_all_devices():
    helper = MeshShardingHelper([3], ['x'], devices=jax.devices()[2:5])
    assert list(helper.mesh.devices) == jax.devices()[2:5]


def test_explicit_meshes_failed():
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=AxisType.Explicit)
    x = helper.shard(np.arange(8.0), P('tp'))
    with helper.get_context({'h': P('fsdp')}):
        assert with_sharding_constraint(x, P('fsdp')).sharding.spec == P('fsdp')
        assert with_sharding_annotation(x, 'h').sharding.spec == P('fsdp')


def test_the_helpers_attributes_held_minus_one():
    assert MeshShardingHelper([-1, 2], ['a', 'b']).axis_dims == (4, 2)


# --- Data -----------------------------------------------------------------------------------------


def test_the_batch_had_to_divide_by_all_local_devices():
    array = HELPER.local_data_to_global_array(np.arange(4), mesh_axis_subset='fsdp')
    np.testing.assert_array_equal(array, np.arange(4))


@pytest.mark.parametrize('scalar', [3, np.float32(0.5), np.zeros(())])
def test_scalars_in_a_batch_failed(scalar):
    assert HELPER.local_data_to_global_array({'n': scalar})['n'] == scalar


def test_negative_batch_axes_failed():
    data = np.arange(16).reshape(2, 8)
    array = HELPER.local_data_to_global_array(data, batch_axis=-1)
    assert array.sharding.spec == P(None, ('fsdp', 'tp'))
    np.testing.assert_array_equal(array, data)


def test_rows_were_permuted_when_the_mesh_orders_devices_differently():
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    helper = MeshShardingHelper([8], ['data'], devices=[jax.devices()[i] for i in order])
    np.testing.assert_array_equal(helper.local_data_to_global_array(np.arange(8)), np.arange(8))


# --- Contexts and transfers -----------------------------------------------------------------------


def test_a_context_was_visible_in_other_threads():
    seen = []
    with HELPER.get_context(annotation_shardings={'h': P()}):
        thread = threading.Thread(target=lambda: seen.append((get_global_mesh(), get_global_mesh_helper())))
        thread.start()
        thread.join()
    assert seen == [(None, None)]


def test_inner_contexts_hid_outer_annotations():
    with HELPER.get_context({'p': P('fsdp')}), HELPER.get_context({'q': P('tp')}):
        assert get_global_annotation_shardings() == {'p': P('fsdp'), 'q': P('tp')}


def test_annotations_leaked_through_the_trace_cache_of_jax():
    inner = jax.jit(lambda x: with_sharding_annotation(x, 'h'))
    x = np.zeros(8, np.float32)
    for spec in (P('fsdp'), P('tp')):
        with HELPER.get_context({'h': spec}):
            assert jax.jit(lambda y: inner(y))(x).sharding.spec == spec


def test_sharding_and_gathering_compiled_once_for_each_leaf():
    compiled = []

    def listen(event, duration, **kwargs):
        if 'backend_compile' in event:
            compiled.append(event)

    tree = {f'w{i}': np.zeros((8, i + 1), np.float32) for i in range(6)}
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        shard_fns, gather_fns = HELPER.make_shard_and_gather_fns(tree, P('fsdp'))
        placed = HELPER.apply_shard_and_gather_fns(shard_fns, tree)
        HELPER.apply_shard_and_gather_fns(gather_fns, placed)
        HELPER.gather(HELPER.shard(tree, P('fsdp')))
        assert compiled == []
        jax.jit(lambda x: x + 12345)(1)
        assert compiled != []  # the listener works
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_gathering_left_arrays_on_devices_of_other_shardings():
    """It insisted that an array lay as the rule says, and compiled a resharding first."""
    _, gather_fns = HELPER.make_shard_and_gather_fns(leaf(8), P('fsdp'))
    there = HELPER.shard(np.arange(8), P('tp'))
    np.testing.assert_array_equal(gather_fns(there), np.arange(8))


def test_colliding_paths_lost_leaves():
    with pytest.raises(ValueError, match="two leaves have the path 'a/b'"):
        scalax.utils.flatten_tree({'a/b': 1, 'a': {'b': 2}}, sep='/')


# --- Names and call forms -------------------------------------------------------------------------

SIGNATURES = {
    'FSDPShardingRule': ['fsdp_axis_name', 'fsdp_axis_size', 'min_fsdp_size'],
    'PolicyShardingRule': ['policy'],
    'TreePathShardingRule': ['rules', 'strict'],
    'MeshShardingHelper': ['axis_dims', 'axis_names', 'mesh_axis_splitting'],
    'MeshShardingHelper.sjit': [
        *('self', 'fun', 'in_shardings', 'out_shardings', 'static_argnums'),
        *('args_sharding_constraint', 'annotation_shardings'),
    ],
    'MeshShardingHelper.match_sharding_rule': ['self', 'rules', 'tree'],
    'MeshShardingHelper.make_shard_and_gather_fns': ['self', 'tree', 'rules'],
    'MeshShardingHelper.apply_shard_and_gather_fns': ['fns', 'tree'],
    'MeshShardingHelper.local_data_to_global_array': ['self', 'tree', 'batch_axis', 'mesh_axis_subset'],
    'MeshShardingHelper.get_context': ['self', 'annotation_shardings'],
    'MeshShardingHelper.with_sharding_constraint': ['tree', 'rules'],
    'MeshShardingHelper.with_sharding_annotation': ['tree', 'sharding_name'],
    'MeshShardingHelper.get_global_mesh_helper': [],
    'MeshShardingHelper.get_global_mesh': [],
    'MeshShardingHelper.get_global_annotation_shardings': [],
    'with_sharding_constraint': ['tree', 'rules'],
    'with_sharding_annotation': ['tree', 'sharding_name'],
    'get_global_mesh_helper': [],
    'get_global_mesh': [],
    'get_global_annotation_shardings': [],
}


@pytest.mark.parametrize(('name', 'parameters'), SIGNATURES.items(), ids=SIGNATURES)
def test_names_and_parameters_of_0_2_5_are_there(name, parameters):
    found = scalax.sharding
    for part in name.split('.'):
        found = getattr(found, part)
    assert list(inspect.signature(found).parameters)[: len(parameters)] == parameters


X = np.zeros((8, 8), np.float32)
KEYWORDS = {
    'match_sharding_rule': ({'rules': P(), 'tree': X}, {'sharding_rules': P(), 'pytree': X}),
    'shard': ({'tree': X, 'rules': P()}, {'pytree': X, 'rules': P()}),
    'abstract': ({'tree': X, 'rules': P()}, {'pytree': X, 'rules': P()}),
    'explain': ({'tree': X, 'rules': P()}, {'pytree': X, 'rules': P()}),
    'visualize': ({'tree': X, 'rules': P()}, {'tree_or_array': X, 'rules': P()}),
    'gather': ({'tree': X}, {'pytree': X}),
    'make_shard_and_gather_fns': ({'tree': X, 'rules': P()}, {'pytree': X, 'sharding_rule': P()}),
    'apply_shard_and_gather_fns': ({'fns': np.abs, 'tree': X}, {'fns': np.abs, 'pytree': X}),
    'local_data_to_global_array': ({'tree': X}, {'pytree': X}),
    'with_sharding_constraint': ({'tree': X, 'rules': P()}, {'pytree': X, 'sharding_rule': P()}),
    'with_sharding_annotation': ({'tree': X, 'sharding_name': 'a'}, {'pytree': X, 'sharding_name': 'a'}),
}


@pytest.mark.parametrize('name', KEYWORDS)
def test_keywords_have_one_name_and_the_old_ones_are_taken(name):
    """`tree` and `rules` everywhere; 0.2.5 called them this here and that there."""
    helper = MeshShardingHelper([4, 2], ['a', 'b'])
    new, old = KEYWORDS[name]
    with helper.get_context():
        results = [getattr(helper, name)(**keywords) for keywords in (new, old)]
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    for both in ({**new, **old}, {**new, 'tee': X}) if new != old else ():
        with pytest.raises(TypeError, match='unexpected keyword argument'):
            getattr(helper, name)(**both)


def test_other_names_of_0_2_5_are_there():
    for name in ('Mesh', 'NamedSharding', 'PartitionSpec', 'ShardingRule'):
        assert name in scalax.sharding.__all__
    utils = ['JaxRNG', 'get_float_dtype_by_name', 'float_tensor_to_dtype', 'float_to_dtype']
    utils += ['tree_path_to_string', 'flatten_tree', 'named_tree_map', 'print_pytree_structure']
    assert {*utils} <= {*scalax.utils.__all__}
