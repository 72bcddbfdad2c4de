"""Reports: folded tables, golden files, differences, bytes of small dtypes."""

import dataclasses
import json
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from scalax._core.util.folding import fold
from scalax.errors import ArgumentError, DataError
from scalax.explain import ReportRow, ShardingReport
from scalax.explain._rows import spec_text
from scalax.sharding import (
    FSDPShardingRule,
    LogicalAxisShardingRule,
    MeshShardingHelper,
    TreePathShardingRule,
)
from tests.support.leaves import leaf
from tests.support.random_examples import examples

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
POD = MeshShardingHelper.from_mesh(AbstractMesh((64, 8), ('fsdp', 'tp')))


def layer():
    return {'up': {'kernel': leaf(64, 256)}, 'down': {'kernel': leaf(256, 64)}, 'norm': leaf(64)}


MODEL = {'embed': leaf(512, 64), 'layers': [layer() for _ in range(12)], 'step': leaf(dtype=jnp.int32)}
RULES = TreePathShardingRule(
    ('layers/3/up', P('fsdp')), ('up|embed', P('fsdp', 'tp')), ('down', P('tp', 'fsdp')), ('', P())
)


def llama_405b():
    width, hidden = 16384, 53248
    kernels = {'query': (width, width), 'key': (width, 1024), 'value': (width, 1024), 'out': (width, width)}
    kernels |= {'mlp/gate': (width, hidden), 'mlp/up': (width, hidden), 'mlp/down': (hidden, width)}
    block = {name: {'kernel': leaf(*shape, dtype=jnp.bfloat16)} for name, shape in kernels.items()}
    block['norms'] = [leaf(width, dtype=jnp.bfloat16)] * 2
    vocabulary = leaf(128256, width, dtype=jnp.bfloat16)
    return {'embed': vocabulary, 'layers': [block] * 126, 'head': vocabulary}


# --- Tables ---------------------------------------------------------------------------------------


def test_table_of_80_columns(snapshot):
    snapshot(HELPER.explain(MODEL, RULES).to_text(80))


def test_table_of_160_columns(snapshot):
    snapshot(HELPER.explain(MODEL, RULES).to_text(160))


THREE = MeshShardingHelper.from_mesh(AbstractMesh((8, 64, 8), ('data', 'fsdp', 'tp')))
LLAMA_RULES = TreePathShardingRule(
    ('embed|head', P('tp', ('data', 'fsdp'))),
    ('query|key|value|gate|up', P(None, 'fsdp', 'tp')),
    ('out|down', P(None, 'tp', 'fsdp')),
    ('a_regex_that_is_long/and_matches_nothing', P()),
    ('another_of_these|(that_is_long)', P()),
    ('', P()),
)


def stacked_405b():
    tree = llama_405b()
    block = tree['layers'][0]
    stacked = jax.tree.map(lambda array: leaf(126, *array.shape, dtype=array.dtype), block)
    return {**tree, 'layers': stacked}


def t5():
    def block(*names):
        attention = {
            f'{name}_projection': {'kernel': leaf(64, 64)} for name in ('query', 'key', 'value', 'out')
        }
        return {**dict.fromkeys(names, attention), 'mlp': {'wi': leaf(64, 256), 'wo': leaf(256, 64)}}

    coders = {
        'encoder': {f'layers_{i}': block('self_attention') for i in range(3)},
        'decoder': {f'layers_{i}': block('self_attention', 'encoder_decoder_attention') for i in range(3)},
    }
    return {'params': {**coders, 'token_embedder': {'embedding': leaf(512, 64)}}}


REPORTS = {
    'model': HELPER.explain(MODEL, RULES),
    'stacked': THREE.explain(stacked_405b(), LLAMA_RULES),
    'unrolled': POD.explain(llama_405b(), FSDPShardingRule()),
    't5': HELPER.explain(t5(), FSDPShardingRule(min_fsdp_size=0)),
    'long keys': HELPER.explain(
        {'k' * 150: {'w': leaf(*[8] * 30)}}, TreePathShardingRule(('k' * 99, P('tp')))
    ),
    'nothing': ShardingReport((), {}, ('unused ' * 20,)),
}


