"""What an acceptance review found: each test is a way in which something was once wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from scalax.errors import ArgumentError, DataError, MeshError, ShardingError, StructureError
from scalax.sharding import (
    FSDPShardingRule,
    LogicalAxisShardingRule,
    MeshShardingHelper,
    PartitionSpec,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
    with_sharding_annotation,
)

P = PartitionSpec
HELPER = MeshShardingHelper([4, 2], ['data', 'model'])
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def test_a_tree_in_place_of_rules_is_an_error_also_after_a_good_call():
    tree, rules = {'a': X, 'b': X[0]}, {'a': P(), 'b': P()}
    HELPER.match_sharding_rule(rules, tree)
    with pytest.raises(StructureError, match='the wrong way round'):
        HELPER.match_sharding_rule(tree, rules)


@pytest.mark.filterwarnings('ignore:Explicitly requested dtype')  # JAX says so, and goes on
@pytest.mark.parametrize('question', ['lower', 'trace', 'eval_shape', 'shardings_for'])
def test_structs_of_wide_dtypes(question):
    compiled = HELPER.sjit(lambda x: x * 2, P('data'))
    getattr(compiled, question)(jax.ShapeDtypeStruct((8,), np.float64))
    assert HELPER.abstract(np.ones(8), P('data')).dtype == np.float32


def test_structures_that_do_not_fit_name_every_argument():
    compiled = HELPER.sjit(
        lambda state, batch: batch, ({'a': P()}, {'a': P(), 'b': P()}), args_sharding_constraint=None
    )
    with pytest.raises(StructureError) as error:
        compiled({'b': X}, {'a': X, 'c': X})
    assert str(error.value) == (
        "the rules do not have the structure of 'state' of the arguments of '<lambda>' (in_shardings) at "
        "its root: there is no rule for 'b'; the tree has nothing called 'a' (known: 'b'). Give one rule "
        'for each subtree (in sjit, None leaves one to the compiler).\n'
        "the rules do not have the structure of 'batch' of the arguments of '<lambda>' (in_shardings) at "
        "its root: there is no rule for 'c'; the tree has nothing called 'b' (known: 'a', 'c'). Give one "
        'rule for each subtree (in sjit, None leaves one to the compiler).'
    )


@pytest.mark.parametrize('move', [lambda x: HELPER.shard(x, P('data')), HELPER.local_data_to_global_array])
def test_moving_a_traced_value_is_an_error(move):
    for compile_ in (jax.jit, HELPER.sjit):
        with pytest.raises(ArgumentError, match='use with_sharding_constraint there'):
            compile_(move)(X)


@pytest.mark.parametrize(
    'rule',
    [
        TreePathShardingRule(('x', P()), strict=False),
        FSDPShardingRule(),
        PolicyShardingRule(lambda path, leaf: P()),
    ],
)
def test_rules_refuse_leaves_that_are_not_arrays(rule):
    with pytest.raises(ShardingError) as error:
        rule.apply({'dtype': 'float32', 'act': len, 'w': X})
    assert [problem.leaf for problem in error.value.problems] == [
        'act: builtin_function_or_method',
        'dtype: str',
    ]


def test_manual_and_empty_meshes_are_refused():
    message = 'axes of type Manual exist inside shard_map only: use Auto or Explicit'
    manual = AbstractMesh((8,), ('a',), axis_types=(AxisType.Manual,))
    for make in (
        lambda: MeshShardingHelper([8], ['a'], axis_types=AxisType.Manual),
        lambda: MeshShardingHelper.from_mesh(manual),
    ):
        with pytest.raises(MeshError) as error:
            make()
        assert str(error.value) == message
    with pytest.raises(MeshError, match='from_mesh got the empty mesh'):
        MeshShardingHelper.from_mesh(jax.sharding.get_mesh())


@pytest.mark.parametrize(
    ('call', 'kind', 'message'),
    [
        (
            lambda: HELPER.local_data_to_global_array(X, 'data'),
            DataError,
            "batch_axis is a whole number, got 'data' (mesh axes go to mesh_axis_subset)",
        ),
        (
            lambda: HELPER.local_data_to_global_array(X, mesh_axis_subset=3),
            MeshError,
            'mesh axes are named by a string or a sequence of them, got 3',
        ),
        (
            lambda: MeshShardingHelper([8], ['a'], axis_types=3),
            MeshError,
            "axis_types is one jax.sharding.AxisType for all axes or one for each of ('a',), got 3",
        ),
        (
            lambda: with_sharding_annotation('h', X),
            ArgumentError,
            'with_sharding_annotation(tree, name): the name is a string, got ndarray',
        ),
    ],
)
def test_swapped_and_mistyped_arguments(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message


def test_debug_nans_finds_the_line_for_host_data_too():
    log = HELPER.sjit(lambda x: jnp.log(x), P('data'))
    log(np.ones(8, np.float32))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match='invalid value'):
        log(-np.ones(8, np.float32))


@pytest.mark.parametrize('types', [AxisType.Explicit, (AxisType.Explicit, AxisType.Auto)])
def test_disable_jit_on_explicit_axes(types):
    helper = MeshShardingHelper([4, 2], ['data', 'model'], axis_types=types)
    double = helper.sjit(lambda x: x * 2, P('data'))
    with jax.disable_jit():
        np.testing.assert_array_equal(double(helper.shard(X, P('data'))), X * 2)


def test_lower_on_an_abstract_mesh_says_what_to_do_instead():
    mesh = AbstractMesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
    compiled = MeshShardingHelper.from_mesh(mesh).sjit(lambda x: x * 2, P('data'))
    with pytest.raises(MeshError) as error:
        compiled.lower(jax.ShapeDtypeStruct((8,), np.float32))
    assert str(error.value) == (
        'lower() needs devices, and this helper was made from an AbstractMesh: use '
        ".trace(...).lower(lowering_platforms=('tpu',))"
    )


def test_a_users_rule_sees_a_shape_on_every_leaf():
    class ByRank(ShardingRule):
        def apply(self, pytree):
            return jax.tree.map(lambda leaf: P('data') if leaf.ndim else P(), pytree)

    shardings = HELPER.match_sharding_rule(ByRank(), {'w': X, 'step': 0})
    assert shardings['step'].spec == P() and shardings['w'].spec == P('data')


def test_the_report_has_its_rules_below_it_where_there_is_no_room():
    tree = {'layers': {'attention': {'query': {'kernel': jax.ShapeDtypeStruct((64, 64), jnp.float32)}}}}
    report = HELPER.explain(tree, TreePathShardingRule(('query/kernel', P('data', 'model'))))
    narrow, wide = report.to_text(80), report.to_text(160)
    assert 'layers/attention/query/kernel' in narrow
    assert '2.0 KiB  [1]' in narrow and "\n[1] regex 'query/kernel'\n" in narrow
    assert "2.0 KiB  regex 'query/kernel'" in wide
    assert all(len(line) <= 80 for line in narrow.splitlines())


def test_what_a_report_calls_shadowed_and_unused():
    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    tree = {'stack': {'w': struct(8, 4, 4), 'scale': struct(8)}, 'small': struct(4), 'odd': struct(8)}
    rules = TreePathShardingRule(
        ('^stack', TreePathShardingRule(('w$', P('model')), ('scale', P())).stacked(1)),
        ('small', FSDPShardingRule('data') | P()),
        ('odd', P()),
        ('odd$', P('data')),
        ('missing', P()),
    )
    report = HELPER.explain(tree, rules)
    assert (report.unused_rules, report.shadowed_rules) == (('missing',), ('odd$',))
    named = LogicalAxisShardingRule({'rows': 'data'}, [('odd', 'rows'), ('none', 'rows')], strict=False)
    assert HELPER.explain(tree, named | P()).unused_rules == ('none',)


def test_an_unknown_memory_names_the_leaf_and_the_rule():
    rule = TreePathShardingRule(('w', P('data'))).with_memory_kind('pined_host')
    with pytest.raises(ShardingError) as error:
        HELPER.match_sharding_rule(rule, {'a': {'w': X}})
    (problem,) = error.value.problems
    assert (problem.kind, problem.leaf, problem.rule) == ('memory-kind', 'a/w: float32[8, 8]', "regex 'w'")
    assert problem.detail.startswith("the devices have no memory 'pined_host'; JAX says: ")
