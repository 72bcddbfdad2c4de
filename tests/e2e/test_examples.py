"""The examples, run as programs at a small size: their output files and their errors."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import app

from examples.llama import data, mesh_choice, settings
from examples.llama.model import ModelConfig
from examples.llama.options import Options
from examples.llama.strategies import STRATEGIES, in_stages
from examples.llama.training import OptimizerConfig
from tests.support import ROOT
from tests.support.processes import compiled

TIMEOUT_S = 500  # an example that hangs is stopped much earlier
SMALL = ['--width=32', '--layers=2', '--sequence_length=32', '--batch_size=8']
REFUSED, INTERRUPTED = 2, 130


def run(module: str, *arguments: str, code: str = '', **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs an example (by its module or file), or `code`, until it exits."""
    command = ['-c', code] if code else ['-m', module, *arguments] if module else arguments
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **compiled(), 'COLUMNS': '120', **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def assert_results(output: Path, steps: int) -> dict:
    """Asserts that all four files are complete, and returns the metrics."""
    numbers = json.loads((output / 'numbers.json').read_text())
    assert numbers['steps'] == len(numbers['train_losses']) == steps
    image = (output / 'loss.png').read_bytes()
    assert image.startswith(b'\x89PNG')
    assert len(image) > 10_000
    assert 'params/layers/up' in (output / 'sharding.txt').read_text()
    assert (output / 'sample.txt').read_text(encoding='utf-8').count('--- the model goes on ---') == 2
    return numbers


@pytest.mark.medium
def test_train_learns_and_leaves_its_results(tmp_path: Path) -> None:
    ended = run('examples.llama.train', *SMALL, '--steps=40', f'--output={tmp_path / "deep" / "out"}')
    assert ended.returncode == 0, ended.stderr
    numbers = assert_results(tmp_path / 'deep' / 'out', steps=40)
    assert numbers['mesh'] == {'fsdp': 4, 'tp': 2}
    assert numbers['devices'] == '8 x cpu'
    assert not numbers['interrupted']
    assert numbers['validation_loss'] < numbers['validation_loss_untrained'] - 1.0
    assert numbers['validation_loss'] < 3.6
    assert numbers['tokens_per_second'] > 0
    table = (tmp_path / 'deep' / 'out' / 'sharding.txt').read_text()
    row = r"opt_state/1/0/mu/layers/up +float32\[2,32,128\] +P\(None, 'fsdp', 'tp'\)"
    assert re.search(row, table) and re.search(row, ended.stdout)  # on paper and, narrower, on screen
    assert re.search(r'Done after 40 of 40 steps: validation loss \d\.\d{3} -> \d\.\d{3} nats', ended.stdout)
    assert re.search(r'training: 100%.* 40/40 .*loss \d\.\d{3}, [\d,]+ tokens/s', ended.stderr)
    assert 'Warning' not in ended.stderr, ended.stderr


@pytest.mark.slow
def test_train_on_the_users_own_files_and_mesh(tmp_path: Path) -> None:
    for name in 'ab':
        (tmp_path / f'{name}.txt').write_text('the quick brown fox jumps over the lazy dog; ' * 40)
    files = [str(tmp_path / 'a.txt'), str(tmp_path / 'b.txt')]
    flags = ['--strategy=zero2', '--devices=4', '--mesh=dp=4', '--steps=3', '--dropout=0.1']
    ended = run('examples.llama.train', *SMALL, *flags, f'--output={tmp_path}', '--text', *files)
    assert ended.returncode == 0, ended.stderr
    numbers = assert_results(tmp_path, steps=3)
    assert numbers['mesh'] == {'dp': 4}
    assert numbers['text'] == ', '.join(files)


@pytest.mark.slow
def test_train_in_pipeline_stages_has_the_same_losses(tmp_path: Path) -> None:
    reached = []
    for flags in ([], ['--stages=2']):
        ended = run('examples.llama.train', *SMALL, '--steps=3', *flags, f'--output={tmp_path}')
        assert ended.returncode == 0, ended.stderr
        assert 'Warning' not in ended.stderr, ended.stderr
        reached.append(assert_results(tmp_path, steps=3))
    assert [numbers['mesh'] for numbers in reached] == [
        {'fsdp': 4, 'tp': 2},
        {'stage': 2, 'fsdp': 2, 'tp': 2},
    ]
    for name in ('train_losses', 'validation_loss'):
        np.testing.assert_allclose(*[numbers[name] for numbers in reached], rtol=1e-5)


