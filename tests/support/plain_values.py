"""Random changes of plain values: what a JSON file could hold in place of what was written."""

import random
from typing import Any

ODD = [
    *(None, True, False, 0, 1, -1, 8, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**300, 0.5, -1.0, 1e308),
    *('', 'x', 'all-gather', 'exactly', 'UNCONSTRAINED', '\x1b[2J\n', 'a' * 5000, '9' * 5000, '/' * 5000),
    *([], {}, [[]], [None], ['x', 'x'], {'x': {}}, [1, 2, 3], [-5]),
]


def places(values: Any, below: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside of another."""
    items = (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    )
    return [way for key, value in items for way in [(*below, key), *places(value, (*below, key))]]


def change(rng: random.Random, values: Any) -> None:
    """Changes one place in *values*."""
    *above, key = rng.choice(places(values))
    for step in above:
        values = values[step]
    kind = rng.randint(0, 7)
    if kind == 0:
        del values[key]
    elif kind == 1 and isinstance(values, dict):
        values[rng.choice(('more', 'bytes', 'spec', '\x1b[0m'))] = rng.choice(ODD)
    elif kind == 2 and isinstance(values, list):
        values.append(rng.choice(values) if rng.random() < 0.7 else rng.choice(ODD))
    elif kind == 3 and isinstance(values[key], int) and not isinstance(values[key], bool):
        values[key] = rng.choice((values[key] + 1, values[key] * 1000, 0, 10**20))
    elif kind == 4 and isinstance(values[key], str):
        values[key] = rng.choice((values[key] + '\u202e', values[key] * 2, 'data', values[key][:1]))
    else:
        values[key] = rng.choice(ODD)
