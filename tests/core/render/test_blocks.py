"""The building blocks of pages: their HTML, and how a browser displays it, with and without scripts."""

import re
import xml.etree.ElementTree as ET

import pytest
from selenium.webdriver.common.by import By

from scalax._core.render import blocks
from scalax._core.render.blocks import (
    Cell,
    Code,
    Collapsible,
    Column,
    Figure,
    Figures,
    Heading,
    HtmlOnly,
    Lines,
    Node,
    Section,
    Table,
    TextOnly,
    Tree,
)
from scalax._core.render.tables import milliseconds

MESH = {'fsdp': 16, 'tp': 4}
HOSTILE = '</script><script>alert(1)</script>\n"\'><img src=x onerror=alert(2)>\u202e' + 'x' * 500
COLUMNS = [Column('mesh', 'lead'), Column('ms', 'number', milliseconds), Column('outcome', 'wide')]
ROWS = [
    ['tp=10', Cell('570 ms', 0.57), 'best'],
    ['tp=9', 1.2, 'slower'],
    ['tp=100', None, 'no program'],
]
TABLE = Table(COLUMNS, ROWS, best=0)
HEADS = [Column('scope'), Column('n', 'number')]


def node(name, number, *children):
    return Node(name, [number], children)


TREE = Tree(HEADS, [node('top', 7, node('one', 5, node('leaf', 1), node('bud', 4)), node('two', 2))])


def parsed(html):
    """An element around blocks, which are well-formed."""
    return ET.fromstring(f'<div>{html}</div>')


def texts(html):
    return [text.strip() for text in parsed(html).itertext() if text.strip()]


def everything(text):
    """All kinds of blocks, with *text* in all of their texts."""
    columns = [Column(text, 'lead'), Column(text, 'number')]
    return [
        Heading(text, {text: 2}, text),
        Figures([Figure(text, text, 'good', True), Figure(text, text)]),
        Lines([text], 'bad'),
        Code(text),
        Section(text, [Lines([text])], text),
        Table(columns, [[text, 1.0], [Cell(text, tone='warn'), Cell(text, 1.0, bar=0.5)]]),
        Tree(columns, [Node(text, [text], [Node(text, [text])])]),
        Collapsible(text, [Lines([text])]),
    ]


def test_texts_are_data():
    def shape(text):
        # Lines of code are lines on the page too.
        return [
            (element.tag, sorted(element.attrib))
            for element in parsed(blocks.html(everything(text))).iter()
            if element.tag != 'br'
        ]

    assert shape(HOSTILE) == shape('x')
    assert not {name for _, names in shape('x') for name in names} & {'id', 'onerror', 'href', 'src'}


@pytest.mark.slow
@pytest.mark.parametrize('text', ['x', HOSTILE], ids=['harmless', 'hostile'])
def test_pages_are_well_formed_and_load_nothing(text):
    page = blocks.page(text, everything(text))
    assert ET.fromstring(page).find('body/main') is not None
    assert not re.findall(r'\w+://[^"\s]+', page)
    assert "default-src 'none'" in page and page.count('<script') == 1


def test_tables_as_text():
    assert TABLE.text(60) == [
        'mesh          ms  outcome',
        '----------------------------',
        'tp=10     570 ms  best',
        'tp=9    1,200 ms  slower',
        'tp=100            no program',
    ]
    # If the first column leaves no room, the second one is below it.
    lines = Table([Column('a'), Column('b', 'wide')], [[56 * 'x', 'some text']]).text(60)
    assert ''.join(line[58:].strip() for line in lines[2:]) == 'sometext'


def test_an_axis_has_its_color_wherever_it_is_named():
    def cell(text, mesh=MESH):
        html = blocks.html([Heading('title', mesh), Table([Column('axes', 'code')], [[text]])])
        return re.search('<td[^>]*>(.*)</td>', html)[1]

    assert cell('tp') == '<span class="axis axis-1">tp</span>'
    assert cell('ici:tp x fsdp') == (
        'ici:<span class="axis axis-1">tp</span> x <span class="axis axis-0">fsdp</span>'
    )
    assert cell('other, tps') == 'other, tps'
    assert 'axis-1">tp</span> 4' in Heading('title', MESH).html({})
    assert 'axis-0' in cell('a6', {f'a{i}': 2 for i in range(8)})