TRAIN = ['-m', 'examples.llama.train']


@contextlib.contextmanager
def training(
    folder: Path, program: Sequence[str] = TRAIN
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[str], None]]]:
    """Yields an endless run, and a function that waits until it prints a message."""
    log, text = folder / 'log.txt', folder / 'text.txt'
    text.write_text('the quick brown fox jumps over the lazy dog; ' * 40)  # evaluating is quick
    command = [sys.executable, '-u', *program, *SMALL, '--steps=1000000', f'--text={text}']
    with log.open('wb') as out:
        process = subprocess.Popen(
            [*command, f'--output={folder}', f'--checkpoints={folder / "saved"}'],
            cwd=ROOT,
            env={**os.environ, **compiled()},
            stdout=out,
            stderr=subprocess.STDOUT,
        )

    def wait_for(message: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            has_ended = process.poll() is not None  # before the last output is read
            if message in (so_far := log.read_text(errors='replace')):
                return
            assert not has_ended and time.monotonic() < deadline, so_far
            time.sleep(0.05)

    try:
        yield process, wait_for
    finally:
        process.kill()
        process.wait(timeout=TIMEOUT_S)


@pytest.mark.slow
def test_ctrl_c_keeps_the_results_so_far(tmp_path: Path) -> None:
    with training(tmp_path) as (process, wait_for):
        wait_for('tokens/s')
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=TIMEOUT_S) == INTERRUPTED
    output = (tmp_path / 'log.txt').read_text(errors='replace')
    assert 'Interrupted: keeping what was reached. Ctrl-C again to abort.' in output
    assert 'Traceback' not in output
    steps = int(re.search(r'Interrupted after (\d+) of 1000000 steps', output)[1])
    assert steps > 0
    numbers = assert_results(tmp_path, steps)
    assert numbers['interrupted']
    assert numbers['validation_loss'] < numbers['validation_loss_untrained']
    assert str(steps) in os.listdir(tmp_path / 'saved' / 'steps')


# After the first Ctrl-C, the run takes long enough for the second one.
SLOW_TO_END = """
import time
from absl import app
from examples.llama import train
evaluate, calls = train.evaluate, []

def evaluate_or_wait(*args):
    calls.append(args)
    if len(calls) == 2:
        time.sleep(600)
    return evaluate(*args)

train.evaluate = evaluate_or_wait
app.run(train.main)
"""


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_and_again_to_abort(tmp_path: Path) -> None:
    with training(tmp_path, ['-c', SLOW_TO_END]) as (process, wait_for):
        wait_for('model ')  # it is about to compile the training step
        process.send_signal(signal.SIGINT)
        wait_for('Interrupted: keeping')
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=TIMEOUT_S) == -signal.SIGINT
    assert not (tmp_path / 'numbers.json').exists()


# equimo, the package of this one's model, needs Python 3.12.
NOT_HERE = set() if importlib.util.find_spec('equimo') else {Path('examples/vit_equinox.py')}
PROGRAMS = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / 'examples').rglob('*.py'))
    if "__name__ == '__main__'" in path.read_text(encoding='utf-8') and path.relative_to(ROOT) not in NOT_HERE
]

# Imports them in one process, as Python does when it starts a file, or a module; no program runs.
IMPORTS = """
import runpy, sys
from absl import flags

given = set(flags.FLAGS)
for program, folder in {programs}:
    sys.path[0] = folder
    runpy.{how}
    for flag in set(flags.FLAGS) - given:
        delattr(flags.FLAGS, flag)
    for module in [module for module in sys.modules if module.startswith('examples')]:
        del sys.modules[module]
"""


