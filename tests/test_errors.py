"""Complete error messages, and errors as values.

Messages about meshes, trees of rules and host data are tested in the folders of their packages.
"""

import pickle

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from scalax import errors
from scalax.errors import (
    IndivisibleWarning,
    MeshError,
    PlacementError,
    Problem,
    RuleError,
    ScalaxError,
    ShardingError,
    did_you_mean,
    shown_leaves,
)
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    NamedSharding,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
)
from tests.support.leaves import leaf

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
MIXED = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=(AxisType.Auto, AxisType.Explicit))
OTHER = MeshShardingHelper([8], ['data']).mesh


class Tuples(ShardingRule):
    def apply(self, pytree):
        return jax.tree.map(lambda _: ('fsdp', None), pytree)


def returns_three(path, x):
    return 3


def returns_text(path, x):
    return 'fsdp' if path == 'w' else P()


DIVIDE = (
    'What to do: change the shape (of a batch: pad it, or drop its last examples) or the spec, or set '
    "on_indivisible='replicate' (or 'warn') on the rule, "
    'or on the helper for bare specs, to leave such dimensions unsharded.'
)


@pytest.mark.parametrize(
    ('rules', 'tree'),
    [
        pytest.param(
            {'near': P('fdsp'), 'far': P('data')},
            {'near': leaf(8), 'far': leaf(8)},
            id='unknown axis',
        ),
        pytest.param(
            TreePathShardingRule(('', P('fsdp', None, 'tp'))),
            {'w': leaf(8, 8), 'b': leaf(8)},
            id='spec longer than the rank',
        ),
        pytest.param(
            P('fsdp'),
            {'step': leaf()},
            id='spec of one entry',
        ),
        pytest.param(
            P('tp', 'fsdp'),
            {'w': leaf(3, 5), 'v': leaf(4, 6)},
            id='indivisible',
        ),
        pytest.param(
            PolicyShardingRule(lambda path, x: P(('fsdp', 'tp'))),
            leaf(12),
            id='indivisible by two axes',
        ),
        pytest.param(
            P('fsdp', ('tp', 'fsdp')),
            [leaf(8, 8)],
            id='axis used twice',
        ),
        pytest.param(
            TreePathShardingRule(('kernal$', P()), ('scale', P())),
            {'dense': {'kernel': leaf(8, 8), 'bias': leaf(8)}, 'step': leaf()},
            id='unmatched',
        ),
        pytest.param(
            PolicyShardingRule(returns_text),
            {'w': leaf(8), 'b': leaf(8)},
            id='policy returns something else',
        ),
        pytest.param(
            Tuples(),
            {'w': leaf(8)},
            id='apply returns something else',
        ),
        pytest.param(
            FSDPShardingRule(),
            {'name': 'adam', 'hook': len, 'table': np.array(['a', 'b']), 'w': leaf(8), 'l': list(range(2))},
            id='not arrays',
        ),
        pytest.param(
            NamedSharding(OTHER, P('data')),
            {'w': leaf(8)},
            id='another mesh',
        ),
        pytest.param(
            {'a': None, 'b': P(P.UNCONSTRAINED)},
            {'a': leaf(8), 'b': leaf(8)},
            id='no reason',
        ),
        pytest.param(
            {'a': TreePathShardingRule(('x', P())), 'b': PolicyShardingRule(returns_three), 'c': P('fsdp')},
            {'a': {'w': leaf(8)}, 'b': leaf(8), 'c': leaf(3)},
            id='everything at once',
        ),
        pytest.param(
            TreePathShardingRule(
                ('p', PolicyShardingRule(returns_three)), ('t', TreePathShardingRule(('q', P())))
            ),
            {name: leaf(8) for name in 'ptw'},
            id='nested rules',
        ),
    ],
)
def test_trees_that_cannot_be_sharded(rules, tree, snapshot):
    for call in (HELPER.match_sharding_rule, lambda rules, tree: HELPER.shard(tree, rules)):
        with snapshot.raises(ShardingError):
            call(rules, tree)


def test_axis_types_that_do_not_mix():
    with pytest.raises(ShardingError) as error:
        MIXED.match_sharding_rule([P(('fsdp', 'tp')), P('tp', unreduced={'fsdp'})], [leaf(8), leaf(8)])
    assert [(problem.leaf, problem.detail, problem.hint) for problem in error.value.problems] == [
        (
            '0: float32[8]',
            'dimension 0 mixes mesh axes of types Auto and Explicit',
            'use axes of one type for each dimension (JAX would reorder them silently).',
        ),
        (
            '1: float32[8]',
            "unreduced or reduced axes ('fsdp') on a mesh that has axes of type Auto ('fsdp')",
            'unreduced and reduced axes need a mesh whose axes are all of type Explicit.',
        ),
    ]


