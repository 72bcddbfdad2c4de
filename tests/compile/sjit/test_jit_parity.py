"""Parity of sjit with jax.jit: each case has equal outcomes, or the difference that docs/sjit.md lists."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

from scalax.errors import ScalaxError
from tests.support import ROOT, jit_cases
from tests.support.jit_cases import CASES, Case
from tests.support.jit_cases.compare import differences

for module in pkgutil.iter_modules(jit_cases.__path__):
    importlib.import_module(f'tests.support.jit_cases.{module.name}')

# The differences that each reason allows: the value of jax.jit, and allowed values of sjit.
ALLOWED = {
    'error classes': lambda of_jit, of_sjit: issubclass(of_sjit, ScalaxError),
    'accepted inputs': lambda of_jit, of_sjit: of_sjit is None,
    'number of traces': lambda of_jit, of_sjit: len(of_sjit) < len(of_jit) and set(of_sjit) <= set(of_jit),
    'shardings on another mesh': lambda of_jit, of_sjit: of_jit is None and issubclass(of_sjit, ScalaxError),
    'argument names beside numbers': lambda of_jit, of_sjit: of_jit.count('True') < of_sjit.count('True'),
    'active mesh': lambda of_jit, of_sjit: (
        'AbstractMesh((' in str(of_jit) and "AbstractMesh('x': 4" in str(of_sjit)
    ),
    'traces of inner functions': lambda of_jit, of_sjit: (
        len(of_sjit) == len(of_jit) + 1 and set(of_sjit) == set(of_jit)
    ),
    'comparison of static values': lambda of_jit, of_sjit: of_jit is None and issubclass(of_sjit, ValueError),
}


def _parameter(case: Case) -> object:
    marks = [pytest.mark.xfail(reason=case.defect, strict=True)] if case.defect else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.medium
@pytest.mark.sampled(5)
@pytest.mark.parametrize('case', [_parameter(case) for case in CASES if case.exists])
def test_case(case):
    outcomes = differences(case)
    unexpected = {aspect: both for aspect, both in outcomes.items() if aspect not in case.meant}
    assert not unexpected, '\n'.join(
        f'{aspect}:\n  jax.jit: {of_jit}\n  sjit:    {of_sjit}'
        for aspect, (of_jit, of_sjit) in unexpected.items()
    )
    assert set(outcomes) == set(case.meant), f'no difference any more: {set(case.meant) - set(outcomes)}'
    for aspect, reason in case.meant.items():
        assert ALLOWED[reason](*outcomes[aspect]), (aspect, reason, outcomes[aspect])


def test_the_table_covers_all_subjects():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert len(names) >= 300


def test_intended_differences_are_documented():
    page = ROOT.joinpath('docs', 'sjit.md').read_text(encoding='utf-8')
    section = page.split('## Differences from jax.jit')[1].split('\n## ')[0]
    documented = [label.lower() for label in re.findall(r'^- \*\*([\w ]+)\.\*\* ', section, re.MULTILINE)]
    assert sorted(documented) == sorted({reason for case in CASES for reason in case.meant.values()})
    assert sorted(documented) == sorted(ALLOWED)
