"""Reports as HTML, without a browser (for a browser see explain/test_browser.py)."""

import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest
from jax.sharding import PartitionSpec as P

from scalax.explain import ReportRow, ShardingReport
from scalax.sharding import FSDPShardingRule
from tests.support.leaves import leaf
from tests.support.reports import HELPER, HOSTILE, hostile_report, report, synthetic_report


def written(report, tmp_path, **options):
    path = tmp_path / 'report.html'
    report.to_html(path, **options)
    return path.read_bytes().decode()


def static_of(part):
    """Returns a part of a notebook without its script."""
    return re.search(r'<div class="scalax-static">\n(.*)\n</div>\n</div>', part, re.DOTALL)[1]


def texts(html):
    return [text.strip() for text in ET.fromstring(f'<div>{html}</div>').itertext() if text.strip()]


def test_texts_of_a_page(tmp_path):
    static = static_of(report()._repr_html_())
    page_texts = texts(static)
    assert page_texts[:6] == ['Sharding report', 'fsdp', '4', 'tp', '2', '8 devices']
    figures = dict(zip(page_texts[6:14:2], page_texts[7:14:2], strict=True))
    assert figures == {
        'arrays': '26',
        'in all': '899.0 KiB',
        'on each device': '163.0 KiB',
        'replicated on each device, 13 arrays': '3.0 KiB',
    }
    assert page_texts[14:16] == [
        "regexes that match nothing: 'head'",
        "regexes always shadowed by earlier ones: 'embed'",
    ]
    for words in ('layers/{0..11}', '24 arrays', '12 x float32[64,256]', '99.0 KiB, 60.7 %', "regex 'up'"):
        assert words in page_texts
    page = written(report(), tmp_path, title='A & B')
    assert '<title>A &amp; B</title>' in page and '<h1>A &amp; B</h1>' in page
    tree = static[static.index('<div class="tree"') :]
    assert tree in page


def test_a_page_is_well_formed_and_loads_nothing(tmp_path):
    for shown in (report(), hostile_report()):
        page = written(shown, tmp_path)
        root = ET.fromstring(page)
        names = {name for element in root.iter() for name in element.attrib}
        assert not {name for name in names if name in ('src', 'srcset', 'action') or name.startswith('on')}
        assert [element.get('href') for element in root.iter() if element.get('href')] == ['data:,']
        assert not re.search(r'https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(', page)
        assert "default-src 'none'" in page and page.count('<script') == 1


def test_equal_reports_give_equal_bytes(tmp_path):
    assert written(report(), tmp_path) == written(report(), tmp_path)
    again = ShardingReport.load(report().to_json())
    assert again._repr_html_() == report()._repr_html_()
    other = dataclasses.replace(report(), mesh={'fsdp': 8})
    assert other._repr_html_() != report()._repr_html_()


def test_texts_are_escaped():
    static = static_of(hostile_report()._repr_html_())
    tags = {element.tag for element in ET.fromstring(f'<div>{static}</div>').iter()}
    assert not tags & {'script', 'img', 'b'}
    assert r'two\nlines\t\x00' in static and r'right \u202e left' in static
    assert r'rule half of a pair \ud800' in static
    assert HOSTILE[0] in ' '.join(texts(static))


@pytest.mark.slow
def test_page_of_100_000_distinct_leaves_is_small(tmp_path):
    path = tmp_path / 'report.html'
    synthetic_report(100_000).to_html(path)
    assert path.stat().st_size < 2_000_000
    assert 'The first 2,000 rows are shown.' in path.read_text(encoding='utf-8')


def test_folds_and_groups_of_keys_with_a_stem():
    names = [f'params/layers_{i}/{name}' for i in range(3) for name in ('b', 'w')]
    rows = tuple(ReportRow(name, (8,), 'int8', P('x'), '', '', 8, 4) for name in names)
    page_texts = texts(static_of(ShardingReport(rows, {'x': 2})._repr_html_()))
    assert page_texts[page_texts.index('params/layers_{0..2}') + 1] == 'array'
    assert [name for name in page_texts if name in ('b', 'w')] == ['b', 'w']


@pytest.mark.parametrize(
    ('tree', 'rule', 'words'),
    [
        ({}, None, '0'),
        (leaf(8), P(), '(leaf)'),
        ({'a': leaf(8)}, None, 'compiler'),
        ({'a': leaf(8)}, FSDPShardingRule(min_fsdp_size=0).with_memory_kind('pinned_host'), 'pinned_host'),
    ],
    ids=['nothing', 'one leaf', 'compiler', 'memory'],
)
def test_unusual_reports(tree, rule, words):
    page_texts = texts(static_of(HELPER.explain(tree, rule)._repr_html_()))
    assert words in ' '.join(page_texts).split(' ')
