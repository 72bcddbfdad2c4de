"""Transfer of host data with several real processes, which run data_checks.py."""

import pytest

from tests.support.processes import Outcome, asked_for, names_of_checks, run_checks

CHECKS = names_of_checks('tests.support.data_checks')
EVERY_MESH = 'check_every_mesh'
# The checks in which four processes can fail differently from two: scalax decides which process sends to
# which, so two processes suffice to test a JAX release.
OF_FOUR = [
    EVERY_MESH,
    'check_every_third_mesh',
    'check_other_batch_axes',
    'check_processes_with_different_numbers_of_devices',
    'check_disagreement',
    'check_replicas_that_differ',
    'check_errors_of_shard_and_gather_reach_all_processes',
    'check_broadcast',
    'check_prefetch_beside_steps',
    'check_data_that_ends_early',
    'check_loader_that_fails',
]


@pytest.fixture(scope='module')
def two(request: pytest.FixtureRequest) -> Outcome:
    names = asked_for(request)
    return run_checks('tests.support.data_checks', processes=2, devices=4, names=names)


@pytest.fixture(scope='module')
def four(request: pytest.FixtureRequest) -> Outcome:
    names = asked_for(request) or OF_FOUR
    return run_checks('tests.support.data_checks', processes=4, devices=2, names=names)


@pytest.mark.medium
@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=[pytest.mark.slow] if name == EVERY_MESH else []) for name in CHECKS]
)
def test_on_two_processes(two: Outcome, name: str) -> None:
    assert name in two.passed, str(two)


@pytest.mark.slow
@pytest.mark.parametrize('name', OF_FOUR)
def test_on_four_processes(four: Outcome, name: str) -> None:
    assert name in four.passed, str(four)


@pytest.mark.medium
@pytest.mark.parametrize('processes', ['two', pytest.param('four', marks=pytest.mark.slow)])
def test_every_process_ended_well(request: pytest.FixtureRequest, processes: str) -> None:
    outcome: Outcome = request.getfixturevalue(processes)
    assert set(outcome.codes) == {0}, str(outcome)
