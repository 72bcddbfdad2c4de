"""Composed rules in use: in trees, stacks of layers, memories, messages, reports, sjit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._core.pytree.paths import NamedTree
from scalax.errors import ShardingError
from scalax.rules import catalogue
from scalax.rules._rule_tree import are_pure
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    OptimizerStateShardingRule,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.testing import assert_collectives
from tests.support.compose_cases import FSDP, STRICT_MISS, FirstOnTp, last_on_tp, specs
from tests.support.leaves import leaf

U = P.UNCONSTRAINED
MEGATRON = TreePathShardingRule(('up', P(None, 'tp')), ('down', P('tp')), ('.*', P()))


class Inherited(TreePathShardingRule):
    """A subclass of a built-in rule that overrides `apply`, as in programs for 0.2.5."""

    def apply(self, pytree):
        return jax.tree.map(lambda leaf: P(*[None] * (len(leaf.shape) - 1), 'tp'), pytree)


# --- In trees of rules, and nested -----------------------------------------------------------------


LAYERS = {'up': leaf(16, 64), 'down': leaf(64, 16), 'norm': leaf(16)}
EXPECTED = {'up': P('fsdp', 'tp'), 'down': P('tp', 'fsdp'), 'norm': P()}


@pytest.fixture(scope='module')
def helper():
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


@pytest.mark.parametrize(
    'rule',
    [
        MEGATRON & FSDP,
        TreePathShardingRule(('.*', MEGATRON & FSDP)),
        PolicyShardingRule(lambda path, leaf: MEGATRON & FSDP),
        {'up': P(None, 'tp') & FSDP, 'down': P('tp') & FSDP, 'norm': P()},
        {'up': P(None, 'tp') & FSDP, 'down': STRICT_MISS | P('tp', 'fsdp'), 'norm': STRICT_MISS | P()},
        TreePathShardingRule(('up|down', MEGATRON & FSDP)) | P(),
        (TreePathShardingRule(('up', P(None, 'tp'))) | TreePathShardingRule(('down', P('tp'))) | P()) & FSDP,
        (STRICT_MISS | (MEGATRON & FSDP)) & (FSDP | STRICT_MISS | P()),
        TreePathShardingRule(('up', Inherited(('x', P())) & FSDP)) | (MEGATRON & FSDP),
    ],
)
def test_fsdp_after_megatron_in_every_notation(helper, rule):
    assert specs(helper, rule, LAYERS) == EXPECTED


def test_a_subclass_sees_the_entire_tree_inside_a_composition(helper):
    class LargestOnly(ShardingRule):
        def apply(self, pytree):
            largest = max(leaf.size for leaf in jax.tree.leaves(pytree))
            return jax.tree.map(lambda leaf: P('tp') if leaf.size == largest else P(), pytree)

    tree = {'a': leaf(8, 8), 'b': leaf(64, 8)}
    only_a = TreePathShardingRule(('a', LargestOnly() & FSDP)) | P(None, 'tp')
    assert specs(helper, only_a, tree) == {'a': P('fsdp'), 'b': P(None, 'tp')}
    assert specs(helper, LargestOnly() & FSDP, tree) == {'a': P('fsdp'), 'b': P('tp', 'fsdp')}


# --- Stacked layers -------------------------------------------------------------------------------


class FirstIfMatrix(ShardingRule):
    def apply(self, pytree):
        return jax.tree.map(lambda leaf: P('tp') if np.ndim(leaf) == 2 else P(), pytree)


@pytest.mark.parametrize(
    ('rule', 'expected'),
    [
        (P('fsdp', 'tp'), P(None, 'fsdp', 'tp')),
        (FSDP, P(None, 'fsdp')),  # 80 is the largest dimension, and divisible
        (P('tp') & FSDP, P(None, 'tp', 'fsdp')),
        (FirstIfMatrix(), P(None, 'tp')),
        (FirstIfMatrix() & FSDP, P(None, 'tp', 'fsdp')),
        (PolicyShardingRule(last_on_tp), P(None, None, 'tp')),
        (Inherited(('x', P())), P(None, None, 'tp')),
        (TreePathShardingRule(('w', FirstIfMatrix())), P(None, 'tp')),
        (PolicyShardingRule(lambda path, leaf: FirstIfMatrix()), P(None, 'tp')),
    ],
)
def test_layers_are_never_sharded(helper, rule, expected):
    stacked = (rule if isinstance(rule, ShardingRule) else STRICT_MISS | rule).stacked()
    assert specs(helper, stacked, {'w': leaf(80, 64, 32)}) == {'w': expected}
    assert stacked.apply({'w': leaf(80, 64, 32)})['w'][:1] in ((None,), P(None))
    inside = TreePathShardingRule(('layers', stacked), ('.*', P()))
    assert specs(helper, inside, {'layers': {'w': leaf(80, 64, 32)}, 'w': leaf(80)}) == {
        'layers': {'w': expected},
        'w': P(),
    }


OVER_DATA = FSDPShardingRule('data', min_fsdp_size=64)
BY_PATH = TreePathShardingRule(('w', P('fsdp', 'tp')), ('.*', P()))
STACKED = {'w': leaf(16, 64, 64), 'b': leaf(16, 64)}


@pytest.fixture(scope='module')
def cube():
    return MeshShardingHelper([2, 2, 2], ['data', 'fsdp', 'tp'])


@pytest.mark.parametrize(
    'rule',
    [
        BY_PATH.stacked() & OVER_DATA,
        BY_PATH.stacked() & P('data', 'data'),
        BY_PATH.stacked() & (P() & OVER_DATA),
        (P() & BY_PATH.stacked()) & OVER_DATA,
        (STRICT_MISS | BY_PATH.stacked()) & OVER_DATA,
        BY_PATH.stacked().with_memory_kind('device') & OVER_DATA,
        TreePathShardingRule(('', BY_PATH.stacked())) & OVER_DATA,
        PolicyShardingRule(lambda path, leaf: BY_PATH.stacked()) & OVER_DATA,
        OptimizerStateShardingRule(BY_PATH.stacked(), STACKED) & OVER_DATA,
        OptimizerStateShardingRule(BY_PATH.stacked() & OVER_DATA, STACKED),
        P() & (BY_PATH.stacked() & OVER_DATA),
    ],
)
def test_and_never_shards_the_layers_of_a_stack(cube, rule):
    assert specs(cube, rule, STACKED) == {'w': P(None, 'fsdp', 'tp'), 'b': P(None, 'data')}


def test_and_never_shards_the_layers_of_two_stacks(cube):
    assert specs(cube, BY_PATH.stacked().stacked() & OVER_DATA, {'w': leaf(4, 16, 64, 64)}) == {
        'w': P(None, None, 'fsdp', 'tp')
    }
    # Another stack, and a stack whose rule has no answer, so that `&` does not treat it as a stack.
    assert specs(cube, FSDP.stacked() & OVER_DATA, {'w': leaf(16, 64, 7)}) == {'w': P(None, 'fsdp')}
    assert specs(cube, FSDP.stacked() & OVER_DATA, {'w': leaf(16, 7, 7)}) == {'w': P('data')}


def test_the_layers_of_the_catalogue_are_never_sharded(cube):
    rule = catalogue.rule(catalogue.LLAMA, stacked='layers/')
    tree = {'embed': {'embedding': leaf(512, 64)}, 'layers': {'q_proj': {'kernel': leaf(16, 64, 64)}}}
    expected = {
        'embed': {'embedding': P('tp', 'fsdp')},
        'layers': {'q_proj': {'kernel': P(None, 'fsdp', 'tp')}},
    }
    assert specs(cube, rule & OVER_DATA, tree) == expected
    assert specs(cube, OptimizerStateShardingRule(rule, tree) & OVER_DATA, {'mu': tree}) == {'mu': expected}


def test_factors_of_stacked_layers_keep_the_stack_unsharded(cube):
    rule = OptimizerStateShardingRule(BY_PATH.stacked(), {'w': leaf(16, 64, 32), 'square': leaf(16, 16, 64)})
    state = {
        'v_row': {'w': leaf(16, 32)},
        'v_col': {'w': leaf(64, 32)},  # without the layers
        'history': {'w': leaf(8, 16, 64, 32)},
        'any': {'square': leaf(16, 64)},  # perhaps the layers
    }
    assert specs(cube, rule & OVER_DATA, state) == {
        'v_row': {'w': P(None, 'tp')},
        'v_col': {'w': P('fsdp', 'tp')},
        'history': {'w': P('data', None, 'fsdp', 'tp')},
        'any': {'square': P(None, 'data')},
    }


def test_a_scan_over_stacked_layers_needs_no_extra_gathers(cube):
    """Sharded layers would have to be gathered in every iteration."""

    def model(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights['w'])[0]

    rule = TreePathShardingRule(('w', P('fsdp', 'tp'))).stacked() & OVER_DATA
    step = cube.sjit(model, in_shardings=(rule, P('data')), out_shardings=P('data'))
    assert_collectives(step, {'w': leaf(16, 64, 64)}, leaf(8, 64), all_gather={'data': 0}, all_to_all=0)


def test_two_stacked_dimensions(helper):
    for rule in (FSDP.stacked(2), FSDP.stacked().stacked()):
        assert specs(helper, rule, {'w': leaf(80, 64, 32, 8)}) == {'w': P(None, None, 'fsdp')}


def test_stacked_rules_as_operands(helper):
    tree = {'w': leaf(8, 64, 32)}
    assert specs(helper, P('fsdp') & FSDP.stacked(), tree) == {'w': P('fsdp')}
    assert specs(helper, P('tp') & FSDP.stacked(), tree) == {'w': P('tp', 'fsdp')}
    assert specs(helper, P(None, 'tp') & FSDP.stacked(), tree) == {'w': P(None, 'tp', 'fsdp')}
    assert specs(helper, FSDP.stacked() & P('tp', None, 'tp'), tree) == {'w': P(None, 'fsdp', 'tp')}
    assert specs(helper, FSDP.stacked() | P('tp'), {'w': leaf(8, 3, 3)}) == {'w': P('tp')}


@pytest.mark.parametrize('rule', [FSDP, FirstIfMatrix(), MEGATRON, FSDP & MEGATRON])
def test_leaves_without_the_stack_are_replicated(helper, rule):
    tree = {'up': leaf(), 'down': leaf(8), 'step': 3}
    assert specs(helper, rule.stacked(2), tree) == {'up': P(), 'down': P(), 'step': P()}


def test_a_leaf_without_the_stack_keeps_its_memory_and_its_clause(helper):
    rule = TreePathShardingRule(('step', P())) | PolicyShardingRule(lambda *_: P())
    pinned = rule.with_memory_kind('pinned_host').stacked(1)
    report = helper.explain({'step': leaf(), 'other': leaf()}, pinned)
    assert [row.memory_kind for row in report.rows] == ['pinned_host'] * 2
    assert report.rows[0].reason == 'fewer than 1 dimension: no stack'


def test_defaults_of_a_large_stack_cost_one_look(helper, monkeypatch):
    seen, original = [], NamedTree.without_leading_dims
    monkeypatch.setattr(
        NamedTree, 'without_leading_dims', lambda tree, dims: seen.append(len(tree)) or original(tree, dims)
    )
    tree = {f'w{i}': leaf(4, 2) for i in range(100)}
    assert set(specs(helper, FSDP.stacked(), tree).values()) == {P()}
    assert seen == [100]  # the entire tree, once


# --- Memory ---------------------------------------------------------------------------------------


def test_memory_kinds(helper):
    tree = {'up': np.ones((16, 64), np.float32), 'norm': np.ones(16, np.float32), 'step': 3}
    rule = (MEGATRON & FSDP).with_memory_kind('pinned_host')
    placed = helper.shard(tree, rule)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(placed)} == {'pinned_host'}
    assert placed['up'].sharding.spec == P('fsdp', 'tp')
    jax.tree.map(np.testing.assert_array_equal, helper.gather(placed), tree)
    assert specs(helper, rule, tree) == specs(helper, MEGATRON & FSDP, tree)
    back = helper.shard(placed, MEGATRON & FSDP)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(back)} == {'device'}
    struct = helper.abstract(tree, rule)['up'].sharding
    assert (struct.spec, struct.memory_kind) == (P('fsdp', 'tp'), 'pinned_host')


@pytest.mark.parametrize(
    ('rule', 'expected'),
    [
        (lambda pinned: pinned & P('tp'), 'pinned_host'),
        (lambda pinned: P('tp') & pinned, 'pinned_host'),
        (
            lambda pinned: P('tp', 'fsdp') & (P() & pinned.parts[0]).with_memory_kind('pinned_host'),
            'pinned_host',
        ),
        (lambda pinned: P('tp', 'fsdp') & pinned, None),  # FSDP has no answer: no dimension is free
        (lambda pinned: P('tp') | pinned, None),
        (lambda pinned: STRICT_MISS | pinned, 'pinned_host'),
        (lambda pinned: pinned.stacked(), 'pinned_host'),
        (lambda pinned: pinned.with_memory_kind('device'), 'device'),
        (lambda pinned: TreePathShardingRule(('w', P('tp'))).with_memory_kind('device') & pinned, 'device'),
        (lambda pinned: P() & pinned.with_memory_kind('device') & pinned, 'device'),
    ],
)
def test_which_memory_kind_applies(helper, rule, expected):
    row = helper.explain({'w': leaf(16, 64)}, rule(FSDP.with_memory_kind('pinned_host'))).rows[0]
    assert row.memory_kind == expected


def test_memory_through_sjit(helper):
    rule = MEGATRON & FSDP
    pinned = rule.with_memory_kind('pinned_host')
    step = helper.sjit(
        lambda state: jax.tree.map(lambda x: x + 1, state), in_shardings=(pinned,), out_shardings=pinned
    )
    tree = {'up': np.ones((16, 64), np.float32)}
    inputs, outputs = step.shardings_for(tree)
    kinds = {sharding.memory_kind for sharding in jax.tree.leaves((inputs, outputs))}
    assert kinds == {'pinned_host'}


# --- Messages -------------------------------------------------------------------------------------


def message_of(helper, rule, tree):
    with pytest.raises(ShardingError) as caught:
        helper.match_sharding_rule(rule, tree)
    return str(caught.value)


def test_a_strict_first_rule_of_and_names_every_leaf(helper, snapshot):
    rule = TreePathShardingRule(('up', P(None, 'tp'))) & FSDP
    snapshot(message_of(helper, rule, {'b': leaf(8), 'up': leaf(8, 8), 'c': {'d': leaf(64, 64)}}))


def test_a_conflict_names_both_rules(helper):
    rule = TreePathShardingRule(('w', P(None, 'tp'))) & TreePathShardingRule(('.*', P('fsdp')))
    p = P('fsdp', 'tp')
    assert message_of(helper, rule, {'w': leaf(6, 8)}) == (
        'One leaf cannot be sharded as asked (mesh: fsdp=4, tp=2):\n'
        '  w: float32[6, 8]\n'
        '    dimension 0 of size 6 is not divisible by 4 (fsdp=4)\n'
        f"    asked for: {p} from regex 'w' & regex '.*'\n"
        'What to do: change the shape (of a batch: pad it, or drop its last examples) or the spec, or set '
        "on_indivisible='replicate' (or 'warn') on the "
        'rule, or on the helper for bare specs, to leave such dimensions unsharded.'
    )


def test_a_spec_that_uses_an_axis_twice_is_an_error(helper):
    rule = TreePathShardingRule(('w', P('fsdp'))) & P(None, 'tp', 'tp')
    p = P('fsdp', 'tp', 'tp')
    assert message_of(helper, rule, {'w': leaf(8, 8, 8)}) == (
        'One leaf cannot be sharded as asked (mesh: fsdp=4, tp=2):\n'
        '  w: float32[8, 8, 8]\n'
        "    mesh axis 'tp' is used more than once (dimensions 1, 2)\n"
        f"    asked for: {p} from regex 'w' & the spec given\n"
        'What to do: use each mesh axis at most once in a spec.'
    )


def test_errors_about_a_stack_name_the_entire_array(helper):
    rule = TreePathShardingRule(('w', P('fsdp', 'tp'))).stacked()
    assert message_of(helper, rule, {'w': leaf(80, 64)}) == (
        'One leaf cannot be sharded as asked (mesh: fsdp=4, tp=2):\n'
        '  w: float32[80, 64]\n'
        '    the spec has 3 entries, the array 2 dimensions\n'
        f"    asked for: {P(None, 'fsdp', 'tp')} from regex 'w'\n"
        'What to do: give a spec at most one entry per dimension (PartitionSpec() replicates).'
    )


def test_errors_of_a_subclass_name_the_entire_leaf(helper, snapshot):
    class Wrong(ShardingRule):
        def apply(self, pytree):
            return jax.tree.map(lambda leaf: 'tp', pytree)

    snapshot(message_of(helper, (Wrong() & FSDP).stacked(), {'w': leaf(80, 64)}))


def test_shardings_of_two_meshes_are_an_error(helper):
    other = MeshShardingHelper([2, 4], ['fsdp', 'tp']).mesh
    by_path = TreePathShardingRule(('w', NamedSharding(helper.mesh, P('fsdp'))))
    for rule in (
        by_path & NamedSharding(other, P(None, 'tp')),
        FSDP | NamedSharding(other, P()),
        P('fsdp') & (FSDP & NamedSharding(other, P())),
    ):
        assert 'for another mesh' in message_of(helper, rule, {'w': leaf(4, 4)})


# --- Purity, reports, sjit -----------------------------------------------------------------------


def test_a_composed_rule_is_pure_if_its_parts_are():
    pure = MEGATRON & FSDPShardingRule('fsdp', min_fsdp_size=64)
    assert are_pure(pure) and are_pure((STRICT_MISS | P('tp')).stacked().with_memory_kind('pinned_host'))
    # Rules that are not pure, or that warn, are called each time.
    warns = TreePathShardingRule(('w', P()), on_indivisible='warn')
    for rule in (PolicyShardingRule(lambda *_: P()), FirstOnTp(), Inherited(('x', P())), warns):
        for composed in (
            rule | P(),
            STRICT_MISS | (FSDP & rule),
            (rule | P()).stacked().with_memory_kind('device'),
        ):
            assert not are_pure(composed)


def test_explain_names_the_rule_and_reason_of_each_leaf(helper):
    rows = {row.path: row for row in helper.explain(LAYERS, MEGATRON & FSDP).rows}
    assert rows['up'].rule == f"regex 'up' & {FSDP!r}"
    assert rows['up'].reason == 'dimension 0 of size 16 is divisible by 4'
    assert rows['norm'].why == "regex '.*': 16 elements < min_fsdp_size 64"
    # A trailing None makes no difference: the first rule alone decides a full spec.
    row = helper.explain({'w': leaf(16, 64)}, FSDP & P(None, 'fsdp')).rows[0]
    assert row.rule == repr(FSDP)


def why(helper, rule, tree):
    return {row.path: row.reason for row in helper.explain(tree, rule).rows}


def test_explain_gives_the_reason_why_the_second_rule_added_nothing(helper):
    tree = {
        'a': leaf(64, 256),
        'b': leaf(7, 9),
        'c': leaf(4, 4),
        'd': leaf(7, 99),
        'e': leaf(64, 3),
        'f': leaf(8, 64),
        'g': leaf(64),
    }
    paths = TreePathShardingRule(('a', P('fsdp')), ('e|g', P('tp')), ('f', P('tp')), ('.*', P()))
    assert why(helper, paths & FSDP, tree) == {
        'a': 'FSDP: fsdp in use',
        'b': '63 elements < min_fsdp_size 64',
        'c': '16 elements < min_fsdp_size 64',
        'd': 'no dimension is divisible by 4',
        'e': 'no free dimension is divisible by 4',
        'f': 'dimension 1 of size 64 is divisible by 4',
        'g': 'FSDP: no dimension is free',
    }
    stacks = {'a': leaf(8, 64, 64)}
    assert why(helper, P('fsdp') & FSDP.stacked(), stacks) == {'a': 'FSDP: fsdp in use'}
    by_path = TreePathShardingRule(('', P('tp')))
    assert why(helper, by_path.stacked() & P(('fsdp', 'tp')), stacks) == {
        'a': 'the spec given asked for fsdp, tp on dimension 0: not free'
    }
    assert why(helper, by_path.stacked() & P('fsdp', None, 'tp'), stacks) == {
        'a': 'the spec given asked for fsdp on dimension 0: not free; '
        'the spec given asked for tp on dimension 2: in use'
    }


def test_leaves_of_one_shape_have_separate_reasons(helper):
    sizes = [(path, FSDPShardingRule('fsdp', min_fsdp_size=size)) for path, size in (('a', 500), ('b', 600))]
    assert why(helper, P() & TreePathShardingRule(*sizes), {'a': leaf(8, 8), 'b': leaf(8, 8)}) == {
        'a': '64 elements < min_fsdp_size 500',
        'b': '64 elements < min_fsdp_size 600',
    }


def test_a_table_whose_axes_are_always_in_use_is_unused(helper):
    first = TreePathShardingRule(('a', P('tp')), ('b', P()), ('.*', P()))
    second = TreePathShardingRule(('^a', P(None, 'tp')), ('^b', P(None, 'tp')), ('', P()))
    tree = {'a': leaf(64, 256), 'b': leaf(64, 256), 'c': leaf(8)}
    for rule in (first & second, P() & (first & second)):
        report = helper.explain(tree, rule)
        assert [row.reason for row in report.rows] == [
            "regex '^a' asked for tp on dimension 1: in use",
            *[''] * 2,
        ]
        assert report.shadowed_rules == ('^a',)
    bracketed = helper.explain(tree, P('tp') & (second & FSDP))
    assert bracketed.rows[0].reason == (
        "dimension 1 of size 256 is divisible by 4; regex '^a' asked for tp on dimension 1: in use"
    )
    assert bracketed.shadowed_rules == ('^a', '^b')


def test_unused_regexes_inside_compositions(helper):
    second = TreePathShardingRule(('up', P('tp')), ('down', P('fsdp')), ('misspelt', P()), ('norm', P()))
    first = TreePathShardingRule(('up|gate', P(None, 'tp')), ('wup', P()))
    for rule in (first | second, P() & (first | second), (first | second).stacked(1)):
        report = helper.explain({'up': leaf(8, 16, 64), 'down': leaf(8, 64, 16), 'norm': leaf(8, 16)}, rule)
        assert report.unused_rules == ('wup', 'misspelt')
        assert report.shadowed_rules == ('up',)


@dataclasses.dataclass
class Unhashable(ShardingRule):
    """A plain dataclass defines `==`, and therefore has no hash."""

    def apply(self, pytree):
        return jax.tree.map(lambda leaf: P('tp'), pytree)


def test_rules_without_a_hash_are_explained(helper):
    table = TreePathShardingRule(('up', Unhashable()), ('misspelt', Unhashable()), ('wup|up', P()), ('', P()))
    for rule in (table, FSDP & table, {'up': table, 'norm': table}):
        tree = {'up': {'up': leaf(16, 64)}, 'norm': {'scale': leaf(16)}}
        report = helper.explain(tree, rule)
        assert report.unused_rules == ('misspelt',)
        assert report.shadowed_rules == ('wup|up',)


def test_equal_rules_are_reported_once(helper):
    def table():
        return TreePathShardingRule(('up', P('tp')), ('down', P()), ('misspelt', P()))

    assert helper.explain(
        {'a': {'up': leaf(8)}, 'b': {'down': leaf(8)}}, {'a': table(), 'b': table()}
    ).unused_rules == ('misspelt',)


def test_the_second_rule_cannot_change_none(helper):
    first = TreePathShardingRule(('up', None), ('.*', P()))
    rule = first & TreePathShardingRule(('up', P('tp')), ('.*', P()))
    report = helper.explain(LAYERS, rule)
    assert [row.spec for row in report.rows] == [P(), P(), None]
    assert report.shadowed_rules == ('up',)


@pytest.mark.medium
def test_sjit_and_annotations_take_compositions(helper):
    rule = MEGATRON & FSDP

    @helper.sjit(
        in_shardings=(rule, P('fsdp')),
        out_shardings=(None, rule.stacked()),
        annotation_shardings={'hidden': P('fsdp') & TreePathShardingRule(('.*', P(None, 'tp')))},
    )
    def step(params, x):
        hidden = with_sharding_annotation(x @ params['up'], 'hidden')
        inner = with_sharding_constraint(hidden @ params['down'], STRICT_MISS | P('fsdp'))
        return inner.sum(), jax.tree.map(lambda w: jnp.stack([w, w]), params)

    params = {'up': np.ones((16, 64), np.float32), 'down': np.ones((64, 16), np.float32)}
    total, stacked = step(params, np.ones((8, 16), np.float32))
    assert float(total) == 8 * 16 * 16 * 64
    assert stacked['up'].sharding.spec == P(None, 'fsdp', 'tp')
    assert stacked['down'].sharding.spec == P(None, 'tp', 'fsdp')
    step(helper.shard(params, MEGATRON & FSDPShardingRule('fsdp', min_fsdp_size=64)), np.ones((8, 16)))


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_unconstrained_entries(kind):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=kind)
    rule = P(U, None) & TreePathShardingRule(('.*', P('tp', 'fsdp')))

    @helper.sjit(in_shardings=(P('tp'),))
    def double(x):
        return with_sharding_constraint(2 * x, rule)

    assert double(np.ones((8, 8), np.float32)).sharding.spec == P('tp', 'fsdp')
    assert 'an UNCONSTRAINED dimension does not determine where' in message_of(helper, rule, leaf(8, 8))


def test_a_regex_whose_rule_had_no_answer_is_not_shadowed(helper):
    rule = TreePathShardingRule(('w', FSDPShardingRule('fsdp'))) | P('tp')
    report = helper.explain({'w': leaf(8, 8)}, rule)
    assert report.rows[0].spec == P('tp')
    assert (report.shadowed_rules, report.unused_rules) == ((), ())