@pytest.mark.slow
def test_all_start_as_files() -> None:
    programs = [(str(path), str(ROOT / path.parent)) for path in PROGRAMS]
    assert len(programs) > 10
    ended = run('', code=IMPORTS.format(programs=programs, how='run_path(program)'), PYTHONPATH='')
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_all_start_as_modules() -> None:
    programs = [('.'.join(path.with_suffix('').parts), str(ROOT)) for path in PROGRAMS]
    how = "run_module(program, run_name='started', alter_sys=True)"
    ended = run('', code=IMPORTS.format(programs=programs, how=how), PYTHONPATH='')
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_modules_beside_a_file_do_not_hide_libraries() -> None:
    """The folder examples/frameworks contains an equinox.py."""
    ended = run('', 'examples/frameworks/train.py', '--framework=equinox', '--steps=1', PYTHONPATH='')
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_digits_are_learnt() -> None:
    code = 'from examples import digits; accuracy = digits.main(); print(accuracy); assert accuracy > 0.96'
    ended = run('', code=code)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_digits_as_a_program_on_fewer_devices() -> None:
    ended = run('examples.digits', '--steps=3', '--devices=3')
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r'test accuracy \d+\.\d\d%\n', ended.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('environment', 'count', 'expected'),
    [
        ({}, 3, 3),
        ({'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}, None, 4),
        ({'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}, 2, 2),
    ],
)
def test_the_users_choice_of_devices_wins(environment: dict, count: int | None, expected: int) -> None:
    code = f'from examples.devices import choose_devices; print(len(choose_devices({count})))'
    ended = run('', code=code, **environment)
    assert ended.stdout == f'{expected}\n', ended.stderr


@pytest.mark.slow
def test_compilers_are_quiet_without_devices() -> None:
    code = 'from examples.devices import choose_devices; choose_devices()'
    # Without the lock it would be quiet while another process has it.
    ended = run('', code=code, JAX_PLATFORMS='', ALLOW_MULTIPLE_LIBTPU_LOAD='1')
    assert (ended.returncode, ended.stderr) == (0, '')


@pytest.mark.slow
def test_too_few_devices_are_reported() -> None:
    code = 'from examples.devices import choose_devices; choose_devices(5)'
    ended = run('', code=code, JAX_NUM_CPU_DEVICES='2')
    assert '--devices 5: JAX sees only 2 here (cpu). Ask for 2 or fewer.' in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ('flags', 'code', 'message'),
    [
        (['--stepz=3'], 1, "Unknown command line flag 'stepz'. Did you mean: steps ?"),
        (['book.txt'], REFUSED, 'error: book.txt: not a flag. To train on a file, write --text book.txt'),
        (
            ['--width=36', '--heads=2', '--mesh=fsdp=8'],
            REFUSED,
            "asked for: P(None, 'tp', 'fsdp') from regex 'layers/(output|down)$'",
        ),
    ],
)
def test_bad_flags_end_the_program_with_a_friendly_error(
    flags: list[str], code: int, message: str, tmp_path: Path
) -> None:
    ended = run('examples.llama.train', *flags, f'--output={tmp_path / "out"}')
    assert ended.returncode == code
    assert message in ended.stderr
    assert 'Traceback' not in ended.stderr
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('strategy', 'mesh', 'devices', 'message'),
    [
        (
            'fsdp_tp',
            'fsd=2',
            8,
            '--mesh fsd=2: strategy fsdp_tp has no mesh axis "fsd", only: fsdp, tp. Did you mean "fsdp"?',
        ),
        (
            'dp',
            'tp=2',
            8,
            '--mesh tp=2: strategy dp has no mesh axis "tp", only: dp. '
            'Strategies with that axis: fsdp_tp, fsdp_tp_sp.',
        ),
        ('dp', 'model', 8, '--mesh model: "model" is not of the form axis=devices, as in dp=-1'),
        ('dp', 'dp=two', 8, '--mesh dp=two: "dp=two" is not of the form axis=devices, as in dp=-1'),
        (
            'dp',
            'dp=0',
            8,
            '--mesh dp=0, --devices 8: axis dimensions are positive, or -1 once, got (0,)',
        ),
        ('dp', 'dp=2,dp=4', 8, '--mesh dp=2,dp=4: axis "dp" is given twice.'),
        (
            'fsdp_tp',
            'fsdp=-1,tp=-1',
            8,
            '--mesh fsdp=-1,tp=-1, --devices 8: axis dimensions are positive, or -1 once, got (-1, -1)',
        ),
        (
            'fsdp_tp',
            'fsdp=-1,tp=3',
            8,
            '--mesh fsdp=-1,tp=3, --devices 8: mesh (fsdp=-1, tp=3): 8 devices are not divisible by 3, '
            'the product of the given dimensions',
        ),
        (
            'fsdp_tp',
            'fsdp=2,tp=2',
            8,
            '--mesh fsdp=2,tp=2, --devices 8: mesh (fsdp=2, tp=2) needs 4 devices, there are 8: '
            'give one of the dimensions as -1, or some of the devices as devices=...',
        ),
    ],
)
def test_an_impossible_mesh_is_rejected(strategy: str, mesh: str, devices: int, message: str) -> None:
    with pytest.raises(app.UsageError) as error:
        settings.make_helper(STRATEGIES[strategy], mesh, jax.devices()[:devices])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ('mesh', 'devices', 'expected'),
    [
        (None, 8, {'fsdp': 4, 'tp': 2}),
        (None, 1, {'fsdp': 1, 'tp': 1}),
        (None, 3, {'fsdp': 3, 'tp': 1}),
        ('tp=-1', 8, {'fsdp': 1, 'tp': 8}),
        (' tp=4 , fsdp=2 ', 8, {'fsdp': 2, 'tp': 4}),
    ],
)
def test_the_mesh_fits_the_devices(mesh: str | None, devices: int, expected: dict) -> None:
    helper = settings.make_helper(STRATEGIES['fsdp_tp'], mesh, jax.devices()[:devices])
    assert dict(helper.mesh.shape) == expected


