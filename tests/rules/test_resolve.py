"""Resolution of rules for a tree on a mesh: kinds of leaves, canonical results, policies, the cache."""

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.errors import IndivisibleWarning, ShardingError, StructureError
from scalax.rules._resolve import ResolveMode, resolve
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
)
from tests.support import ROOT
from tests.support.leaves import leaf

HELPER = MeshShardingHelper([4, 2], ['data', 'tp'])
U = P.UNCONSTRAINED


def spec_of(rule, x, helper=HELPER):
    return helper.match_sharding_rule(rule, x).spec


# --- Leaves ---------------------------------------------------------------------------------------

KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))


@pytest.mark.parametrize(
    'make',
    [
        lambda: np.zeros(8),
        lambda: jnp.zeros(8),
        lambda: jnp.zeros(8, jnp.bfloat16),
        lambda: np.zeros(8, jnp.bfloat16),
        lambda: np.zeros(8, 'int4'),
        lambda: np.zeros(8, bool),
        lambda: np.zeros(8, complex),
        lambda: leaf(8),
        lambda: KEYS,
        lambda: jax.random.split(jax.random.key(0), 8),
    ],
)
@pytest.mark.parametrize(
    'rule',
    [
        P('data'),
        FSDPShardingRule('data', min_fsdp_size=0),
        TreePathShardingRule(('', P('data'))),
        PolicyShardingRule(lambda path, x: P(*['data'] * len(x.shape))),
        NamedSharding(HELPER.mesh, P('data')),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_kinds_of_arrays(make, rule):
    assert spec_of(rule, make()) == P('data')


@pytest.mark.parametrize('x', [1, 1.0, True, 1j, np.float32(1), np.zeros(()), jax.random.key(0)], ids=str)
@pytest.mark.parametrize(
    'rule',
    [
        P(),
        FSDPShardingRule('data', min_fsdp_size=0),
        TreePathShardingRule(('', P('data'))),
        TreePathShardingRule(('nothing', P('data')), strict=True),  # steps and counts need no pair
    ],
)
def test_scalars_are_replicated(x, rule):
    assert spec_of(rule, x) == P()


def test_none_nodes_and_empty_trees():
    assert HELPER.match_sharding_rule(P(), {'a': None, 'b': ()}) == {'a': None, 'b': ()}
    assert HELPER.match_sharding_rule(TreePathShardingRule(), {}) == {}
    assert resolve(P(), None, HELPER.mesh).shardings == []


def test_an_empty_key_is_part_of_the_path():
    tree = {'w': {'': leaf(6, 3)}, 'v': leaf(6, 3), 'u': {'k': {'': leaf(6, 3)}}}
    paths = ['u/k/', 'v', 'w/']
    miss = TreePathShardingRule(('nothing', P()))
    for rule in (P(), {'u': {'k': P()}, 'v': P(), 'w': P()}):
        assert [row.path for row in HELPER.explain(tree, rule).rows] == paths
    for rule in (P('data'), miss, miss.stacked(1), FSDPShardingRule('data') & P('data')):
        for rules in (rule, {'u': {'k': rule}, 'v': rule, 'w': rule}, {'u': rule, 'v': rule, 'w': rule}):
            with pytest.raises(ShardingError) as error:
                HELPER.match_sharding_rule(rules, tree)
            assert [problem.leaf for problem in error.value.problems] == [
                f'{p}: float32[6, 3]' for p in paths
            ]


def test_an_empty_key_of_a_tree_of_rules_is_part_of_the_path():
    tree = {'': {'w': leaf(6, 3), '': leaf(6, 3)}, 'v': leaf(6, 3)}
    rules = {'': P('data'), 'v': P('data')}
    with pytest.raises(ShardingError) as error:
        HELPER.match_sharding_rule(rules, tree)
    leaves = [f'{path}: float32[6, 3]' for path in ('/', '/w', 'v')]
    assert [problem.leaf for problem in error.value.problems] == leaves
    assert [row.path for row in HELPER.explain(tree, {'': P(), 'v': P()}).rows] == ['/', '/w', 'v']
    with pytest.raises(ShardingError) as error:
        HELPER.sjit(lambda tree: tree, in_shardings=(rules,))(jax.tree.map(lambda x: np.zeros(x.shape), tree))
    leaves = [f'tree/{path}: float64[6, 3]' for path in ('/', '/w', 'v')]
    assert [problem.leaf for problem in error.value.problems] == leaves
    with pytest.raises(StructureError, match='do not match the structure of the tree'):
        HELPER.match_sharding_rule({'': {}, 'v': P()}, tree)
    with pytest.raises(StructureError, match="contain 'data' of type str at '/w', which is not a rule"):
        HELPER.match_sharding_rule({'': {'w': 'data', '': P()}, 'v': P()}, tree)


def test_all_problems_are_raised_together_in_tree_order():
    rule = TreePathShardingRule(('[ac]$', P('data')), ('d', P('dta')), ('e', P()))
    policy = PolicyShardingRule(lambda path, x: 'data' if path == 'z' else P('data'))
    tree = {
        'part': {'a': leaf(6), 'b': leaf(8), 'c': leaf(7), 'd': leaf(8), 'e': leaf(5)},
        'more': {'x': leaf(6), 'y': leaf(8), 'z': leaf(8)},
    }
    with pytest.raises(ShardingError) as error:
        HELPER.match_sharding_rule({'part': rule, 'more': policy}, tree)
    assert [(problem.kind, problem.leaf) for problem in error.value.problems] == [
        ('indivisible', 'more/x: float32[6]'),
        ('not-a-spec', 'more/z: float32[8]'),
        ('indivisible', 'part/a: float32[6]'),
        ('unmatched', 'part/b: float32[8]'),
        ('indivisible', 'part/c: float32[7]'),
        ('unknown-axis', 'part/d: float32[8]'),
    ]


def test_leaves_with_the_same_path_are_different_leaves():
    tree = {'a/b': leaf(8, 4), 'a': {'b': leaf(2, 8)}}
    rule = PolicyShardingRule(lambda path, x: P('data') if x.shape[0] == 8 else P(None, 'data'))
    shardings = HELPER.match_sharding_rule(rule, tree)
    assert (shardings['a/b'].spec, shardings['a']['b'].spec) == (P('data'), P(None, 'data'))


# --- Results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('spec', 'canonical'),
    [
        (P(None, None), P()),
        (P('data', None), P('data')),
        (P(('data',), ()), P('data')),
        (P(('data', 'tp'), None), P(('data', 'tp'))),
        (P(None, 'tp'), P(None, 'tp')),
    ],
)
@pytest.mark.parametrize(
    'rule',
    [
        lambda spec: spec,
        lambda spec: TreePathShardingRule(('', spec)),
        lambda spec: NamedSharding(HELPER.mesh, spec),
    ],
)
def test_results_are_canonical(spec, canonical, rule):
    result = spec_of(rule(spec), leaf(8, 8))
    assert result == canonical
    assert len(result) == len(canonical)


def test_equal_shardings_are_one_object():
    tree = {'a': leaf(8, 8), 'b': [leaf(8), leaf(16, 2)]}
    first, second = (HELPER.match_sharding_rule(spec, tree) for spec in (P('data'), P(('data',))))
    assert len({id(s) for s in jax.tree.leaves([first, second])}) == 1
    other = MeshShardingHelper.from_mesh(jax.sharding.Mesh(HELPER.mesh.devices, ('data', 'tp')))
    assert other.match_sharding_rule(P('data'), leaf(8)) is first['a']
    assert HELPER.local_data_to_global_array(np.zeros(8), mesh_axis_subset='data').sharding is first['a']


def test_every_decision_is_recorded():
    tree = {'w': leaf(8, 8), 'b': leaf(8), 'x': leaf(8)}
    rules = {
        'w': TreePathShardingRule(('', FSDPShardingRule('data', min_fsdp_size=0))),
        'b': FSDPShardingRule('data'),
        'x': None,
    }
    answers = resolve(rules, tree, HELPER.mesh, mode=ResolveMode.BOUNDARY).decisions
    fsdp = "FSDPShardingRule('data'"
    assert [(answer.spec, answer.origin, answer.reason) for answer in answers] == [
        (P(), f'{fsdp})', '8 elements < min_fsdp_size 1048576'),
        (
            P('data', None),
            f"regex '' -> {fsdp}, min_fsdp_size=0)",
            'dimension 0 of size 8 is divisible by 4',
        ),
        (None, '', ''),
    ]


# --- Shardings of other meshes --------------------------------------------------------------------


def test_named_shardings_of_an_equal_mesh_are_accepted():
    equal = MeshShardingHelper([4, 2], ['data', 'tp']).mesh
    for mesh in (equal, equal.abstract_mesh):
        assert HELPER.match_sharding_rule(NamedSharding(mesh, P('tp')), leaf(8)).mesh == HELPER.mesh
    abstract = MeshShardingHelper.from_mesh(equal.abstract_mesh)
    assert spec_of(NamedSharding(equal, P('tp')), leaf(8), abstract) == P('tp')


@pytest.mark.parametrize(
    'mesh',
    [
        MeshShardingHelper([2, 4], ['data', 'tp']).mesh,
        MeshShardingHelper([2, 4], ['tp', 'data']).mesh,
        MeshShardingHelper([4, 2], ['data', 'tp'], devices=jax.devices()[::-1]).mesh,
        MeshShardingHelper([4, 2], ['data', 'tp'], axis_types=AxisType.Explicit).mesh,
        MeshShardingHelper([2, 4], ['data', 'tp']).mesh.abstract_mesh,
    ],
    ids=str,
)
@pytest.mark.parametrize(
    'rule', [lambda s: s, lambda s: TreePathShardingRule(('', s)), lambda s: PolicyShardingRule(lambda *_: s)]
)
def test_named_shardings_of_other_meshes_are_errors(mesh, rule):
    with pytest.raises(ShardingError) as error:
        HELPER.match_sharding_rule(rule(NamedSharding(mesh, P('tp'))), {'w': leaf(8), 'v': leaf(8)})
    assert [problem.kind for problem in error.value.problems] == ['other-mesh'] * 2


def test_an_order_of_devices_in_a_named_sharding_is_not_dropped():
    sharding = NamedSharding(HELPER.mesh, P('tp'), _logical_device_ids=(1, 0, 3, 2, 5, 4, 7, 6))
    for rule in (sharding, TreePathShardingRule(('', sharding)), TreePathShardingRule(('', P())) & sharding):
        with pytest.raises(ShardingError) as error:
            HELPER.match_sharding_rule(rule, {'w': leaf(8)})
        [problem] = error.value.problems
        assert problem.kind == 'other-mesh'
    kind = NamedSharding(HELPER.mesh, P('tp'), memory_kind='pinned_host')
    assert HELPER.match_sharding_rule(kind, leaf(8)) == kind


# --- Dimensions that are not divisible -------------------------------------------------------------

TREE = {'a': leaf(8, 2), 'b': leaf(6, 2), 'c': leaf(3, 3), 'd': leaf(4, 4)}
ASKED = P(('tp', 'data'), None)
REDUCED = {'a': P(('tp', 'data')), 'b': P('tp'), 'c': P(), 'd': P('tp')}


def with_policy(kind, policy):
    """Returns a helper and a rule of a kind, with a policy for dimensions that are not divisible."""
    if kind == 'path':
        return HELPER, TreePathShardingRule(('', ASKED), on_indivisible=policy)
    if kind == 'policy':
        return HELPER, PolicyShardingRule(lambda path, x: ASKED, on_indivisible=policy)
    helper = MeshShardingHelper([4, 2], ['data', 'tp'], on_indivisible=policy)
    return helper, ASKED if kind == 'spec' else NamedSharding(helper.mesh, ASKED)


@pytest.mark.parametrize('kind', ['path', 'policy', 'spec', 'named sharding'])
def test_policies_for_indivisible_dimensions(kind):
    helper, rule = with_policy(kind, 'error')
    with pytest.raises(ShardingError) as error:
        helper.match_sharding_rule(rule, TREE)
    assert [problem.leaf[0] for problem in error.value.problems] == ['b', 'c', 'd']

    helper, rule = with_policy(kind, 'replicate')
    assert {k: s.spec for k, s in helper.match_sharding_rule(rule, TREE).items()} == REDUCED

    helper, rule = with_policy(kind, 'warn')
    for _ in range(2):  # a second look warns as well
        with pytest.warns(IndivisibleWarning) as caught:
            assert {k: s.spec for k, s in helper.match_sharding_rule(rule, TREE).items()} == REDUCED
        assert len(caught) == 1


def test_the_helpers_policy_does_not_apply_to_rules():
    helper = MeshShardingHelper([4, 2], ['data', 'tp'], on_indivisible='replicate')
    assert spec_of(ASKED, leaf(6, 2), helper) == P('tp')
    with pytest.raises(ShardingError):
        spec_of(TreePathShardingRule(('', ASKED)), leaf(6, 2), helper)


def test_values_inside_a_function_are_padded_with_a_warning():
    with pytest.warns(IndivisibleWarning) as caught:
        resolution = resolve(
            P('data'), {'x': leaf(6)}, HELPER.mesh, mode=ResolveMode.INTERMEDIATE, where='here'
        )
    assert resolution.shardings[0].spec == P('data')
    assert [str(warning.message) for warning in caught] == [
        'dimensions of here that are not divisible (mesh: data=4, tp=2):\n'
        "  x: float32[6], P('data',) from the spec given: dimension 0 of size 6 is not divisible by 4 "
        '(data=4); XLA pads it, and computes some operations wrong there (jnp.nonzero)'
    ]
    # Explicit dimensions cannot be padded.
    explicit = MeshShardingHelper([8], ['data'], axis_types=AxisType.Explicit)
    with pytest.raises(ShardingError):
        resolve(P('data'), leaf(6), explicit.mesh, mode=ResolveMode.INTERMEDIATE)


# --- None and UNCONSTRAINED in each mode ----------------------------------------------------------


@pytest.mark.parametrize(
    ('spec', 'concrete', 'boundary', 'intermediate'),
    [(None, None, 'compiler', 'compiler'), (P(U), None, None, P(U)), (P(), P(), P(), P())],
)
def test_uses(spec, concrete, boundary, intermediate):
    for mode, expected in zip(ResolveMode, (concrete, boundary, intermediate, intermediate), strict=True):
        if expected is None:
            with pytest.raises(ShardingError):
                resolve(spec, leaf(8), HELPER.mesh, mode=mode)
        else:
            [sharding] = resolve(spec, leaf(8), HELPER.mesh, mode=mode).shardings
            assert ('compiler' if sharding is None else sharding.spec) == expected


# --- Caching ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('sizes', 'kind', 'shape', 'problem'),
    [
        ([4, 2], AxisType.Auto, (8,), None),
        ([2, 4], AxisType.Auto, (8,), None),
        ([4, 2], AxisType.Explicit, (8,), None),
        ([4, 2], AxisType.Auto, (6,), 'indivisible'),
        ([4, 2], AxisType.Auto, (), 'rank'),
    ],
)
def test_a_spec_that_is_valid_once_is_checked_on_other_meshes_and_shapes(sizes, kind, shape, problem):
    HELPER.match_sharding_rule(P('data'), np.zeros(8))
    helper = MeshShardingHelper(sizes, ['data', 'tp'], axis_types=kind)
    if problem is None:
        assert helper.match_sharding_rule(P('data'), np.zeros(shape)) == NamedSharding(helper.mesh, P('data'))
        return
    with pytest.raises(ShardingError) as error:
        helper.match_sharding_rule(P('data'), np.zeros(shape))
    assert [item.kind for item in error.value.problems] == [problem]


