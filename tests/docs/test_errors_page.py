"""docs/errors.md has a section for each exception, each warning, and each kind of ShardingError."""

import ast
import re

import pytest

from scalax import errors
from tests.support import ROOT

PAGE = (ROOT / 'docs' / 'errors.md').read_text(encoding='utf-8')
MAKERS = {'Fault', 'Problem', '_problem'}  # their first argument is the kind


def kinds_in_the_code() -> set[str]:
    kinds = set()
    for file in (ROOT / 'scalax').rglob('*.py'):
        for node in ast.walk(ast.parse(file.read_text(encoding='utf-8'))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, 'id', '')
            kind = node.args[0]
            if name in MAKERS and isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                kinds.add(kind.value)
    return kinds


def test_each_exception_and_warning_has_a_section():
    bases = {errors.ScalaxError, errors.ScalaxWarning}
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, tuple(bases)) and value not in bases
    }
    assert len(classes) > 10
    assert set(re.findall(r'^## (\w+(?:Error|Warning))$', PAGE, re.MULTILINE)) == classes


@pytest.mark.medium
def test_each_kind_has_a_section():
    kinds = kinds_in_the_code()
    assert len(kinds) >= 20
    assert set(re.findall(r'^### (.+)$', PAGE, re.MULTILINE)) == kinds
