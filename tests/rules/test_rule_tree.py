"""Trees of rules: the subtree that each rule decides about, and trees that do not match."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from scalax.errors import ShardingError, StructureError
from scalax.rules._rule import is_rule
from scalax.rules._rule_tree import cache_key, match_subtrees
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule

HELPER = MeshShardingHelper([4, 2], ['data', 'tp'])
FSDP = FSDPShardingRule('data', min_fsdp_size=0)
X = np.zeros((8, 8), np.float32)

Pair = collections.namedtuple('Pair', ['a', 'b'])


def by_size(path, leaf):
    return P('data') if leaf.size > 64 else P()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Config:
    w: object
    name: str = dataclasses.field(default='', metadata={'static': True})


@pytest.mark.parametrize(
    ('rules', 'tree', 'parts'),
    [
        (P(), {'w': X}, [(None, ['w'])]),
        (None, [X, X], [(None, ['0', '1'])]),
        (FSDP, X, [(None, [''])]),
        ({'': P(), 'b': FSDP}, {'': {'': X}, 'b': X}, [('', ['']), ('b', [''])]),
        ({'a': P(), 'b': FSDP}, {'a': {'w': X, 'v': X}, 'b': X}, [('a', ['v', 'w']), ('b', [''])]),
        ([P(), None], [X, {'w': X}], [('0', ['']), ('1', ['w'])]),
        ((P(), (FSDP, P())), (X, ([X], X)), [('0', ['']), ('1/0', ['0']), ('1/1', [''])]),
        (Pair(P(), P('data')), Pair({'w': X}, X), [('a', ['w']), ('b', [''])]),
        (Config(P()), Config({'k': X}), [('w', ['k'])]),
        # A None in the tree has no leaves, for any rule.
        ({'a': P(), 'b': None}, {'a': None, 'b': None}, [('a', []), ('b', [])]),
        ({}, {}, []),
        ([], [], []),
    ],
)
def test_each_rule_gets_its_subtree(rules, tree, parts):
    subtrees = match_subtrees(rules, tree)
    paths = [
        [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]
        for leaves in (jax.tree_util.tree_leaves_with_path(part.tree) for part in subtrees)
    ]
    assert list(zip([part.path for part in subtrees], paths, strict=True)) == parts


def test_rules_see_paths_that_start_at_their_subtree():
    tree = {'params': {'w': X}, 'opt': {'w': X}}
    rules = {'params': TreePathShardingRule(('^w$', P('tp'))), 'opt': TreePathShardingRule(('^w', P('data')))}
    shardings = HELPER.match_sharding_rule(rules, tree)
    assert shardings['params']['w'].spec == P('tp')
    assert shardings['opt']['w'].spec == P('data')


@pytest.mark.parametrize(
    ('value', 'expected'),
    [
        (P(), True),
        (None, True),
        (FSDP, True),
        (NamedSharding(HELPER.mesh, P()), True),
        ((P(), P()), False),
        ({}, False),
        ('data', False),
        (SingleDeviceSharding(jax.devices()[0]), False),
    ],
)
def test_which_values_are_one_rule(value, expected):
    assert is_rule(value) is expected


def test_keys_of_equal_rules_are_equal():
    def rules():
        return {'a': P('data', None), 'b': (FSDPShardingRule('data'), None)}

    assert cache_key(rules()) == cache_key(rules())
    assert hash(cache_key(rules())) == hash(cache_key(rules()))
    assert cache_key(rules()) != cache_key({'a': P('data', None), 'b': [FSDPShardingRule('data'), None]})
    assert cache_key(P()) == P()


def differ(path, has):
    return (
        'the rules do not match the structure of the tree. Where they differ, the tree has:\n'
        f'  {path}: {has}\n'
        'What to do: give one rule for each subtree there, or one for all (in sjit, None leaves it to the '
        'compiler). Regexes on paths are for TreePathShardingRule((regex, rule), ...).'
    )


TAKEN = 'which is not a rule: give a ShardingRule, a PartitionSpec, a NamedSharding or None'


@pytest.mark.parametrize(
    ('rules', 'tree', 'message'),
    [
        (
            {'params': {'kernl': P()}},
            {'params': {'kernel': X, 'bias': X}},
            differ('params', "a dict without 'kernl', with 'bias', 'kernel'"),
        ),
        (
            {'w': P()},
            {'w': X, 'b': X},
            differ('(the root)', "a dict with 'b'"),
        ),
        (
            {'w': P(), 'b': P()},
            {'w': X},
            differ('(the root)', "a dict without 'b'"),
        ),
        (
            (P(), P()),
            (X, X, X),
            differ('(the root)', 'a tuple with 3 children in place of a tuple with 2 children'),
        ),
        (
            {},
            {str(number): X for number in range(12)},
            differ('(the root)', "a dict with '0', '1', '10', '11', '2', '3', '4', '5', '6', '7' and 2 more"),
        ),
        (
            {'a': {'x': P()}},
            {'a': {}},
            differ('a', "a dict without 'x'"),
        ),
        (
            {'.*kernel': P(), 'bias': None},
            {'kernel': X, 'bias': X},
            differ('(the root)', "a dict without '.*kernel', with 'kernel'"),
        ),
        (
            [('w', P()), ('b', None)],
            {'w': X, 'b': X},
            f"the rules contain 'w' of type str at '0/0', {TAKEN}; pairs of a regex and a rule are for "
            'TreePathShardingRule((regex, rule), ...)',
        ),
        (
            {'w': FSDPShardingRule},
            {'w': X},
            f"the rules contain {FSDPShardingRule!r} of type ABCMeta at 'w', {TAKEN}; this is the class: "
            'write FSDPShardingRule(...)',
        ),
        (
            {'a': {'x': P()}},
            {'a': None},
            differ('a', 'None in place of a dict with 1 child'),
        ),
        (
            {'a': {'x': P(), 'y': P()}},
            {'a': X},
            differ('a', 'a leaf in place of a dict with 2 children'),
        ),
        (
            {'a': [{'x': [P()]}]},
            {'a': [{'x': ()}]},
            differ('a/0/x', 'a tuple with 0 children in place of a list with 1 child'),
        ),
        (
            Pair(P(), P()),
            (X, X),
            differ('(the root)', 'a tuple with 2 children in place of a Pair with 2 children'),
        ),
        (
            {'c': Config(P(), 'one')},
            {'c': Config(X, 'two')},
            differ('c', 'a Config that differs in its static fields'),
        ),
        (
            {'a': 'data'},
            {'a': X},
            f"the rules contain 'data' of type str at 'a', {TAKEN}; write PartitionSpec('data')",
        ),
        (
            ['data'],
            [X],
            f"the rules contain 'data' of type str at '0', {TAKEN}; write PartitionSpec('data')",
        ),
        (
            3,
            X,
            f'the rules contain 3 of type int, {TAKEN}',
        ),
        (
            {'w': X},
            FSDP,
            f"the rules contain float32[8, 8] of type ndarray at 'w', {TAKEN}; are the tree and the rules "
            'the wrong way round?',
        ),
        (
            by_size,
            X,
            f'the rules contain {by_size!r} of type function, {TAKEN}',
        ),
        (
            SingleDeviceSharding(jax.devices()[0]),
            X,
            'the rules contain SingleDeviceSharding(device=CpuDevice(id=0), memory_kind=... of type '
            f'SingleDeviceSharding, {TAKEN}',
        ),
    ],
)
def test_trees_of_rules_that_do_not_match(rules, tree, message):
    with pytest.raises(StructureError) as error:
        HELPER.match_sharding_rule(rules, tree)
    assert str(error.value) == message


def test_messages_name_the_tree(snapshot):
    with snapshot.raises(StructureError):
        match_subtrees({'w': P()}, {'v': X}, "argument 'state'")


def test_an_unmatched_leaf_has_the_path_that_the_rule_saw():
    tree = {'params': {'up': X, 'b': X}, 'up': X}
    rule = TreePathShardingRule(('up', P()))
    with pytest.raises(ShardingError) as error:
        HELPER.match_sharding_rule({'params': rule, 'up': rule}, tree)
    assert [(problem.leaf, problem.detail) for problem in error.value.problems] == [
        ('params/b: float32[8, 8]', "no regex of the rule matches the path 'b' (inside 'params')"),
        ('up: float32[8, 8]', "no regex of the rule matches the path '' (inside 'up')"),
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A train state like flax's, whose optimizer is static."""

    step: object
    params: object
    tx: object = dataclasses.field(metadata={'static': True})


