"""Errors about names of dimensions that do not fit, and the parsing of patterns."""

import hypothesis
import pytest
from einops.parsing import ParsedExpression
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from scalax.errors import RuleError, ShardingError
from scalax.rules import _einops_pattern
from scalax.sharding import LogicalAxisShardingRule
from tests.support.leaves import leaf

MAPPING = {'batch': ('data', 'fsdp'), 'embed': 'fsdp', 'mlp': 'tp', 'heads': 'tp', 'layers': None}


def message(error):
    return str(error.value)


# --- Errors of leaves -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('names', 'expected'),
    [
        ('embed mlp', "'embed mlp' names 2 dimensions, the array has 3"),
        ('embed', "'embed' names 1 dimension, the array has 3"),
        (
            '... layers batch embed mlp',
            "'... layers batch embed mlp' names at least 4 dimensions, the array has 3",
        ),
    ],
)
def test_another_number_of_dimensions(names, expected):
    with pytest.raises(ShardingError) as error:
        LogicalAxisShardingRule(MAPPING, [('w', names)]).apply({'w': leaf(2, 3, 4)})
    assert message(error) == (
        'One leaf cannot be sharded as asked:\n'
        '  w: float32[2, 3, 4]\n'
        f'    {expected}\n'
        f"    rule: regex 'w': {names!r}\n"
        "What to do: name every dimension ('_' for one without a name, '...' for any number of them), or "
        'put a rule for such leaves before this one.'
    )


def test_all_unmatched_leaves_are_named():
    rule = LogicalAxisShardingRule(MAPPING, [('kernel', 'embed mlp')])
    with pytest.raises(ShardingError) as error:
        rule.apply({'bias': leaf(8), 'kernel': leaf(8, 8), 'scale': leaf(4)})
    assert message(error) == (
        '2 leaves cannot be sharded as asked:\n'
        '  bias: float32[8]\n'
        "    the leaf does not name its dimensions, and no regex of axis_names matches the path 'bias'\n"
        '    rule: LogicalAxisShardingRule with 1 regex\n'
        '  scale: float32[4]\n'
        "    the leaf does not name its dimensions, and no regex of axis_names matches the path 'scale'\n"
        '    rule: LogicalAxisShardingRule with 1 regex\n'
        'What to do: add a pair for these leaves to axis_names, put a rule for them after this one '
        '(rule | FSDPShardingRule()), or pass strict=False to replicate them.'
    )


def pattern(text, why, at):
    return f'invalid pattern {text!r}: {why}\n  {text}\n  {" " * at}^'


def misplaced(word):
    kinds = "names, '_', numbers, groups '(a b)', and one '...' outside of these"
    return f'{word!r} does not belong here: a pattern has {kinds}'


@pytest.mark.parametrize(
    ('names', 'why', 'at'),
    [
        ('embed (mlp', "'(' is never closed", 6),
        ('embed mlp)', misplaced(')'), 9),
        ('(embed (mlp))', misplaced('('), 7),
        ('(... embed)', misplaced('...'), 1),
        ('embed …', misplaced('…'), 6),
        ('... embed ...', misplaced('...'), 10),
        ('embed mlp embed', "'embed' is used twice", 10),
        ('embed (heads embed)', "'embed' is used twice", 13),
        ('embed, mlp', misplaced(','), 5),
        ('embed -> mlp', misplaced('-'), 6),
        ('embed ..', misplaced('.'), 6),
        ('embed 3d', misplaced('3d'), 6),
        ('embed ²', misplaced('²'), 6),
        ('embed 0', misplaced('0'), 6),
        ('embed _mlp', misplaced('_mlp'), 6),
        ('in embed in', "'in' is used twice", 9),
        ('embed mpl', "axis_mapping has no name 'mpl' (did you mean 'mlp'?)", 6),
        ('(heads d) x', "axis_mapping has no name 'd' (known: 'embed', 'mlp', 'heads')", 7),
    ],
)
def test_errors_point_into_invalid_patterns(names, why, at):
    with pytest.raises(RuleError) as error:
        LogicalAxisShardingRule({'embed': 'fsdp', 'mlp': 'tp', 'heads': 'tp'}, [('w', names)])
    assert message(error) == pattern(names, why, at)