OPTIONS = Options(
    model=ModelConfig(),
    optimizer=OptimizerConfig(steps=1),
    batch_size=16,
    sequence_length=128,
    seed=0,
    strategy='fsdp_tp',
    mesh=None,
    devices=None,
    text=(),
    output='',
    checkpoints=None,
    save_every=100,
    pause=0.0,
)


TABLE = '8: fsdp=4,tp=2; 6: fsdp=6 ;4:tp=-1'


@pytest.mark.parametrize(
    ('mesh', 'devices', 'expected'),
    [
        (TABLE, 8, 'fsdp=4,tp=2'),
        (TABLE, 6, 'fsdp=6'),
        (TABLE, 4, 'tp=-1'),
        ('fsdp=8', 8, 'fsdp=8'),
        (None, 8, None),
    ],
)
def test_a_table_of_meshes(mesh: str | None, devices: int, expected: str | None) -> None:
    options = dataclasses.replace(OPTIONS, mesh=mesh)
    assert mesh_choice.choose_mesh(options, STRATEGIES['fsdp_tp'], jax.devices()[:devices]) == expected


@pytest.mark.parametrize(
    ('mesh', 'message'),
    [
        (
            '8: fsdp=8; 4: fsdp=4',
            '--mesh 8: fsdp=8; 4: fsdp=4: 6 devices are here, and it has meshes for 8, 4. Add "6: ...", or '
            'give search.',
        ),
        ('8: fsdp=8; 6', '--mesh 8: fsdp=8; 6: "6" is not of the form devices: mesh, as in 8: fsdp=4,tp=2'),
        ('x: fsdp=8', '--mesh x: fsdp=8: "x: fsdp=8" is not of the form devices: mesh, as in 8: fsdp=4,tp=2'),
        ('6: tp=6; 6: fsdp=6', '--mesh 6: tp=6; 6: fsdp=6: 6 devices are given twice.'),
        (
            'search',
            '--mesh search, 6 devices: no mesh over fsdp, tp with 6 devices satisfies the constraints',
        ),
    ],
)
def test_a_table_without_the_mesh_is_rejected(mesh: str, message: str) -> None:
    options = dataclasses.replace(OPTIONS, mesh=mesh)  # a batch of 16 is not divisible by 3
    with pytest.raises(app.UsageError) as error:
        mesh_choice.choose_mesh(options, STRATEGIES['fsdp_tp'], jax.devices()[:6])
    assert str(error.value) == message


@pytest.mark.slow
def test_a_search_finds_a_mesh_that_divides_all_dimensions() -> None:
    model = ModelConfig(width=48, layers=1, heads=4, kv_heads=2)
    options = dataclasses.replace(OPTIONS, model=model, batch_size=12, sequence_length=32, mesh='search')
    # Of fsdp=6, fsdp=3 with tp=2, and tp=3 or 6, the heads leave the first two.
    result = mesh_choice.choose_mesh(options, STRATEGIES['fsdp_tp'], jax.devices()[:6])
    assert result in ('fsdp=6,tp=1', 'fsdp=3,tp=2')