@pytest.mark.parametrize('width', [60, 80, 100, 120])
@pytest.mark.parametrize('name', REPORTS)
def test_no_text_is_truncated_at_any_width(name, width):
    report = REPORTS[name]
    text = report.to_text(width)
    assert max(map(len, text.splitlines())) <= width
    assert '...' not in text
    squeezed = re.sub(r'\s', '', text)
    lines = report.to_text(10_000).splitlines()
    for line in lines[2 : lines.index('')]:
        path, array, spec, size, why = re.split(' {2,}', line)
        array, spec, why = (re.sub(r'\s', '', part) for part in (array, spec, why))
        number = re.search(rf'{re.escape(path + array + spec)}{size.replace(" ", "")}(\[\d+\])?', squeezed)
        assert number, line
        assert (number[1] or '') + why in squeezed
    for line in lines[lines.index('') :]:
        assert re.sub(r'\s', '', line) in squeezed


def test_a_table_too_narrow_for_its_columns_packs_them_below_the_paths(snapshot):
    leaves = {name: leaf for name, leaf in stacked_405b()['layers'].items() if name in ('key', 'mlp/gate')}
    report = THREE.explain({'model': {'decoder': {'every_one_of_the_layers': leaves}}}, LLAMA_RULES)
    snapshot(report.to_text(60))


def test_405b_fits_a_screen():
    report = POD.explain(llama_405b(), FSDPShardingRule())
    text = report.to_text(120)
    assert len(report.rows) == 126 * 9 + 2
    assert len(text.splitlines()) <= 40
    assert 'layers/{0..125}/mlp/up/kernel' in text
    assert max(map(len, text.splitlines())) <= 120


def test_layers_that_alternate_are_abbreviated():
    tree = {'layers': [{'w': leaf(8, 8 * (1 + i % 2))} for i in range(40)]}
    lines = HELPER.explain(tree, P('fsdp')).to_text(100).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == [
        'layers/{0,2,4,6,8,...,38}/w',
        'layers/{1,3,5,7,9,...,39}/w',
    ]


