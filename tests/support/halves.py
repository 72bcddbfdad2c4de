"""Half of the cases of large tables, for releases of JAX that are near one another.

What a release changes shows in many cases of such a test. With ``--half first`` about every other one runs,
with ``--half second`` the rest: a checksum of its name says which. Tests with few cases run whole.
"""

import zlib
from collections import Counter

import pytest

MANY = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    said = f'of tests with more than {MANY} cases, run this half'
    parser.addoption('--half', choices=['first', 'second'], help=said)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (half := config.getoption('half')):
        return
    counts = Counter(map(_test, items))
    others = {
        item for item in items if counts[_test(item)] > MANY and _is_in_first(item) != (half == 'first')
    }
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition('[')[0]


def _is_in_first(item: pytest.Item) -> bool:
    return zlib.crc32(item.nodeid.encode()) % 2 == 0