def test_ten_leaves_are_shown_and_the_rest_counted():
    for count, rest in ((10, DIVIDE), (11, '  ... and 1 more leaf'), (14, '  ... and 4 more leaves')):
        with pytest.raises(ShardingError) as error:
            HELPER.match_sharding_rule(P('fsdp'), {f'w{i:02}': leaf(3) for i in range(count)})
        lines = str(error.value).splitlines()
        assert lines[0] == f'{count} leaves cannot be sharded as asked (mesh: fsdp=4, tp=2):'
        assert [line for line in lines if line.startswith('  w')] == [
            f'  w{i:02}: float32[3]' for i in range(10)
        ]
        assert lines[-1 if count == 10 else -2] == rest
        assert len(error.value.problems) == count


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (
            lambda: TreePathShardingRule(('ok', P()), ('layers/(', P())),
            "TreePathShardingRule, pair 1: invalid regex 'layers/(': missing ), unterminated subpattern "
            '(position 7)',
        ),
        (
            lambda: TreePathShardingRule(('w', ('fsdp', None))),
            "TreePathShardingRule, pair 0 ('w'): the value is a PartitionSpec, a rule or None, got "
            "('fsdp', None)",
        ),
        (
            lambda: TreePathShardingRule(('w', ['fsdp', 'tp'])),
            "TreePathShardingRule, pair 0 ('w'): the value is a PartitionSpec, a rule or None, got "
            "['fsdp', 'tp']",
        ),
        (
            lambda: TreePathShardingRule(('w', 'fsdp')),
            "TreePathShardingRule, pair 0 ('w'): the value is a PartitionSpec, a rule or None, got 'fsdp'",
        ),
        (
            lambda: TreePathShardingRule([('w', P())]),
            "TreePathShardingRule, pair 0: expected a pair (regex, PartitionSpec), got [('w', P())]; "
            'unpack a list of pairs: *pairs',
        ),
        (
            lambda: TreePathShardingRule((3, P())),
            'TreePathShardingRule, pair 0: the regex is a string, got 3',
        ),
        (
            lambda: TreePathShardingRule(('w', P()), on_indivisible='pad'),
            "on_indivisible is 'error', 'replicate' or 'warn', got 'pad'",
        ),
        (lambda: PolicyShardingRule(P('fsdp')), "policy is a function of (path, leaf), got P('fsdp',)"),
        (
            lambda: MeshShardingHelper([8], ['fsdp'], on_indivisible='pad'),
            "on_indivisible is 'error', 'replicate' or 'warn', got 'pad'",
        ),
        (
            lambda: HELPER.match_sharding_rule(FSDPShardingRule('fdsp'), leaf(8)),
            f"{FSDPShardingRule('fdsp')!r}: the mesh has no axis 'fdsp' (did you mean 'fsdp'?)",
        ),
        (
            lambda: HELPER.match_sharding_rule(FSDPShardingRule('fsdp', 8), leaf(8)),
            f'{FSDPShardingRule("fsdp", 8)!r}: fsdp_axis_size is 8, but the mesh has 4 devices along '
            "'fsdp'; leave fsdp_axis_size out: the helper takes it from the mesh",
        ),
        (
            lambda: FSDPShardingRule(fsdp_axis_name=None),
            'fsdp_axis_name is a mesh axis or a tuple of them, got None',
        ),
        (
            lambda: FSDPShardingRule(fsdp_axis_name=('a', 1)),
            "fsdp_axis_name is a mesh axis or a tuple of them, got ('a', 1)",
        ),
        *(
            (
                lambda size=size: FSDPShardingRule(fsdp_axis_size=size),
                f'fsdp_axis_size is a positive integer or None, got {size!r}',
            )
            for size in (0, -1, '4', 4.0, True)
        ),
        *(
            (
                lambda size=size: FSDPShardingRule(min_fsdp_size=size),
                f'min_fsdp_size is a number of elements, got {size!r}',
            )
            for size in (None, '1M')
        ),
    ],
)
def test_invalid_rules(make, message):
    with pytest.raises(RuleError) as error:
        make()
    assert str(error.value) == message


def test_one_cause_in_many_layers_is_reported_once(snapshot):
    def layer():
        return {'q': np.zeros((6, 4)), 'k': np.zeros((6, 4)), 'bias': np.zeros(8)}

    tree = {'layers': [layer() for _ in range(280)], 'head': np.zeros((6, 4))}
    with pytest.raises(ShardingError) as error:
        HELPER.match_sharding_rule(P('fsdp'), tree)
    assert len(error.value.problems) == 561
    snapshot(error.value)


