"""Conformance with the sharding guide of scalax 0.2.5: each function, parameter and result that it documents.

The tests follow the guide, heading by heading. Where this version differs on purpose, the test asserts what
this version does, and the section "scalax 0.2.5" of docs/coming_from.md says so.

The tests of this folder are promises to the users of these documents: a test is deleted or weakened only with
a line in the changelog that says who loses what.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import scalax.sharding
from scalax.errors import RuleError, ShardingError
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
    with_sharding_annotation,
    with_sharding_constraint,
)

P = PartitionSpec
PARAMS = {'wq': np.ones((16, 8), np.float32), 'norm': np.ones(8, np.float32)}
BATCH = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.fixture
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def named(helper: MeshShardingHelper, *spec: object) -> NamedSharding:
    return NamedSharding(helper.mesh, P(*spec))


class TestSharding:
    """# Sharding"""

    @pytest.mark.parametrize(
        'name',
        [
            'MeshShardingHelper',
            'with_sharding_constraint',
            'with_sharding_annotation',
            'ShardingRule',
            'FSDPShardingRule',
            'TreePathShardingRule',
            'PolicyShardingRule',
        ],
    )
    def test_names_are_in_scalax_sharding(self, name: str) -> None:
        assert name in scalax.sharding.__all__
        assert inspect.getdoc(getattr(scalax.sharding, name))


class TestMeshShardingHelperConstructor:
    """## Class `MeshShardingHelper`, ### Constructor"""

    @pytest.mark.parametrize('container', [list, tuple])
    def test_axis_dims_and_axis_names(self, container: type) -> None:
        helper = MeshShardingHelper(container([2, 4]), container(['a', 'b']))
        assert dict(helper.mesh.shape) == {'a': 2, 'b': 4}

    def test_keywords(self) -> None:
        helper = MeshShardingHelper(axis_dims=[2, 4], axis_names=['a', 'b'], mesh_axis_splitting=False)
        assert helper.mesh.axis_names == ('a', 'b')

    @pytest.mark.parametrize(('dims', 'sizes'), [([-1], (8,)), ([2, -1], (2, 4)), ([-1, 2, 2], (2, 2, 2))])
    def test_one_axis_dim_can_be_inferred(self, dims: list[int], sizes: tuple[int, ...]) -> None:
        names = ['x', 'y', 'z'][: len(dims)]
        assert MeshShardingHelper(dims, names).mesh.axis_sizes == sizes

    def test_as_many_names_as_dims(self) -> None:
        with pytest.raises(ValueError, match='axis_dims'):
            MeshShardingHelper([8], ['a', 'b'])

    @pytest.mark.parametrize('splitting', [False, True])
    def test_mesh_axis_splitting(self, splitting: bool) -> None:
        helper = MeshShardingHelper([4, 2], ['a', 'b'], splitting)  # the third by position
        assert dict(helper.mesh.shape) == {'a': 4, 'b': 2}

    def test_mesh_axis_splitting_defaults_to_false(self) -> None:
        assert inspect.signature(MeshShardingHelper).parameters['mesh_axis_splitting'].default is False


