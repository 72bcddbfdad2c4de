"""Faults are steps whose results on a mesh differ from one device; `FAULTS` contains all of them.

A fault makes a step and its arguments for a helper, as a user would. The step is right if all mesh axes of
the helper have size 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal
from unittest import mock

import jax
import jaxlib
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.sharding import MeshShardingHelper

Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step and its arguments."""
Kind = Literal['partitioner', 'scalax', 'user', 'sound']

FSDP_TP: Mapping[str, int] = {'fsdp': 4, 'tp': 2}
FSDP: Mapping[str, int] = {'fsdp': 8}
WHOLE = P()


@dataclasses.dataclass(frozen=True)
class Fault:
    """A step that is wrong on a mesh, or one of `SOUND`, which is right.

    Attributes:
        name: its name.
        make: makes the step and its arguments for a helper.
        kind: the cause of the fault: XLA's partitioner, scalax or the user.
        expects: words that the report must contain: paths of results, and operations.
        source: the publication of the fault; empty if there is none.
        mesh: mesh axis -> size.
        explicit: whether the axes are Explicit.
        fixed_in: the first jaxlib without the fault; empty if all versions have it.
        seeded: a context that inserts a fault into scalax.
        raises: text of the error that the step raises, on one device as well; empty if it raises none.
    """

    name: str
    make: Callable[[MeshShardingHelper], Step]
    kind: Kind
    expects: tuple[str, ...]
    source: str = ''
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: FSDP_TP)
    explicit: bool = False
    fixed_in: str = ''
    seeded: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    raises: str = ''

    @property
    def shows(self) -> bool:
        """Whether the installed jaxlib has the fault."""
        return not self.fixed_in or _numbers(jaxlib.__version__) < _numbers(self.fixed_in)

    @property
    def is_seeded(self) -> bool:
        """Whether the fault exists only inside the context `seeded`."""
        return self.seeded is not contextlib.nullcontext

    def helper(self) -> MeshShardingHelper:
        """Returns a helper for the mesh of the fault."""
        return self._helper([*self.mesh.values()])

    def one_device(self) -> MeshShardingHelper:
        """Returns a helper with the same axes, all of size 1."""
        return self._helper([1] * len(self.mesh))

    def _helper(self, sizes: list[int]) -> MeshShardingHelper:
        axis_type = AxisType.Explicit if self.explicit else AxisType.Auto
        devices = jax.devices()[: math.prod(sizes)]
        return MeshShardingHelper(sizes, [*self.mesh], devices=devices, axis_types=axis_type)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple([int(part) for part in version.split('.') if part.isdigit()])


FAULTS: dict[str, Fault] = {}
SOUND: dict[str, Fault] = {}
"""Sound steps: their results differ only by rounding, even where a result consists of rounding errors."""


def fault(kind: Kind, expects: tuple[str, ...], **options: Any) -> Callable[[Any], Any]:
    """Registers a fault under the name of the function that makes its step."""

    def added(make: Callable[[MeshShardingHelper], Step]) -> Callable[[MeshShardingHelper], Step]:
        name = make.__name__
        catalogue = SOUND if kind == 'sound' else FAULTS
        assert name not in catalogue, name
        catalogue[name] = Fault(name, make, kind, expects, **options)
        return make

    return added


partitioner = functools.partial(fault, 'partitioner')
user = functools.partial(fault, 'user')
sound = functools.partial(fault, 'sound', ())


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns normal random numbers, determined by shape and seed."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def integers(most: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Returns random integers below *most*, determined by shape and seed."""
    return np.random.default_rng([seed, most, *shape]).integers(0, most, size=shape).astype(np.int32)


def jitted(helper: MeshShardingHelper, fun: Callable[..., Any], *specs: P, **options: Any) -> Any:
    """Returns `jax.jit` of a function, with shardings on the helper's mesh."""
    shardings = tuple([NamedSharding(helper.mesh, spec) for spec in specs])
    return jax.jit(fun, in_shardings=shardings, **options)


def seeded(
    expects: tuple[str, ...], *changes: tuple[Any, str, Any], kind: Kind = 'scalax', **options: Any
) -> Callable[[Any], Any]:
    """Registers a fault of scalax: `changes` replace attributes of modules while the step is traced."""

    @contextlib.contextmanager
    def put_in() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for where, name, value in changes:
                stack.enter_context(mock.patch.object(where, name, value))
            yield

    return fault(kind, expects, seeded=put_in, **options)


def always(answer: Any) -> Callable[..., Any]:
    """Returns a function that always returns *answer*."""
    return lambda *args, **kwargs: answer
