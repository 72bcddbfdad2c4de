"""A search as a page: its text, its sortable table, and the plan of each mesh."""

import dataclasses
import functools
import re
import xml.etree.ElementTree as ET

import jax
import pytest
from selenium.webdriver.common.by import By

from scalax._planning.mesh_search.ranking import ranked
from scalax.plan import HARDWARE, Candidate, DevicePosition, SearchResult
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

GIB = 2**30
LIMIT = HARDWARE['v5e'].hbm_bytes
HOSTILE = '</script><img src=x onerror=alert(1)>\u202e"\'&' + 'w' * 300


@functools.cache
def plan(fsdp, tp, peak=4, names=('fsdp', 'tp')):
    """A plan of the CPU compiler, with the devices of eight v5e chips."""
    helper = MeshShardingHelper([fsdp, tp], names)
    step = helper.sjit(
        lambda w, x: (x @ w).sum(0), in_shardings=(P(*names), P(names[0])), out_shardings=P(names[1])
    )
    cpu_plan = helper.plan(
        step, jax.ShapeDtypeStruct((4096, 4096), 'bfloat16'), jax.ShapeDtypeStruct((65536, 4096), 'bfloat16')
    )
    memory = dataclasses.replace(
        cpu_plan.memory, arguments=peak * GIB, outputs=0, temporaries=0, peak=peak * GIB, limit=LIMIT
    )
    positions = tuple(DevicePosition(0, (i % 2, i // 2)) for i in range(8))
    return dataclasses.replace(
        cpu_plan,
        name='step',
        memory=dataclasses.replace(memory, estimated=False),
        device_positions=positions,
        platform='tpu',
        device_kind='TPU v5 lite',
        quick=True,
    )


def candidate(fsdp, tp, peak=4, **more):
    return Candidate({'fsdp': fsdp, 'tp': tp}, plan=plan(fsdp, tp, peak), **more)


@functools.cache
def search():
    """One mesh of each kind: the best, a slower one, one too large, two not compiled, one that failed."""
    return SearchResult(
        ranked(
            [
                candidate(8, 1, 10),
                candidate(4, 2, 9),
                candidate(2, 4, 20, reason='does not fit: 20.0 GiB of 15.8 GiB'),
                Candidate({'fsdp': 1, 'tp': 8}, reason='cannot fit', ruled_out=True, argument_bytes=30 * GIB),
                Candidate({'fsdp': 1, 'tp': 9}, reason='cannot fit', ruled_out=True, argument_bytes=31 * GIB),
                Candidate({'fsdp': 1, 'tp': 7}, reason='ValueError: no'),
            ]
        ),
        'v5e:2x4',
        num_quick_plans=3,
        search_seconds=12.3456,
    )


def hostile():
    sizes = {HOSTILE: 4, 'tp': 2}
    hostile_plan = plan(4, 2, names=('<img src=x>', 'tp'))  # XLA cannot read a name with quotes
    best = Candidate(sizes, dataclasses.replace(hostile_plan, name=HOSTILE))
    return SearchResult((best, Candidate(sizes, reason=HOSTILE)), HOSTILE)


def written(result, folder, **options):
    result.to_html(folder / 'search.html', **options)
    return (folder / 'search.html').read_text(encoding='utf-8')


def columns(text):
    """Returns the columns of the table of meshes by their headings."""
    root = ET.fromstring(text)
    table = next(element for element in root.iter() if element.get('class') == 'sortable')
    heads = [''.join(element.itertext()) for element in table.iter('th')]
    rows = [[''.join(cell.itertext()) for cell in row.iter('td')] for row in table.find('tbody')]
    return dict(zip(heads, zip(*rows, strict=True), strict=True))


# --- What is written ------------------------------------------------------------------------------


@pytest.mark.parametrize('make', [search, hostile, lambda: SearchResult((), 'v5e:2x4', True, num_untried=3)])
def test_the_page_is_well_formed_and_self_contained(make, tmp_path):
    text = written(make(), tmp_path, title='A <b> title')
    root = ET.fromstring(text)
    assert root.findtext('head/title') == root.findtext('.//h1') == 'A <b> title'
    assert set(re.findall(r'\w+://[^"\s]+', text)) <= {'http://www.w3.org/2000/svg'}
    assert "default-src 'none'" in text and '<img' not in text and '\u202e' not in text


def test_words_of_the_page(tmp_path):
    text = written(search(), tmp_path)
    message = [words.strip() for words in ET.fromstring(text).find('body').itertext() if words.strip()]
    assert message[:1] == ['Meshes for step on v5e:2x4']
    best = search().best
    roofline = best.roofline()
    for words in (
        'best of 6 meshes',
        '6 meshes on v5e:2x4: 3 planned quickly, 2 ruled out before compiling; it took 12.3 s',
        f'{best.memory.peak // GIB}.0 GiB',
        roofline.bottleneck,
        f'{roofline.mfu:.1%}',
    ):
        assert words in message


def test_the_table(tmp_path):
    result = search()
    cells = columns(written(result, tmp_path))
    assert cells['mesh'] == tuple(row.name for row in result.candidates)
    assert cells['memory'][2:] == ('20.0 GiB', '>30.0 GiB', '>31.0 GiB', '')
    assert cells['at least'][3:] == ('', '', '')
    assert cells['outcome'] == ('best', *(row.reason for row in result.candidates[1:]))


@pytest.mark.parametrize(
    ('result', 'message'),
    [
        (SearchResult((), 'v5e:2x4'), ['nothing planned', 'No mesh was planned.']),
        (
            SearchResult((Candidate({'x': 8}, reason='no'),), 'v5e:2x4'),
            ['nothing planned'],
        ),
        (
            SearchResult((candidate(8, 1, 20, reason='does not fit'),), 'v5e:2x4'),
            ['no mesh fits'],
        ),
        (
            SearchResult((candidate(8, 1),), 'v5e:2x4', True, num_untried=3),
            ['1 mesh on v5e:2x4; stopped early, 3 not reached'],
        ),
    ],
)
def test_important_notes_are_on_the_page(result, message, tmp_path):
    text = written(result, tmp_path)
    for words in message:
        assert words in text, words
    assert result._repr_html_()


def test_a_notebook_has_no_plans():
    text = search()._repr_html_()
    static = text[: text.index('<script')]
    assert '<details' not in static
    assert '<img' not in hostile()._repr_html_()


# --- In a browser ---------------------------------------------------------------------------------


def opened(browser, result, folder, **window):
    written(result, folder)
    browser.open(folder / 'search.html', **window)
    return browser.driver.find_element(By.TAG_NAME, 'main')


def ranks(root):
    rows = root.find_element(By.CSS_SELECTOR, 'table.sortable tbody').find_elements(By.TAG_NAME, 'tr')
    return [int(row.find_element(By.TAG_NAME, 'td').text) for row in rows]


def open_plans(root):
    folds = root.find_elements(By.CSS_SELECTOR, 'section > details')
    return [position for position, fold in enumerate(folds, 1) if fold.get_attribute('open')]


def sorted_by(root, head):
    [button] = [
        element for element in root.find_elements(By.CSS_SELECTOR, 'th button') if element.text == head
    ]
    button.click()
    return ranks(root)


@pytest.mark.medium
def test_the_table_sorts(browser, tmp_path):
    root = opened(browser, search(), tmp_path)
    assert ranks(root) == [1, 2, 3, 4, 5, 6]
    peaks = {1: search().candidates[0].plan.memory.peak, 2: search().candidates[1].plan.memory.peak}
    first, second = sorted(peaks, key=peaks.get, reverse=True)
    assert sorted_by(root, 'memory') == [5, 4, 3, first, second, 6]  # meshes without a value stay last
    assert sorted_by(root, 'memory') == [second, first, 3, 4, 5, 6]
    assert sorted_by(root, 'at least')[0] in (1, 2, 3)  # the meshes with a plan
    assert sorted_by(root, 'outcome')[0] == 2  # '10% slower ...'
    assert sorted_by(root, 'rank') == [6, 5, 4, 3, 2, 1]
    assert browser.complaints() == []


@pytest.mark.slow
def test_the_plan_of_each_unfolds(browser, tmp_path):
    root = opened(browser, search(), tmp_path)
    assert open_plans(root) == []
    root.find_elements(By.CSS_SELECTOR, 'section > details > summary')[1].click()
    assert open_plans(root) == [2]
    assert '8 devices of v5e' in root.find_elements(By.CSS_SELECTOR, 'section > details')[1].text


@pytest.mark.medium
@pytest.mark.parametrize('width', [1280, 400])
@pytest.mark.parametrize('dark', [False, True])
@pytest.mark.parametrize('make', [search, hostile])
def test_no_text_is_cut(browser, tmp_path, make, width, dark):
    root = opened(browser, make(), tmp_path, width=width, dark=dark)
    assert browser.overflow() == 0 and browser.complaints() == []
    assert root.find_element(By.CSS_SELECTOR, 'tbody td').is_displayed()
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
