"""Plans as pages and pictures: what is written, and how a browser shows it."""

import dataclasses
import functools
import re
import sys
import xml.etree.ElementTree as ET

import jax
import pytest
from selenium.webdriver.common.by import By

from scalax._plan.figure_data import axes_on_torus
from scalax.errors import MissingDependencyError
from scalax.plan import HARDWARE, Buffer, HostMoves, Place, Source
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.browser import browser_or_skip

GIB = 2**30
HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])


@functools.cache
def plan():
    """A plan of this machine's compiler, as if it were for eight chips of v5e."""

    def step(w, x):
        return (x @ w).sum(0)

    fun = HELPER.sjit(step, in_shardings=(P('fsdp', 'tp'), P('fsdp')), out_shardings=P('tp'))
    made = HELPER.plan(
        fun, jax.ShapeDtypeStruct((4096, 4096), 'bfloat16'), jax.ShapeDtypeStruct((65536, 4096), 'bfloat16')
    )
    memory = dataclasses.replace(
        made.memory,
        arguments=4 * GIB,
        outputs=GIB,
        temporaries=9 * GIB,
        peak=12 * GIB,
        limit=HARDWARE['v5e'].hbm_bytes,
        estimated=False,
    )
    places = tuple(Place(0, (i % 2, i // 2)) for i in range(8))
    return dataclasses.replace(
        made, memory=memory, places=places, platform='tpu', device_kind='TPU v5 lite', quick=True
    )


def too_large():
    return dataclasses.replace(
        plan(),
        memory=dataclasses.replace(plan().memory, temporaries=28 * GIB, peak=31 * GIB),
        refusal='RESOURCE_EXHAUSTED: too <large>',
        buffers=(Buffer(GIB, 'bf16[48,4096]', Source(operand="params['<b>']"), 2),),
    )


def words(html):
    """The texts of an element, in order."""
    return [text.strip() for text in ET.fromstring(html).itertext() if text.strip()]


def test_a_plan_is_well_formed_and_self_contained(tmp_path):
    for made in (plan(), too_large()):
        made.to_html(tmp_path / 'plan.html', title='A <b> title')
        page = (tmp_path / 'plan.html').read_text(encoding='utf-8')
        assert ET.fromstring(page).findtext('head/title') == 'A <b> title'
        assert page.count(made._repr_html_()) == 1
        # The only address is the name of a language, which nobody fetches.
        assert set(re.findall(r'\w+://[^"\s]+', page)) <= {'http://www.w3.org/2000/svg'}
        assert not re.search(r'<script|javascript:|\son\w+=|\sid=|@import|url\(', page)
        assert "default-src 'none'" in page
    plan().to_html(tmp_path / 'plan.html')
    assert ET.parse(tmp_path / 'plan.html').findtext('head/title') == 'Plan of step'


def test_words_of_a_page():
    said = words(plan()._repr_html_())
    roofline = plan().roofline()
    assert said[:3] == [
        'step on 8 tpu devices (fsdp=4, tp=2)',
        'Memory of each device',
        '12.0 GiB of 15.8 GiB: it fits (quick, as laid out before code is made)',
    ]
    assert said[3:6] == ['arguments 4.0 GiB', 'outputs 1.0 GiB', 'temporaries at the peak 7.0 GiB']
    assert said[6] == 'gaps at the peak 2.0 GiB'
    for name, seconds in roofline.parts.items():
        assert said[said.index(name) + 1] == f'{1e3 * seconds:,.3f} ms'
    heads = said.index('collective')
    assert said[heads : heads + 6] == ['collective', 'axes', 'times', 'bytes', 'ms', 'because of']
    assert 'fsdp=4: a colour for each place along it' in said
    said = words(too_large()._repr_html_())
    assert 'RESOURCE_EXHAUSTED: too <large>' in said
    row = said.index("argument params['<b>']")
    assert said[row - 2 : row + 3] == ['1.0 GiB', '2 x bf16[48,4096]', said[row], '30.0 GiB', 'smaller ones']


def test_a_page_leaves_out_nothing_that_text_says():
    [row, *_] = plan().collectives
    rows = (row, dataclasses.replace(row, cause='compiler'))
    memory = dataclasses.replace(plan().memory, host=GIB)
    made = dataclasses.replace(plan(), memory=memory, host_moves=HostMoves(2 * GIB, 0), collectives=rows)
    said = words(made._repr_html_())
    assert 'on the host: 1.0 GiB, 2.0 GiB are written there and 0 B read in one call' in said
    assert '50.0% of the bytes have no origin in the program after partitioning' in said


def test_bars_are_as_long_as_what_they_stand_for():
    def widths(made):
        return [float(width) for width in re.findall(r'style="width: ([\d.]+)%', made._repr_html_())]

    limit = 15.75
    assert widths(plan())[:4] == pytest.approx([100 * gib / limit for gib in (4, 1, 7, 2)], abs=0.01)
    assert max(widths(plan())[4:]) == 100
    assert 'left:' not in plan()._repr_html_()
    assert widths(too_large())[:3] == pytest.approx([400 / 33, 100 / 33, 2600 / 33], abs=0.01)
    assert f'left: {100 * limit / 33:.2f}%' in too_large()._repr_html_()


def test_without_numbers_of_the_hardware():
    made = dataclasses.replace(plan(), device_kind='cpu', places=())
    said = words(made._repr_html_())
    assert any(
        text.startswith("Not known: the numbers of 'cpu' devices are not known: give") for text in said
    )
    assert 'Mesh axes on the torus' not in said
    # Nor is the reason kept back in text, of devices that have a roofline elsewhere.
    made = dataclasses.replace(plan(), device_kind='TPU7x')
    assert (
        "no roofline: a roofline of communication along a torus needs numbers that the hardware 'tpu7x' "
        'does not have: ring_multiple. Add them: dataclasses.replace(hardware, ring_multiple=...)'
    ) in str(made).splitlines()


def on_torus(of):
    return axes_on_torus(of.mesh, of.places)


def test_where_mesh_axes_lie():
    fsdp, tp = on_torus(plan())
    assert (fsdp.axis, fsdp.size, fsdp.slices, fsdp.across) == ('fsdp', 4, 1, False)
    assert [layer.tolist() for layer in fsdp.layers] == [[[0, 0], [1, 1], [2, 2], [3, 3]]]
    assert [layer.tolist() for layer in tp.layers] == [[[0, 1]] * 4]
    # Two devices on each of two chips, one above the other, in two slices.
    places = tuple(Place(i // 4, (5, 0, i // 2 % 2), i % 2) for i in range(8))
    across, tp = axes_on_torus({'data': 2, 'tp': 4, 'one': 1}, places)
    assert (across.across, tp.across, tp.slices) == (True, False, 2)
    assert [layer.tolist() for layer in tp.layers] == [[[0, 1]], [[2, 3]]]
    # A mesh need not fill its slice.
    [some] = axes_on_torus({'x': 3}, tuple(Place(0, at) for at in [(0, 0), (1, 0), (1, 1)]))
    assert [layer.tolist() for layer in some.layers] == [[[0, 1], [-1, 2]]]


def test_large_slices_are_short_to_write():
    places = tuple(Place(0, (x, y, z)) for z in range(16) for y in range(16) for x in range(16))
    pod = dataclasses.replace(plan(), mesh={'fsdp': 256, 'tp': 16}, places=places, collectives=())
    assert len(pod._repr_html_()) < 700_000


def test_pictures(tmp_path):
    image = pytest.importorskip('matplotlib.image')
    for number, made in enumerate(
        [plan(), too_large(), dataclasses.replace(plan(), device_kind='cpu', places=())]
    ):
        path = tmp_path / f'{number}.png'
        made.save_png(path)
        pixels = image.imread(path)
        assert pixels.shape[1] == 1500
        colors = {tuple(round(255 * part) for part in pixel) for pixel in pixels[::3, ::3, :3].reshape(-1, 3)}
        assert {(0x77, 0xAA, 0xDD), (0xEE, 0x88, 0x66), (0x44, 0xBB, 0x99)} <= colors


def test_pictures_show_names_as_they_are(tmp_path):
    pytest.importorskip('matplotlib')
    formula = '$\\frac{$\x1b'
    made = plan()
    named = dataclasses.replace(
        made,
        name=formula,
        device_kind=formula,
        mesh={formula: made.devices},
        collectives=tuple(dataclasses.replace(row, axes=(formula,)) for row in made.collectives),
    )
    named.save_png(tmp_path / 'plan.png')
    dataclasses.replace(made, name=formula).save_png(tmp_path / 'plan.png')


def test_pictures_need_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(MissingDependencyError) as raised:
        plan().save_png(tmp_path / 'plan.png')
    assert str(raised.value) == 'pictures of plans need matplotlib: pip install matplotlib'


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    with browser_or_skip(tmp_path_factory.mktemp('profile')) as browser:
        yield browser


@pytest.mark.parametrize('width', [1280, 400])
@pytest.mark.parametrize('dark', [False, True])
def test_a_page_in_a_browser(browser, tmp_path, width, dark):
    too_large().to_html(tmp_path / 'plan.html')
    browser.open(tmp_path / 'plan.html', width, dark=dark)
    assert browser.complaints() == []
    assert browser.overflow() == 0
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    bars = browser.driver.find_elements(By.CSS_SELECTOR, 'div[title]')
    arguments, outputs, temporaries, limit = (bar.rect for bar in bars)
    assert arguments['width'] / temporaries['width'] == pytest.approx(4 / 26, rel=0.05)
    assert outputs['x'] == pytest.approx(arguments['x'] + arguments['width'], abs=1)
    whole = arguments['width'] + outputs['width'] + temporaries['width']
    assert limit['x'] - arguments['x'] == pytest.approx(whole * 15.75 / 31, abs=2)
    # Squares are drawn, and can be told from the ground.
    squares = browser.driver.find_elements(By.CSS_SELECTOR, 'svg rect')
    assert len(squares) == 16 and all(square.rect['width'] > 10 for square in squares)
    text = browser.run('return getComputedStyle(document.body).color')
    assert text == ('rgb(230, 234, 239)' if dark else 'rgb(26, 31, 38)')
