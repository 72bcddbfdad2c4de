"""Rules as a person would write them: each leaf gets its spec, and the text is short."""

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import optax
import pytest

from benchmarks.unchanged.catalogue import all_models
from scalax._core.pytree.partition_specs import canonical
from scalax._core.pytree.paths import NamedTree
from scalax._planning.autoshard.codegen import rule_code
from scalax._planning.autoshard.regex_rules import readable_rule
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule
from tests.support.random_examples import examples

Leaves = Mapping[str, tuple[tuple[int, ...], P]]

COLUMN, ROW, VECTOR = P('fsdp', 'tp'), P('tp', 'fsdp'), P('tp')


def matched_value(path: str, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Returns the value of the first pair whose regex matches a part of the path."""
    return next((value for regex, value in pairs if re.search(regex, path)), 'no pair')


def assert_resolves(rule: TreePathShardingRule, leaves: Leaves) -> None:
    wrong = {
        path: (matched_value(path, rule.rules), spec)
        for path, (shape, spec) in leaves.items()
        if any(size != 1 for size in shape) and matched_value(path, rule.rules) != canonical(spec)
    }
    assert not wrong


def rows(leaves: Leaves) -> list[tuple[Any, Any]]:
    """Returns the rows, after a check that they give each leaf its spec."""
    rule = readable_rule(leaves)
    assert_resolves(rule, leaves)
    assert (
        made_by(rule_code(rule))
        == rule
        == eval(repr(rule), {'P': P, 'TreePathShardingRule': TreePathShardingRule})
    )
    return list(rule.rules)


def made_by(code: str) -> TreePathShardingRule:
    namespace: dict[str, Any] = {'P': P, 'TreePathShardingRule': TreePathShardingRule}
    exec(code, namespace)
    return namespace['rule']


def state(params: Leaves, **moments: P) -> Leaves:
    """Returns params and a state of AdamW; the moments have the spec *moments*, if passed."""
    result = {f'0/{path}': leaf for path, leaf in params.items()} | {'1/0/count': ((), P())}
    for name in ('mu', 'nu'):
        result |= {f'1/0/{name}/{path}': (s, moments.get(name, spec)) for path, (s, spec) in params.items()}
    return result


def decoder(layers: int, first: int = 0) -> Leaves:
    """A decoder; the *first* layers have an MLP, all others have experts."""
    leaves = {'embed/embedding': ((64, 8), ROW)}
    for layer in range(layers):
        at = f'layers/{layer}'
        experts = layer >= first
        for name in ('query', 'key', 'value'):
            leaves[f'{at}/attn/{name}/kernel'] = (8, 8), COLUMN
            leaves[f'{at}/attn/{name}/bias'] = (8,), VECTOR
        leaves[f'{at}/attn/out/kernel'] = (8, 8), ROW
        leaves[f'{at}/attn/out/bias'] = (8,), P()
        for name in ('gate', 'up'):
            leaves[f'{at}/mlp/{name}/kernel'] = (
                ((4, 8, 32), P('expert', *COLUMN)) if experts else ((8, 32), COLUMN)
            )
        leaves[f'{at}/mlp/down/kernel'] = ((4, 32, 8), P('expert', *ROW)) if experts else ((32, 8), ROW)
        leaves[f'{at}/norm/scale'] = (8,), P()
    return leaves | {'norm/scale': ((8,), P(None)), 'unembed/kernel': ((8, 64), COLUMN)}


@pytest.mark.medium
def test_layers_and_moments_take_the_rows_of_one_layer() -> None:
    expected = [
        ('(^|/)down/kernel$', P('expert', 'tp', 'fsdp')),
        ('(^|/)(gate|up)/kernel$', P('expert', 'fsdp', 'tp')),
        ('(^|/)(embedding|out/kernel)$', ROW),
        ('(^|/)kernel$', COLUMN),
        ('(^|/)(query|key|value)/bias$', VECTOR),
        ('.*', P()),
    ]
    assert rows(decoder(2)) == expected
    assert rows(state(decoder(80))) == expected


@pytest.mark.medium
def test_layer_indices_are_named_if_layers_differ() -> None:
    assert rows(state(decoder(80, first=3))) == [
        ('(^|/)(query|key|value)/bias$', VECTOR),
        ('(^|/)(embedding|out/kernel|layers/(0|1|2)/mlp/down/kernel)$', ROW),
        ('(^|/)down/kernel$', P('expert', 'tp', 'fsdp')),
        ('(^|/)((query|key|value|unembed)/kernel|layers/(0|1|2)/mlp/(gate|up)/kernel)$', COLUMN),
        ('(^|/)kernel$', P('expert', 'fsdp', 'tp')),
        ('.*', P()),
    ]


@pytest.mark.parametrize(
    ('leaves', 'expected'),
    [
        pytest.param(
            state(decoder(3), mu=P('data'), nu=P('data')),
            [
                ('^1/', P('data')),
                ('(^|/)down/kernel$', P('expert', 'tp', 'fsdp')),
                ('(^|/)(gate|up)/kernel$', P('expert', 'fsdp', 'tp')),
                ('(^|/)(embedding|out/kernel)$', ROW),
                ('(^|/)kernel$', COLUMN),
                ('(^|/)(query|key|value)/bias$', VECTOR),
                ('.*', P()),
            ],
            id='moments differ',
        ),
        pytest.param(
            state(
                {path: (shape, P()) for path, (shape, _) in decoder(3).items()}, mu=P('data'), nu=P('data')
            ),
            [('^1/', P('data')), ('.*', P())],
            id='ZeRO-1',
        ),
        pytest.param(
            {
                path: (shape, P('data') if re.search('(mu|nu).*(kernel|embedding)', path) else P())
                for path, (shape, _) in state(decoder(3)).items()
            },
            [('^0/', P()), ('(^|/)(embedding|kernel)$', P('data')), ('.*', P())],
            id='ZeRO-1 of matrices',
        ),
        pytest.param(
            {
                path: (shape, P() if path.startswith('0/') else spec)
                for path, (shape, spec) in state(decoder(3, first=3)).items()
            },
            [
                ('^0/', P()),
                ('(^|/)(query|key|value)/bias$', VECTOR),
                ('(^|/)(embedding|(out|down)/kernel)$', ROW),
                ('(^|/)kernel$', COLUMN),
                ('.*', P()),
            ],
            id='replicated params',
        ),
        pytest.param(
            {'embed': ((8, 8), ROW), 'unembed': ((8, 8), COLUMN), 'norm': ((8,), P())},
            [('(^|/)embed$', ROW), ('(^|/)unembed$', COLUMN), ('.*', P())],
            id='a name in another',
        ),
        pytest.param(
            {'x/w': ((8, 8), ROW), 'x/wo': ((8, 8), COLUMN), 'w_norm/b': ((8,), P())},
            [('(^|/)w$', ROW), ('(^|/)wo$', COLUMN), ('.*', P())],
            id='one letter',
        ),
        pytest.param(
            {
                f'{name}/{leaf}/value': ((8, 8), COLUMN if leaf == 'kernel' else P())
                for name in 'ab'
                for leaf in ('kernel', 'bias')
            },
            [('(^|/)kernel/value$', COLUMN), ('.*', P())],
            id='an uninformative last key',
        ),
        pytest.param(
            {
                f'{name}/{leaf}': ((8, 8), P() if name == 'router' or leaf == 'bias' else COLUMN)
                for name in ('query', 'key', 'value', 'out', 'gate', 'up', 'down', 'cross', 'head', 'router')
                for leaf in ('kernel', 'bias')
            },
            [('^router/', P()), ('(^|/)kernel$', COLUMN), ('.*', P())],
            id='a part that is an exception',
        ),
        pytest.param(
            {
                f'{name}/w': ((8, 8), P() if name == 'router' else COLUMN)
                for name in ('query', 'key', 'value', 'out', 'gate', 'up', 'down', 'cross', 'head', 'router')
            },
            [('(^|/)router/w$', P()), ('(^|/)w$', COLUMN), ('.*', P())],
            id='an exception',
        ),
        pytest.param({'a': ((8,), VECTOR), 'b/c': ((8, 2), P('tp', None))}, [('.*', VECTOR)], id='one spec'),
        pytest.param(
            {'a': ((8,), VECTOR), 'b': ((8,), P('x'))},
            [('(^|/)b$', P('x')), ('.*', VECTOR)],
            id='nothing replicated',
        ),
        pytest.param(
            {
                f'{at}transformer/h{layer}_{name}': ((8, 8), spec)
                for at in ('0/', '1/0/mu/')
                for layer in range(12)
                for name, spec in (
                    ('attn/query/w', COLUMN),
                    ('attn/linear/w', ROW),
                    ('attn/linear/b', P()),
                    ('mlp/linear/w', COLUMN),
                    ('mlp/linear_1/w', ROW),
                    ('ln_1/scale', P()),
                )
            },
            [(r'(^|/)(query/w|h\d+_mlp/linear/w)$', COLUMN), ('(^|/)w$', ROW), ('.*', P())],
            id='Haiku',
        ),
        pytest.param(
            {name: ((8, 8), P() if name == 'a/up' else COLUMN) for name in ('a/ed', 'a/embed', 'a/up')},
            [('(^|/)(ed|embed)$', COLUMN), ('.*', P())],
            id='a key that another one holds',
        ),
        pytest.param(
            {'w': ((8,), ROW), 'a/w': ((8,), COLUMN), 'b/a/w': ((8,), VECTOR)}
            | {'a/b': ((8,), P()), 'b/a/b': ((8,), P())},
            [('^w$', ROW), ('^a/w$', COLUMN), ('(^|/)w$', VECTOR), ('.*', P())],
            id='paths that are suffixes of others',
        ),
        pytest.param(
            {f'{at}/tables/{i}': ((8,), ROW) for at in 'xy' for i in range(3)} | {'0/b': ((8,), P())},
            [(r'(^|/)tables/\d+$', ROW), ('.*', P())],
            id='an uninformative number',
        ),
        pytest.param(
            {'a b.c': ((8,), ROW), 'a bxc': ((8,), P())},
            [(r'(^|/)a b\.c$', ROW), ('.*', P())],
            id='special characters of regexes',
        ),
        pytest.param(
            {'a': ((8,), COLUMN), 'a\n': ((8,), ROW), 'b': ((8,), P())},
            [('\\Aa\n\\Z', ROW), ('(^|/)a$', COLUMN), ('(^|/)a\n$', ROW), ('.*', P())],
            id='newlines',
        ),
        pytest.param(
            {f'0/layer/{name}': ((8,), P()) for name in ('gate', 'up', 'down', 'out')}
            | {f'1/{at}/layer/{name}': ((8,), ROW) for at in ('mu', 'nu') for name in ('gate', 'up')}
            | {f'1/{at}/layer/{name}': ((8,), COLUMN) for at in ('mu', 'nu') for name in ('down', 'out')},
            [('^0/', P()), ('(^|/)(gate|up)$', ROW), ('(^|/)(down|out)$', COLUMN), ('.*', P())],
            id='other leaves are replicated too',
        ),
        pytest.param({}, [('.*', P())], id='no leaves'),
        pytest.param({'a': ((1, 1), VECTOR), 'b': ((), P())}, [('.*', P())], id='one element each'),
        pytest.param({'': ((8,), VECTOR)}, [('.*', VECTOR)], id='a bare leaf'),
        pytest.param(
            {'': ((8,), VECTOR), 'a': ((8,), P())}, [('(^|/)$', VECTOR), ('.*', P())], id='an empty path'
        ),
    ],
)
def test_tables(leaves: Leaves, expected: list[tuple[str, P]]) -> None:
    assert rows(leaves) == expected


NAMES = st.sampled_from(
    ['w', 'b', 'kernel', 'up', 'up_proj', 'embed', 'unembed', '0', '1', '12', 'layers_2', 'mu']
)
HOSTILE = st.sampled_from(
    [
        '',
        'a',
        'A',
        'a\n',
        '\n',
        '.',
        '.*',
        '(',
        '[a]',
        '|',
        '$',
        '^',
        '\\',
        '\\d',
        '007',
        '\u0663',
        '\u0664',
        '\\d+',
        'a2b3',
        'a4b3',
        'é',
        'a b',
        "'",
        '"',
        '-1',
    ]
)
SPECS = st.sampled_from([P(), P(None), P('x'), P('x', None), P(None, 'x'), P(('x', 'y')), P('y', 'x')])
SHAPES = st.sampled_from([(8, 8), (8, 1), (0, 8), (1, 1)])


def trees(names: st.SearchStrategy[str]) -> st.SearchStrategy[Leaves]:
    paths = st.lists(names, min_size=1, max_size=5).map('/'.join)
    return st.dictionaries(paths, st.tuples(SHAPES, SPECS), max_size=25)


@examples(300)
@hypothesis.given(trees(NAMES))
def test_ends_of_paths_tell_any_leaves_apart(leaves: Leaves) -> None:
    assert not any(regex.startswith(r'\A') for regex, _ in rows(leaves))


@examples(300)
@hypothesis.given(trees(HOSTILE | NAMES))
def test_any_keys_resolve_as_asked(leaves: Leaves) -> None:
    rows(leaves)


@examples(100)
@hypothesis.given(trees(NAMES))
def test_a_regex_matches_entire_keys(leaves: Leaves) -> None:
    """A regex for the last key of a path does not match a longer key that contains it."""
    *result, (_, default) = rows(leaves)
    ends = [(regex, spec) for regex, spec in result if not regex.endswith('/')]
    for path in leaves:
        for other in (f'{path}_', f'{path}/x{path.rpartition("/")[2]}'):
            assert matched_value(other, [*ends, ('.*', default)]) == default


@pytest.mark.medium
@examples(100)
@hypothesis.given(st.data())
def test_layers_that_differ_at_random_resolve_as_asked(data: st.DataObject) -> None:
    specs = st.lists(SPECS, min_size=1, max_size=3)
    table = {name: data.draw(specs) for name in ('attn/query/kernel', 'mlp/up/kernel', 'norm', 'up')}
    leaves = {
        f'{prefix}layers/{layer}/{name}': ((8, 8), data.draw(st.sampled_from(choice)))
        for name, choice in table.items()
        for layer in range(data.draw(st.integers(0, 12)))
        for prefix in ('0/', '1/0/mu/')
    }
    rows(leaves)


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('model', all_models('large'), ids=lambda model: model.name)
def test_rules_are_nearly_as_short_as_hand_written_rules(model: Any) -> None:
    params = jax.eval_shape(model.init, jax.random.key(0))
    tree = params, jax.eval_shape(optax.adamw(1e-3).init, params)
    specs = jax.tree.leaves(model.columns_and_rows.apply(tree), is_leaf=lambda leaf: isinstance(leaf, P))
    named = NamedTree.of(tree)
    result = rows(dict(zip(named.paths, zip(named.shapes, specs, strict=True), strict=True)))
    if 'LLaMA' in model.name:  # the catalogue's rows, which cover many models
        assert len(result) <= 5
    else:
        by_hand = model.columns_and_rows.rules
        assert len(result) <= len(by_hand)
        # Hand-written rows match parts of keys; these are anchored, and include the `value` of nnx.
        allowed = sum(len(regex) + len('(^|/)()/value$') for regex, _ in by_hand)
        assert sum(len(regex) for regex, _ in result) <= allowed


@pytest.mark.medium
def test_large_trees_take_little_time() -> None:
    leaves = state(decoder(140, first=3))
    assert len(leaves) > 5000
    start = time.process_time()
    readable_rule(leaves)
    assert time.process_time() - start < 5  # it takes a tenth of that


# --- As code -------------------------------------------------------------------------------------

IMPORTS = """\
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule
"""
CODE = """\
rule = TreePathShardingRule(
    (r'layers/\\d+/w', P('x')),
    (
        'a_long_name_of_a_matrix|another_long_name_of_a_matrix|yet_another',
        P('data', ('fsdp', 'tp')),
    ),
    (r'\\A(NORM)\\Z', P(None, P.UNCONSTRAINED)),
    ("it's", P('x')),
    ('.*', P()),
)
"""


def test_code() -> None:
    assert rule_code(made_by(CODE)) == CODE


@pytest.mark.parametrize(
    'rule',
    [
        TreePathShardingRule((r'\A(a\\b|\n)\Z', P(('x', 'y'), None)), ('\\\\', P(unreduced={'x', 'y'}))),
        TreePathShardingRule(('\'"\\\\', P('x'))),
    ],
    ids=['escapes', 'quotes'],
)
def test_code_makes_the_rule_again(rule: TreePathShardingRule) -> None:
    assert made_by(rule_code(rule)) == rule


@pytest.mark.parametrize(
    'rule', [made_by(CODE), readable_rule(state(decoder(80, first=3)))], ids=['any', 'found']
)
def test_code_is_as_formatters_leave_it(rule: TreePathShardingRule, tmp_path: Path) -> None:
    pytest.importorskip('ruff')
    path = tmp_path / 'table.py'
    path.write_text(f'{IMPORTS}\n{rule_code(rule)}')
    ruff = [sys.executable, '-m', 'ruff']
    style = ['--isolated', '--config', 'format.quote-style="single"']
    subprocess.run([*ruff, 'format', '--check', *style, path], check=True, timeout=500)
    subprocess.run([*ruff, 'check', '--isolated', '--select', 'I,F', path], check=True, timeout=500)
