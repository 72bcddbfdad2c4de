"""Reports as HTML: what is written, without a browser (explain/test_browser.py opens it)."""

import base64
import dataclasses
import hashlib
import html.parser
import json
import re
import zlib

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from scalax._report import pages
from scalax.explain import ReportRow, ShardingReport
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from tests.support.leaves import leaf
from tests.support.reports import HELPER, HOSTILE, hostile_report, report, synthetic_report

POD = MeshShardingHelper.from_mesh(AbstractMesh((64, 8), ('fsdp', 'tp')))


class Elements(html.parser.HTMLParser):
    """The elements of a page with their attributes, and the text inside each kind of them."""

    def __init__(self, page):
        super().__init__()
        self.found, self.texts, self._open = [], {}, ['']
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1], []).append(data)


def written(report, tmp_path, **options):
    path = tmp_path / 'report.html'
    report.to_html(path, **options)
    return path.read_bytes().decode()


def data_of(page):
    [packed] = re.findall('<script type="text/plain">(.*)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def static_of(page):
    return re.search(r'<div class="scalax-static">\n(.*?)\n</div>', page, re.DOTALL)[1]


def test_page_without_scripts_is_a_folded_table(tmp_path, snapshot):
    static = static_of(report()._repr_html_())
    snapshot(static)
    page = written(report(), tmp_path, title='A & B')
    assert static_of(page) == f'<h1>A &amp; B</h1>\n{static}'
    assert '<title>A &amp; B</title>' in page


def test_page_loads_nothing_and_runs_only_its_script(tmp_path):
    page = written(report(), tmp_path)
    elements = Elements(page)
    assert not [
        (tag, name)
        for tag, attributes in elements.found
        for name, value in attributes.items()
        if name in ('src', 'srcset', 'action')
        or name.startswith('on')
        or (name == 'href' and value != 'data:,')
    ]
    assert not re.search(r'https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(', page)
    [policy] = [a['content'] for tag, a in elements.found if a.get('http-equiv') == 'Content-Security-Policy']
    [script] = [text for text in elements.texts['script'] if 'WIDGET' in text]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert [tag for tag, _ in elements.found].count('script') == 2


def test_a_cell_without_its_scripts_is_the_plain_table_only():
    cell = re.sub('<script.*?</script>\n', '', report()._repr_html_(), flags=re.DOTALL)
    assert re.sub('"[0-9a-f]{12}"', '"name"', cell) == (
        '<div data-scalax="name" data-lm-suppress-shortcuts="true">\n<div class="scalax-static">\n'
        f'{static_of(report()._repr_html_())}\n</div>\n</div>\n'
    )


def test_equal_reports_give_equal_bytes(tmp_path):
    assert written(report(), tmp_path) == written(report(), tmp_path)
    again = ShardingReport.load(report().to_json())
    assert again._repr_html_() == report()._repr_html_()
    other = dataclasses.replace(report(), mesh={'fsdp': 8})
    assert other._repr_html_() != report()._repr_html_()


def test_whatever_a_report_says_is_text(tmp_path):
    page = written(hostile_report(), tmp_path, title=HOSTILE[1])
    known = Elements(written(report(), tmp_path))
    elements = Elements(page)
    assert {tag for tag, _ in elements.found} == {tag for tag, _ in known.found}
    assert [tag for tag, _ in elements.found].count('script') == 2
    assert r'two\nlines\t\x00' in static_of(page)
    assert r'right \u202e left' in static_of(page)
    data = data_of(page)
    assert [line[0][0] for line in data['lines']] == [pages.visible(name.split('/')[0]) for name in HOSTILE]
    assert data['texts'][data['lines'][5][3]] == r'rule half of a pair \ud800'
    assert all(text.isprintable() for text in data['texts'])


def test_data_is_the_whole_report(tmp_path):
    made = report()
    data = data_of(written(made, tmp_path, title='T'))
    assert {key: data[key] for key in ('title', 'mesh', 'unused', 'shadowed')} == {
        'title': 'T',
        'mesh': [['fsdp', 4], ['tp', 2]],
        'unused': ['head'],
        'shadowed': ['embed'],
    }
    texts = data['texts']
    assert [(path, *[texts[i] for i in line[:4]], *line[4:]) for path, *line in data['lines']] == [
        (['embed'], 'float32[512,64]', "P('tp',)", "regex 'embed'", '', 131072, 65536, 0),
        (
            ['layers', ['{0..11}', [[0, 11]], ''], 'norm'],
            'float32[64]',
            'replicated',
            "regex 'norm'",
            '',
            256,
            256,
            1,
        ),
        (
            ['layers', ['{0..11}', [[0, 11]], ''], 'up'],
            *('float32[64,256]', "P('fsdp', 'tp')", "regex 'up'", '', 65536, 8192, 0),
        ),
        (['step'], 'int32[]', 'replicated', 'TreePathShardingRule', 'one element', 4, 4, 1),
    ]


def test_many_lines_keep_the_plain_table_short(tmp_path):
    rows = tuple(
        ReportRow(f'x{i}', (i + 1,), 'int8', P(), '', '', i + 1, i + 1) for i in range(pages.MOST_LINES + 3)
    )
    page = written(ShardingReport(rows, {'x': 1}), tmp_path)
    static = static_of(page)
    paths = re.findall('<tr><td style="text-align:left">(x[0-9]+)</td>', static)
    assert paths == [f'x{i}' for i in range(3, pages.MOST_LINES + 3)]
    assert '<p>smaller ones, not shown: 3 arrays, 6 B on each device</p>' in static
    assert len(data_of(page)['lines']) == pages.MOST_LINES + 3


def test_page_of_100_000_distinct_leaves_is_small(tmp_path):
    path = tmp_path / 'report.html'
    synthetic_report(100_000).to_html(path)
    assert path.stat().st_size < 5_000_000
    assert len(data_of(path.read_text(encoding='utf-8'))['lines']) == 100_000


@pytest.mark.parametrize(
    ('tree', 'rule', 'line'),
    [
        ({}, None, None),
        (leaf(8), P(), '<td style="text-align:left">(leaf)</td>'),
        ({'a': leaf(8)}, None, '<td style="text-align:left">compiler</td>'),
        (
            {'a': leaf(8)},
            FSDPShardingRule(min_fsdp_size=0).with_memory_kind('pinned_host'),
            '<td style="text-align:left">P(&#x27;fsdp&#x27;,) in pinned_host</td>',
        ),
    ],
    ids=['nothing', 'one leaf', 'compiler', 'memory'],
)
def test_unusual_reports(tree, rule, line):
    page = HELPER.explain(tree, rule)._repr_html_()
    assert len(data_of(page)['lines']) == len(jax.tree.leaves(tree))
    assert line is None or line in static_of(page)


def test_difference_as_html(snapshot):
    before = HELPER.explain({'a<b': leaf(8), 'n': 1}, P())
    after = POD.explain({'a<b': leaf(8), 'n': 1}, {'a<b': P('tp'), 'n': P()})
    snapshot(before.diff(after)._repr_html_())
    assert before.diff(before)._repr_html_() == (
        '<p>no array changed</p>\n<p>bytes/device of all arrays: 36 B before, 36 B after (+0 B)</p>'
    )


def test_large_differences_are_cut():
    rows = tuple(ReportRow(f'x{i}', (8,), 'int8', P(), '', '', i + 1, i + 1) for i in range(302))
    page = ShardingReport(rows, {'x': 1}).diff(ShardingReport((), {'x': 1}))._repr_html_()
    assert page.count('<tr>') == 1 + pages.MOST_LINES
    assert '<p>lines not shown: 2</p>\n<p>302 arrays removed</p>' in page
