"""`MeshShardingHelper`: sharding and gathering trees, abstract trees, reports, abstract meshes."""

import json
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.axes import axis_mapping
from scalax.custom_op import sharded_op
from scalax.errors import ArgumentError, DataError, MeshError, RuleError, ShardingError, StructureError
from scalax.sharding import (
    FSDPShardingRule,
    LogicalAxisShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
    with_sharding_annotation,
)

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
ABSTRACT = MeshShardingHelper.from_mesh(HELPER.mesh.abstract_mesh)
EXPLICIT = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=AxisType.Explicit)
MIXED = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=(AxisType.Explicit, AxisType.Auto))


def make_tree():
    return {
        'kernel': np.arange(128, dtype=np.float32).reshape(8, 16),
        'half': jnp.arange(8, dtype=jnp.bfloat16),
        'rng': jax.random.split(jax.random.key(0), 8),
        'count': 3,
        'rate': 0.5,
        'nothing': None,
    }


RULE = TreePathShardingRule(('kernel', P('fsdp', 'tp')), ('half', P('tp')), ('rng', P('fsdp')))


@pytest.mark.parametrize(
    ('helper', 'text'),
    [
        (HELPER, 'MeshShardingHelper(fsdp=4, tp=2)'),
        (ABSTRACT, 'MeshShardingHelper(fsdp=4, tp=2)'),
        (EXPLICIT, 'MeshShardingHelper(fsdp=4, tp=2; Explicit, Explicit)'),
        (MIXED, 'MeshShardingHelper(fsdp=4, tp=2; Explicit, Auto)'),
        (MeshShardingHelper([], [], devices=jax.devices()[:1]), 'MeshShardingHelper()'),
    ],
)
def test_repr(helper, text):
    assert repr(helper) == text


def test_the_helper_is_one_class():
    assert MeshShardingHelper.__mro__ == (MeshShardingHelper, object)
    assert pickle.loads(pickle.dumps(MeshShardingHelper)) is MeshShardingHelper
    # The docstring of the class lists the kinds of rules.
    for kind in ('ShardingRule', 'PartitionSpec', 'NamedSharding', 'None', 'prefix'):
        assert kind in MeshShardingHelper.__doc__


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (
            lambda: MeshShardingHelper([8], ['data'], axis_type=AxisType.Auto),
            "MeshShardingHelper.__init__() got an unexpected keyword argument 'axis_type'",
        ),
        (
            lambda: HELPER.gather(),
            "MeshShardingHelper.gather() missing 1 required positional argument: 'tree'",
        ),
    ],
)
def test_errors_about_calls_name_the_public_class(call, message):
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value).startswith(message)  # Python may add a suggestion


OPTIONS = {
    'splitting': lambda flag: MeshShardingHelper([8], ['data'], flag),
    'quick': lambda flag: HELPER.plan(lambda x: x, 1.0, quick=flag),
    'check': lambda flag: HELPER.local_data_to_global_array(np.ones(8), check=flag),
    'check_replicas': lambda flag: HELPER.local_data_to_global_array(np.ones(8), check_replicas=flag),
    'prefetch': lambda flag: HELPER.prefetch([], check=flag),
    'check_vma': lambda flag: HELPER.shard_map(lambda x: x, P(), P(), check_vma=flag),
    'merge': lambda flag: axis_mapping({}, merge=flag).__enter__(),
    'sharded_op': lambda flag: sharded_op('a -> a', check_vma=flag),
    'strict': lambda flag: TreePathShardingRule(('', P()), strict=flag),
    'strict names': lambda flag: LogicalAxisShardingRule({}, strict=flag),
}


