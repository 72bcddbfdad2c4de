"""A table of cases that run with both `jax.jit` and `sjit`.

A case is a function of the wrapper, ``jit``, that returns the values that a user would look at. It creates
its functions itself, so that runs share no cache entries, and may call `traced` in them. The modules next to
this one contain the cases by subject; `compare` compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['x', 'y'])
EXPLICIT = MeshShardingHelper([4, 2], ['x', 'y'], axis_types=AxisType.Explicit)
X = np.arange(8, dtype=np.float32)
M = np.arange(32, dtype=np.float32).reshape(8, 4)

CASES: list[Case] = []
TRACES: list[Any] = []


@dataclasses.dataclass(frozen=True)
class Case:
    """One behaviour of jax.jit.

    Attributes:
        name: subject and function.
        run: maps the wrapper to the values to compare.
        meant: the aspects (see `compare`) in which sjit differs on purpose, each with the name of the
            difference in docs/sjit.md, "Differences from jax.jit", in lower case.
        defect: why sjit differs although it should not; the case is then expected to fail.
        raises: whether ``jax.jit`` raises an error; the classes of both errors are compared.
        explicit: whether the axes of the mesh are Explicit, and the mesh is set.
        since, until: the first and the last JAX version on which the case runs.
    """

    name: str
    run: Callable[[Any], Any]
    meant: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defect: str = ''
    raises: bool = False
    explicit: bool = False
    since: tuple[int, ...] = ()
    until: tuple[int, ...] = (99,)

    @property
    def exists(self) -> bool:
        """Whether the case runs on the installed version of JAX."""
        return self.since <= jax.__version_info__ <= self.until


def case(
    function: Callable[..., Any] | None = None, *, variants: Mapping[str, Any] | None = None, **fields: Any
) -> Any:
    """Adds a function to the table, or one case per value of *variants*, which is its second argument."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f'{function.__module__.rpartition(".")[2]}-{function.__name__}'
        if variants is None:
            CASES.append(Case(name, function, **fields))
        else:
            for key, value in variants.items():
                CASES.append(Case(f'{name}[{key}]', _bound(function, value), **fields))
        return function

    return add if function is None else add(function)


def _bound(function: Callable[..., Any], value: Any) -> Callable[[Any], Any]:
    return lambda jit: function(jit, value)


def traced(mark: Any = None) -> None:
    """Counts traces: the function of a case calls it each time it runs as Python code."""
    TRACES.append(mark)


def on(*spec: Any, helper: MeshShardingHelper = HELPER) -> NamedSharding:
    """Returns a sharding on the mesh of the cases."""
    return NamedSharding(helper.mesh, P(*spec))


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> type[Exception] | None:
    """Returns the class of the error that a call raises, or None."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error)
    return None