@pytest.mark.medium
@pytest.mark.parametrize('layers', [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_100_leaves_in_each_of_many_layers(layers):
    tree = {'layers': [[leaf(8, 8)] * 100 for _ in range(layers)]}
    report = HELPER.explain(tree, P('fsdp'))
    assert len(report.rows) == 100 * layers
    assert f'layers/{{0..{layers - 1}}}/{{0..99}}  {100 * layers} x float32[8,8]' in report.to_text(100)
    again = ShardingReport.load(report.to_json())
    assert again == report
    assert not report.diff(again)


# --- Folding --------------------------------------------------------------------------------------

NUMBERS = ['0', '1', '2', '3', '7', '10', 'l_0', 'l_1', 'l_2', 'l.1', 'l.2', 'a_1_0', 'a_1_1', '_1']
OTHER_KEYS = ['w', 'b', '07', '-1', '', 'x1', 'x2', 'l_', 'l_01', 'l_{1,2}_0', 'l_{1,2}_1']
keys = st.sampled_from([*NUMBERS, *OTHER_KEYS])
leaves = st.lists(
    st.tuples(st.lists(keys, min_size=1, max_size=4).map('/'.join), st.sampled_from('ab')), max_size=40
)
EXAMPLES = examples(300)


def unfolded(name):
    """Returns the paths that a folded name stands for, parsed from its text."""
    # Braces in a key, such as l_{1,2}_0, are not folded numbers.
    match = re.search(r'\{([0-9.,]+)\}(?=/|$)', name)
    if match is None:
        return [name]
    numbers = []
    for run in match[1].split(','):
        first, _, last = run.partition('..')
        numbers.extend(range(int(first), int(last or first) + 1))
    before, after = name[: match.start()], name[match.end() :]
    return [path for number in numbers for path in unfolded(f'{before}{number}{after}')]


@EXAMPLES
@hypothesis.given(leaves)
def test_names_of_folds_give_back_all_paths(drawn):
    folds = fold(drawn)
    got = []
    for item in folds:
        paths = unfolded(item.name)
        assert paths == list(item.paths)
        assert len(paths) == len(set(paths)) == item.count
        kind = drawn[item.first][1]
        assert drawn[item.first][0] in paths
        got.extend((path, kind) for path in paths)
    assert sorted(got) == sorted(drawn)
    assert [item.first for item in folds] == sorted(item.first for item in folds)


def stem(part):
    return part.rstrip('0123456789') if isinstance(part, str) else part.stem


@EXAMPLES
@hypothesis.given(leaves)
def test_folding_is_complete(drawn):
    drawn = list(dict.fromkeys(drawn))
    folds = [(item.parts, drawn[item.first][1]) for item in fold(drawn)]
    for position in range(4):
        rests = [
            (stem(parts[position]), parts[:position], parts[position + 1 :], kind)
            for parts, kind in folds
            if position < len(parts) and parts[position] not in OTHER_KEYS
        ]
        assert len(rests) == len(set(rests))


@EXAMPLES
@hypothesis.given(
    st.lists(st.tuples(st.lists(keys, min_size=1, max_size=4).map('/'.join), st.integers(1, 4)), max_size=30)
)
def test_folded_tables_count_the_same_arrays_and_bytes(drawn):
    rows = tuple(ReportRow(path, (size,), 'int8', P('x'), 'rule', '', 2 * size, size) for path, size in drawn)
    report = ShardingReport(rows, {'x': 2})
    lines = report.to_text(400).splitlines()[2:-3]
    counts, sizes = 0, 0
    for line in lines:
        match = re.search(r'(?:(\d+) x )?int8\[\d+\] +P\(.*\) +(\d+) B +rule$', line)
        counts += int(match[1] or 1)
        sizes += int(match[2])
    assert (counts, sizes) == (len(rows), report.bytes_per_device)
    assert [row.path for row in report.rows] == [path for path, _ in drawn]


@pytest.mark.parametrize(
    'other',
    [
        *({'dtype': 'int16'}, {'shape': (4, 4)}, {'spec': P('y')}, {'spec': None}),
        *({'rule': 'another'}, {'reason': 'another'}, {'memory_kind': 'pinned_host'}),
    ],
    ids=str,
)
def test_only_rows_that_agree_fold(other):
    row = ReportRow('0/w', (8, 8), 'int8', P('x'), 'rule', 'reason', 64, 32)
    rows = (row, dataclasses.replace(row, path='1/w'), dataclasses.replace(row, path='2/w', **other))
    text = ShardingReport(rows, {'x': 2}).to_text(200)
    assert '{0,1}/w  2 x int8[8,8]' in text
    assert '\n2/w ' in text


def test_layers_of_flax_linen_fold_by_their_stems():
    def block(**more):
        return {'attn': {'q': {'kernel': leaf(8, 8)}}, 'Dense_0': {'bias': leaf(8)}, **more}

    params = {f'layers_{i}': block() for i in range(126)}
    params |= {
        'heads.0': leaf(8),
        'heads.1': leaf(8),
        'tail_0': leaf(8),
        'block1': leaf(8),
        'block2': leaf(8),
    }
    lines = HELPER.explain({'params': params}, P('fsdp')).to_text(100).splitlines()
    assert [line.split()[0] for line in lines[2:-3]] == [
        'params/block1',
        'params/block2',
        'params/heads.{0,1}',
        'params/layers_{0..125}/Dense_0/bias',
        'params/layers_{0..125}/attn/q/kernel',
        'params/tail_0',
    ]


def test_the_same_numbers_of_two_stems_do_not_fold():
    names = ['encoder_0/w', 'encoder_1/w', 'decoder_0/w', 'decoder_1/w', '0/w', '1/w']
    folds = fold((name, None) for name in names)
    assert [item.name for item in folds] == ['encoder_{0,1}/w', 'decoder_{0,1}/w', '{0,1}/w']
    assert [path for item in folds for path in item.paths] == names


# --- Golden files ---------------------------------------------------------------------------------


def test_json_is_a_line_for_each_leaf(snapshot):
    report = HELPER.explain({'w': leaf(8, 16), 'n': 1}, TreePathShardingRule(('w', P(None, ('fsdp', 'tp')))))
    snapshot(report.to_json())


EXPLICIT = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=AxisType.Explicit)


@pytest.mark.parametrize(
    'report',
    [
        HELPER.explain(MODEL, RULES),
        HELPER.explain({}, None),
        HELPER.explain({'a': leaf(8), 'b': leaf(8)}, {'a': None, 'b': P(('fsdp', 'tp'))}),
        HELPER.explain({'é"\n': leaf(8)}, P('tp')),
        HELPER.explain(leaf(8, 16), FSDPShardingRule(min_fsdp_size=0).with_memory_kind('pinned_host')),
        EXPLICIT.explain(leaf(8), P('fsdp', unreduced={'tp'})),
        ShardingReport(
            (ReportRow('w', (8, 8), 'int8', P(P.UNCONSTRAINED, 'x'), '', '', 64, 32),),
            {'x': 2},
            ('a',),
            ('b',),
        ),
    ],
    ids=range(7),
)
def test_json_round_trip(report, tmp_path):
    text = report.to_json()
    path = tmp_path / 'golden.json'
    path.write_text(text, encoding='utf-8')
    for source in (text, path, str(path)):
        again = ShardingReport.load(source)
        assert again == report
        assert again.to_json() == text
        assert str(again) == str(report)
    values = json.loads(text)
    assert values.pop('version') == 1
    assert values == report.to_dict()


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (
            '{"version": 2}',
            'the text is a report of version 2, this scalax reads version 1: write it again with '
            'report.to_json()',
        ),
        ('{"rows": []}', 'the text is not the JSON of a report: it has no version'),
        (
            '{"version": 1, "mesh": {}, "unused_rules": [], "shadowed_rules": []}',
            "the text is not a complete report: it has no 'rows'. If another release of scalax wrote it, "
            'write it again with report.to_json()',
        ),
        (
            '{',
            'the text is not the JSON of a report: Expecting property name enclosed in double quotes: '
            'line 1 column 2 (char 1)',
        ),
    ],
)
def test_invalid_reports_are_errors(text, message, tmp_path):
    with pytest.raises(DataError) as error:
        ShardingReport.load(text)
    assert str(error.value) == message
    path = tmp_path / 'golden.json'
    path.write_text(text)
    with pytest.raises(DataError) as error:
        ShardingReport.load(path)
    assert str(error.value) == message.replace('the text', repr(str(path)), 1)


