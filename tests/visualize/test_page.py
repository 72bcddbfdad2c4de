"""Pictures as SVG and HTML: well-formed, escaped, self-contained, readable."""

import re
import xml.etree.ElementTree as ET

import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.visualize import visualize
from scalax.visualize._blocks import blocks_of
from scalax.visualize._drawn import scaled
from scalax.visualize._svg import colors_of
from tests.support.visualize_cases import HELPER, POD, leaf

SVG = '{http://www.w3.org/2000/svg}'
CUBE = AbstractMesh((2, 2, 2), ('x', 'y', 'z'))

CASES = {
    'grid': leaf((8, 16), P('fsdp', 'tp')),
    'replicas': leaf((8, 16), P('tp')),
    'replicated': leaf((8, 16), P()),
    'scalar': leaf((), P()),
    'empty': leaf((0, 2), P('fsdp', 'tp')),
    'uneven': leaf((7, 2), P('fsdp', 'tp')),
    'three': leaf((4, 4, 4), P('x', 'y', 'z'), CUBE),
    'four': leaf((2, 2, 2, 2), P(*'abcd'), AbstractMesh((2, 2, 2, 2), tuple('abcd'))),
    'pod grid': leaf((8192, 8192), P('data', ('fsdp', 'tp')), POD),
    'pod strip': leaf((8192,), P('data'), POD),
    'pod panels': leaf((8192, 8, 8), P('data', 'fsdp', 'tp'), POD),
}


def blocks_in(svg):
    """The title of each block -> its colour, the colour of its text, and its lines."""
    found = {}
    for group in ET.fromstring(svg).iter(f'{SVG}g'):
        title = group.find(f'{SVG}title')
        if title is not None:
            lines = [text.text for text in group.findall(f'{SVG}text')]
            found[title.text] = (group.find(f'{SVG}rect').get('fill'), group.get('fill'), *lines)
    return found


def test_blocks_of_a_grid():
    assert blocks_in(visualize(CASES['grid']).to_svg()) == {
        '[0:2, 0:8] on 1 device: 0': ('#77AADD', '#000000', '0'),
        '[0:2, 8:16] on 1 device: 1': ('#EE8866', '#000000', '1'),
        '[2:4, 0:8] on 1 device: 2': ('#44BB99', '#000000', '2'),
        '[2:4, 8:16] on 1 device: 3': ('#FFAABB', '#000000', '3'),
        '[4:6, 0:8] on 1 device: 4': ('#EEDD88', '#000000', '4'),
        '[4:6, 8:16] on 1 device: 5': ('#99DDFF', '#000000', '5'),
        '[6:8, 0:8] on 1 device: 6': ('#BBCC33', '#000000', '6'),
        '[6:8, 8:16] on 1 device: 7': ('#AAAA00', '#000000', '7'),
    }


def test_replicas_are_counted_in_their_block():
    assert blocks_in(visualize(CASES['replicas']).to_svg()) == {
        '[0:4, 0:16] on 4 devices: 0,2,4,6': ('#77AADD', '#000000', '0,2,4,6', '4 devices'),
        '[4:8, 0:16] on 4 devices: 1,3,5,7': ('#EE8866', '#000000', '1,3,5,7', '4 devices'),
    }
    assert blocks_in(visualize(CASES['replicated']).to_svg()) == {
        '[0:8, 0:16] on 8 devices: 0..7': ('#DDDDDD', '#000000', 'all 8 devices')
    }


def test_words_of_a_picture():
    root = ET.fromstring(visualize({'w': CASES['three']}).to_svg())
    words = [text.text for text in root.iter(f'{SVG}text')]
    assert words == [
        'w: float32[4,4,4]',
        "P('x', 'y', 'z'): 8 blocks of [2,2,2], each on 1 device",
        'dim 0: 4 over x=2, a panel for each part; dim 1 ↓ 4 over y=2; dim 2 → 4 over z=2',
        *('dim 0 = 0:2', '0:2', '2:4', '0:2', '0', '1', '2:4', '2', '3'),
        *('dim 0 = 2:4', '0:2', '2:4', '0:2', '4', '5', '2:4', '6', '7'),
        'Numbers are positions, in mesh order, in the abstract mesh (x=2, y=2, z=2), which has no devices.',
    ]
    assert root.get('role') == 'img'
    label = "w: float32[4,4,4]: P('x', 'y', 'z'): 8 blocks of [2,2,2], each on 1 device"
    assert root.get('aria-label') == label
    assert root[0].tag == f'{SVG}title' and root[0].text == label


