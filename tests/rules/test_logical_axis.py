"""Names of dimensions and their mesh axes. Leaves that name their dimensions: interop/test_boxes.py."""

import dataclasses
import pickle
import re
import warnings

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from scalax._core.pytree.partition_specs import canonical, spec_axes
from scalax.errors import IndivisibleWarning, ShardingError
from scalax.rules import _einops_pattern
from scalax.sharding import (
    FSDPShardingRule,
    LogicalAxisShardingRule,
    MeshShardingHelper,
    OptimizerStateShardingRule,
    TreePathShardingRule,
    with_sharding_annotation,
)
from tests.support.leaves import leaf

# One mapping for small and large meshes.
MAPPING = {
    'batch': ('replica', 'data', 'fsdp', 'expert'),
    'sequence': 'context',
    'embed': 'fsdp',
    'mlp': 'tp',
    'heads': 'tp',
    'head_dim': None,
    'expert': 'expert',
    'vocab': ('tp', 'fsdp'),
    'layers': None,
}
LAPTOP = {'fsdp': 8}
POD = {'data': 4, 'fsdp': 16, 'tp': 8, 'expert': 2, 'context': 4}


def helper_for(sizes):
    """Returns a helper for a mesh of any size, because resolving needs no devices."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return MeshShardingHelper.from_mesh(mesh)


def specs(rule, tree, sizes):
    return jax.tree.map(lambda sharding: sharding.spec, helper_for(sizes).match_sharding_rule(rule, tree))


def message(error):
    return str(error.value)


# --- Which axes a dimension gets ------------------------------------------------------------------


@pytest.mark.parametrize(
    ('names', 'shape', 'laptop', 'pod'),
    [
        ('batch sequence embed', (1024, 64, 512), P('fsdp'), P(('data', 'fsdp', 'expert'), 'context')),
        ('embed mlp', (512, 2048), P('fsdp'), P('fsdp', 'tp')),
        ('mlp embed', (2048, 512), P(None, 'fsdp'), P('tp', 'fsdp')),
        ('vocab embed', (1024, 512), P('fsdp'), P(('tp', 'fsdp'))),
        ('embed vocab', (512, 1024), P('fsdp'), P('fsdp', 'tp')),
        ('expert embed mlp', (8, 512, 64), P(None, 'fsdp'), P('expert', 'fsdp', 'tp')),
        ('embed heads head_dim', (512, 8, 64), P('fsdp'), P('fsdp', 'tp')),
        ('embed (heads head_dim)', (512, 512), P('fsdp'), P('fsdp', 'tp')),
        ('(heads head_dim) embed', (512, 512), P(None, 'fsdp'), P('tp', 'fsdp')),
        ('(mlp embed)', (1024,), P('fsdp'), P(('tp', 'fsdp'))),
        ('(3 heads head_dim) _', (192, 4), P(), P('tp')),
        ('layers embed mlp', (2, 512, 64), P(None, 'fsdp'), P(None, 'fsdp', 'tp')),
        ('heads mlp', (8, 8), P(), P('tp')),
        ('... embed', (512,), P('fsdp'), P('fsdp')),
        ('... embed', (2, 3, 512), P(None, None, 'fsdp'), P(None, None, 'fsdp')),
        ('embed ... mlp', (512, 3, 5, 8), P('fsdp'), P('fsdp', None, None, 'tp')),
        ('...', (3, 5), P(), P()),
        ('_ 1 (1) 5 embed', (3, 1, 1, 5, 16), P(*[None] * 4, 'fsdp'), P(*[None] * 4, 'fsdp')),
    ],
)
def test_one_mapping_serves_every_mesh(names, shape, laptop, pod):
    rule = LogicalAxisShardingRule(MAPPING, [('', names)])
    assert specs(rule, leaf(*shape), LAPTOP) == laptop
    assert specs(rule, leaf(*shape), POD) == pod


@pytest.mark.parametrize(
    ('names', 'mesh', 'spec'),
    [  # the table in the docstring of the rule
        ('embed mlp', 'data fsdp tp', P('fsdp', 'tp')),
        ('embed mlp', 'fsdp', P('fsdp', None)),
        ('batch embed', 'data fsdp tp', P(('data', 'fsdp'), 'tp')),
        ('batch embed mlp', 'data fsdp tp', P(('data', 'fsdp'), 'tp', None)),
        ('mlp embed', 'data tp', P('tp', None)),
        ('(mlp embed)', 'fsdp tp', P(('tp', 'fsdp'))),
        # Cases that the text below the table describes.
        ('embed batch', 'data fsdp', P('fsdp', 'data')),  # no pair is free: the rest of the first pair
        ('mlp embed two', 'data fsdp tp pp', P('tp', 'fsdp', 'data')),  # the same, of two pairs
        ('unsharded', 'fsdp', P(None)),
        ('off embed', 'fsdp tp', P(None, 'fsdp')),  # None stops the search
        ('late', 'tp', P('tp')),  # the mesh lacks the first pair's axis
    ],
)
def test_precedence(names, mesh, spec):
    pairs = [
        *[('batch', ('data', 'fsdp')), ('embed', 'fsdp'), ('mlp', 'tp'), ('embed', 'tp')],
        *[('unsharded', None), ('off', None), ('off', 'fsdp'), ('late', 'replica'), ('late', 'tp')],
        *[('two', ('fsdp', 'data')), ('two', ('tp', 'pp'))],
    ]
    rule = LogicalAxisShardingRule(pairs, [('', names)])
    shape = leaf(*[4] * len(_einops_pattern.parse(names).dimensions))
    assert specs(rule, shape, dict.fromkeys(mesh.split(), 2)) == canonical(spec)


def test_without_a_mesh_every_axis_is_used():
    rule = LogicalAxisShardingRule(MAPPING, [('w', 'batch embed mlp')])
    assert rule.apply({'w': leaf(8, 8, 8)}) == {'w': P(('replica', 'data', 'fsdp', 'expert'), None, 'tp')}


def test_the_first_matching_regex_applies():
    rule = LogicalAxisShardingRule(
        MAPPING, [('attention/.*/kernel', 'embed heads'), (re.compile('KERNEL', re.I), 'embed mlp')]
    )
    tree = {'attention': {'q': {'kernel': leaf(8, 8)}}, 'mlp': {'kernel': leaf(8, 8)}}
    assert rule.apply(tree) == {
        'attention': {'q': {'kernel': P('fsdp', 'tp')}},
        'mlp': {'kernel': P('fsdp', 'tp')},
    }


def test_names_may_be_python_keywords():
    """Names may be Python keywords, about which einops warns."""
    rule = LogicalAxisShardingRule({'in': 'fsdp', 'axis': 'tp', 'not_in': None}, [('w', '(in axis) not_in')])
    assert rule.apply({'w': leaf(16, 2)}) == {'w': P(('fsdp', 'tp'), None)}
    assert _einops_pattern.parse('in (lambda out) axis').dimensions == (('in',), ('lambda', 'out'), ('axis',))


def test_arrays_of_one_element_are_replicated():
    rule = LogicalAxisShardingRule(MAPPING, [('w', 'embed mlp')])
    assert rule.apply({'w': leaf(1), 'step': 0, 's': leaf()}) == {'w': P(), 'step': P(), 's': P()}


def test_strict_false():
    rule = LogicalAxisShardingRule({'embed': 'fsdp'}, [('w', 'embed other')], strict=False)
    tree = {'w': leaf(8, 8), 'b': leaf(1024, 1024)}
    assert rule.apply(tree) == {'b': P(), 'w': P('fsdp', None)}
    assert (rule | FSDPShardingRule()).apply(tree) == {'b': P('fsdp', None), 'w': P('fsdp', None)}


def test_reports_give_the_reason():
    rule = LogicalAxisShardingRule(MAPPING, [('w', 'heads mlp embed'), ('v', 'embed vocab')])
    report = helper_for(POD).explain({'w': leaf(8, 8, 16), 'v': leaf(16, 8), 's': 0, 'z': leaf()}, rule)
    assert [(row.path, row.rule, row.reason) for row in report.rows] == [
        ('s', 'LogicalAxisShardingRule', 'one element'),
        ('v', "regex 'v': 'embed vocab'", 'embed -> fsdp; vocab -> tp (fsdp in use)'),
        ('w', "regex 'w': 'heads mlp embed'", 'heads -> tp; mlp: tp in use; embed -> fsdp'),
        ('z', 'LogicalAxisShardingRule', 'one element'),
    ]
    assert helper_for({'x': 2}).explain({'w': leaf(8, 8, 16)}, rule).rows[0].reason == (
        "heads: the mesh has no 'tp'; mlp: the mesh has no 'tp'; embed: the mesh has no 'fsdp'"
    )
    none = LogicalAxisShardingRule({'embed': None}, [('', 'embed')])
    assert helper_for(POD).explain(leaf(8), none).rows[0].reason == 'no name maps to a mesh axis'


def test_a_report_shows_axes_that_the_mesh_lacks():
    rule = LogicalAxisShardingRule({'embed': ('pod', 'fdsp'), 'mlp': ('tp', 'pod')}, [('', 'embed mlp')])
    assert helper_for({'fsdp': 4, 'tp': 2}).explain(leaf(8, 8), rule).rows[0].reason == (
        "embed: the mesh has no 'pod', 'fdsp' (did you mean 'fsdp'?); mlp -> tp"
    )


@pytest.mark.parametrize(
    ('mapping', 'reason'),
    [
        ({'embed': ('tp', 'fdsp')}, "embed -> tp; the mesh has no 'fdsp' (did you mean 'fsdp'?)"),
        (
            [('mlp', 'tp'), ('embed', ('tp', 'fdsp'))],
            "mlp -> tp; embed: tp in use; the mesh has no 'fdsp' (did you mean 'fsdp'?)",
        ),
        (
            [('mlp', 'tp'), ('embed', ('tp', 'data', 'fdsp'))],
            "mlp -> tp; embed -> data (tp in use); the mesh has no 'fdsp' (did you mean 'fsdp'?)",
        ),
        # One mapping serves many meshes, and 'dp' looks like 'fsdp', which is named too.
        ({'embed': ('dp', 'fsdp')}, 'embed -> fsdp'),
        ({'embed': ('replica', 'fsdp')}, 'embed -> fsdp'),
    ],
)
def test_a_misspelt_mesh_axis_among_others_is_shown(mapping, reason):
    rule = LogicalAxisShardingRule({'mlp': None, **dict(mapping)}, [('', 'mlp embed')])
    report = helper_for({'data': 2, 'fsdp': 2, 'tp': 2}).explain(leaf(8, 8), rule)
    assert report.rows[0].reason == reason


# --- Sizes and divisibility -----------------------------------------------------------------------

FUSED = [('', 'embed (heads head_dim)')]


def test_a_fused_dimension_needs_a_divisible_product():
    rule = LogicalAxisShardingRule(MAPPING, FUSED)
    assert specs(rule, leaf(16, 24), {'fsdp': 2, 'tp': 4}) == P('fsdp', 'tp')


@pytest.mark.parametrize(
    ('names', 'shape', 'detail'),
    [
        ('embed 3 mlp', (16, 2, 8), 'dimension 1 has size 2, not 3'),
        ('... 1', (16, 2), 'dimension 1 has size 2, not 1'),
        ('(2 3) embed', (8, 16), 'dimension 0 has size 8, not 6'),
        ('(3 mlp)', (16,), 'dimension 0 of size 16 is not (3 mlp): it is not divisible by 3'),
        ('(mlp 2 _ 4)', (12,), 'dimension 0 of size 12 is not (mlp 2 _ 4): it is not divisible by 8'),
    ],
)
def test_a_number_in_a_pattern_is_the_size(names, shape, detail):
    with pytest.raises(ShardingError) as error:
        LogicalAxisShardingRule(MAPPING, [('w', names)]).apply({'w': leaf(*shape)})
    assert message(error) == (
        'One leaf cannot be sharded as asked:\n'
        f'  w: float32{list(shape)}\n'
        f'    {detail}\n'
        f"    rule: regex 'w': {names!r}\n"
        "What to do: correct the number in the pattern, or write '_' for a dimension of any size."
    )


def test_indivisible_dimensions_follow_the_policy(snapshot):
    mesh = {'fsdp': 4, 'tp': 2}
    names = [('', 'embed mlp')]
    with pytest.raises(ShardingError) as error:
        specs(LogicalAxisShardingRule(MAPPING, names), leaf(6, 8), mesh)
    snapshot(message(error))
    rule = LogicalAxisShardingRule(MAPPING, names, on_indivisible='replicate')
    assert specs(rule, leaf(6, 8), mesh) == P(None, 'tp')


@pytest.mark.parametrize(
    ('names', 'shape', 'spec'),
    [
        ('a b', (3, 8), P(None, 'y')),
        ('(a c) b', (3, 8), P(None, 'y')),
        ('a (b c)', (3, 32), P(None, ('y', 'x'))),
        ('d b', (6, 8), P('y', None)),  # x is left out, y is in use
        ('a d', (3, 8), P(None, ('y', 'x'))),
    ],
)
@pytest.mark.parametrize('policy', ['replicate', 'warn'])
def test_axes_that_do_not_divide_are_free_for_later_dimensions(names, shape, spec, policy):
    mapping = {'a': 'y', 'b': 'y', 'c': 'x', 'd': ('y', 'x')}
    rule = LogicalAxisShardingRule(mapping, [('w', names)], on_indivisible=policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert specs(rule, {'w': leaf(*shape)}, {'x': 4, 'y': 2}) == {'w': canonical(spec)}
    assert [warning.category for warning in caught] == [IndivisibleWarning] * (policy == 'warn')


def test_warnings_name_the_leaves_of_the_tree():
    """The rule may resolve other leaves, such as parameters or layers of a stack."""
    rule = LogicalAxisShardingRule({'a': 'x', 'b': 'y'}, [('w', 'a b')], on_indivisible='warn')
    state = {'mu': {'w': leaf(3, 8)}, 'nu': {'w': leaf(3, 8)}, 'row': {'w': leaf(8)}}
    of_state = OptimizerStateShardingRule(rule, {'w': leaf(3, 8)})
    text = 'dimension 0 of size 3 is not divisible by x; no axis is used'
    with pytest.warns(IndivisibleWarning) as caught:
        result = specs(of_state, state, {'x': 2, 'y': 2})
        assert result == {'mu': {'w': P(None, 'y')}, 'nu': {'w': P(None, 'y')}, 'row': {'w': P('y')}}
        assert specs(rule.stacked(), {'w': leaf(5, 3, 8)}, {'x': 2, 'y': 2}) == {'w': P(None, None, 'y')}
        assert specs(rule & P(None, 'x'), {'w': leaf(3, 8)}, {'x': 2, 'y': 2}) == {'w': P(None, 'y')}
    origin = "OptimizerStateShardingRule -> regex 'w': 'a b'"
    assert [str(warning.message).splitlines()[1:] for warning in caught] == [
        [
            f'  mu/w: float32[3, 8], {origin}: {text}',
            f'  nu/w: float32[3, 8], {origin}: {text}',
            f'  row/w: float32[8], {origin}: {text}',
        ],
        [f"  w: float32[5, 3, 8], regex 'w': 'a b': {text}"],
        [f"  w: float32[3, 8], regex 'w': 'a b': {text}"],
    ]


def test_no_other_pair_is_tried_for_an_indivisible_dimension():
    pairs = [('a', 'y'), ('a', 'x'), ('b', 'x')]
    rule = LogicalAxisShardingRule(pairs, [('w', 'a b')], on_indivisible='warn')
    with pytest.warns(IndivisibleWarning) as caught:
        assert specs(rule, {'w': leaf(3, 8)}, {'x': 3, 'y': 2}) == {'w': P()}
    assert [str(warning.message) for warning in caught] == [
        'dimensions that are not divisible (mesh: x=3, y=2):\n'
        "  w: float32[3, 8], regex 'w': 'a b': dimension 0 of size 3 is not divisible by y; no axis is used\n"
        "  w: float32[3, 8], regex 'w': 'a b': dimension 1 of size 8 is not divisible by x; no axis is used"
    ]


# --- Composed -------------------------------------------------------------------------------------


def test_with_other_rules():
    names = LogicalAxisShardingRule({'mlp': 'tp', 'embed': None}, [('kernel', 'embed mlp')])
    fsdp = FSDPShardingRule(fsdp_axis_size=4, min_fsdp_size=0)
    tree = {'kernel': leaf(16, 8), 'bias': leaf(8)}
    assert (names | P('tp')).apply(tree) == {'bias': P('tp'), 'kernel': P(None, 'tp')}
    assert (names | fsdp).apply(tree) == {'bias': P('fsdp'), 'kernel': P(None, 'tp')}
    assert (names & fsdp).apply({'kernel': leaf(16, 8)}) == {'kernel': P('fsdp', 'tp')}
    assert TreePathShardingRule(('kernel', names), ('.*', P())).apply(tree) == {
        'bias': P(),
        'kernel': P(None, 'tp'),
    }


def test_named_dimensions_choose_among_the_free_axes():
    pairs = [('embed', 'fsdp'), ('mlp', 'tp'), ('mlp', 'fsdp')]
    rule = P('tp') & LogicalAxisShardingRule(pairs, [('', 'embed mlp')])
    # An earlier rule shards embed, so it does not use fsdp; tp is in use, so mlp uses its next pair.
    assert rule.apply(leaf(8, 8)) == P('tp', 'fsdp')


def test_stacked_names_describe_one_layer(snapshot):
    rule = LogicalAxisShardingRule(MAPPING, [('', 'embed mlp')]).stacked(1)
    assert specs(rule, leaf(3, 16, 8), {'fsdp': 4, 'tp': 2}) == P(None, 'fsdp', 'tp')
    with pytest.raises(ShardingError) as error:
        rule.apply({'w': leaf(3, 16)})
    snapshot(message(error))


def test_memory_kind():
    rule = LogicalAxisShardingRule(MAPPING, [('', 'embed mlp')]).with_memory_kind('pinned_host')
    sharding = MeshShardingHelper([4, 2], ['fsdp', 'tp']).match_sharding_rule(rule, leaf(16, 8))
    assert (sharding.spec, sharding.memory_kind) == (P('fsdp', 'tp'), 'pinned_host')


# --- Compiled functions ---------------------------------------------------------------------------


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_sjit_with_names_for_parameters_and_activations(axis_type):
    helper = MeshShardingHelper([2, 2, 2], ['data', 'fsdp', 'tp'], axis_types=axis_type)
    parameters = LogicalAxisShardingRule(
        {'embed': 'fsdp', 'mlp': 'tp'}, [('up', 'embed mlp'), ('down', 'mlp embed')]
    )
    activations = LogicalAxisShardingRule(
        {'batch': ('data', 'fsdp'), 'sequence': 'context', 'embed': 'fsdp'},
        axis_names=[('', 'batch sequence embed')],
    )
    seen = []

    def forward(params, x):
        x = with_sharding_annotation(x * 2, 'activations')
        jax.debug.inspect_array_sharding(x, callback=lambda sharding: seen.append(sharding))
        return x

    step = helper.sjit(
        forward,
        in_shardings=(parameters, activations),
        out_shardings=activations,
        annotation_shardings={'activations': activations},
    )
    params = {'up': np.ones((8, 16), 'f'), 'down': np.ones((16, 8), 'f')}
    x = np.arange(4 * 6 * 8, dtype='f').reshape(4, 6, 8)
    out = step(params, x)
    np.testing.assert_array_equal(out, x * 2)
    assert out.sharding.spec == P(('data', 'fsdp'))
    (inputs, _), outputs = step.shardings_for(params, x)
    assert {name: sharding.spec for name, sharding in inputs.items()} == {
        'up': P('fsdp', 'tp'),
        'down': P('tp', 'fsdp'),
    }
    assert outputs.spec == P(('data', 'fsdp'))
    assert all(sharding.is_equivalent_to(out.sharding, 3) for sharding in seen)


# --- Values ---------------------------------------------------------------------------------------

VALUES = [
    LogicalAxisShardingRule({}),
    LogicalAxisShardingRule(MAPPING),
    LogicalAxisShardingRule({'embed': ['fsdp', 'tp'], 'mlp': (), 'heads': ('tp',)}),
    LogicalAxisShardingRule([('embed', 'fsdp'), ('embed', None)], [('w', 'embed _'), ('.*', '...')]),
    LogicalAxisShardingRule({'a': 'x'}, [(re.compile('w', re.I), '(a b)')], strict=False),
    LogicalAxisShardingRule({'a': 'x', 'b': 'y'}, None, True, 'warn'),
]


@pytest.mark.parametrize('rule', VALUES, ids=repr)
def test_rules_are_values(rule):
    again = eval(repr(rule), {'LogicalAxisShardingRule': LogicalAxisShardingRule, 're': re})
    for other in (again, pickle.loads(pickle.dumps(rule))):
        assert other == rule
        assert hash(other) == hash(rule)
        assert repr(other) == repr(rule)
    assert len({*VALUES, again}) == len(VALUES)
    assert rule.is_pure == (rule.on_indivisible != 'warn')
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.strict = False


def test_long_regexes_are_shown_in_full():
    regex = re.compile('w|' + 'a' * 300)
    rule = LogicalAxisShardingRule({'a': 'x'}, [(regex, 'a b')], strict=False)
    assert eval(repr(rule), {'LogicalAxisShardingRule': LogicalAxisShardingRule, 're': re}) == rule
    (row,) = helper_for({'x': 2}).explain({'w': leaf(8, 8)}, rule).rows
    assert row.rule == f"regex re.compile({regex.pattern!r}): 'a b'"


def test_the_simplest_repr():
    assert repr(LogicalAxisShardingRule([('a', ['x'])], [['w', 'a']])) == (
        "LogicalAxisShardingRule({'a': 'x'}, [('w', 'a')])"
    )


# --- Properties -----------------------------------------------------------------------------------

AXES = ['data', 'fsdp', 'tp']
ENTRIES = st.one_of(st.none(), st.sampled_from(AXES), st.lists(st.sampled_from(AXES), unique=True))
PAIRS = st.lists(st.tuples(st.sampled_from('abcd'), ENTRIES), max_size=8)


@hypothesis.given(PAIRS, st.permutations('abcd'), st.lists(st.sampled_from(AXES), min_size=1, unique=True))
def test_every_mapping_works_on_every_mesh(pairs, names, mesh):
    rule = LogicalAxisShardingRule(pairs, [('', ' '.join(names))], strict=False)
    spec = specs(rule, leaf(8, 8, 8, 8), dict.fromkeys(mesh, 2))
    used = spec_axes(spec)
    assert set(used) <= set(mesh)
    assert len(set(used)) == len(used)
    for name, entry in zip(names, spec, strict=False):
        allowed = {axis for other, axes in pairs if other == name for axis in spec_axes(P(axes or None))}
        assert set(spec_axes(P(entry))) <= allowed