ROW = (
    '{"path": "w", "shape": [8], "dtype": "int8", "spec": ["x"], "rule": "", "reason": "", "bytes": 8, '
    '"bytes_per_device": 4, "memory_kind": null}'
)


def one_row(**values):
    row = json.dumps({**json.loads(ROW), **values})
    return f'{{"version": 1, "mesh": {{"x": 2}}, "unused_rules": [], "shadowed_rules": [], "rows": [{row}]}}'


def test_an_empty_text_is_no_report():
    with pytest.raises(DataError) as error:
        ShardingReport.load('')
    message = 'the text is not the JSON of a report: Expecting value: line 1 column 1 (char 0)'
    assert str(error.value) == message


def test_load_rejects_other_types(tmp_path):
    for other in ({'version': 1}, b'{}', 3, None):
        with pytest.raises(ArgumentError) as error:
            ShardingReport.load(other)
        assert str(error.value) == (
            f'ShardingReport.load takes text, or the path of a file, got {type(other).__name__}: '
            'pass the result of report.to_json(), or the path of its file'
        )
    path = tmp_path / 'golden.json'
    with pytest.raises(FileNotFoundError):
        ShardingReport.load(path)
    path.write_bytes(b'\xff{}')
    with pytest.raises(DataError, match=r'golden\.json.* is not the JSON of a report: .*utf-8'):
        ShardingReport.load(path)


def test_files_that_are_no_reports(tmp_path):
    (tmp_path / 'loop').symlink_to(tmp_path / 'loop')
    for file, why in (
        (tmp_path, 'Is a directory'),
        (tmp_path / 'loop', 'Too many levels of symbolic links'),
        ('a' * 5000, 'File name too long'),
    ):
        with pytest.raises(DataError) as error:
            ShardingReport.load(file)
        assert str(error.value).startswith(f'{str(file)!r} is not the JSON of a report: ')
        assert why in str(error.value)
    with pytest.raises(DataError, match='null byte'):
        ShardingReport.load('a\0b')


def test_a_hostile_report():
    with pytest.raises(DataError) as error:
        ShardingReport.load('{"version": ' + '[' * 10**6)
    message = 'the text is not the JSON of a report: maximum recursion depth exceeded'
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ('changes', 'why'),
    [
        ({'bytes': '8'}, "'8' is not of type int"),
        ({'bytes': True}, 'True is not of type int'),
        ({'path': 3}, '3 is not of type str'),
        ({'shape': 'ab'}, "'ab' is not of type list"),
        ({'shape': [8, None]}, 'None is not of type int'),
    ],
)
def test_values_of_other_types(changes, why):
    """Values that a manually edited golden file may contain."""
    with pytest.raises(DataError) as error:
        ShardingReport.load(one_row(**changes))
    assert str(error.value) == (
        f'the text is not a complete report: {why}. If another release of scalax wrote it, write it again '
        'with report.to_json()'
    )