def test_a_long_strip_has_several_lines_and_counts_the_rest():
    many = AbstractMesh((512,), ('fsdp',))
    svg = visualize(leaf((512,), P('fsdp'), many)).to_svg()
    assert len(blocks_in(svg)) == 111
    words = [text.text for text in ET.fromstring(svg).iter(f'{SVG}text')]
    assert words.count('401 more') == 1
    assert words.count('...') == 1


@pytest.mark.parametrize('name', CASES)
def test_files_are_well_formed_and_self_contained(name, tmp_path):
    picture = visualize({'layers': [CASES[name], CASES[name]], 'other': CASES['grid']})
    svg = picture.to_svg(tmp_path / 'picture.svg')
    assert (tmp_path / 'picture.svg').read_text(encoding='utf-8') == svg
    picture.to_html(tmp_path / 'picture.html', title='A <b> title')
    page = (tmp_path / 'picture.html').read_text(encoding='utf-8')
    assert ET.fromstring(page).findtext('head/title') == 'A <b> title'
    for text in (svg, page, picture._repr_html_()):
        ET.fromstring(text)
        # The only address is the name of a language, which nobody fetches.
        assert set(re.findall(r'\w+://[^"\s]+', text)) <= {'http://www.w3.org/2000/svg'}
        assert not re.search(r'<script|javascript:|\son\w+=|\sid=|@import|url\(', text)


@pytest.mark.parametrize('name', CASES)
def test_nothing_is_drawn_outside_the_picture(name):
    root = ET.fromstring(visualize(CASES[name]).to_svg())
    width, height = float(root.get('width')), float(root.get('height'))
    assert width <= 1200

    def check(element, x, y):
        moved = re.fullmatch(r'translate\((\S+) (\S+)\)', element.get('transform', 'translate(0 0)'))
        x, y = x + float(moved[1]), y + float(moved[2])
        if element.tag == f'{SVG}rect':
            assert x + float(element.get('x')) >= 0
            assert x + float(element.get('x')) + float(element.get('width')) <= width + 1
            assert y + float(element.get('y')) + float(element.get('height')) <= height + 1
        if element.tag == f'{SVG}text':
            assert 0 <= y + float(element.get('y')) <= height
        for child in element:
            check(child, x, y)

    check(root, 0, 0)


HOSTILE = '</svg><script>alert(1)</script>&"\'\x00\x1b[31m\n\u202e\ud800'


def test_hostile_names_stay_text(tmp_path):
    mesh = AbstractMesh((2,), (HOSTILE,), axis_types=(AxisType.Auto,))
    picture = visualize({HOSTILE: leaf((2,), P(HOSTILE), mesh)})
    shown = '</svg><script>alert(1)</script>&"\'\\x00\\x1b[31m\\n\\u202e\\ud800'
    assert str(picture).splitlines()[0] == f'{shown}: float32[2]'
    assert str(picture).replace('\n', '').isprintable()
    root = ET.fromstring(picture.to_svg())
    assert next(root.iter(f'{SVG}text')).text == f'{shown}: float32[2]'
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {'svg', 'title', 'g', 'text', 'rect'}
    assert ET.fromstring(picture._repr_html_()).findtext('section/p') == f'{shown}: float32[2]'
    picture.to_html(tmp_path / 'page.html')
    assert '<script' not in (tmp_path / 'page.html').read_text(encoding='utf-8')


def contrast(one, other):
    """https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio"""

    def luminance(color):
        parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_text_reads_well_on_every_colour():
    grid = blocks_of(CASES['grid'].sharding, (8, 16))
    few = colors_of(grid, grid.holders.values()).values()
    for color in [*few, '#DDDDDD', *(scaled(number / 1000) for number in range(1001))]:
        assert contrast('#000000', color) >= 4.5, color


def test_a_device_has_one_colour_however_an_array_is_cut():
    rows, columns = (
        colors_of(blocks, blocks.holders.values())
        for spec in (P('fsdp', 'tp'), P('tp', 'fsdp'))
        for blocks in [blocks_of(NamedSharding(HELPER.mesh, spec), (8, 8))]
    )
    assert rows == columns
    assert len(set(rows.values())) == 8


def test_many_groups_share_a_scale():
    blocks = blocks_of(CASES['pod grid'].sharding, (8192, 8192))
    colors = colors_of(blocks, [(0,), (100,), *((number,) for number in range(200, 220))])
    assert colors[0,] == scaled(0)
    assert colors[100,] == scaled(1 / 21)
    assert colors[219,] == scaled(1)