@pytest.mark.parametrize('call', OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize('flag', ['no', 'False', 2, []])
def test_flags_have_to_be_booleans(call, flag):
    with pytest.raises((ArgumentError, RuleError), match=re.escape(f'is True or False, got {flag!r}')):
        call(flag)


def test_flags_may_be_numpy_booleans():
    rule = TreePathShardingRule(('x', P()), strict=np.bool_(False))
    assert (rule.strict, type(rule.strict)) == (False, bool)


# --- Placing and fetching -------------------------------------------------------------------------


@pytest.mark.parametrize('helper', [HELPER, EXPLICIT, MIXED], ids=repr)
def test_shard_places_and_gather_fetches(helper):
    tree = make_tree()
    placed = helper.shard(tree, RULE)
    shardings = helper.match_sharding_rule(RULE, tree)
    assert jax.tree.map(lambda x: x.sharding, placed) == shardings
    assert placed['kernel'].addressable_shards[0].data.shape == (2, 8)
    assert placed['nothing'] is None
    assert (placed['half'].dtype, placed['count'].dtype) == (jnp.bfloat16, np.int32)

    back = helper.gather(placed)
    assert {type(leaf) for name, leaf in back.items() if name not in ('rng', 'nothing')} == {np.ndarray}
    assert back['rng'].dtype == tree['rng'].dtype
    for name in ('kernel', 'half', 'count', 'rate'):
        np.testing.assert_array_equal(back[name], tree[name])


def test_gather_leaves_other_leaves_alone():
    tree = {'x': HELPER.shard(np.arange(8), P('fsdp')), 'name': 'adam', 'host': np.ones(2), 'f': len}
    back = HELPER.gather(tree)
    assert all(back[name] is tree[name] for name in ('name', 'host', 'f'))
    assert isinstance(back['x'], np.ndarray)


def test_shard_moves_arrays_from_other_devices():
    tree = make_tree()
    there = HELPER.shard(HELPER.shard(tree, P()), RULE)
    other = MeshShardingHelper([2], ['x'], devices=jax.devices()[6:])
    back = other.shard(there['kernel'], P(None, 'x'))
    assert back.sharding.device_set == set(jax.devices()[6:])
    np.testing.assert_array_equal(back, tree['kernel'])


def test_shard_transfers_the_tree_at_once_and_only_after_all_checks(monkeypatch):
    calls = []
    put = jax.device_put
    monkeypatch.setattr(jax, 'device_put', lambda *args: calls.append(args) or put(*args))
    HELPER.shard(make_tree(), RULE)
    assert len(calls) == 1
    with pytest.raises(ShardingError):
        HELPER.shard({'good': np.zeros(8), 'bad': np.zeros(3)}, P('fsdp'))
    with pytest.raises(StructureError):
        HELPER.shard({'good': np.zeros(8)}, {'other': P()})
    assert len(calls) == 1


def test_shapes_cannot_be_placed(snapshot):
    tree = {
        'a': jax.ShapeDtypeStruct((8,), 'float32'),
        'b': np.zeros(8),
        'c': jax.ShapeDtypeStruct((), 'int8'),
    }
    with snapshot.raises(ShardingError):
        HELPER.shard(tree, P())


@pytest.mark.parametrize('call', [HELPER.shard, HELPER.abstract], ids=['shard', 'abstract'])
def test_integers_of_more_bits_than_jax_has(call, snapshot):
    tree = {'a': 2**31, 'b': 2**31 - 1, 'c': -(2**31), 'd': -(2**31) - 1, 'e': True}
    with snapshot.raises(ShardingError):
        call(tree, P())
    with jax.enable_x64(True):
        assert call(tree, P())['a'].dtype == 'int64'


def test_memory_kinds():
    tree = {'w': np.ones(8, np.float32)}
    host = NamedSharding(HELPER.mesh, P('fsdp'), memory_kind='pinned_host')
    for rule in (host, TreePathShardingRule(('w', host)), PolicyShardingRule(lambda path, x: host)):
        assert HELPER.shard(tree, rule)['w'].sharding == host
    assert HELPER.explain(tree, host).rows[0].memory_kind == 'pinned_host'
    default = NamedSharding(HELPER.mesh, P('fsdp'))
    assert HELPER.match_sharding_rule(default, tree)['w'] is HELPER.match_sharding_rule(P('fsdp'), tree)['w']


def test_functions_that_shard_and_gather():
    tree = make_tree()
    shard_fns, gather_fns = HELPER.make_shard_and_gather_fns(tree, RULE)
    placed = HELPER.apply_shard_and_gather_fns(shard_fns, tree)
    assert jax.tree.map(lambda x: x.sharding, placed) == HELPER.match_sharding_rule(RULE, tree)
    kernel = shard_fns['kernel'](tree['kernel'])
    assert kernel.sharding == placed['kernel'].sharding
    back = MeshShardingHelper.apply_shard_and_gather_fns(gather_fns, placed)
    assert isinstance(back['kernel'], np.ndarray)
    np.testing.assert_array_equal(back['kernel'], tree['kernel'])


def test_functions_for_another_tree(snapshot):
    functions, _ = HELPER.make_shard_and_gather_fns({'a': np.zeros(8)}, P())
    with snapshot.raises(StructureError):
        HELPER.apply_shard_and_gather_fns(functions, {'b': np.zeros(8)})


# --- Abstract trees and meshes --------------------------------------------------------------------


@pytest.mark.parametrize('helper', [HELPER, EXPLICIT, MIXED, ABSTRACT], ids=repr)
def test_abstract(helper):
    tree = make_tree()
    abstract = helper.abstract(tree, RULE)
    assert jax.tree.structure(abstract) == jax.tree.structure(tree)
    assert {type(leaf) for leaf in jax.tree.leaves(abstract)} == {jax.ShapeDtypeStruct}
    assert jax.tree.map(lambda x: x.sharding, abstract) == helper.match_sharding_rule(RULE, tree)
    assert (abstract['count'].shape, abstract['count'].dtype) == ((), np.int32)
    assert (abstract['rng'].shape, abstract['rng'].dtype) == ((8,), tree['rng'].dtype)
    # `abstract` accepts its own results.
    assert jax.tree.leaves(helper.abstract(abstract, RULE)) == jax.tree.leaves(abstract)


def test_an_x64_array_keeps_its_dtype_without_x64():
    with jax.enable_x64(True):
        wide = HELPER.shard({'a': np.ones(8)}, P('fsdp'))
    dtypes = [np.float64, np.float32]
    tree = {**wide, 'b': np.ones(8)}  # numpy data are narrowed when they are placed
    assert [leaf.dtype for leaf in jax.tree.leaves(HELPER.shard(tree, P('fsdp')))] == dtypes
    assert [x.dtype for x in jax.tree.leaves(HELPER.abstract(tree, P('fsdp')))] == dtypes
    rows = HELPER.explain(tree, P('fsdp')).rows
    assert [(row.dtype, row.bytes) for row in rows] == [('float64', 64), ('float32', 32)]


def test_abstract_meshes_support_everything_without_devices():
    mesh = AbstractMesh((4096, 8), ('fsdp', 'tp'), axis_types=(AxisType.Auto,) * 2)
    pod = MeshShardingHelper.from_mesh(mesh, on_indivisible='replicate')
    tree = {'w': jax.ShapeDtypeStruct((8192, 64), 'float32'), 'v': jax.ShapeDtypeStruct((12, 4), 'float32')}
    assert pod.match_sharding_rule(P('fsdp', 'tp'), tree)['w'].shard_shape((8192, 64)) == (2, 8)
    assert pod.explain(tree, P('fsdp')).bytes_per_device == 2 * 64 * 4 + 12 * 4 * 4
    assert pod.mesh == mesh
    assert pod.on_indivisible == 'replicate'


@pytest.mark.parametrize(
    ('name', 'call'),
    [
        ('shard', lambda: ABSTRACT.shard(np.zeros(8), P())),
        ('make_shard_and_gather_fns', lambda: ABSTRACT.make_shard_and_gather_fns(np.zeros(8), P())),
        ('local_data_to_global_array', lambda: ABSTRACT.local_data_to_global_array(np.zeros(8))),
    ],
)
def test_errors_about_missing_devices(name, call):
    with pytest.raises(MeshError) as error:
        call()
    assert str(error.value) == (
        f'{name} needs devices to run on, and this helper was made from an AbstractMesh, which has none: use '
        'a helper over a Mesh'
    )


# --- Reports --------------------------------------------------------------------------------------

STATE = {
    'dense': {'kernel': np.zeros((8, 16), np.float32), 'bias': np.zeros(16, np.float32)},
    'odd': np.zeros((6, 4)),
    'step': 0,
}
RULES = TreePathShardingRule(
    ('kernel', P('fsdp', 'tp')),
    ('dense/kernel', P()),
    ('qkv', P('tp')),
    ('odd', P('fsdp')),
    ('step', P()),
    ('', P('tp')),
    on_indivisible='replicate',
)


def test_report_values():
    report = HELPER.explain(STATE, RULES)
    rows = {row.path: row for row in report.rows}
    assert list(rows) == ['dense/bias', 'dense/kernel', 'odd', 'step']
    kernel = rows['dense/kernel']
    assert (kernel.shape, kernel.dtype, kernel.spec) == ((8, 16), 'float32', P('fsdp', 'tp'))
    assert (kernel.rule, kernel.reason) == ("regex 'kernel'", '')
    assert (kernel.bytes, kernel.bytes_per_device, kernel.is_replicated) == (512, 64, False)
    assert rows['odd'].reason == "asked for P('fsdp',), but a dimension is not divisible"
    assert rows['odd'].dtype == 'float32'  # the dtype of a float64 NumPy array on a device
    assert (report.bytes, report.bytes_per_device) == (512 + 64 + 96 + 4, 64 + 32 + 96 + 4)
    assert (report.replicated.paths, report.replicated.bytes) == (('odd', 'step'), 100)
    assert (report.unused_rules, report.shadowed_rules) == (('qkv',), ('dense/kernel',))


def test_report_text(monkeypatch, snapshot):
    monkeypatch.setenv('COLUMNS', '100')
    snapshot(HELPER.explain(STATE, RULES))


def test_report_of_what_the_compiler_decides():
    report = HELPER.explain(
        {'a': np.zeros(8, np.int8), 'b': np.zeros((8, 8), np.int8)}, {'a': P('tp'), 'b': None}
    )
    assert [(row.spec, row.rule, row.reason) for row in report.rows] == [
        (P('tp'), 'the spec given', ''),
        (None, '', 'left to the compiler'),
    ]
    assert report.replicated.paths == ()


def test_report_as_plain_values():
    as_dict = HELPER.explain(STATE, RULES).to_dict()
    assert json.loads(json.dumps(as_dict)) == as_dict
    assert as_dict['mesh'] == {'fsdp': 4, 'tp': 2}
    assert as_dict['rows'][1]['spec'] == ['fsdp', 'tp']
    several = HELPER.explain(np.zeros((4, 8)), P(None, ('fsdp', 'tp'))).to_dict()['rows'][0]
    assert (several['spec'], several['bytes_per_device']) == ([None, ['fsdp', 'tp']], 16)


def test_regexes_of_nested_rules_and_of_subtrees_are_counted():
    inner = TreePathShardingRule(('^layer/w$', P('fsdp')), ('bias', P()), ('^layer/', P()))
    outer = TreePathShardingRule(('layer', inner), ('step', P()))
    tree = {'layer': {'w': np.zeros(8), 'b': np.zeros(8)}, 'step': 1}
    for report in (HELPER.explain(tree, outer), HELPER.explain({'at': tree}, {'at': outer})):
        assert (report.unused_rules, report.shadowed_rules) == (('bias',), ())


def test_a_forgotten_rule_is_reported():
    params = {f'layer{i}': {'w': np.zeros((64, 64), np.float32)} for i in range(4)}
    assert not HELPER.explain(params, FSDPShardingRule(min_fsdp_size=0)).replicated.bytes
    forgotten = TreePathShardingRule(('layer[0-2]', FSDPShardingRule(min_fsdp_size=0)), strict=False)
    report = HELPER.explain(params, forgotten).replicated
    assert (report.bytes, report.paths) == (16384, ('layer3/w',))


# --- Call forms -----------------------------------------------------------------------------------


def test_rules_of_users_serve_everywhere():
    class Rows(ShardingRule):
        def apply(self, pytree):
            return jax.tree.map(lambda x: P('fsdp') if np.ndim(x) else P(), pytree)

    tree = {'w': np.zeros((8, 2), np.float32), 'n': 1}
    assert HELPER.shard(tree, Rows())['w'].sharding.spec == P('fsdp')
    assert HELPER.abstract(tree, Rows())['w'].sharding.spec == P('fsdp')
    assert [row.rule for row in HELPER.explain(tree, Rows()).rows] == ['Rows', 'Rows']


def test_unknown_policies_are_found_at_construction():
    for make in (
        lambda: MeshShardingHelper([8], ['x'], on_indivisible='ignore'),
        lambda: MeshShardingHelper.from_mesh(HELPER.mesh, on_indivisible='ignore'),
    ):
        with pytest.raises(RuleError):
            make()


def test_sharding_and_gathering_compile_nothing():
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


def test_gathering_takes_arrays_of_any_sharding():
    _, gather_fns = HELPER.make_shard_and_gather_fns(np.zeros(8), P('fsdp'))
    there = HELPER.shard(np.arange(8), P('tp'))
    np.testing.assert_array_equal(gather_fns(there), np.arange(8))


@pytest.mark.parametrize('move', [lambda x: HELPER.shard(x, P('fsdp')), HELPER.local_data_to_global_array])
def test_moving_a_traced_value_is_an_error(move):
    for compile_ in (jax.jit, HELPER.sjit):
        with pytest.raises(ArgumentError, match='use with_sharding_constraint there'):
            compile_(move)(np.zeros(8))


@pytest.mark.parametrize(
    ('call', 'kind', 'message'),
    [
        (
            lambda: HELPER.local_data_to_global_array(np.zeros(8), 'fsdp'),
            DataError,
            "batch_axis is an integer, got 'fsdp' (mesh axes go to mesh_axis_subset)",
        ),
        (
            lambda: HELPER.local_data_to_global_array(np.zeros(8), mesh_axis_subset=3),
            ArgumentError,
            "mesh_axis_subset are names of mesh axes, such as ('fsdp',), got 3",
        ),
        (
            lambda: MeshShardingHelper([8], ['a'], axis_types=3),
            MeshError,
            "axis_types is one jax.sharding.AxisType for all axes or one for each of ('a',), got 3",
        ),
        (
            lambda: with_sharding_annotation('h', np.zeros(8)),
            ArgumentError,
            'with_sharding_annotation(tree, name): the name is a string, got ndarray',
        ),
    ],
)
def test_swapped_and_mistyped_arguments(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message


def test_an_unknown_memory_names_the_leaf_and_the_rule():
    rule = TreePathShardingRule(('w', P('fsdp'))).with_memory_kind('pined_host')
    with pytest.raises(ShardingError) as error:
        HELPER.match_sharding_rule(rule, {'a': {'w': np.zeros((8, 8), np.float32)}})
    (problem,) = error.value.problems
    assert (problem.kind, problem.leaf, problem.rule) == ('memory-kind', 'a/w: float32[8, 8]', "regex 'w'")
    assert problem.detail.startswith("the devices have no memory 'pined_host'; JAX reports: ")
