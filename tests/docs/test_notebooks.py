"""The notebooks of docs/ match their scripts, and show the current outputs."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from scripts import make_notebooks
from scripts.make_notebooks import ROOT, SCRIPTS, Cell

TIMEOUT_S = 500

each_script = pytest.mark.parametrize('script', SCRIPTS, ids=lambda script: script.stem)


def kept(script):
    return json.loads(script.with_suffix('.ipynb').read_text(encoding='utf-8'))


def test_every_notebook_has_a_script():
    notebooks = [file for file in (ROOT / 'docs').rglob('*.ipynb') if '.ipynb_checkpoints' not in file.parts]
    assert sorted(file.with_suffix('.py') for file in notebooks) == sorted(SCRIPTS)
    assert len(SCRIPTS) >= 3


@each_script
def test_a_notebook_has_the_cells_of_its_script(script):
    cells = make_notebooks.read_cells(script.read_text(encoding='utf-8'))
    outputs = [cell.get('outputs', []) for cell in kept(script)['cells']]
    assert make_notebooks.differences(make_notebooks.notebook(cells, outputs), kept(script)) == ''


@pytest.mark.slow
@each_script
def test_a_notebook_shows_its_current_outputs(script):
    """In a new process, as for a reader: the script chooses the number of devices."""
    if script.stem != 'tutorial' and jax.__version_info__ < (0, 12):
        pytest.skip('the programs are those that the newest JAX makes')
    environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    ended = subprocess.run(
        [sys.executable, '-W', 'error', 'scripts/make_notebooks.py', '--check', script],
        cwd=ROOT,
        env={**environment, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout == f'{script.stem}.ipynb is as {script.name} makes it\n'


@each_script
def test_every_cell_of_code_shows_something_or_only_defines(script):
    shows = [bool(cell['outputs']) for cell in kept(script)['cells'] if cell['cell_type'] == 'code']
    defines = {'tutorial': 2, 'fsdp_tp': 1, 'planning': 2}  # the imports, and a model or step
    assert shows.count(False) == defines[script.stem]


SMALL = """# %% [markdown]
# # Title
#
# Text.

# %%
x = 2
print(x)
x

# %% tags=["tpu"]
x = 3
print(x)
"""


def test_cells_are_read_and_run():
    cells = make_notebooks.read_cells(SMALL)
    assert cells == [
        Cell(False, '# Title\n\nText.', 2),
        Cell(True, 'x = 2\nprint(x)\nx', 7),
        Cell(True, 'x = 3\nprint(x)', 12, ('tpu',)),
    ]
    outputs = list(make_notebooks.run(cells, SCRIPTS[0]))
    printed = [{'name': 'stdout', 'output_type': 'stream', 'text': [f'{number}\n']} for number in (2, 3)]
    shown = {'data': {'text/plain': ['2']}, 'metadata': {}, 'output_type': 'display_data'}
    assert outputs == [[], [printed[0], shown], [printed[1]]]
    notebook = make_notebooks.notebook(cells, outputs)
    assert [cell['cell_type'] for cell in notebook['cells']] == ['markdown', 'code', 'code']
    assert [cell['metadata'] for cell in notebook['cells']] == [{}, {}, {'tags': ['tpu']}]
    assert make_notebooks.differences(notebook, notebook) == ''
    other = make_notebooks.notebook(cells, [[], [], []])
    assert '"2\\n"' in make_notebooks.differences(notebook, other)


@pytest.mark.parametrize('here', [True, False])
def test_outputs_of_the_tpu_compiler_are_kept_without_it(here, monkeypatch):
    cells = make_notebooks.read_cells(SMALL)
    outputs = list(make_notebooks.run(cells, SCRIPTS[0]))
    before = make_notebooks.notebook(cells, [[], [], [{'text': ['of the TPU compiler\n']}]])
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: here or None)
    merged_outputs = make_notebooks.with_kept(cells, outputs, before)
    assert merged_outputs[:2] == outputs[:2]
    assert (merged_outputs[2] == outputs[2]) == here
    assert make_notebooks.with_kept(cells, outputs, {'cells': []}) == outputs


def test_an_error_names_the_line_of_the_script():
    cells = make_notebooks.read_cells('# %% [markdown]\n# a\n\n# %%\nx = 0\n1 / x\n')
    with pytest.raises(ZeroDivisionError) as error:
        list(make_notebooks.run(cells, SCRIPTS[0]))
    last = error.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(SCRIPTS[0]), 6)
