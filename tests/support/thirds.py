"""A third of the cases of large tables, for the oldest JAX: the newest runs all of them.

What a release changes shows in many cases of such a test. With ``--third`` about every third one runs: a
checksum of its name says which. Tests with few cases run whole, and so do those with the mark ``whole``.
"""

import zlib
from collections import Counter

import pytest

MANY = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--third', action='store_true', help=f'of tests with more than {MANY} cases, run a third'
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption('third'):
        return
    counts = Counter(map(_test, items))
    tables = [item for item in items if counts[_test(item)] > MANY and not item.get_closest_marker('whole')]
    others = {item for item in tables if _is_left_out(item)}
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition('[')[0]


def _is_left_out(item: pytest.Item) -> bool:
    return zlib.crc32(item.nodeid.encode()) % 3 != 0
