"""The public names of scalax, their signatures and what each says of itself, as a text that a person reads.

``python tests/test_api.py`` writes ``tests/api.txt`` anew; what changed is then seen in the diff.
"""

import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

SNAPSHOT = Path(__file__).resolve().parent / 'api.txt'
MODULES = [
    'scalax',
    'scalax.axes',
    'scalax.checkpoint',
    'scalax.custom_op',
    'scalax.distributed',
    'scalax.errors',
    'scalax.explain',
    'scalax.interop',
    'scalax.plan',
    'scalax.rules',
    'scalax.rules.catalogue',
    'scalax.sharding',
    'scalax.testing',
    'scalax.utils',
    'scalax.visualize',
]


def public(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """The names of a module that are for users: those of ``__all__``, else those that it defines itself."""
    names = getattr(module, '__all__', None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith('_') and getattr(value, '__module__', None) == module.__name__
    ]
    return ((name, getattr(module, name)) for name in sorted(names))


def signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):  # some classes of JAX do not say
        return ''


def first_line(value: Any) -> str:
    return (inspect.getdoc(value) or '').partition('\n')[0]


def entries(name: str, value: Any) -> Iterator[str]:
    """A name, and the public members of a class of ours."""
    if inspect.ismodule(value):
        return
    ours = getattr(value, '__module__', '').startswith('scalax')
    if not (callable(value) and ours):
        yield f'  {name}: {type(value).__name__}'
        return
    yield f'  {name}{signature(value)}'
    yield f'      {first_line(value)}'
    if not inspect.isclass(value):
        return
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    members = {
        member: found
        for base in reversed(value.__mro__)
        if base.__module__.startswith('scalax')
        for member, found in vars(base).items()
    }
    for member, found in sorted(members.items()):
        if member.startswith('_') or member in fields:
            continue
        plain = inspect.unwrap(getattr(found, '__func__', found))
        yield f'    .{member}{signature(plain) if callable(plain) else ""}'
        yield f'        {first_line(found)}'


def described() -> str:
    lines = []
    for name in MODULES:
        module = importlib.import_module(name)
        lines.append(name)
        for entry, value in public(module):
            lines += entries(entry, value)
    return '\n'.join(lines) + '\n'


@pytest.mark.skipif(sys.version_info < (3, 13), reason='Python before 3.13 writes some signatures otherwise')
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason='JAX before 0.12 shows some defaults otherwise')
def test_the_public_api_is_what_was_agreed() -> None:
    assert described() == SNAPSHOT.read_text(encoding='utf-8')


if __name__ == '__main__':
    SNAPSHOT.write_text(described(), encoding='utf-8')
