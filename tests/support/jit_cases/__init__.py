"""A table of cases that `jax.jit` and `sjit` are both run through.

A case is a function of the wrapper, ``jit``, that gives back what a user would look at. It makes its own
functions, so that nothing of one run is in the caches of the other, and may call `traced` in them. The
modules beside this one hold the cases by subject; `compare` says what is compared.
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
    """One behaviour.

    Attributes:
        name: subject and function.
        run: takes the wrapper, and gives what is compared.
        meant: the aspects (see `compare`) in which sjit differs on purpose, each with the name of the
            difference in docs/sjit.md, "Differences from jax.jit", in lower case.
        defect: why sjit differs although it should not; the case is then expected to fail.
        raises: whether ``jax.jit`` ends in an error; the classes of both are compared.
        explicit: whether the axes of the mesh are Explicit, and the mesh is set.
        since, until: the JAX versions, both included, on which the case is run.
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
        """Whether the installed version of JAX is one on which the case is run."""
        return self.since <= jax.__version_info__ <= self.until


def case(
    function: Callable[..., Any] | None = None, *, variants: Mapping[str, Any] | None = None, **fields: Any
) -> Any:
    """Adds a function to the table; with *variants* once for each value, which is its second argument."""

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
    """Called by the function of a case: counts how often it is run as Python code."""
    TRACES.append(mark)


def on(*spec: Any, helper: MeshShardingHelper = HELPER) -> NamedSharding:
    """A sharding on the mesh of the cases."""
    return NamedSharding(helper.mesh, P(*spec))


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> type[Exception] | None:
    """The class of what a call raises; None if it succeeds."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error)
    return None