def test_messages_locate_different_static_fields(snapshot):
    tree = TrainState(0, {'d': {'w': np.ones(8)}}, 'adam')
    rules = TrainState(P(), {'d': {'w': P()}}, 'sgd')
    with snapshot.raises(StructureError):
        match_subtrees(rules, tree)
    below = TrainState(P(), {'d': {'v': P()}}, 'sgd')
    with pytest.raises(StructureError, match="params/d: a dict without 'v', with 'w'"):
        match_subtrees(below, tree)


def test_a_tree_instead_of_rules_is_an_error_even_after_a_valid_call():
    tree, rules = {'a': X, 'b': X[0]}, {'a': P(), 'b': P()}
    HELPER.match_sharding_rule(rules, tree)
    with pytest.raises(StructureError, match='the wrong way round'):
        HELPER.match_sharding_rule(tree, rules)


@pytest.mark.parametrize('tree', [P('data'), {'w': P('data')}])
def test_rules_instead_of_a_tree(tree):
    with pytest.raises(ShardingError) as raised:
        HELPER.shard(tree, P())
    leaf = 'w' if isinstance(tree, dict) else '(the leaf itself)'
    assert str(raised.value) == (
        f'One leaf cannot be sharded as asked (mesh: data=4, tp=2):\n'
        f'  {leaf}: {type(P()).__module__}.{type(P()).__name__}\n'
        "    P('data',) is not an array\n"
        'What to do: shard trees of arrays, and take other leaves out (a function may close over them). Or '
        'are the tree and the rules the wrong way round?'
    )


def test_equal_differences_in_many_layers_are_folded(snapshot):
    tree = {'layers': [{'q': 1.0, 'k': 1.0} for _ in range(100)], 'head': {'w': 1.0}}
    rules = jax.tree.map(lambda _: P(), tree)
    for layer in rules['layers'][:60]:
        layer['query'] = layer.pop('q')
    rules['head'] = P(), P()
    with snapshot.raises(StructureError):
        HELPER.match_sharding_rule(rules, tree)