def open_page(browser, tmp_path, html, **options):
    path = tmp_path / 'page.html'
    path.write_text(html, encoding='utf-8')
    browser.open(path, **options)
    return browser.driver


def visible_texts(root, selector):
    elements = root.find_elements(By.CSS_SELECTOR, selector)
    return [element.text for element in elements if element.is_displayed()]


def leads(root):
    return visible_texts(root, 'tbody td.lead')


@pytest.mark.medium
def test_tables_sort(browser, tmp_path):
    page = open_page(browser, tmp_path, blocks.page('table', [TABLE]))
    mesh, ms, _ = page.find_elements(By.CSS_SELECTOR, 'th button')
    assert leads(page) == ['tp=10', 'tp=9', 'tp=100']
    mesh.click()
    assert leads(page) == ['tp=9', 'tp=10', 'tp=100']  # numbers in names are compared as numbers
    ms.click()
    assert leads(page) == ['tp=9', 'tp=10', 'tp=100']
    ms.click()
    assert leads(page) == ['tp=10', 'tp=9', 'tp=100']  # cells without a number stay last
    assert page.find_element(By.CSS_SELECTOR, '[aria-sort]').get_attribute('aria-sort') == 'ascending'
    heads = page.find_elements(By.CSS_SELECTOR, 'th')
    assert [head.get_attribute('aria-sort') for head in heads] == [None, 'ascending', None]
    assert visible_texts(page, 'tr.best td.lead') == ['tp=10']
    assert browser.complaints() == []


def names(root):
    return visible_texts(root, '.tree .row:not(.heads) .name')


@pytest.mark.medium
def test_trees_fold(browser, tmp_path):
    page = open_page(browser, tmp_path, blocks.page('tree', [TREE]))
    assert names(page) == ['top', 'one', 'leaf', 'bud', 'two']
    page.find_element(By.CSS_SELECTOR, 'summary').click()
    assert names(page) == ['top']
    everything, nothing = page.find_elements(By.CSS_SELECTOR, '.tools button')
    everything.click()
    assert names(page) == ['top', 'one', 'leaf', 'bud', 'two']
    nothing.click()
    assert names(page) == ['top']
    assert browser.complaints() == []


def test_levels_are_open_while_they_have_few_rows():
    def open_nodes(count):
        nodes = [node(f'a{i}', 1, *(node('b', 1, node('c', 1)) for _ in range(3))) for i in range(count)]
        details = parsed(Tree(HEADS, nodes).html({})).iter('details')
        return [element.get('open') is not None for element in details]

    assert open_nodes(5) == [True] * 20  # of 5 + 15 + 15 rows
    assert open_nodes(6) == [True, False, False, False] * 6
    assert not any(open_nodes(11))


def test_long_tables_are_cut():
    rows = [[f'a{i}', i] for i in range(blocks.MAX_ROWS + 3)]
    assert texts(Table(HEADS, rows).html({}))[-1] == '... and 3 more'
    assert len(Table(HEADS, rows).text(60)) == 2 + len(rows)
    assert Table(HEADS, rows, max_text_rows=2).text(60)[4:] == ['... and 2,001 more']


def test_text_and_pages_render_the_same_blocks():
    both = [
        TextOnly([Section('', [Lines(['only in text'])])]),
        HtmlOnly([Lines(['only on a page'])]),
        Section('Title', [Lines(['', 'in both']), Code('code()')], 'about'),
        Section('Empty', [Lines([''])], 'about'),
        Collapsible('held', [Table([Column('a'), Column('b', html_only=True)], [['x', 'y']])]),
    ]
    assert blocks.text(both, 60).splitlines() == [
        *('only in text', '', 'about:', 'in both', 'code()', '', 'held:', 'a', '-', 'x'),
    ]
    assert texts(blocks.html(both)) == [
        *('only on a page', 'Title', 'About.', 'in both', 'code()', 'held', 'a', 'b', 'x', 'y'),
    ]


