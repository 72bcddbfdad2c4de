"""Checkpoints with several real processes, some of which fail; they run the modules of checks."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from safetensors.numpy import save_file

from scalax.checkpoint import Checkpointer
from scalax.errors import CheckpointError
from scalax.sharding import MeshShardingHelper
from tests.support import checkpoint_checks
from tests.support.processes import Outcome, asked_for, names_of_checks, run_checks

MODULES = ['tests.support.checkpoint_checks', 'tests.support.checkpoint_failure_checks']
CHECKS = [name for module in MODULES for name in names_of_checks(module)]
SAVED = 'check_saving_and_restoring'  # the final restore of one process


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns the save folder of one process, and the directories of the others."""
    folder = tmp_path_factory.mktemp('checkpoints')
    helper = MeshShardingHelper([4, 2], ['x', 'y'])
    with Checkpointer(folder / 'one') as checkpointer:
        checkpointer.save(5, checkpoint_checks.state(helper))
    save_file({'w': checkpoint_checks.wide()}, folder / 'w.safetensors')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('CHECKPOINT_CHECKS', str(folder))
        yield folder


@pytest.fixture(scope='module')
def two(request: pytest.FixtureRequest, folder: Path) -> Outcome:
    return run_checks(MODULES, processes=2, devices=4, names=[*asked_for(request), SAVED])


@pytest.fixture(scope='module')
def four(request: pytest.FixtureRequest, folder: Path) -> Outcome:
    return run_checks(MODULES, processes=4, devices=2, names=[*asked_for(request), SAVED])


@pytest.mark.medium
@pytest.mark.parametrize('name', CHECKS)
def test_on_two_processes(two: Outcome, name: str) -> None:
    assert name in two.passed, str(two)


@pytest.mark.medium
@pytest.mark.slow
@pytest.mark.parametrize('name', CHECKS)
def test_on_four_processes(four: Outcome, name: str) -> None:
    assert name in four.passed, str(four)


@pytest.mark.parametrize('processes', ['two', pytest.param('four', marks=pytest.mark.slow)])
def test_every_process_ended_well(request: pytest.FixtureRequest, processes: str) -> None:
    outcome: Outcome = request.getfixturevalue(processes)
    assert set(outcome.codes) == {0}, str(outcome)


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('shape', [(4, 2), (2, 4), (8,), (1,)], ids=str)
@pytest.mark.parametrize('processes', ['two', pytest.param('four', marks=pytest.mark.slow)])
def test_one_process_restores_a_save_of_several(
    request: pytest.FixtureRequest, folder: Path, processes: str, shape: tuple[int, ...]
) -> None:
    outcome: Outcome = request.getfixturevalue(processes)
    count = len(outcome.codes)
    size = 1
    for dim in shape:
        size *= dim
    helper = MeshShardingHelper(shape, ['x', 'y'][: len(shape)], devices=jax.devices()[:size])
    checkpointer = Checkpointer(folder / f'{count}-processes')
    rule = checkpoint_checks.rule(helper)
    restored = checkpointer.restore(helper, rule, checkpoint_checks.state(helper), verify=True)
    checkpoint_checks.assert_same(restored, helper)
    with pytest.raises(CheckpointError, match=f'it has data.0-of-{count}, '):
        checkpointer.data()
