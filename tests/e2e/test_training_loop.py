"""The program of docs/training_loop.md on two processes: its losses are the losses on the page."""

import re
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.docs_blocks import read_blocks
from tests.support.processes import started

PAGE = (ROOT / 'docs' / 'training_loop.md').read_text(encoding='utf-8')
SIMULATED = "jax.config.update('jax_num_cpu_devices', 8)"
CALLED = "state = train('run', 30)"
EVALUATED = re.compile(r'^(\d+) eval_loss=(\S+)$', re.MULTILINE)


def program(folder: Path) -> str:
    """Returns the page's code blocks for plain JAX, with 20 steps and another folder."""
    blocks = [block.text for block in read_blocks(PAGE) if block.is_python]
    [end] = [number for number, block in enumerate(blocks) if CALLED in block]
    text = '\n'.join(blocks[: end + 1])
    assert text.count(SIMULATED) == text.count(CALLED) == 1
    return text.replace(SIMULATED, '').replace(CALLED, f'train({str(folder)!r}, 20)')


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_only_the_first_prints(tmp_path: Path) -> None:
    flags = ['--processes=2', '--devices=4', '--restarts=0']
    with started(['-m', 'examples.launch.local', *flags, '--', '-c', program(tmp_path)]) as launcher:
        assert launcher.wait() == (0,), launcher.output()
        losses = {step: float(loss) for step, loss in EVALUATED.findall(launcher.output())}
        assert len(EVALUATED.findall(launcher.output())) == 2
    shown = {step: float(loss) for step, loss in EVALUATED.findall(PAGE)}
    assert losses.keys() == {'0', '20'}
    for step, loss in losses.items():
        assert abs(loss - shown[step]) < 0.1, step  # bfloat16 sums depend on their order
    assert (tmp_path / 'checkpoints' / '20').exists()
    assert len(list((tmp_path / 'profile').rglob('*.xplane.pb'))) == 1
