"""The page of a report in a real browser: wide and narrow, with hostile names, and in a notebook."""

import pytest
from jax.sharding import PartitionSpec as P
from selenium.webdriver.common.by import By

from scalax.explain import ReportRow, ShardingReport
from tests.support.reports import HOSTILE, hostile_report, report

# The report of test_html: embed, layers/{0..11}/norm, layers/{0..11}/up, step.
AT_FIRST = ['embed', 'layers/{0..11}', 'norm', 'up', 'step']


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a report in a window of a given width; the console must be empty at the end."""

    def open_report(shown_report=None, width=1280, **options):
        path = tmp_path / 'report.html'
        (report() if shown_report is None else shown_report).to_html(path)
        browser.open(path, width, **options)
        return browser.driver

    yield open_report
    assert browser.complaints() == []


def cells(root, column):
    """Returns the texts in a column of the tree, without collapsed rows."""
    rows = root.find_elements(By.CSS_SELECTOR, '.tree .row:not(.heads)')
    shown = [row for row in rows if row.is_displayed()]
    return [row.find_elements(By.CSS_SELECTOR, '.name, .cell')[column].text for row in shown]


def named_report():
    sizes = {'b': 1, 'c10': 8, 'c9': 4, 'a': 2}
    rows = [ReportRow(f'{n}/w', (s,), 'int8', P('x'), '', '', 100 - s, s) for n, s in sizes.items()]
    return ShardingReport(tuple(rows), {'x': 2})


def test_all_columns(opened):
    root = opened()
    assert cells(root, 0) == AT_FIRST
    assert cells(root, 1) == [
        *('float32[512,64]', '24 arrays', '12 x float32[64]', '12 x float32[64,256]', 'int32[]'),
    ]
    assert cells(root, 2) == ["P('tp',)", '', 'replicated', "P('fsdp', 'tp')", 'replicated']
    assert cells(root, 3) == ['128.0 KiB', '771.0 KiB', '3.0 KiB', '768.0 KiB', '4 B']
    assert cells(root, 4) == ['64.0 KiB', '99.0 KiB, 60.7 %', '3.0 KiB', '96.0 KiB', '4 B']
    assert cells(root, 5) == [
        *("regex 'embed'", '', "regex 'norm'", "regex 'up'", 'TreePathShardingRule: one element')
    ]


@pytest.mark.parametrize('dark', [False, True], ids=['light', 'dark'])
@pytest.mark.parametrize('width', [1280, 800, 400])
def test_fits_the_window(browser, opened, width, dark):
    opened(width=width, dark=dark)
    assert browser.overflow() == 0
    edges = browser.run(
        'return [...document.querySelectorAll(".row > *, header *, .tools *, dd")]'
        '.map((each) => each.getBoundingClientRect().right)'
    )
    assert max(edges) <= width
    ground = browser.run('return getComputedStyle(document.body).backgroundColor')
    assert ground == ('rgb(18, 22, 27)' if dark else 'rgb(255, 255, 255)')
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ('head', 'paths'),
    [
        ('path', ['a/w', 'b/w', 'c9/w', 'c10/w']),
        ('bytes', ['b/w', 'a/w', 'c9/w', 'c10/w']),
        ('bytes/device', ['c10/w', 'c9/w', 'a/w', 'b/w']),
    ],
)
def test_each_column_sorts(opened, head, paths):
    root = opened(named_report())
    assert cells(root, 0) == ['b/w', 'c10/w', 'c9/w', 'a/w']
    [button] = [item for item in root.find_elements(By.CSS_SELECTOR, '.heads button') if item.text == head]
    button.click()
    assert cells(root, 0) == paths


def test_groups_are_sorted_by_their_contents(opened):
    root = opened()
    root.find_elements(By.CSS_SELECTOR, '.heads button')[4].click()
    assert cells(root, 0) == ['layers/{0..11}', 'up', 'norm', 'embed', 'step']


@pytest.mark.parametrize(
    ('text', 'paths'),
    [
        ('NORM', ['layers/{0..11}', 'norm']),
        ("'fsdp'", ['layers/{0..11}', 'up']),
        ('one element', ['step']),
        ('{0..11}/up', ['layers/{0..11}', 'up']),
        ('[512,', ['embed']),
        ('^(embed|step)$', ['embed', 'step']),
        ('bytes/', []),  # the head of a column
    ],
)
def test_rows_are_filtered_by_any_text(opened, text, paths):
    root = opened()
    root.find_element(By.CSS_SELECTOR, '.tools input').send_keys(text)
    assert cells(root, 0) == paths


def test_hostile_names_are_text_and_run_nothing(browser, opened):
    root = opened(hostile_report())
    shown = ' '.join(cells(root, 0))
    for name in (HOSTILE[0], HOSTILE[1], HOSTILE[2], r'two\nlines\t\x00', r'right \u202e left', 'é → 層'):
        assert name in shown
    assert f'rule {HOSTILE[1]}: reason {HOSTILE[1]}' in cells(root, 5)
    assert browser.run('return window.hacked') is None
    assert browser.overflow() == 0


# --- Notebooks ------------------------------------------------------------------------------------


def notebook(browser, tmp_path, *parts, style='', **options):
    """Opens a page of another project, with a table of its own, that contains reports."""
    path = tmp_path / 'page.html'
    path.write_text(
        '<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">'
        '<style>td { color: rgb(1, 2, 3); text-align: right; } h1 { font-size: 77px }</style>'
        f'<body style="{style}"><table id="mine"><tr><td>mine</td></tr></table>{"".join(parts)}',
        encoding='utf-8',
    )
    browser.open(path, **options)
    hosts = browser.driver.find_elements(By.CSS_SELECTOR, '[data-scalax]')
    for host in hosts:
        browser.until(lambda host=host: browser.run('return arguments[0].shadowRoot', host))
    return [host.shadow_root for host in hosts]


def test_reports_on_one_page_are_independent(browser, tmp_path):
    html = report()._repr_html_()
    first, second, third = notebook(browser, tmp_path, html, named_report()._repr_html_(), html)
    browser.run("window.heard = []; document.addEventListener('keydown', (event) => heard.push(event.key))")
    second.find_elements(By.CSS_SELECTOR, '.heads button')[4].click()
    third.find_element(By.CSS_SELECTOR, '.tools input').send_keys('embed')
    assert browser.run('return heard') == [], 'keys typed into a report are no commands of the notebook'
    assert cells(first, 0) == AT_FIRST
    assert cells(second, 0) == ['c10/w', 'c9/w', 'a/w', 'b/w']
    assert cells(third, 0) == ['embed']
    # Styles of the page do not affect reports, and styles of reports do not affect the page.
    cell = browser.driver.find_element(By.CSS_SELECTOR, '#mine td')
    assert cell.value_of_css_property('color') == 'rgba(1, 2, 3, 1)'
    assert first.find_element(By.CSS_SELECTOR, 'h1').value_of_css_property('font-size') == '21px'
    assert browser.complaints() == []


@pytest.mark.parametrize(('ground', 'scheme'), [('#111', 'dark'), ('#fafafa', 'light')])
def test_theme_follows_the_notebook(browser, tmp_path, ground, scheme):
    notebook(browser, tmp_path, report()._repr_html_(), style=f'background: {ground}', dark=scheme == 'light')
    host = browser.driver.find_element(By.CSS_SELECTOR, '[data-scalax]')
    assert browser.run('return getComputedStyle(arguments[0]).colorScheme', host) == scheme


@pytest.mark.medium
@pytest.mark.parametrize('width', [1280, 400])
def test_without_scripts_the_page_is_complete_and_folds(browser_without_scripts, tmp_path, width):
    browser = browser_without_scripts
    path = tmp_path / 'report.html'
    report().to_html(path, title='Title')
    browser.open(path, width)
    root = browser.driver
    assert cells(root, 0) == AT_FIRST
    root.find_element(By.CSS_SELECTOR, 'summary').click()
    assert cells(root, 0) == ['embed', 'layers/{0..11}', 'step']
    assert root.find_element(By.TAG_NAME, 'h1').text == 'Title'
    assert browser.overflow() == 0
    # The browser only reports that it may not run scripts.
    assert all('script' in complaint.lower() for complaint in browser.complaints())