def test_every_list_of_leaves_is_folded(snapshot):
    state = {'layers': [{'w': np.zeros((8, 8), np.float32)} for _ in range(100)]}
    placed = HELPER.shard(state, P('fsdp'))
    with snapshot.raises(PlacementError):
        HELPER.sjit(lambda state: 1.0, in_shardings={'state': P('tp')})(placed)
    with pytest.warns(IndivisibleWarning) as warned:
        HELPER.match_sharding_rule(
            TreePathShardingRule(('.*', P('fsdp')), on_indivisible='warn'), {'layers': [np.zeros(9)] * 40}
        )
    snapshot(warned[0].message)


def test_leaves_fold_where_the_text_quotes_their_paths(snapshot):
    tree = {'layers': [{'norm': np.zeros(8)} for _ in range(100)]}
    with pytest.raises(ShardingError) as error:
        HELPER.match_sharding_rule({'layers': TreePathShardingRule(('w', P()), strict=True)}, tree)
    snapshot(error.value)
    details = {problem.leaf: problem.detail for problem in error.value.problems}
    assert len(details) == 100
    assert "'7/norm'" in details['layers/7/norm: float64[8]']


def test_leaves_are_listed():
    assert shown_leaves([]) == ''
    assert shown_leaves(['a/0', 'a/1', 'b']) == '  a/{0,1} (2 leaves)\n  b'
    assert shown_leaves(['a.0.w: x', 'a.1.w: x'], '.') == '  a.{0,1}.w: 2 x x'
    assert shown_leaves(f'{letter}/w: x' for letter in 'abcdefghijkl').endswith('\n  ... and 2 more leaves')


# --- Errors as values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    'error',
    [
        ShardingError([Problem('kind', 'w: float32[8]', 'is wrong', 'P()', 'rule', 'hint')], 'a=8', 'x'),
        ShardingError([], message='something about all leaves'),
        MeshError('text'),
    ],
)
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ('name', 'builtin'),
    [
        ('MeshError', ValueError),
        ('RuleError', ValueError),
        ('ShardingError', ValueError),
        ('StructureError', ValueError),
        ('ArgumentError', TypeError),
        ('PlacementError', ValueError),
        ('DataError', ValueError),
        ('MissingDependencyError', ImportError),
    ],
)
def test_errors_derive_from_builtin_exceptions(name, builtin):
    assert issubclass(getattr(errors, name), ScalaxError)
    assert issubclass(getattr(errors, name), builtin)
    assert f'{name} ' in errors.__doc__


@pytest.mark.parametrize(
    ('word', 'names', 'text'),
    [
        ('fdsp', ['fsdp', 'tp'], "did you mean 'fsdp'?"),
        ('data1', ['data2', 'data3', 'tp'], "did you mean 'data3' or 'data2'?"),
        ('x', ['fsdp', 'tp'], "known: 'fsdp', 'tp'"),
        ('x', [], 'there are none'),
        ('x', [str(i) for i in range(11)], "known: '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', ..."),
    ],
)
def test_did_you_mean(word, names, text):
    assert did_you_mean(word, names) == text


def test_long_rules_are_abbreviated_in_text_only(snapshot):
    regex = '|'.join(f'layer_{i}/kernel' for i in range(40))
    with pytest.raises(ShardingError) as error:
        HELPER.match_sharding_rule(TreePathShardingRule((regex, P('fsdp'))), {'layer_7': {'kernel': leaf(3)}})
    snapshot(str(error.value).splitlines()[3])
    assert error.value.problems[0].rule == f'regex {regex!r}'


def called_with_an_array_before(masked):
    doubled = HELPER.sjit(lambda x: 2 * x, in_shardings=P('fsdp'))
    doubled(np.ones(8))
    return doubled(masked)


MASKED = {
    'shard': lambda masked: HELPER.shard(masked, P('fsdp')),
    'sjit': lambda masked: HELPER.sjit(lambda x: 2 * x, in_shardings=P('fsdp'))(masked),
    'sjit again': called_with_an_array_before,
    'shard_map': lambda masked: HELPER.shard_map(lambda x: 2 * x, P('fsdp'), P('fsdp'))(masked),
    'host data': HELPER.local_data_to_global_array,
    'prefetch': lambda masked: next(HELPER.prefetch([masked])),
    'broadcast': lambda masked: HELPER.broadcast_from(0, masked),
}


@pytest.mark.parametrize('call', MASKED.values(), ids=MASKED)
def test_a_mask_is_never_dropped(call):
    masked = np.ma.masked_array(np.ones(8), np.arange(8) % 2)
    with pytest.raises(ScalaxError) as error:
        call(masked)
    assert 'MaskedArray (.filled() makes a plain array of it)' in str(error.value)