def test_all_invalid_settings_are_reported_at_once() -> None:
    model = dataclasses.replace(OPTIONS.model, heads=3, dropout=1.0)
    options = dataclasses.replace(OPTIONS, batch_size=6, model=model)
    with pytest.raises(app.UsageError) as error:
        settings.check_settings(options, STRATEGIES['fsdp_tp'], {'fsdp': 4, 'tp': 2})
    assert str(error.value).splitlines() == [
        'these settings do not go together:',
        '  --width 128 is not a multiple of --heads 3',
        '  --heads 3 is not a multiple of --kv_heads 2',
        '  --dropout 1.0 leaves nothing: give less than 1',
        '  --batch_size 6 cannot be sharded over 4 devices (fsdp): make it a multiple of 4, '
        'or change --mesh or --devices',
        '  --heads 3 cannot be sharded over 2 devices (tp): make it a multiple of 2, '
        'or change --mesh or --devices',
    ]


def test_indivisible_stages_are_rejected() -> None:
    options = dataclasses.replace(OPTIONS, model=dataclasses.replace(OPTIONS.model, layers=3))
    strategy = in_stages(STRATEGIES['fsdp_tp'], 2, microbatches=5)
    with pytest.raises(app.UsageError) as error:
        settings.check_settings(options, strategy, {'stage': 2, 'fsdp': 2, 'tp': 2})
    assert str(error.value).splitlines()[1:] == [
        '  --layers 3 cannot be divided into 2 stages: make it a multiple of 2',
        '  --batch_size 16 cannot be divided into 5 microbatches, each sharded over the devices of a stage: '
        'make it a multiple of 10, or change --microbatches',
    ]


def test_the_default_settings_fit_every_strategy() -> None:
    strategies = [*STRATEGIES.values(), *[in_stages(base, 2, 4) for base in STRATEGIES.values()]]
    for strategy in strategies:
        for devices in (1, 2, 4, 8) if strategy.pipeline is None else (2, 4, 8):
            helper = settings.make_helper(strategy, None, jax.devices()[:devices])
            settings.check_settings(OPTIONS, strategy, helper.mesh.shape)


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (None, 'cannot be read (No such file or directory).'),
        (b' \n', 'the file is empty.'),
        (b'short', '5 bytes are too few for sequences of 128. The last tenth is the validation text'),
    ],
)
def test_unusable_text_is_rejected(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / 'text.txt'
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(app.UsageError) as error:
        data.load_corpus([str(path)], sequence=128)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_validation_text_is_the_last_tenth_and_is_not_trained_on() -> None:
    corpus = data.load_corpus([], sequence=128)
    size = len(corpus.train) + len(corpus.validation)
    assert 300_000 < size < 600_000
    assert len(corpus.validation) == size // 10
    text = data.documentation().encode()
    assert corpus.train.tobytes() + corpus.validation.tobytes() == text
    seen = set(corpus.train.tobytes().split(b'\n\n'))
    paragraphs = [part for part in corpus.validation.tobytes().split(b'\n\n') if part]
    assert len(paragraphs) > 100
    assert not seen.intersection(paragraphs)


def test_batches_are_windows_of_the_training_text_fixed_by_seed_and_step() -> None:
    corpus = data.Corpus('numbers', np.arange(200, dtype=np.uint8), np.arange(200, 230, dtype=np.uint8))
    batch = corpus.batch(4, 8, seed=1, step=2)
    assert batch.shape == (4, 9)
    assert batch.dtype == np.int32
    np.testing.assert_array_equal(np.diff(batch), 1)
    assert batch.max() < 200
    np.testing.assert_array_equal(batch, corpus.batch(4, 8, seed=1, step=2))
    assert (batch != corpus.batch(4, 8, seed=1, step=3)).any()
    assert (batch != corpus.batch(4, 8, seed=2, step=2)).any()


def test_validation_batches_predict_each_byte_once() -> None:
    corpus = data.Corpus('numbers', np.arange(200, dtype=np.uint8), np.arange(200, 230, dtype=np.uint8))
    batches = list(corpus.validation_batches(2, 8))
    assert [(batch.shape, count) for batch, count in batches] == [((2, 9), 2), ((2, 9), 1)]
    predicted = np.concatenate([batch[:count, 1:].ravel() for batch, count in batches])
    np.testing.assert_array_equal(predicted, np.arange(201, 225))


def test_the_model_code_names_no_mesh_axis() -> None:
    axes = {axis for strategy in STRATEGIES.values() for axis in strategy.mesh}
    assert axes == {'dp', 'fsdp', 'tp'}
    for name in ('model.py', 'training.py', 'generate.py', 'trainer.py'):
        words = re.findall(r'\w+', (ROOT / 'examples' / 'llama' / name).read_text())
        assert not axes.intersection(words), name
