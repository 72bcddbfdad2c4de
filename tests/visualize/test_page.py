"""Pictures as HTML: well-formed, escaped, self-contained, coloured."""

import re
import xml.etree.ElementTree as ET

import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from scalax.visualize import visualize
from tests.support.visualize_cases import POD, leaf

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


def cells_of(tree, tmp_path):
    """Returns the title of each block -> its colour and its text."""
    path = tmp_path / 'picture.html'
    visualize(tree).to_html(path)
    cells = ET.fromstring(path.read_text(encoding='utf-8')).iter('td')
    return {
        cell.get('title'): (re.search('background: ([^;]*)', cell.get('style'))[1], cell.text)
        for cell in cells
        if cell.get('title')
    }


def test_blocks_of_a_grid(tmp_path):
    cells = cells_of(CASES['grid'], tmp_path)
    assert {title: text for title, (_, text) in cells.items()} == {
        '[0:2, 0:8] on 1 device': '0',
        '[0:2, 8:16] on 1 device': '1',
        '[2:4, 0:8] on 1 device': '2',
        '[2:4, 8:16] on 1 device': '3',
        '[4:6, 0:8] on 1 device': '4',
        '[4:6, 8:16] on 1 device': '5',
        '[6:8, 0:8] on 1 device': '6',
        '[6:8, 8:16] on 1 device': '7',
    }
    assert len({color for color, _ in cells.values()}) == 8


def test_replicas(tmp_path):
    assert cells_of(CASES['replicas'], tmp_path) == {
        '[0:4, 0:16] on 4 devices': ('hsl(0 70% 78%)', '0,2,4,6'),
        '[4:8, 0:16] on 4 devices': ('hsl(180 70% 78%)', '1,3,5,7'),
    }
    assert cells_of(CASES['replicated'], tmp_path) == {'[0:8, 0:16] on 8 devices': ('#ddd', '0..7')}


def test_a_device_has_one_colour_for_all_shardings(tmp_path):
    rows, columns = (
        {text: color for color, text in cells_of(leaf((8, 8), spec), tmp_path).values()}
        for spec in (P('fsdp', 'tp'), P('tp', 'fsdp'))
    )
    assert rows == columns


@pytest.mark.parametrize('name', CASES)
def test_files_are_well_formed_and_self_contained(name, tmp_path):
    picture = visualize({'layers': [CASES[name], CASES[name]], 'other': CASES['grid']})
    picture.to_html(tmp_path / 'picture.html', title='A <b> title')
    page = (tmp_path / 'picture.html').read_text(encoding='utf-8')
    assert ET.fromstring(page).findtext('head/title') == 'A <b> title'
    assert not re.search(r'\w+://', page)


HOSTILE = '</svg><script>alert(1)</script>&"\'\x00\x1b[31m\n\u202e\ud800'


def test_hostile_names_stay_text(tmp_path):
    mesh = AbstractMesh((2,), (HOSTILE,), axis_types=(AxisType.Auto,))
    picture = visualize({HOSTILE: leaf((2,), P(HOSTILE), mesh)})
    shown = '</svg><script>alert(1)</script>&"\'\\x00\\x1b[31m\\n\\u202e\\ud800'
    assert str(picture).splitlines()[0] == f'{shown}: float32[2]'
    assert str(picture).replace('\n', '').isprintable()
    picture.to_html(tmp_path / 'page.html', title=HOSTILE)
    root = ET.fromstring((tmp_path / 'page.html').read_text(encoding='utf-8'))
    assert next(root.iter('section')).findtext('p') == f'{shown}: float32[2]'