class TestMethodSjit:
    """### Method `sjit`"""

    def test_order_of_the_parameters(self) -> None:
        assert list(inspect.signature(MeshShardingHelper.sjit).parameters)[:7] == [
            'self',
            'fun',
            'in_shardings',
            'out_shardings',
            'static_argnums',
            'args_sharding_constraint',
            'annotation_shardings',
        ]

    def test_fun(self, helper: MeshShardingHelper) -> None:
        np.testing.assert_array_equal(helper.sjit(lambda x: x + 1)(BATCH), BATCH + 1)

    @pytest.mark.parametrize('rule', [FSDPShardingRule(min_fsdp_size=0), P('fsdp'), P(None, 'tp')], ids=repr)
    def test_in_shardings(self, helper: MeshShardingHelper, rule: object) -> None:
        step = helper.sjit(lambda x: x, in_shardings=(rule,))
        (sharding,), _ = step.shardings_for(BATCH)
        assert sharding == helper.match_sharding_rule(rule, BATCH)

    def test_in_shardings_of_a_rule_for_each_argument(self, helper: MeshShardingHelper) -> None:
        rule = TreePathShardingRule(('wq', P('fsdp', 'tp')), ('.*', P()))
        step = helper.sjit(lambda params, batch: batch, in_shardings=(rule, P('fsdp')))
        (params, batch), _ = step.shardings_for(PARAMS, BATCH)
        assert params == {'wq': named(helper, 'fsdp', 'tp'), 'norm': named(helper)}
        assert batch == named(helper, 'fsdp')

    def test_in_shardings_none_is_inferred(self, helper: MeshShardingHelper) -> None:
        placed = helper.shard(BATCH, P('fsdp', 'tp'))
        out = helper.sjit(lambda x, y: x + 1, in_shardings=(None, P()))(placed, BATCH)
        assert out.sharding.is_equivalent_to(placed.sharding, 2)

    def test_out_shardings(self, helper: MeshShardingHelper) -> None:
        rule = FSDPShardingRule(min_fsdp_size=0)
        one, two = helper.sjit(lambda x: (x, x.T), out_shardings=(P('tp'), rule))(BATCH)
        assert one.sharding == named(helper, 'tp')
        assert two.sharding == named(helper, None, 'fsdp')

    def test_out_shardings_none_is_inferred(self, helper: MeshShardingHelper) -> None:
        step = helper.sjit(lambda x: (x + 1, x), in_shardings=P('fsdp'), out_shardings=(None, P()))
        inferred, replicated = step(BATCH)
        assert inferred.sharding.is_equivalent_to(named(helper, 'fsdp'), 2)
        assert replicated.sharding == named(helper)

    def test_static_argnums(self, helper: MeshShardingHelper) -> None:
        step = helper.sjit(lambda x, n: x * n if n > 1 else x, in_shardings=(P('fsdp'),), static_argnums=(1,))
        np.testing.assert_array_equal(step(BATCH, 3), 3 * BATCH)
        np.testing.assert_array_equal(step(BATCH, 1), BATCH)

    @pytest.mark.parametrize(
        'rule', [P('fsdp', 'tp'), TreePathShardingRule(('.*', P('fsdp', 'tp')))], ids=['spec', 'rule']
    )
    def test_args_sharding_constraint(self, helper: MeshShardingHelper, rule: object) -> None:
        step = helper.sjit(lambda x: x, in_shardings=(P(),), args_sharding_constraint=(rule,))
        assert step(BATCH).sharding.is_equivalent_to(named(helper, 'fsdp', 'tp'), 2)

    def test_args_sharding_constraint_none_is_inferred(self, helper: MeshShardingHelper) -> None:
        step = helper.sjit(
            lambda x, y: (x, y), in_shardings=(P('tp'), P()), args_sharding_constraint=(None, P('fsdp'))
        )
        one, two = step(BATCH, BATCH)
        assert one.sharding.is_equivalent_to(named(helper, 'tp'), 2)
        assert two.sharding.is_equivalent_to(named(helper, 'fsdp'), 2)

    @pytest.mark.parametrize(
        'rule', [P(None, 'tp'), TreePathShardingRule(('.*', P(None, 'tp')))], ids=['spec', 'rule']
    )
    def test_annotation_shardings(self, helper: MeshShardingHelper, rule: object) -> None:
        step = helper.sjit(
            lambda x: with_sharding_annotation(x + 1, 'hidden'), annotation_shardings={'hidden': rule}
        )
        assert step(BATCH).sharding.is_equivalent_to(named(helper, None, 'tp'), 2)

    def test_all_by_position(self, helper: MeshShardingHelper) -> None:
        step = helper.sjit(
            lambda x, n: with_sharding_annotation(x, 'out') * n,
            (P('fsdp'),),
            P(None, 'tp'),
            (1,),
            (P('tp'),),
            {'out': P()},
        )
        out = step(BATCH, 2)
        np.testing.assert_array_equal(out, 2 * BATCH)
        assert out.sharding == named(helper, None, 'tp')

    def test_returns_a_compiled_function(self, helper: MeshShardingHelper) -> None:
        traces = []
        step = helper.sjit(lambda x: traces.append(x) or x + 1)
        for _ in range(3):
            np.testing.assert_array_equal(step(BATCH), BATCH + 1)
        assert len(traces) == 1