def test_large_trees_are_cut():
    nodes = [node(f'a{i}', 1, node('b', 1)) for i in range(blocks.MAX_ROWS // 2 + 3)]
    tree = Tree(HEADS, nodes).html({})
    assert tree.count('class="name"') == blocks.MAX_ROWS + 1
    assert texts(tree)[-1] == 'The first 2,000 rows are shown.'


@pytest.mark.medium
def test_trees_sort_level_by_level(browser, tmp_path):
    page = open_page(browser, tmp_path, blocks.page('tree', [TREE]))
    scope, number = page.find_elements(By.CSS_SELECTOR, '.heads button')
    number.click()
    assert names(page) == ['top', 'one', 'bud', 'leaf', 'two']
    number.click()
    assert names(page) == ['top', 'two', 'one', 'leaf', 'bud']
    assert page.find_element(By.CSS_SELECTOR, '[aria-sort]').get_attribute('aria-sort') == 'ascending'
    number.click()  # as it was
    assert names(page) == ['top', 'one', 'leaf', 'bud', 'two']
    assert page.find_elements(By.CSS_SELECTOR, '[aria-sort]') == []
    scope.click()
    assert names(page) == ['top', 'one', 'bud', 'leaf', 'two']


@pytest.mark.medium
@pytest.mark.parametrize(
    ('text', 'expected', 'status'),
    [
        ('LEAF', ['top', 'one', 'leaf'], '1 of 3 rows'),
        ('one/', ['top', 'one', 'leaf', 'bud'], '2 of 3 rows'),  # with the names of the groups
        ('^top/(one/bud|two)', ['top', 'one', 'bud', 'two'], '2 of 3 rows'),
        ('(', [], '0 of 3 rows'),  # not a regular expression
        ('nothing', [], '0 of 3 rows'),
    ],
)
def test_trees_are_filtered(browser, tmp_path, text, expected, status):
    page = open_page(browser, tmp_path, blocks.page('tree', [TREE]))
    page.find_elements(By.CSS_SELECTOR, '.tools button')[1].click()
    box = page.find_element(By.CSS_SELECTOR, '.tools input')
    box.send_keys(text)
    assert names(page) == expected  # open, although all were closed
    assert visible_texts(page, '.tools [role=status]') == [status]
    browser.run("arguments[0].value = ''; arguments[0].dispatchEvent(new Event('input'))", box)
    assert names(page) == ['top']  # as it was
    assert browser.complaints() == []


@pytest.mark.medium
def test_without_scripts(browser_without_scripts, tmp_path):
    body = [TABLE, TREE]
    page = open_page(browser_without_scripts, tmp_path, blocks.page('still', body))
    assert leads(page) == ['tp=10', 'tp=9', 'tp=100']
    assert page.find_elements(By.CSS_SELECTOR, 'button') == []
    page.find_element(By.CSS_SELECTOR, 'summary').click()
    assert names(page) == ['top']


@pytest.mark.medium
@pytest.mark.parametrize('dark', [False, True])
def test_in_a_notebook(browser, tmp_path, dark):
    ground = '#111' if dark else '#fff'
    body = [TABLE, TREE]
    style = f'<style>td {{ color: red; font-size: 40px }} body {{ background: {ground} }}</style>'
    page = open_page(
        browser, tmp_path, f'<!DOCTYPE html>{style}{blocks.fragment(body)}{blocks.fragment(body)}'
    )
    hosts = page.find_elements(By.CSS_SELECTOR, '[data-scalax]')
    roots = [
        browser.until(lambda host=host: browser.run('return arguments[0].shadowRoot', host)) for host in hosts
    ]
    assert len(roots) == 2
    for root in roots:
        assert browser.until(lambda root=root: leads(root)) == ['tp=10', 'tp=9', 'tp=100']
    roots[1].find_elements(By.CSS_SELECTOR, 'th button')[0].click()
    assert [leads(root)[0] for root in roots] == ['tp=10', 'tp=9']
    cell = roots[0].find_element(By.CSS_SELECTOR, 'td')
    assert cell.value_of_css_property('font-size') == '13px'  # not the style of the surrounding page
    assert cell.value_of_css_property('color') == (
        'rgba(230, 234, 239, 1)' if dark else 'rgba(26, 31, 38, 1)'
    )


@pytest.mark.medium
@pytest.mark.parametrize('width', [1280, 400])
@pytest.mark.parametrize('dark', [False, True])
def test_no_text_is_cut(browser, tmp_path, width, dark):
    page = blocks.page(HOSTILE, [*everything('fsdp=16, tp=4'), *everything(HOSTILE)])
    root = open_page(browser, tmp_path, page, width=width, dark=dark)
    assert browser.overflow() == 0 and browser.complaints() == []
    assert root.find_element(By.CSS_SELECTOR, 'tbody td').is_displayed()
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