@pytest.mark.parametrize(
    ('tree', 'spec'),
    [
        ({'w': leaf(16, 4)}, P('data')),
        ({'w': leaf(4, 16)}, P(None, 'data')),
        ({'w': jax.ShapeDtypeStruct((16, 4), 'int8')}, P('data')),
        ({'v': leaf(16, 4)}, P()),
        ([leaf(16, 4)], P()),
    ],
)
def test_the_cache_distinguishes_trees(tree, spec):
    rule = TreePathShardingRule(('w', FSDPShardingRule('data', min_fsdp_size=0)), strict=False)
    HELPER.match_sharding_rule(rule, {'w': leaf(16, 4)})
    [sharding] = jax.tree.leaves(HELPER.match_sharding_rule(rule, tree))
    assert sharding.spec == spec


def test_answers_of_impure_rules_are_not_cached():
    mood = {}

    class Moody(ShardingRule):
        def apply(self, pytree):
            return jax.tree.map(lambda _: mood['spec'], pytree)

    for rule in (
        Moody(),
        PolicyShardingRule(lambda path, x: mood['spec']),
        TreePathShardingRule(('', Moody())),
        {'w': Moody()},
    ):
        mood['spec'] = P('data')
        assert HELPER.match_sharding_rule(rule, {'w': leaf(8)})['w'].spec == P('data')
        mood['spec'] = P('tp')
        assert HELPER.match_sharding_rule(rule, {'w': leaf(8)})['w'].spec == P('tp')


