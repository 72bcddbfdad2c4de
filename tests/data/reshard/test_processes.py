"""Resharding between meshes of several real processes, which run reshard_checks.py."""

import pytest

from tests.support.processes import Outcome, asked_for, names_of_checks, run_checks

CHECKS = names_of_checks('tests.support.reshard_checks')


@pytest.fixture(scope='module')
def two(request: pytest.FixtureRequest) -> Outcome:
    return run_checks('tests.support.reshard_checks', processes=2, devices=4, names=asked_for(request))


@pytest.mark.medium
@pytest.mark.parametrize('name', CHECKS)
def test_on_two_processes(two: Outcome, name: str) -> None:
    assert name in two.passed, str(two)
