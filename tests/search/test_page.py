"""A search as a page: its words, its table that sorts, and the plan of each a click away."""

import dataclasses
import functools
import re
import xml.etree.ElementTree as ET

import jax
import pytest
from selenium.webdriver.common.by import By

from scalax._report.tables import human_bytes
from scalax._search import blocks as module
from scalax._search.ranking import ranked
from scalax.plan import HARDWARE, Candidate, Place, Search
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

GIB = 2**30
LIMIT = HARDWARE['v5e'].hbm_bytes
HOSTILE = '</script><img src=x onerror=alert(1)>\u202e"\'&' + 'w' * 300


@functools.cache
def plan(fsdp, tp, peak=4, names=('fsdp', 'tp')):
    """A plan of this machine's compiler, as if it were for eight chips of v5e."""
    helper = MeshShardingHelper([fsdp, tp], names)
    step = helper.sjit(
        lambda w, x: (x @ w).sum(0), in_shardings=(P(*names), P(names[0])), out_shardings=P(names[1])
    )
    made = helper.plan(
        step, jax.ShapeDtypeStruct((4096, 4096), 'bfloat16'), jax.ShapeDtypeStruct((65536, 4096), 'bfloat16')
    )
    memory = dataclasses.replace(
        made.memory, arguments=peak * GIB, outputs=0, temporaries=0, peak=peak * GIB, limit=LIMIT
    )
    places = tuple(Place(0, (i % 2, i // 2)) for i in range(8))
    return dataclasses.replace(
        made,
        name='step',
        memory=dataclasses.replace(memory, estimated=False),
        places=places,
        platform='tpu',
        device_kind='TPU v5 lite',
        quick=True,
    )


def candidate(fsdp, tp, peak=4, **more):
    return Candidate({'fsdp': fsdp, 'tp': tp}, plan=plan(fsdp, tp, peak), **more)


@functools.cache
def search():
    """One mesh of each kind: the best, a slower one, one too large, two not compiled, one that failed."""
    return Search(
        ranked(
            [
                candidate(8, 1, 10),
                candidate(4, 2, 9),
                candidate(2, 4, 20, lost='does not fit: 20.0 GiB of 15.8 GiB'),
                Candidate(
                    {'fsdp': 1, 'tp': 8}, 'a', lost='cannot fit: 30', ruled_out=True, least_memory=30 * GIB
                ),
                Candidate(
                    {'fsdp': 1, 'tp': 8},
                    'b',
                    lost='cannot fit: 31',
                    ruled_out=True,
                    least_memory=31 * GIB,
                ),
                Candidate({'fsdp': 1, 'tp': 8}, 'c', lost='ValueError: no'),
            ]
        ),
        'v5e:2x4',
        compiled=3,
        seconds=12.3456,
    )


def hostile():
    sizes = {HOSTILE: 4, 'tp': 2}
    made = plan(4, 2, names=('<img src=x>', 'tp'))  # a name with quotes is none that XLA reads
    best = Candidate(sizes, HOSTILE, dataclasses.replace(made, name=HOSTILE))
    return Search((best, Candidate(sizes, HOSTILE, lost=HOSTILE)), HOSTILE)


def written(found, folder, **options):
    found.to_html(folder / 'search.html', **options)
    return (folder / 'search.html').read_text(encoding='utf-8')


def columns(text):
    """The cells of the table of meshes by their heads: those of the best first."""
    root = ET.fromstring(text)
    table = next(each for each in root.iter() if each.get('class') == 'sortable')
    heads = [''.join(each.itertext()) for each in table.iter('th')]
    rows = [[''.join(cell.itertext()) for cell in row.iter('td')] for row in table.find('tbody')]
    return dict(zip(heads, zip(*rows, strict=True), strict=True))


# --- What is written ------------------------------------------------------------------------------


@pytest.mark.parametrize('make', [search, hostile, lambda: Search((), 'v5e:2x4', True, not_tried=3)])
def test_the_page_is_well_formed_and_self_contained(make, tmp_path):
    text = written(make(), tmp_path, title='A <b> title')
    root = ET.fromstring(text)
    assert root.findtext('head/title') == root.findtext('.//h1') == 'A <b> title'
    assert set(re.findall(r'\w+://[^"\s]+', text)) <= {'http://www.w3.org/2000/svg'}
    assert "default-src 'none'" in text and '<img' not in text and '\u202e' not in text
    ids = [each.get('id') for each in root.iter() if each.get('id')]
    links = {each.get('href') for each in root.iter() if each.get('href') != 'data:,'} - {None}
    assert len(ids) == len(set(ids)) and links == ({f'#{each}' for each in ids} if make().fits else set())


def test_words_of_the_page(tmp_path):
    text = written(search(), tmp_path)
    said = [words.strip() for words in ET.fromstring(text).find('body').itertext() if words.strip()]
    assert said[:1] == ['Meshes for step on v5e:2x4']
    best = search().best
    roofline = best.roofline()
    for words in (
        'best of 6 meshes',
        '6 meshes on v5e:2x4: 3 planned quickly, 2 ruled out by a bound; it took 12.3 s',
        f'{best.memory.peak // GIB}.0 GiB',
        roofline.bound,
        f'{roofline.mfu:.1%}',
    ):
        assert words in said


def test_the_table(tmp_path):
    found = search()
    cells = columns(written(found, tmp_path))
    assert cells['mesh'] == tuple(each.name for each in found.candidates)
    assert cells['fits'] == ('fits', 'fits', *['does not fit'] * 3, 'not compiled')
    assert cells['memory'][2:] == ('20.0 GiB', '>30.0 GiB', '>31.0 GiB', '')
    assert cells['at least'][3:] == ('', '', '')
    assert cells['outcome'] == ('best', *(each.lost for each in found.candidates[1:]))
    # As many bytes as the plan says, of all kinds together.
    totals = found.best.totals
    assert totals
    for axes, kinds in totals.items():
        shown = cells[f'bytes {"+".join(axes)}'][0]
        assert shown == human_bytes(sum(kinds.values())) != '0 B'
    for axes, shown in cells.items():
        if axes.startswith('bytes '):
            assert shown[3:] == ('', '', '')


def test_bytes_of_few_axes_have_a_column(monkeypatch):
    rows = [Candidate({}, plan=object()) for _ in range(3)]
    moved = {('a',): 5, ('b',): 100, ('c',): 1, ('a', 'b'): 7, ('d',): 2}
    monkeypatch.setattr(module, '_moved', lambda each: moved)
    assert module._axes(rows) == [('b',), ('a', 'b'), ('a',), ()]
    del moved['d',]
    assert module._axes(rows) == [('b',), ('a', 'b'), ('a',), ('c',)]


def test_plans_of_the_best_only(tmp_path, monkeypatch):
    monkeypatch.setattr(module, 'MOST_PLANS', 2)
    text = written(search(), tmp_path)
    assert re.findall(r'id="(plan-\d+)"', text) == ['plan-1', 'plan-2']
    assert 'Those of the best 2; 1 more are not on this page.' in text


@pytest.mark.parametrize(
    ('found', 'said'),
    [
        (Search((), 'v5e:2x4'), ['nothing planned', 'There are none.']),
        (
            Search((Candidate({'x': 8}, lost='no'),), 'v5e:2x4'),
            ['nothing planned', 'on none of these meshes'],
        ),
        (
            Search((candidate(8, 1, 20, lost='does not fit'),), 'v5e:2x4'),
            ['no mesh fits', 'The step fits on none of these meshes. The table says why of each.'],
        ),
        (
            Search((candidate(8, 1),), 'v5e:2x4', True, not_tried=3),
            ['Stopped before the end: 3 meshes were not reached.', '1 mesh on v5e:2x4; stopped'],
        ),
        (Search((candidate(8, 1, 15),), 'v5e:2x4'), ['only a full plan says whether it fits']),
    ],
)
def test_what_a_reader_should_not_miss(found, said, tmp_path):
    text = written(found, tmp_path)
    for words in said:
        assert words in text, words
    assert found._repr_html_()


def test_a_notebook_has_no_plans_and_no_links():
    text = search()._repr_html_()
    static = text[: text.index('<script')]
    assert 'search.candidates[i].plan' in static and '<details' not in static
    assert not re.search(r'\s(id|href)=', static)
    assert '<img' not in hostile()._repr_html_()


# --- In a browser ---------------------------------------------------------------------------------


def opened(browser, found, folder, **window):
    written(found, folder)
    browser.open(folder / 'search.html', **window)
    return browser.driver.find_element(By.TAG_NAME, 'main')


def ranks(root):
    rows = root.find_elements(By.CSS_SELECTOR, '#meshes tbody tr')
    return [int(row.find_element(By.TAG_NAME, 'td').text) for row in rows]


def open_plans(root):
    folds = root.find_elements(By.CSS_SELECTOR, '.target > details')
    return [place for place, fold in enumerate(folds, 1) if fold.get_attribute('open')]


def sorted_by(root, head):
    [button] = [each for each in root.find_elements(By.CSS_SELECTOR, 'th button') if each.text == head]
    button.click()
    return ranks(root)


def test_the_table_sorts(browser, tmp_path):
    root = opened(browser, search(), tmp_path)
    assert ranks(root) == [1, 2, 3, 4, 5, 6]
    peaks = {1: search().candidates[0].plan.memory.peak, 2: search().candidates[1].plan.memory.peak}
    first, second = sorted(peaks, key=peaks.get, reverse=True)
    assert sorted_by(root, 'memory') == [5, 4, 3, first, second, 6]  # what has none stays last
    assert sorted_by(root, 'memory') == [second, first, 3, 4, 5, 6]
    assert sorted_by(root, 'at least')[0] in (1, 2, 3)  # those with a plan
    assert sorted_by(root, 'outcome')[0] == 2  # '10% slower ...'
    assert sorted_by(root, 'rank') == [6, 5, 4, 3, 2, 1]
    assert browser.complaints() == []


def test_the_plan_of_each_is_a_click_away(browser, tmp_path):
    root = opened(browser, search(), tmp_path)
    assert open_plans(root) == []
    sorted_by(root, 'memory')
    root.find_element(By.LINK_TEXT, search().candidates[1].name).click()
    assert open_plans(root) == [2]
    plan = root.find_element(By.CSS_SELECTOR, '#plan-2 details')
    top = 'return arguments[0].getBoundingClientRect().top'
    assert browser.until(lambda: -1 < browser.run(top, plan) < 900)  # pages scroll by whole pixels
    assert '8 devices of v5e' in plan.text
    plan.find_element(By.LINK_TEXT, 'Back to all meshes').click()
    meshes = root.find_element(By.ID, 'meshes')
    assert browser.until(lambda: -1 < browser.run(top, meshes) < 900)
    # Again, after it was closed: the address stays the same.
    browser.run('arguments[0].open = false', plan)
    root.find_element(By.LINK_TEXT, search().candidates[1].name).click()
    assert open_plans(root) == [2]


def test_an_address_opens_a_plan(browser, tmp_path):
    written(search(), tmp_path)
    browser.driver.get((tmp_path / 'search.html').as_uri() + '#plan-3')
    assert open_plans(browser.driver) == [3]
    browser.driver.get((tmp_path / 'search.html').as_uri() + '#"no<such')
    browser.driver.refresh()
    assert open_plans(browser.driver) == []


def test_without_scripts(browser_without_scripts, tmp_path):
    browser = browser_without_scripts
    root = opened(browser, search(), tmp_path)
    root.find_element(By.LINK_TEXT, search().candidates[1].name).click()
    root.find_element(By.CSS_SELECTOR, '#plan-2 summary').click()
    assert open_plans(root) == [2]


@pytest.mark.parametrize('width', [1280, 400])
@pytest.mark.parametrize('dark', [False, True])
@pytest.mark.parametrize('make', [search, hostile])
def test_nothing_is_cut(browser, tmp_path, make, width, dark):
    root = opened(browser, make(), tmp_path, width=width, dark=dark)
    assert browser.overflow() == 0 and browser.complaints() == []
    assert root.find_element(By.CSS_SELECTOR, 'tbody td').is_displayed()
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
