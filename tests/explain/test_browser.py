"""The HTML of reports in a real browser: it folds, sorts, filters, and does without scripts."""

import pytest
from jax.sharding import PartitionSpec as P
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from scalax._report.tables import human_bytes
from scalax.explain import ReportRow, ShardingReport
from tests.support.reports import HOSTILE, hostile_report, report, synthetic_report

# The report of test_explain_html: embed, layers/{0..11}/norm, layers/{0..11}/up, step.
AT_FIRST = ['embed', 'layers/{0..11}', 'norm × 12', 'up × 12', 'step']


class Widget:
    """One report on the page, and what people do with it."""

    def __init__(self, browser, number=0):
        self.browser = browser

        def awake():
            hosts = browser.driver.find_elements(By.CSS_SELECTOR, '[data-scalax]')
            if len(hosts) <= number or not browser.run('return arguments[0].shadowRoot', hosts[number]):
                return None
            return hosts[number].shadow_root

        self.root = browser.until(awake)
        browser.until(lambda: self.text('.count'))

    def all(self, selector):
        return self.root.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        [found] = self.all(selector)
        return found

    def text(self, selector):
        return self.one(selector).text

    def cells(self, column):
        """The texts of a column, top down."""
        script = (
            'return [...arguments[0].querySelectorAll(arguments[1])].map((cell) => cell.innerText.trim())'
        )
        return self.browser.run(script, self.root, f'tbody td.{column}')

    @property
    def paths(self):
        return self.cells('path')

    def click(self, selector):
        self.one(selector).click()

    def row(self, path):
        return self.all('tbody tr')[self.paths.index(path)]

    def toggle(self, path):
        self.row(path).find_element(By.CSS_SELECTOR, '.name').click()

    def filter(self, text):
        box = self.one('.filter')
        box.clear()
        box.send_keys(text)

    def sort(self, order):
        self.one(f'option[value="{order}"]').click()

    def focused(self):
        """The path of the row that has the focus."""
        return self.browser.run(
            'return arguments[0].activeElement?.querySelector(".path")?.innerText.trim()', self.root
        )

    def press(self, *keys):
        for key in keys:
            self.browser.driver.switch_to.active_element.send_keys(key)


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a report in a window of a given width; at the end the console must have nothing to say."""

    def open_report(made=None, width=1280, **options):
        path = tmp_path / 'report.html'
        (report() if made is None else made).to_html(path)
        browser.open(path, width, **options)
        return Widget(browser)

    yield open_report
    assert browser.complaints() == []


def fragments(*html):
    """A page of another project, with a table of its own."""
    return (
        '<!DOCTYPE html><meta charset="utf-8"><title>notebook</title>'
        '<link rel="icon" href="data:,">'
        '<style>td { color: rgb(1, 2, 3); text-align: right; } h1 { font-size: 77px }</style>'
        f'<h1>Mine</h1><table id="mine"><tr><td>mine</td></tr></table>{"".join(html)}'
    )


# --- What is seen ---------------------------------------------------------------------------------


def test_all_columns(opened):
    widget = opened()
    assert widget.paths == AT_FIRST
    assert widget.cells('array') == [
        'float32[512,64]',
        '24 arrays',
        'float32[64]',
        'float32[64,256]',
        'int32[]',
    ]
    assert widget.cells('spec') == ["P('tp',)", '', 'replicated', "P('fsdp', 'tp')", 'replicated']
    assert widget.cells('bytes') == ['128.0 KiB', '771.0 KiB', '3.0 KiB', '768.0 KiB', '4 B']
    assert widget.cells('device') == ['64.0 KiB', '99.0 KiB\n60.7 %', '3.0 KiB', '96.0 KiB', '4 B']
    assert widget.cells('why') == [
        *("regex 'embed'", '', "regex 'norm'", "regex 'up'", 'TreePathShardingRule: one element')
    ]
    bars = widget.browser.run(
        'return [...arguments[0].querySelectorAll(".bar i")].map((bar) => bar.style.width)', widget.root
    )
    assert [round(float(bar.rstrip('%'))) for bar in bars] == [67, 3, 100, 1]
    marked = [row.find_element(By.CSS_SELECTOR, '.name').text for row in widget.all('tr.replicated')]
    assert marked == ['norm', 'step']


def test_head(opened):
    widget = opened()
    assert widget.text('.title') == 'Sharding report'
    assert [item.text for item in widget.all('.mesh li')] == ['fsdp 4', 'tp 2', '8 devices']
    assert [(item.text, item.tag_name) for item in widget.all('.totals dt, .totals dd')] == [
        *(('arrays', 'dt'), ('26', 'dd'), ('in all', 'dt'), ('899.0 KiB', 'dd')),
        *(('on each device', 'dt'), ('163.0 KiB', 'dd')),
        *(('replicated on each device, 13 arrays', 'dt'), ('3.0 KiB', 'dd')),
    ]
    assert [item.text for item in widget.all('.idle summary')] == [
        '1 regex matches nothing',
        '1 regex is always shadowed by earlier ones',
    ]
    assert not widget.one('.idle details:first-child code').is_displayed()
    widget.click('.idle details:first-child summary')
    assert widget.text('.idle details:first-child code') == 'head'
    assert widget.text('.count') == '26 arrays in 4 lines; the longest bar is 96.0 KiB'


def test_without_groups_there_is_nothing_to_open_at_once(opened):
    assert opened(named_report()).one('.all').is_displayed() is False
    assert opened().one('.all').is_displayed() is True


def test_bytes_read_as_in_the_text(opened):
    sizes = [0, 1, 1023, 1024, 1280, 1792, 1331, 1048575, 2**20, 5 * 2**30 // 4, 3 * 2**40, 2**52]
    rows = tuple(ReportRow(f'{n:x}k', (n,), 'int8', P(), '', '', n, n) for n in sizes)
    assert opened(ShardingReport(rows, {'x': 1})).cells('bytes') == [human_bytes(size) for size in sizes]


@pytest.mark.parametrize('dark', [False, True], ids=['light', 'dark'])
@pytest.mark.parametrize('width', [1280, 800, 400])
def test_fits_the_window(opened, width, dark):
    widget = opened(width=width, dark=dark)
    widget.toggle('norm × 12')
    assert widget.browser.overflow() == 0
    # Everything is inside the window, down to each cell.
    edges = widget.browser.run(
        'return [...arguments[0].querySelectorAll("tbody td > *, header *, .tools *, dd, summary")]'
        '.map((each) => each.getBoundingClientRect().right)',
        widget.root,
    )
    assert max(edges) <= width
    ground = widget.browser.run('return getComputedStyle(document.body).backgroundColor')
    assert ground == ('rgb(18, 22, 27)' if dark else 'rgb(255, 255, 255)')


# --- Folding --------------------------------------------------------------------------------------


def test_groups_fold(opened):
    widget = opened()
    assert widget.row('layers/{0..11}').get_attribute('aria-expanded') == 'true'
    widget.toggle('layers/{0..11}')
    assert widget.paths == ['embed', 'layers/{0..11}', 'step']
    assert widget.row('layers/{0..11}').get_attribute('aria-expanded') == 'false'
    widget.click('.open')
    assert widget.paths == AT_FIRST
    widget.click('.close')
    assert widget.paths == ['embed', 'layers/{0..11}', 'step']


def test_folded_lines_open_to_their_arrays(opened):
    widget = opened()
    widget.toggle('up × 12')
    assert widget.paths == [*AT_FIRST[:4], *[f'layers/{i}/up' for i in range(12)], 'step']
    assert widget.cells('device')[4:16] == ['8.0 KiB'] * 12
    assert [row.get_attribute('aria-level') for row in widget.all('tbody tr')][2:6] == ['2', '2', '3', '3']
    widget.toggle('up × 12')
    assert widget.paths == AT_FIRST


def test_folds_over_several_numbers_give_every_path(opened):
    names = [f'a/{i}/b/{j}' for i in (0, 1, 2, 7) for j in (3, 5)]
    rows = tuple(ReportRow(name, (8,), 'int8', P('x'), '', '', 8, 4) for name in names)
    widget = opened(ShardingReport(rows, {'x': 2}))
    assert widget.paths == ['a/{0..2,7}/b/{3,5} × 8']
    widget.toggle('a/{0..2,7}/b/{3,5} × 8')
    assert widget.paths[1:] == names


def test_folds_of_keys_with_a_stem_give_every_path(opened):
    names = [f'params/layers_{i}/{name}' for i in range(3) for name in ('b', 'w')]
    rows = tuple(ReportRow(name, (8,), 'int8', P('x'), '', '', 8, 4) for name in names)
    widget = opened(ShardingReport(rows, {'x': 2}))
    assert widget.paths == ['params/layers_{0..2}', 'b × 3', 'w × 3']
    widget.toggle('w × 3')
    assert widget.paths[3:] == ['layers_0/w', 'layers_1/w', 'layers_2/w']
    widget.click('.list')
    assert widget.paths[2:] == ['params/layers_0/w', 'params/layers_1/w', 'params/layers_2/w']


def test_list_has_no_groups(opened):
    widget = opened()
    widget.click('.list')
    assert widget.paths == ['embed', 'layers/{0..11}/norm × 12', 'layers/{0..11}/up × 12', 'step']
    widget.sort('name')
    assert widget.paths[0] == 'embed'
    widget.sort('device')
    assert widget.paths[0] == 'layers/{0..11}/up × 12'
    widget.click('.list')
    assert widget.paths[0] == 'layers/{0..11}'


# --- Sorting --------------------------------------------------------------------------------------


def named_report():
    sizes = {'b': 1, 'c10': 8, 'c9': 4, 'a': 2}
    rows = [ReportRow(f'{n}/w', (s,), 'int8', P('x'), '', '', 100 - s, s) for n, s in sizes.items()]
    return ShardingReport(tuple(rows), {'x': 2})


@pytest.mark.parametrize(
    ('order', 'paths'),
    [
        ('tree', ['b/w', 'c10/w', 'c9/w', 'a/w']),
        ('name', ['a/w', 'b/w', 'c9/w', 'c10/w']),
        ('bytes', ['b/w', 'a/w', 'c9/w', 'c10/w']),
        ('device', ['c10/w', 'c9/w', 'a/w', 'b/w']),
    ],
)
def test_orders(opened, order, paths):
    widget = opened(named_report())
    widget.sort('name')
    widget.sort(order)
    assert widget.paths == paths


def test_heads_sort(opened):
    widget = opened(named_report())

    def order():
        heads = {
            head.text.split()[0]: head.get_attribute('aria-sort') for head in widget.all('th[aria-sort]')
        }
        return widget.paths[0], [name for name, sort in heads.items() if sort != 'none']

    heads = {head.get_attribute('data-sort'): head for head in widget.all('th button')}
    assert order() == ('b/w', [])
    heads['device'].click()
    assert order() == ('c10/w', ['Bytes'])
    assert widget.one('select').get_property('value') == 'device'
    heads['tree name'].click()
    assert order() == ('b/w', [])
    heads['tree name'].click()
    assert order() == ('a/w', ['Path'])


def test_groups_are_sorted_by_what_they_hold(opened):
    widget = opened()
    widget.sort('device')
    assert widget.paths == ['layers/{0..11}', 'up × 12', 'norm × 12', 'embed', 'step']


# --- Filtering ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('text', 'paths', 'count'),
    [
        (
            'NORM',
            ['layers/{0..11}', 'norm × 12'],
            '12 of 26 arrays: 3.0 KiB of 163.0 KiB per device, 3.0 KiB of 899.0 KiB in all',
        ),
        (
            'layers/1',
            ['layers/{0..11}', 'norm 3 of 12', 'up 3 of 12'],
            '6 of 26 arrays: 24.8 KiB of 163.0 KiB per device, 192.8 KiB of 899.0 KiB in all',
        ),
        (
            "'fsdp'",
            ['layers/{0..11}', 'up × 12'],
            '12 of 26 arrays: 96.0 KiB of 163.0 KiB per device, 768.0 KiB of 899.0 KiB in all',
        ),
        (
            'one element',
            ['step'],
            '1 of 26 arrays: 4 B of 163.0 KiB per device, 4 B of 899.0 KiB in all',
        ),
        (
            '{0..11}/up',
            ['layers/{0..11}', 'up × 12'],
            '12 of 26 arrays: 96.0 KiB of 163.0 KiB per device, 768.0 KiB of 899.0 KiB in all',
        ),
        (
            '[512,',
            ['embed'],
            '1 of 26 arrays: 64.0 KiB of 163.0 KiB per device, 128.0 KiB of 899.0 KiB in all',
        ),
        (
            'nothing like it',
            [],
            '0 of 26 arrays: 0 B of 163.0 KiB per device, 0 B of 899.0 KiB in all',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else '',
)
def test_filter(opened, text, paths, count):
    widget = opened()
    widget.filter(text)
    assert widget.paths == paths
    assert widget.text('.count') == count


def test_what_is_filtered_opens_to_what_was_found(opened):
    widget = opened()
    widget.filter('/1')
    assert widget.paths == ['layers/{0..11}', 'norm 3 of 12', 'up 3 of 12']
    widget.toggle('up 3 of 12')
    assert widget.paths[3:] == ['layers/1/up', 'layers/10/up', 'layers/11/up']
    assert widget.cells('device')[2] == '24.0 KiB'
    widget.toggle('layers/{0..11}')
    assert widget.paths == ['layers/{0..11}']
    widget.filter('/10/')
    assert widget.paths[:2] == ['layers/{0..11}', 'norm 1 of 12']


def test_regular_expressions(opened):
    widget = opened()
    widget.filter('^(embed|step)$')
    assert widget.paths == []
    widget.click('.regex')
    assert widget.paths == ['embed', 'step']
    widget.filter('(')
    assert widget.one('.filter').get_attribute('aria-invalid') == 'true'
    assert 'Invalid regular expression' in widget.text('.count')
    widget.filter('s.ep')
    assert widget.one('.filter').get_attribute('aria-invalid') == 'false'
    assert widget.paths == ['step']


def test_replicated_only(opened):
    widget = opened()
    widget.click('.whole')
    assert widget.paths == ['layers/{0..11}', 'norm × 12', 'step']
    assert widget.text('.count').startswith('13 of 26 arrays: 3.0 KiB of 163.0 KiB per device')
    widget.filter('step')
    assert widget.paths == ['step']
    widget.click('.whole')
    assert widget.paths == ['step']


# --- Keys -----------------------------------------------------------------------------------------


def test_keys(opened):
    widget = opened()
    widget.browser.run('arguments[0].querySelector(".close").focus()', widget.root)
    widget.press(Keys.TAB, Keys.TAB, Keys.TAB, Keys.TAB)
    assert widget.focused() == 'embed'
    widget.press(Keys.DOWN)
    assert widget.focused() == 'layers/{0..11}'
    widget.press(Keys.LEFT)
    assert (widget.focused(), widget.paths) == ('layers/{0..11}', ['embed', 'layers/{0..11}', 'step'])
    widget.press(Keys.RIGHT)
    assert (widget.focused(), widget.paths) == ('layers/{0..11}', AT_FIRST)
    widget.press(Keys.RIGHT)
    assert widget.focused() == 'norm × 12'
    widget.press(Keys.ENTER, Keys.DOWN, Keys.DOWN)
    assert widget.focused() == 'layers/1/norm'
    widget.press(Keys.LEFT)
    assert widget.focused() == 'norm × 12'
    widget.press(Keys.LEFT, Keys.LEFT)
    assert (widget.focused(), widget.paths) == ('layers/{0..11}', AT_FIRST)
    widget.press(Keys.END)
    assert widget.focused() == 'step'
    widget.press(Keys.UP, Keys.HOME)
    assert widget.focused() == 'embed'


# --- Much, and hostile ----------------------------------------------------------------------------


def test_many_lines_come_as_one_scrolls(opened):
    widget = opened(synthetic_report(3000))
    assert widget.text('.count').startswith('3,000 arrays in 3,000 lines')
    widget.click('.list')
    first = len(widget.paths)
    assert 300 <= first < 3000
    widget.browser.run('window.scrollTo(0, document.body.scrollHeight)')
    widget.browser.until(lambda: len(widget.paths) > first)
    widget.filter('leaf_bb7_')
    assert widget.paths == ['block_2/part_27/leaf_bb7_kernel']


def test_hostile_names_are_text_and_run_nothing(opened):
    widget = opened(hostile_report())
    widget.click('.list')
    shown = ' '.join(widget.paths)
    for name in (HOSTILE[0], HOSTILE[1], HOSTILE[2], r'two\nlines\t\x00', r'right \u202e left', 'é → 層'):
        assert name in shown
    assert widget.cells('why')[1] == f'rule {HOSTILE[1]}: reason {HOSTILE[1]}'
    assert widget.browser.run('return window.hacked') is None
    assert widget.all('img, tbody script, tbody b:not(.spec b)') == []
    assert [code.get_attribute('textContent') for code in widget.all('.idle code')] == ['</script>', '<b>']


def test_nothing_is_loaded(opened):
    widget = opened()
    assert (
        widget.browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
    )


# --- Notebooks ------------------------------------------------------------------------------------


def test_reports_on_one_page_do_not_disturb_one_another(browser, tmp_path):
    page = tmp_path / 'page.html'
    html = report()._repr_html_()
    page.write_text(fragments(html, named_report()._repr_html_(), html), encoding='utf-8')
    browser.open(page)
    first, second, third = (Widget(browser, number) for number in range(3))
    browser.run("window.heard = []; document.addEventListener('keydown', (event) => heard.push(event.key))")
    second.sort('device')
    third.filter('embed')
    assert browser.run('return heard') == [], 'keys typed into a report are no commands of the notebook'
    assert first.paths == AT_FIRST
    assert second.paths == ['c10/w', 'c9/w', 'a/w', 'b/w']
    assert third.paths == ['embed']
    # Nor the page around them: its styles stay outside, and ours inside.
    style = """
        const { color, textAlign, fontSize } = getComputedStyle(arguments[0]);
        return [color, textAlign, fontSize];
    """
    assert browser.run(style, browser.driver.find_element(By.ID, 'mine').find_element(By.TAG_NAME, 'td')) == [
        *('rgb(1, 2, 3)', 'right', '16px')
    ]
    assert browser.run(style, first.all('td.path')[0])[1:] == ['start', '12.5px']
    assert browser.run(style, first.one('.title'))[2] == '21px'
    assert browser.complaints() == []


@pytest.mark.parametrize(('ground', 'scheme'), [('#111', 'dark'), ('#fafafa', 'light')])
def test_theme_is_that_of_the_notebook(browser, tmp_path, ground, scheme):
    page = tmp_path / 'page.html'
    page.write_text(
        f'<body style="background: {ground}">{fragments(report()._repr_html_())}', encoding='utf-8'
    )
    browser.open(page, dark=scheme == 'light')
    Widget(browser)
    host = browser.driver.find_element(By.CSS_SELECTOR, '[data-scalax]')
    assert browser.run('return getComputedStyle(arguments[0]).colorScheme', host) == scheme


@pytest.mark.parametrize('width', [1280, 400])
def test_without_scripts_there_is_a_folded_table(browser_without_scripts, tmp_path, width):
    browser = browser_without_scripts
    path = tmp_path / 'report.html'
    report().to_html(path, title='Title')
    browser.open(path, width)
    rows = browser.driver.find_elements(By.TAG_NAME, 'tr')
    assert [row.text.split()[0] for row in rows] == [
        'path',
        'embed',
        'layers/{0..11}/norm',
        'layers/{0..11}/up',
        'step',
    ]
    assert browser.driver.find_element(By.TAG_NAME, 'h1').text == 'Title'
    assert '26 arrays, 899.0 KiB in all' in browser.driver.find_element(By.TAG_NAME, 'body').text
    assert browser.overflow() == 0
    # What the browser says is only that it was told to run no scripts.
    assert all('script' in said.lower() for said in browser.complaints())
