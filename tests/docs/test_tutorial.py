"""docs/tutorial.py and docs/tutorial.ipynb are the same, and show what comes out here."""

import json
import os
import subprocess
import sys

import pytest

from scripts import make_tutorial
from scripts.make_tutorial import NOTEBOOK, ROOT, SCRIPT, Cell

TIMEOUT_S = 500


def kept():
    return json.loads(NOTEBOOK.read_text(encoding='utf-8'))


def test_the_notebook_has_the_cells_of_the_script():
    cells = make_tutorial.read_cells(SCRIPT.read_text(encoding='utf-8'))
    outputs = [cell.get('outputs', []) for cell in kept()['cells']]
    assert make_tutorial.differences(make_tutorial.notebook(cells, outputs), kept()) == ''


def test_the_notebook_shows_what_comes_out():
    """In a fresh process, as for a reader: the script chooses the number of devices itself."""
    environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    ended = subprocess.run(
        [sys.executable, '-W', 'error', 'scripts/make_tutorial.py', '--check'],
        cwd=ROOT,
        env={**environment, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout == 'tutorial.ipynb is as tutorial.py makes it\n'


def test_every_cell_of_code_shows_something_or_only_defines():
    shows = [bool(cell['outputs']) for cell in kept()['cells'] if cell['cell_type'] == 'code']
    assert shows.count(False) == 2  # the imports, and the network


SMALL = """# %% [markdown]
# # Title
#
# Text.

# %%
x = 2
print(x)
x

# %%
x = 3
"""


def test_cells_are_read_and_run():
    cells = make_tutorial.read_cells(SMALL)
    assert cells == [
        Cell(False, '# Title\n\nText.', 2),
        Cell(True, 'x = 2\nprint(x)\nx', 7),
        Cell(True, 'x = 3', 12),
    ]
    outputs = list(make_tutorial.run(cells))
    assert outputs == [
        [],
        [
            {'name': 'stdout', 'output_type': 'stream', 'text': ['2\n']},
            {'data': {'text/plain': ['2']}, 'metadata': {}, 'output_type': 'display_data'},
        ],
        [],
    ]
    made = make_tutorial.notebook(cells, outputs)
    assert [cell['cell_type'] for cell in made['cells']] == ['markdown', 'code', 'code']
    assert make_tutorial.differences(made, made) == ''
    other = make_tutorial.notebook(cells, [[], [], []])
    assert '"2\\n"' in make_tutorial.differences(made, other)


def test_an_error_names_the_line_of_the_script():
    with pytest.raises(ZeroDivisionError) as error:
        list(make_tutorial.run(make_tutorial.read_cells('# %% [markdown]\n# a\n\n# %%\nx = 0\n1 / x\n')))
    last = error.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(SCRIPT), 6)
