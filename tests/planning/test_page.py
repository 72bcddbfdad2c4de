"""Plans as HTML pages: their content, and how a browser displays it."""

import dataclasses
import functools
import re
import xml.etree.ElementTree as ET

import jax
import pytest
from selenium.webdriver.common.by import By

from scalax._core.render import blocks
from scalax._planning.report.plan_page import plan_blocks
from scalax.plan import HARDWARE, Buffer, DevicePosition, HostTransfers, Plan, ScopeCost, ScopeRuns, Source
from scalax.sharding import CollectiveRow, MeshShardingHelper, PropagationReport, RedundantWork
from scalax.sharding import PartitionSpec as P

GIB = 2**30
HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])


@functools.cache
def plan():
    """A plan of the CPU compiler, with the devices of eight v5e chips."""

    def step(w, x):
        return (x @ w).sum(0)

    fun = HELPER.sjit(step, in_shardings=(P('fsdp', 'tp'), P('fsdp')), out_shardings=P('tp'))
    base = HELPER.plan(
        fun, jax.ShapeDtypeStruct((4096, 4096), 'bfloat16'), jax.ShapeDtypeStruct((65536, 4096), 'bfloat16')
    )
    memory = dataclasses.replace(
        base.memory,
        arguments=4 * GIB,
        outputs=GIB,
        temporaries=9 * GIB,
        peak=12 * GIB,
        limit=HARDWARE['v5e'].hbm_bytes,
        estimated=False,
    )
    positions = tuple(DevicePosition(0, (i % 2, i // 2)) for i in range(8))
    return dataclasses.replace(
        base, memory=memory, device_positions=positions, platform='tpu', device_kind='TPU v5 lite', quick=True
    )


def too_large():
    return dataclasses.replace(
        plan(),
        memory=dataclasses.replace(plan().memory, temporaries=28 * GIB, peak=31 * GIB),
        refusal='RESOURCE_EXHAUSTED: too <large>',
        buffers=(Buffer(GIB, 'bf16[48,4096]', Source(operand="params['<b>']"), 2),),
    )


def simulated():
    return dataclasses.replace(
        plan(),
        device_positions=(),
        platform='cpu',
        device_kind='cpu',
        quick=False,
        memory=dataclasses.replace(plan().memory, estimated=True, limit=None),
    )


HOSTILE = '</script><script>alert(1)</script>\n"\'><img src=x onerror=alert(2)>\u202e$\\frac{' + 'x' * 400


def hostile():
    """A plan with a malicious name in every place of a user's name."""
    source = Source(HOSTILE, f'/tmp/{HOSTILE}', 3, HOSTILE, HOSTILE)
    base = plan()
    rows = tuple(
        dataclasses.replace(
            row, axes=(HOSTILE,), source=source, scopes=(ScopeRuns(HOSTILE, row.count),), phase='backward'
        )
        for row in base.collectives
    )
    work = dataclasses.replace(
        base.device_cost, by_scope=(ScopeCost(HOSTILE, 'forward', base.device_cost.flops, 5),)
    )
    words = HOSTILE, HOSTILE, HOSTILE, HOSTILE
    propagation = PropagationReport(
        HOSTILE,
        {HOSTILE: base.devices},
        (HOSTILE,),
        (CollectiveRow(HOSTILE, 'examples', *words, (HOSTILE,), HOSTILE, 5, 1, is_backward=False),),
        (RedundantWork('examples', HOSTILE, HOSTILE, HOSTILE, 5, 5, 1),),
        reason=HOSTILE,
        gradient_outside=True,
        batch=(HOSTILE,),
    )
    return dataclasses.replace(
        base,
        name=HOSTILE,
        mesh={HOSTILE: base.devices},
        collectives=rows,
        device_cost=work,
        refusal=HOSTILE,
        buffers=(Buffer(GIB, HOSTILE, source),),
        propagation=propagation,
    )


def html_of(plan_, title=''):
    return blocks.html(plan_blocks(plan_, title or plan_.name))


def blocks_of(plan_):
    return ET.fromstring(f'<div>{html_of(plan_)}</div>')


def words(plan_):
    """Returns the texts of a plan's blocks, in order."""
    return [text.strip() for text in blocks_of(plan_).itertext() if text.strip()]


@pytest.mark.slow
@pytest.mark.parametrize('make', [plan, too_large, simulated, hostile])
def test_a_plan_is_well_formed_and_self_contained(tmp_path, make):
    plan_ = make()
    plan_.to_html(tmp_path / 'plan.html', title='A <b> title')
    page = (tmp_path / 'plan.html').read_text(encoding='utf-8')
    assert ET.fromstring(page).findtext('head/title') == 'A <b> title'
    assert html_of(plan_, 'A <b> title') in page
    # The only address is an XML namespace, which is not fetched.
    assert set(re.findall(r'\w+://[^"\s]+', page)) <= {'http://www.w3.org/2000/svg'}
    assert "default-src 'none'" in page and "script-src 'sha256-" in page
    elements = [*blocks_of(plan_).iter()]
    assert not {element.tag for element in elements} & {'script', 'img', 'style'}
    attributes = {name for element in elements for name in element.attrib}
    assert not [name for name in attributes if name == 'id' or name.startswith('on')]
    assert plan_._repr_html_().count('<script') == 1
    plan_.to_html(tmp_path / 'plan.html')
    assert ET.parse(tmp_path / 'plan.html').findtext('head/title').startswith('Plan of ')


def test_texts_of_a_page():
    texts = words(plan())
    roofline = plan().roofline()
    assert texts[:6] == ['step', 'fsdp', '4', 'tp', '2', '8 devices of v5e']
    figures = dict(zip(texts[6:18:2], texts[7:18:2], strict=True))
    assert figures == {
        'the memory of a device': 'fits',
        'peak of memory of 15.8 GiB, 76.2 %': '12.0 GiB',
        f'one call at least; {1e3 * roofline.step_seconds.serial:.2f} ms if nothing overlaps': (
            f'{1e3 * roofline.step_seconds.overlapped:.2f} ms'
        ),
        'bounds it': 'compute',
        'MFU at most': f'{roofline.mfu:.1%}',
        'the model needs 2.20 TFLOPs': '2.20 TFLOPs',
    }
    verdict = '12.0 GiB of 15.8 GiB: it fits'
    assert f'memory of each device (quick: the layout before code generation): {verdict}' in texts
    heads = texts.index('reason')
    assert texts[heads - 6 : heads] == ['collective', 'axes', 'times', 'bytes', 'total', 'ms']
    assert 'does not fit' in words(too_large()) and 'RESOURCE_EXHAUSTED: too <large>' in words(too_large())
    texts = words(too_large())
    row = texts.index("argument params['<b>']")
    expected = ['1.0 GiB', '2 x bf16[48,4096]', texts[row], '30.0 GiB', 'smaller arrays']
    assert texts[row - 2 : row + 3] == expected


def test_three_figures():
    """Times have at most three figures, on the page and in text; bytes have one decimal."""
    for text in (' '.join(words(plan())), str(plan())):
        times = re.findall(r'([\d,.]+) ms', text)
        assert times
        assert [
            time for time in times if len(re.sub(r'^0\.0*|[,.]', '', time)) > 3 and not time.endswith('0')
        ] == []
        assert not re.search(r'\d\.\d{2,} [KMGT]?i?B', text)


@pytest.mark.medium
def test_phases_of_a_step():
    """Forward, backward and recomputed work and collectives add up."""

    def step(w, x):
        @jax.checkpoint
        def layer(w, x):
            return jax.numpy.tanh(x @ w) @ w.T

        return jax.grad(lambda w: layer(w, x).sum() ** 2)(w)

    fun = HELPER.sjit(step, in_shardings=(P('fsdp', 'tp'), P('fsdp')))
    plan_ = HELPER.plan(fun, *[jax.ShapeDtypeStruct((1024, 1024), 'bfloat16')] * 2)
    positions = tuple(DevicePosition(0, (i % 2, i // 2)) for i in range(8))
    plan_ = dataclasses.replace(plan_, device_positions=positions, device_kind='TPU v5 lite')
    roofline, root = plan_.roofline(), blocks_of(plan_)
    [table] = [
        section.find('.//table')
        for section in root.findall('section')
        if section.findtext('h2') == 'Forward, backward, update'
    ]
    names = [''.join(row[0].itertext()) for row in table.findall('tbody/tr')]
    assert names[0] == 'forward' and {'backward', 'recomputed'} <= set(names)
    rows = table.findall('tbody/tr')
    sums = [sum(float(row[column].get('data-key') or 0) for row in rows) for column in range(1, 7)]
    moved = sum(row.count * row.bytes for row in plan_.collectives)
    network = sum(seconds for _, seconds in roofline.collectives)
    work = plan_.device_cost
    assert sums == pytest.approx([work.flops, work.bytes, moved, roofline.compute, roofline.hbm, network])


def test_the_batch():
    row = CollectiveRow(
        *('all_gather', 'examples', 'examples gathered for sort', '', 'sort', 'model.py:9 route'),
        *(('fsdp',), 'float32[64]', 256, 1, False),
    )
    alike = RedundantWork('examples', 'sort', 'model.py:9 route', 'float32[64]', 0, 256, 1)
    propagation = PropagationReport('step', {'fsdp': 8}, ('fsdp',), (row,), (alike,), batch=('x',))
    texts = words(dataclasses.replace(plan(), propagation=propagation))
    title = texts.index('Partitioning along the batch')
    assert texts[title + 1] == "partitioned along fsdp; its batch is 'x': 1 collective of scalax in one call"
    assert 'examples gathered for sort at model.py:9 route: float32[64], 256 B' in texts
    assert 'computed redundantly by all devices: sort at model.py:9 route: float32[64], 256 B' in texts
    assert 'Partitioning along the batch' not in words(dataclasses.replace(plan(), propagation=None))


def test_advice_for_seconds_of_simulated_devices():
    plan_ = simulated()
    texts = words(plan_)
    [line] = [text for text in texts if text.startswith('No seconds')]
    code = texts[texts.index(line) + 1]
    assert line.startswith("No seconds for 'cpu' devices. ") and 'from_topology' in line
    assert code == "plan.roofline('v5p', torus={'fsdp': 4, 'tp': 2})"
    assert eval(code, {'plan': plan_}).step_seconds.overlapped > 0
    assert line in ' '.join(str(plan_).split()) and code in str(plan_)
    assert 'no limit known' in texts and 'bounds it' not in texts


def test_advice_for_unknown_gpus():
    plan_ = dataclasses.replace(simulated(), platform='gpu', device_kind='Mine')
    [line] = [text for text in words(plan_) if text.startswith('No seconds')]
    assert line.startswith(
        "No seconds: the specs of 'Mine' devices are unknown: pass hardware=..., a scalax."
    )
    assert "v5p', torus" not in str(plan_)


def test_a_page_contains_everything_in_the_text():
    [row, *_] = plan().collectives
    rows = (row, dataclasses.replace(row, cause='compiler'))
    memory = dataclasses.replace(plan().memory, host=GIB)
    plan_ = dataclasses.replace(
        plan(), memory=memory, host_transfers=HostTransfers(2 * GIB, 0), collectives=rows
    )
    texts = words(plan_)
    on_host = texts.index('on the host')
    moved = '2.0 GiB are written there and 0 B read in one call'
    assert texts[on_host : on_host + 3] == ['on the host', '1.0 GiB', moved]
    tight = dataclasses.replace(memory, peak=15 * GIB, temporaries=12 * GIB)
    page = ' '.join(words(dataclasses.replace(plan_, memory=tight)))
    assert '15.0 GiB, and 17.0 GiB with gaps between arrays, of 15.8 GiB: it does NOT fit' in page
    assert any(text.startswith('added by the compiler: ') for text in texts)


def test_page_without_specs():
    # Unknown specs of the host link are named, in text and on the page.
    plan_ = dataclasses.replace(plan(), device_kind='TPU7x', host_transfers=HostTransfers(2**23, 2**24))
    message = "specs that the hardware 'tpu7x' lacks: host_bytes_per_second."
    assert message in ' '.join(str(plan_).split()) and message in ' '.join(words(plan_))
    assert message not in ' '.join(words(plan()))


def test_large_slices_are_short_to_write():
    positions = tuple(DevicePosition(0, (x, y, z)) for z in range(16) for y in range(16) for x in range(16))
    pod = dataclasses.replace(
        plan(), mesh={'fsdp': 256, 'tp': 16}, device_positions=positions, collectives=()
    )
    assert len(html_of(pod)) < 700_000


@pytest.mark.parametrize('width', [1280, 400])
@pytest.mark.parametrize('dark', [False, True])
def test_a_page_in_a_browser(browser, tmp_path, width, dark):
    too_large().to_html(tmp_path / 'plan.html')
    browser.open(tmp_path / 'plan.html', width, dark=dark)
    assert browser.complaints() == []
    assert browser.overflow() == 0
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    badge = browser.driver.find_element(By.CSS_SELECTOR, '.badge.bad')
    assert badge.text == 'does not fit' and badge.is_displayed()
    text = browser.run('return getComputedStyle(document.body).color')
    assert text == ('rgb(230, 234, 239)' if dark else 'rgb(26, 31, 38)')


@pytest.mark.medium
@pytest.mark.parametrize('width', [1280, 400])
def test_hostile_names_do_nothing_and_fit(browser, tmp_path, width):
    hostile().to_html(tmp_path / 'plan.html')
    browser.open(tmp_path / 'plan.html', width)
    assert browser.complaints() == [] and browser.overflow() == 0


def test_collectives_sort(browser, tmp_path):
    [row, *_] = plan().collectives
    rows = [
        dataclasses.replace(row, count=count, bytes=size) for count, size in ((2, 512), (9, 128), (30, 4))
    ]
    dataclasses.replace(plan(), collectives=tuple(rows)).to_html(tmp_path / 'plan.html')
    browser.open(tmp_path / 'plan.html')
    root = browser.driver

    table = root.find_element(By.XPATH, "//table[.//th[.='collective']]")

    def column(name):
        heads = [head.text.split()[0] for head in table.find_elements(By.CSS_SELECTOR, 'th')]
        cells = table.find_elements(By.CSS_SELECTOR, f'td:nth-child({heads.index(name) + 1})')
        return [cell.text for cell in cells]

    assert column('bytes') == ['512 B', '128 B', '4 B']
    times = next(button for button in table.find_elements(By.TAG_NAME, 'button') if button.text == 'times')
    times.click()
    assert column('times') == ['30', '9', '2']
    assert column('bytes') == ['4 B', '128 B', '512 B']


def test_a_plan_in_a_notebook(browser, tmp_path):
    html = f'<!DOCTYPE html><body style="background: #111">{plan()._repr_html_()}</body>'
    (tmp_path / 'cell.html').write_text(html, encoding='utf-8')
    browser.open(tmp_path / 'cell.html', 900)
    [host] = browser.driver.find_elements(By.CSS_SELECTOR, '[data-scalax]')
    browser.until(lambda: browser.run("return arguments[0].shadowRoot?.querySelector('.badge')", host))
    badge = host.shadow_root.find_element(By.CSS_SELECTOR, '.badge')
    assert badge.text == 'fits'
    assert badge.value_of_css_property('color') == 'rgba(116, 214, 157, 1)'  # the color of a dark page
    assert browser.complaints() == [] and browser.overflow() == 0


def test_a_plan_that_was_saved_looks_the_same(tmp_path):
    plan_ = hostile()
    assert html_of(Plan.load(plan_.to_json()), 'x') == html_of(plan_, 'x')
