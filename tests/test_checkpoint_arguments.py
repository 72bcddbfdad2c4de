"""Checkpoints: arguments that make no sense are errors, before anything is written or read."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from scalax.checkpoint import Checkpointer, load_safetensors
from scalax.errors import ArgumentError, CheckpointError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
STATE = {'params': {'w': np.ones(8, np.float32), 'b': np.ones(4, np.float32)}, 'count': np.int32(1)}


@pytest.fixture(scope='module')
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('saved')
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(3, STATE)
    return folder


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize('options', [{'keep': 0}, {'save_every': 0}, {'save_every': 2.0}, {'timeout': -1}])
def test_options(tmp_path: Path, options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ArgumentError) as caught:
        Checkpointer(tmp_path, **options)
    assert str(caught.value) == f'Checkpointer: {name} is a positive number, got {value!r}'


@pytest.mark.parametrize('step', [7.0, 6.5, -1, True, '7', np.float32(7), None], ids=repr)
def test_what_is_no_step(saved: Path, step: Any) -> None:
    with Checkpointer(saved) as checkpointer:
        wanted = f'step is a whole number, at least 0, got {step!r}'
        assert message(checkpointer.save, step, STATE) == wanted
        if step is not None:  # the latest, for those who read
            assert message(checkpointer.restore, HELPER, P(), STATE, step=step) == wanted
            assert message(checkpointer.describe, step) == wanted
            assert message(checkpointer.data, step) == wanted
    assert [path.name for path in saved.iterdir()] == ['3']


@pytest.mark.parametrize('step', [np.int64(12), jnp.int32(12)], ids=['numpy', 'jax'])
def test_steps_of_numpy_and_jax(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(step, STATE)
        assert not checkpointer.save(12, STATE)  # the same
        checkpointer.wait()
        assert checkpointer.restore(HELPER, P(), STATE, step=step)['count'] == 1
    assert [path.name for path in tmp_path.iterdir()] == ['12']


@pytest.mark.parametrize(
    'options, wanted',
    [
        ({'only': '('}, "only: invalid regex '(': missing ), unterminated subpattern (position 0)"),
        ({'only': ['params']}, "only: the regex is a string, got ['params']"),
        (
            {'rename': [('[', 'x')]},
            "rename: invalid regex '[': unterminated character set (position 0)",
        ),
        (
            {'rename': ('^a/', 'b/')},
            "rename: expected a list of pairs (regex, replacement), got '^a/' in it",
        ),
        (
            {'rename': [('params/(.)', r'\2')]},
            r"rename: the replacement '\\2' does not fit 'params/(.)': invalid group reference 2 "
            'at position 1',
        ),
        (
            {'rename': [('params/(.)', r'\g<name>')]},
            r"rename: the replacement '\\g<name>' does not fit 'params/(.)': unknown group name 'name'",
        ),
    ],
)
def test_regexes(saved: Path, options: dict[str, Any], wanted: str) -> None:
    assert message(Checkpointer(saved).restore, HELPER, P(), STATE, **options) == wanted


def test_a_part_that_is_not_there_is_not_taken_for_restored(saved: Path) -> None:
    checkpointer = Checkpointer(saved)
    with pytest.raises(CheckpointError) as caught:
        checkpointer.restore(HELPER, P(), STATE, only='^parms/')
    assert str(caught.value) == (
        "only='^parms/' is found in no leaf path of like, so that nothing would be restored:\n"
        '  count\n'
        '  params/b\n'
        '  params/w'
    )
    assert checkpointer.restored_step is None
    assert checkpointer.restore(HELPER, P(), {}, only='^params/') == {}


@pytest.mark.parametrize(
    'mapping, wanted',
    [
        ([('(', 'x')], "mapping: invalid regex '(': missing ), unterminated subpattern (position 0)"),
        ([('a', 'x', (0,), 1)], 'mapping: expected a list of pairs (regex, replacement), got '),
        ([('w', r'\1')], r"mapping: the replacement '\\1' does not fit 'w': invalid group reference 1 at "),
    ],
)
def test_mappings_of_safetensors(tmp_path: Path, mapping: Any, wanted: str) -> None:
    file = tmp_path / 'model.safetensors'
    save_file({'w': np.ones(8, np.float32)}, file)
    assert message(load_safetensors, HELPER, file, P(), mapping).startswith(wanted)