def test_errors_are_not_cached():
    for _ in range(2):
        with pytest.raises(ShardingError):
            HELPER.match_sharding_rule(P('data'), {'w': leaf(6)})


# --- Determinism ----------------------------------------------------------------------------------

PROGRAM = """
import jax, numpy as np
jax.config.update('jax_num_cpu_devices', 8)
from scalax.sharding import *
names = [f'layer{i}' for i in range(20)]
tree = {name: {'w': np.zeros((8, 16)), 'b': np.zeros(16), name: np.zeros((4, 4, 4))} for name in names}
helper = MeshShardingHelper([2, 2, 2], ['a', 'b', 'c'])
rules = TreePathShardingRule(
    ('r1', PartitionSpec(('b', 'a'))), ('w', FSDPShardingRule('c', min_fsdp_size=0)),
    ('', PolicyShardingRule(lambda p, x: PartitionSpec('a'))), on_indivisible='replicate')
print(jax.tree.leaves(helper.match_sharding_rule(rules, tree)))
print(helper.explain(tree, rules).to_dict())
try:
    helper.shard(tree, PartitionSpec(('zz', 'yy', 'a'), 'a', unreduced={'q'}))
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_another_process_decides_the_same():
    outputs = set()
    for seed in ('1', '2'):
        env = {**os.environ, 'PYTHONHASHSEED': seed, 'PYTHONPATH': str(ROOT)}
        done = subprocess.run([sys.executable, '-c', PROGRAM], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert "mesh axis 'a' is used more than once" in outputs.pop()


def test_resolving_issues_no_other_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        HELPER.match_sharding_rule(FSDPShardingRule('data'), {'w': np.zeros((2048, 2048)), 'k': KEYS})


def test_threads_share_a_helper():
    helper = MeshShardingHelper([8], ['data'])
    shapes = [leaf(8 * n, 3) for n in range(1, 40)]

    def work(order):
        return [helper.match_sharding_rule(FSDPShardingRule('data', min_fsdp_size=60), [s]) for s in order]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, [shapes, shapes[::-1]] * 6))
    for result in results:
        assert sorted(s.spec == P('data') for [s] in result) == [False] * 2 + [True] * 37
