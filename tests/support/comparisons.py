"""Pytest output for plans or reports that should be equal: both tables, line by line."""

import difflib
from typing import Any


def pytest_assertrepr_compare(op: str, left: Any, right: Any) -> list[str] | None:
    from scalax.plan import Plan
    from scalax.sharding import ShardingReport

    for kind in (Plan, ShardingReport):
        if op == '==' and isinstance(left, kind) and isinstance(right, kind):
            lines = difflib.ndiff(str(left).splitlines(), str(right).splitlines())
            return [f'two {kind.__name__}s differ (- left, + right):', *(line.rstrip('\n') for line in lines)]
    return None