def test_a_mesh_axis_with_the_name_of_the_marker_is_not_written():
    helper = MeshShardingHelper([8], ['UNCONSTRAINED'])
    report = helper.explain({'w': np.zeros((8, 8))}, P('UNCONSTRAINED'))
    with pytest.raises(DataError) as error:
        report.to_json()
    assert str(error.value).endswith(
        "('UNCONSTRAINED',) cannot be written: 'UNCONSTRAINED' stands for PartitionSpec.UNCONSTRAINED"
    )


def test_a_spec_that_jax_refuses():
    spec = {'entries': ['x'], 'unreduced': ['x'], 'reduced': []}
    with pytest.raises(DataError, match='not a complete report: '):
        ShardingReport.load(one_row(spec=spec))


def test_reports_escape_control_characters():
    texts = {key: f'{key}\x1b[2J\n\u202e' for key in ('path', 'dtype', 'rule', 'reason', 'memory_kind')}
    report = ShardingReport.load(one_row(**texts))
    for width in (60, 200):
        text = report.to_text(width) + report.diff(ShardingReport.load(one_row()))
        assert text.replace('\n', '').isprintable()


def test_paths_with_very_many_keys_and_digits():
    rows = [
        json.loads(ROW) | {'path': '/'.join('01' * 20_000)},
        json.loads(ROW) | {'path': f'a/{"9" * 5000}'},
    ]
    values = json.loads(one_row()) | {'rows': rows}
    report = ShardingReport.load(json.dumps(values))
    assert '2 arrays' in str(report)


# --- Values ---------------------------------------------------------------------------------------


def test_reports_have_a_hash():
    report = HELPER.explain(MODEL, RULES)
    same = ShardingReport.load(report.to_json())
    assert {report: 1}[same] == 1
    assert report != dataclasses.replace(report, mesh={'fsdp': 8})


def test_methods_reject_other_types():
    report = HELPER.explain(MODEL, RULES)
    for width in ('80', 80.5, True):
        with pytest.raises(ArgumentError) as error:
            report.to_text(width)
        assert str(error.value) == f'width is a number of columns or None, got {width!r}'


# --- Unreduced arrays ----------------------------------------------------------------------------


def test_unreduced_arrays_are_not_replicated():
    """Each device holds a partial sum of the size of the global array."""
    specs = {
        'parts': P(unreduced={'tp', 'fsdp'}),
        'cut': P('fsdp', unreduced={'tp'}),
        'reduced': P(reduced={'tp'}),
        'whole': P(),
    }
    tree = {name: leaf(8, 4) for name in specs}
    report = EXPLICIT.explain(tree, specs)
    assert {row.path: (row.is_unreduced, row.is_replicated) for row in report.rows} == {
        'cut': (True, False),
        'parts': (True, False),
        'reduced': (False, True),
        'whole': (False, True),
    }
    assert report.replicated.paths == ('reduced', 'whole')
    assert [(row.path, spec_text(row)) for row in report.rows] == [
        ('cut', "P('fsdp', unreduced={'tp'})"),
        ('parts', "P(unreduced={'fsdp', 'tp'})"),
        ('reduced', "P(reduced={'tp'})"),
        ('whole', 'replicated'),
    ]
    assert str(report).splitlines()[-2:] == [
        '4 arrays, 512 B in all, 416 B on each device of the mesh (fsdp=4, tp=2)',
        'replicated: 2 arrays, 256 B on each device',
    ]
    assert ShardingReport.load(report.to_json()) == report
    assert report.replicated.bytes == 256
    replicated_report = EXPLICIT.explain({'parts': tree['parts']}, P())
    parts = EXPLICIT.explain({'parts': tree['parts']}, specs['parts'])
    assert parts.diff(replicated_report) == (
        "parts: float32[8,4] P(unreduced={'fsdp', 'tp'}) (128 B on a device) -> "
        'float32[8,4] replicated (128 B on a device)'
    )


@pytest.mark.skipif(not hasattr(jax.sharding, 'UnreducedKind'), reason='this JAX knows sums only')
def test_unreduced_specs_round_trip():
    spec = P('fsdp', unreduced={'tp'}, unreduced_kind=jax.sharding.UnreducedKind.max)
    report = EXPLICIT.explain(leaf(8, 4), spec)
    assert report.rows[0].spec == spec
    again = ShardingReport.load(report.to_json())
    assert again == report
    assert "P('fsdp', unreduced={'tp'}, unreduced_kind=max)" in str(again)
    with pytest.raises(DataError, match="not a complete report: it has no 'median'"):
        ShardingReport.load(report.to_json().replace('"max"', '"median"'))


