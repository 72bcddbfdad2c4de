"""`save_picture`: comparisons as PNGs."""

import struct
import sys

import pytest

from scalax._report.memory_seconds import Alternative
from scalax._report.picture import save_picture
from scalax.errors import MissingDependencyError

EVERY = [Alternative('a', 1 << 30, 0.1, 0.2, True, True), Alternative('b', 3 << 30, 0.3, 0.5, False)]


def size(path):
    data = path.read_bytes()
    assert data[:8] == b'\x89PNG\r\n\x1a\n'
    return struct.unpack('>II', data[16:24])


@pytest.mark.one_jax
def test_points_and_text_are_drawn(tmp_path):
    pytest.importorskip('matplotlib')
    text = 'a $formula$ {that} is \\none\n' * 3
    save_picture(text, (), None, tmp_path / 'text.png')
    save_picture(text, EVERY, 2 << 30, tmp_path / 'both.png')
    save_picture(text * 100, EVERY, None, tmp_path / 'long.png')
    heights = [size(tmp_path / f'{name}.png')[1] for name in ('text', 'both', 'long')]
    assert heights[0] < heights[1] < heights[2] < 4000


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(MissingDependencyError, match='pip install matplotlib'):
        save_picture('text', EVERY, None, tmp_path / 'none.png')