RULE = 'LogicalAxisShardingRule'


@pytest.mark.parametrize(
    ('make', 'expected'),
    [
        (
            lambda: LogicalAxisShardingRule('embed'),
            f"{RULE}: axis_mapping is a dict or pairs of a name and its mesh axes, got 'embed'",
        ),
        (
            lambda: LogicalAxisShardingRule([('embed', 'fsdp', 'tp')]),
            f'{RULE}: axis_mapping is a dict or pairs of a name and its mesh axes, '
            "got [('embed', 'fsdp', 'tp')]",
        ),
        (
            lambda: LogicalAxisShardingRule({1: 'fsdp'}),
            f'{RULE}, axis_mapping: a name is a string, got 1',
        ),
        (
            lambda: LogicalAxisShardingRule({'embed': 3}),
            f"{RULE}, axis_mapping of 'embed': the value is a mesh axis, a tuple of them or None, got 3",
        ),
        (
            lambda: LogicalAxisShardingRule({'embed': ('tp', 'tp')}),
            f"{RULE}, axis_mapping of 'embed': a mesh axis is repeated in ('tp', 'tp')",
        ),
        (
            lambda: LogicalAxisShardingRule({}, 'embed mlp'),
            f"{RULE}: axis_names is pairs of a regex and names such as 'embed mlp', got 'embed mlp'",
        ),
        (
            lambda: LogicalAxisShardingRule({}, [('[', 'embed')]),
            f"{RULE}, pair 0 of axis_names: invalid regex '[': unterminated character set (position 0)",
        ),
        (
            lambda: LogicalAxisShardingRule({}, [(1, 'embed')]),
            f'{RULE}, pair 0 of axis_names: the regex is a string, got 1',
        ),
        (
            lambda: LogicalAxisShardingRule({}, [('w', P('embed'))]),
            f"{RULE}, pair 0 of axis_names: the names are a string such as 'embed mlp', got P('embed',)",
        ),
        (
            lambda: LogicalAxisShardingRule({}, on_indivisible='drop'),
            "on_indivisible is 'error', 'replicate' or 'warn', got 'drop'",
        ),
    ],
)
def test_an_invalid_rule_is_an_error_at_construction(make, expected):
    with pytest.raises(RuleError) as error:
        make()
    assert message(error) == expected


# --- Patterns -------------------------------------------------------------------------------------

NAMES = st.sampled_from(['embed', 'mlp', 'heads', 'batch', 'vocab', '_', '1', '3'])
GROUPS = st.lists(NAMES, max_size=3).map(lambda names: f'({" ".join(names)})')
PATTERNS = st.lists(st.one_of(NAMES, GROUPS, st.just('...')), max_size=5).map(' '.join)


@hypothesis.given(PATTERNS)
def test_patterns_have_the_meaning_of_einops(text):
    try:
        expected = ParsedExpression(text, allow_underscore=True)
    except Exception as error:
        with pytest.raises(RuleError):
            _einops_pattern.parse(text)
        assert 'duplicate' in str(error) or 'only one ellipsis' in str(error)
        return
    parsed = _einops_pattern.parse(text)
    dimensions = [['_' if part is None else str(part) for part in dim] for dim in parsed.dimensions]
    if parsed.ellipsis is not None:
        dimensions.insert(parsed.ellipsis, '…')
    assert dimensions == [
        dim if isinstance(dim, str) else [str(part).removesuffix('-axis') for part in dim]
        for dim in expected.composition
    ]
    if parsed.ellipsis is None:
        assert _einops_pattern.parse(str(parsed)) == parsed
