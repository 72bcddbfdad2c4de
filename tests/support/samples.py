"""Samples of large tables of cases: `make test` runs every n-th case, and `make test-all` runs all.

A test with many variations of one behaviour is marked ``@pytest.mark.sampled(5)``.
"""

from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m leaves out slow cases; pytest-randomly has shuffled them before
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of a sampled test as slow, except every n-th one."""
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker('sampled') and not item.get_closest_marker('slow'):
            tables[item.nodeid.partition('[')[0]].append(item)
    for cases in tables.values():
        step = cases[0].get_closest_marker('sampled').args[0]
        for position, case in enumerate(cases):
            if position % step:
                case.add_marker('slow')