class TestMethodMatchShardingRule:
    """### Method `match_sharding_rule`"""

    @pytest.mark.parametrize(
        'keywords', [('rules', 'tree'), ('sharding_rules', 'pytree')], ids=['now', '0.2.5']
    )
    def test_parameters(self, helper: MeshShardingHelper, keywords: tuple[str, str]) -> None:
        found = helper.match_sharding_rule(**dict(zip(keywords, (P('fsdp'), BATCH), strict=True)))
        assert found == named(helper, 'fsdp')

    def test_a_rule(self, helper: MeshShardingHelper) -> None:
        found = helper.match_sharding_rule(FSDPShardingRule(min_fsdp_size=16), PARAMS)
        assert found == {'wq': named(helper, 'fsdp'), 'norm': named(helper)}

    def test_a_spec_for_the_whole_tree(self, helper: MeshShardingHelper) -> None:
        assert helper.match_sharding_rule(P('tp'), PARAMS) == dict.fromkeys(PARAMS, named(helper, 'tp'))

    def test_a_tree_of_rules_and_specs(self, helper: MeshShardingHelper) -> None:
        rules = {'wq': FSDPShardingRule(min_fsdp_size=0), 'norm': P('tp')}
        assert helper.match_sharding_rule(rules, PARAMS) == {
            'wq': named(helper, 'fsdp'),
            'norm': named(helper, 'tp'),
        }

    def test_returns_the_structure_of_the_tree(self, helper: MeshShardingHelper) -> None:
        tree = {'a': [PARAMS, (BATCH, None)], 'b': {}}
        found = helper.match_sharding_rule(P(), tree)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        assert all(isinstance(leaf, NamedSharding) for leaf in jax.tree.leaves(found))


class TestMethodLocalDataToGlobalArray:
    """### Method `local_data_to_global_array`"""

    def test_pytree(self, helper: MeshShardingHelper) -> None:
        out = helper.local_data_to_global_array({'x': BATCH, 'y': BATCH[:, 0]})
        assert isinstance(out['x'], jax.Array)
        np.testing.assert_array_equal(out['x'], BATCH)
        np.testing.assert_array_equal(out['y'], BATCH[:, 0])

    def test_batch_axis_defaults_to_zero(self, helper: MeshShardingHelper) -> None:
        assert helper.local_data_to_global_array(BATCH).sharding.spec[0] == ('fsdp', 'tp')

    def test_batch_axis(self, helper: MeshShardingHelper) -> None:
        out = helper.local_data_to_global_array(BATCH.T, batch_axis=1)
        assert out.sharding == named(helper, None, ('fsdp', 'tp'))
        np.testing.assert_array_equal(out, BATCH.T)

    def test_mesh_axis_subset(self, helper: MeshShardingHelper) -> None:
        out = helper.local_data_to_global_array(BATCH, mesh_axis_subset=['fsdp'])
        assert out.sharding == named(helper, 'fsdp')

    def test_mesh_axis_subset_defaults_to_all(self, helper: MeshShardingHelper) -> None:
        assert helper.local_data_to_global_array(BATCH, 0, None).sharding == named(helper, ('fsdp', 'tp'))


class TestFunctionWithShardingConstraint:
    """## Function `with_sharding_constraint`"""

    @pytest.mark.parametrize(
        ('rules', 'spec'),
        [
            (P('fsdp', 'tp'), P('fsdp', 'tp')),
            (FSDPShardingRule(min_fsdp_size=0), P('fsdp')),
            ({'x': P(None, 'tp')}, P(None, 'tp')),
            ({'x': FSDPShardingRule(min_fsdp_size=0)}, P('fsdp')),
        ],
        ids=['spec', 'rule', 'tree of specs', 'tree of rules'],
    )
    def test_enforces_a_sharding_inside_of_sjit(
        self, helper: MeshShardingHelper, rules: object, spec: PartitionSpec
    ) -> None:
        out = helper.sjit(lambda x: with_sharding_constraint({'x': x}, rules))(BATCH)
        assert set(out) == {'x'}
        assert out['x'].sharding.is_equivalent_to(named(helper, *spec), 2)
        np.testing.assert_array_equal(out['x'], BATCH)

    @pytest.mark.parametrize(
        'keywords', [('tree', 'rules'), ('pytree', 'sharding_rule')], ids=['now', '0.2.5']
    )
    def test_parameters(self, helper: MeshShardingHelper, keywords: tuple[str, str]) -> None:
        def constrain(x: jax.Array) -> jax.Array:
            return with_sharding_constraint(**dict(zip(keywords, (x, P('tp')), strict=True)))

        assert helper.sjit(constrain)(BATCH).sharding.is_equivalent_to(named(helper, 'tp'), 2)