# --- Differences ----------------------------------------------------------------------------------


def test_no_difference():
    report = HELPER.explain(MODEL, RULES)
    assert report.diff(HELPER.explain(MODEL, RULES | P())) == ''


def changed_model():
    model = {**MODEL, 'head': leaf(64, 512), 'layers': [layer() for _ in range(13)]}
    del model['step']
    rules = TreePathShardingRule(('up|embed', P('fsdp', 'tp')), ('down', P('tp')), ('', P()))
    return HELPER.explain(MODEL, RULES).diff(HELPER.explain(model, rules))


def test_leaves_of_one_path_are_compared_one_by_one():
    tree = {'a': {'b': leaf(8)}, 'a/b': leaf(8)}
    replicated = HELPER.explain(tree, P())
    assert replicated.diff(HELPER.explain(tree, {'a': P('fsdp'), 'a/b': P()})) == (
        "a/b: float32[8] replicated (32 B on a device) -> float32[8] P('fsdp',) (8 B on a device)"
    )


def test_difference_text(snapshot):
    snapshot(changed_model())


def test_difference_of_meshes_and_arrays(snapshot):
    before = MeshShardingHelper([8], ['fsdp']).explain({'a': leaf(8), 'b': leaf(16)}, {'a': P(), 'b': P()})
    after = MeshShardingHelper([4], ['fsdp'], devices=jax.devices()[:4]).explain(
        {'a': leaf(8), 'b': leaf(16, dtype=jnp.int8)}, {'a': P(), 'b': P('fsdp')}
    )
    snapshot(before.diff(after))
    same = dataclasses.replace(before, mesh={'fsdp': 4})
    assert before.diff(same)
    assert not before.diff(before)


# --- Bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('array', 'spec', 'sizes'),
    [
        (leaf(8, 16, dtype=jnp.int4), P('fsdp'), (64, 16)),
        (leaf(3, dtype=jnp.uint4), P(), (2, 2)),
        (leaf(8, dtype=bool), P('fsdp'), (8, 2)),
        (leaf(8, dtype=jnp.float8_e4m3fn), P('tp'), (8, 4)),
        (np.zeros(8, np.float64), P('tp'), (32, 16)),
    ],
)
def test_bytes_of_small_dtypes_and_of_keys(array, spec, sizes):
    report = HELPER.explain(array, spec)
    assert (report.bytes, report.bytes_per_device) == sizes
    keys = HELPER.explain(jax.random.split(jax.random.key(0), 8), P('fsdp'))
    assert (keys.bytes, keys.bytes_per_device) == (64, 16)


def test_the_report_has_its_rules_below_it_where_there_is_no_room():
    tree = {'layers': {'attention': {'query': {'kernel': jax.ShapeDtypeStruct((64, 64), jnp.float32)}}}}
    report = HELPER.explain(tree, TreePathShardingRule(('query/kernel', P('fsdp', 'tp'))))
    narrow, wide = report.to_text(80), report.to_text(160)
    assert 'layers/attention/query/kernel' in narrow
    assert '2.0 KiB  [1]' in narrow and "\n[1] regex 'query/kernel'\n" in narrow
    assert "2.0 KiB  regex 'query/kernel'" in wide
    assert all(len(line) <= 80 for line in narrow.splitlines())


def test_shadowed_and_unused_regexes():
    tree = {'stack': {'w': leaf(8, 4, 4), 'scale': leaf(8)}, 'small': leaf(4), 'odd': leaf(8)}
    rules = TreePathShardingRule(
        ('^stack', TreePathShardingRule(('w$', P('tp')), ('scale', P())).stacked(1)),
        ('small', FSDPShardingRule('fsdp') | P()),
        ('odd', P()),
        ('odd$', P('fsdp')),
        ('missing', P()),
    )
    report = HELPER.explain(tree, rules)
    assert (report.unused_rules, report.shadowed_rules) == (('missing',), ('odd$',))
    named = LogicalAxisShardingRule({'rows': 'fsdp'}, [('odd', 'rows'), ('none', 'rows')], strict=False)
    assert HELPER.explain(tree, named | P()).unused_rules == ('none',)
