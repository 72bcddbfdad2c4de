"""Runs `python -m benchmarks` in tests."""

import sys

import pytest

import benchmarks.__main__


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Returns the program's last message, if it ends with an error."""
    monkeypatch.setattr(sys, 'argv', ['program', *arguments])
    with pytest.raises(SystemExit) as end:
        benchmarks.__main__.main()
    return str(end.value)