class TestFunctionWithShardingAnnotation:
    """## Function `with_sharding_annotation`"""

    def test_the_sharding_comes_from_sjit(self, helper: MeshShardingHelper) -> None:
        def forward(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return with_sharding_annotation(tree, 'activations')

        for spec in (P('fsdp'), P(None, 'tp')):
            out = helper.sjit(forward, annotation_shardings={'activations': spec})({'x': BATCH, 'y': BATCH})
            assert set(out) == {'x', 'y'}
            assert all(leaf.sharding.is_equivalent_to(named(helper, *spec), 2) for leaf in out.values())

    @pytest.mark.parametrize('first', ['tree', 'pytree'], ids=['now', '0.2.5'])
    def test_parameters(self, helper: MeshShardingHelper, first: str) -> None:
        def forward(x: jax.Array) -> jax.Array:
            return with_sharding_annotation(**{first: x, 'sharding_name': 'x'})

        out = helper.sjit(forward, annotation_shardings={'x': P('tp')})(BATCH)
        assert out.sharding.is_equivalent_to(named(helper, 'tp'), 2)


class TestClassShardingRule:
    """## Class `ShardingRule`"""

    def test_apply_of_a_subclass_is_used_for_a_tree(self, helper: MeshShardingHelper) -> None:
        class FirstDimension(ShardingRule):
            def apply(self, pytree: object) -> object:
                return jax.tree.map(lambda leaf: P('tp'), pytree)

        assert helper.match_sharding_rule(FirstDimension(), PARAMS) == dict.fromkeys(
            PARAMS, named(helper, 'tp')
        )
        assert helper.sjit(lambda x: x, out_shardings=FirstDimension())(BATCH).sharding == named(helper, 'tp')


class TestClassFSDPShardingRule:
    """## Class `FSDPShardingRule`"""

    def test_fsdp_axis_name(self, helper: MeshShardingHelper) -> None:
        rule = FSDPShardingRule(fsdp_axis_name='tp', min_fsdp_size=0)
        assert helper.match_sharding_rule(rule, BATCH).spec == P('tp')
        assert FSDPShardingRule().fsdp_axis_name == 'fsdp'

    def test_fsdp_axis_size(self) -> None:
        rule = FSDPShardingRule(fsdp_axis_size=3, min_fsdp_size=0)
        assert rule.apply({'w': np.zeros((8, 9))}) == {'w': P(None, 'fsdp')}

    def test_fsdp_axis_size_that_differs_from_the_mesh(self, helper: MeshShardingHelper) -> None:
        """An error on purpose: 0.2.5 sharded over another number of devices than the axis has."""
        with pytest.raises(RuleError, match='fsdp_axis_size is 3, but the mesh has 4 devices along'):
            helper.match_sharding_rule(FSDPShardingRule(fsdp_axis_size=3, min_fsdp_size=0), np.zeros((8, 9)))

    def test_fsdp_axis_size_none_is_the_largest_power_of_two(self) -> None:
        rule = FSDPShardingRule(min_fsdp_size=0)
        assert rule.apply({'w': np.zeros((12, 8)), 'v': np.zeros((6, 4, 5))}) == {
            'w': P(None, 'fsdp'),
            'v': P(None, 'fsdp', None),
        }

    def test_through_a_helper_the_size_is_that_of_the_mesh(self, helper: MeshShardingHelper) -> None:
        rule = FSDPShardingRule(min_fsdp_size=0)
        assert helper.match_sharding_rule(rule, np.zeros((12, 8))).spec == P('fsdp')

    def test_min_fsdp_size(self, helper: MeshShardingHelper) -> None:
        small, large = np.zeros((16, 7)), np.zeros((16, 8))
        rule = FSDPShardingRule(min_fsdp_size=128)
        assert helper.match_sharding_rule(rule, [small, large]) == [named(helper), named(helper, 'fsdp')]

    def test_parameters_by_position(self, helper: MeshShardingHelper) -> None:
        assert helper.match_sharding_rule(FSDPShardingRule('fsdp', 4, 0), BATCH).spec == P('fsdp')


class TestFSDPShardingRuleApply:
    """## Class `FSDPShardingRule`, ### Method `apply`"""

    def test_returns_specs_in_the_structure_of_the_tree(self) -> None:
        """PartitionSpecs, as 0.2.5 returned them, although its guide says NamedShardings."""
        found = FSDPShardingRule(min_fsdp_size=64).apply(PARAMS)
        assert found == {'wq': P('fsdp', None), 'norm': P()}
        assert FSDPShardingRule(min_fsdp_size=64).apply(pytree=PARAMS) == found


class TestClassTreePathShardingRule:
    """## Class `TreePathShardingRule`"""

    def test_the_first_pattern_that_matches_counts(self) -> None:
        rule = TreePathShardingRule(('wq', P('fsdp')), ('w', P('tp')), ('.*', P()))
        tree = {'wq': BATCH, 'wo': BATCH, 'norm': BATCH}
        assert rule.apply(tree) == {'wq': P('fsdp'), 'wo': P('tp'), 'norm': P()}

    def test_patterns_are_regexes_of_paths(self) -> None:
        rule = TreePathShardingRule((r'layers/\d+/w$', P('tp')), ('.*', P()))
        assert rule.apply({'layers': [{'w': BATCH, 'wide': BATCH}]}) == {
            'layers': [{'w': P('tp'), 'wide': P()}]
        }

    def test_strict_defaults_to_true(self, helper: MeshShardingHelper) -> None:
        rule = TreePathShardingRule(('wq', P('fsdp')))
        for apply in (rule.apply, lambda tree: helper.match_sharding_rule(rule, tree)):
            with pytest.raises(ShardingError, match=re.escape('norm')):
                apply(PARAMS)

    def test_strict_leaves_scalars_alone(self) -> None:
        """On purpose: an array of one element has no other sharding."""
        rule = TreePathShardingRule(('wq', P('fsdp')))
        assert rule.apply({'wq': BATCH, 'step': np.int32(0)}) == {'wq': P('fsdp'), 'step': P()}

    def test_not_strict_replicates_what_no_pattern_matches(self) -> None:
        rule = TreePathShardingRule(('wq', P('fsdp')), strict=False)
        assert rule.apply(PARAMS) == {'wq': P('fsdp'), 'norm': P()}

    def test_apply_through_a_helper_returns_named_shardings(self, helper: MeshShardingHelper) -> None:
        rule = TreePathShardingRule(('wq', P('fsdp', 'tp')), ('norm', P()))
        assert helper.match_sharding_rule(rule, PARAMS) == {
            'wq': named(helper, 'fsdp', 'tp'),
            'norm': named(helper),
        }


class TestClassPolicyShardingRule:
    """## Class `PolicyShardingRule`"""

    def test_the_policy_gets_the_path_and_the_leaf(self) -> None:
        calls = []

        def policy(path: str, leaf: np.ndarray) -> PartitionSpec:
            calls.append((path, leaf.shape))
            return P('tp') if leaf.ndim == 2 else P()

        assert PolicyShardingRule(policy).apply({'layer': PARAMS}) == {'layer': {'wq': P('tp'), 'norm': P()}}
        assert sorted(set(calls)) == [('layer/norm', (8,)), ('layer/wq', (16, 8))]

    def test_keyword_and_helper(self, helper: MeshShardingHelper) -> None:
        rule = PolicyShardingRule(policy=lambda path, leaf: P('fsdp'))
        assert helper.match_sharding_rule(rule, PARAMS) == dict.fromkeys(PARAMS, named(helper, 'fsdp'))


@pytest.mark.medium
def test_all_of_it_together(helper: MeshShardingHelper) -> None:
    """A train step with rules, a constraint and an annotation computes what one device computes."""

    def step(params: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            hidden = with_sharding_annotation(batch @ params['wq'], 'hidden')
            return jnp.mean(with_sharding_constraint(hidden, P('fsdp')) ** 2 * params['norm'])

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    batch = np.linspace(0, 1, 128, dtype=np.float32).reshape(8, 16)
    rule = FSDPShardingRule(min_fsdp_size=0)
    compiled = helper.sjit(
        step,
        in_shardings=(rule, P('fsdp')),
        out_shardings=(rule, None),
        annotation_shardings={'hidden': P('fsdp', 'tp')},
    )
    params, value = compiled(PARAMS, helper.local_data_to_global_array(batch, mesh_axis_subset=['fsdp']))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), 'with_sharding_annotation', lambda x, name: x)
        patch.setitem(globals(), 'with_sharding_constraint', lambda x, rule: x)
        expected, expected_value = jax.jit(step)(PARAMS, batch)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5), params, expected)
    assert params['wq'].sharding.is_equivalent_to(named(helper, 'fsdp'), 2)
