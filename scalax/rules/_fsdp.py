"""The rule for fully sharded data parallelism (FSDP): shards one dimension of each large array."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from typing import Any

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import entries, entry_axes, spec_axes
from scalax._core.pytree.paths import NamedTree
from scalax._core.pytree.spec_validation import unknown_axis_text
from scalax.errors import RuleError, plural
from scalax.rules._answer import REPLICATED, Answer, AxisSizes, Decision, NoAnswer
from scalax.rules._rule import BuiltinRule


@dataclasses.dataclass(frozen=True, repr=False)
class FSDPShardingRule(BuiltinRule):
    """Shards the largest dimension that is divisible by the FSDP axis; small arrays are replicated.

    The axis size comes from the mesh when the rule is resolved through a helper. Without a mesh it is
    `fsdp_axis_size`. With neither, the dimension with the largest power-of-two divisor is sharded, which
    suits every axis size that is a power of two. Of equal dimensions the first one wins.

    Args:
        fsdp_axis_name: the mesh axis to shard over, or a tuple of axes used together.
        fsdp_axis_size: the number of shards. It must equal the size of the mesh axis, if there is a mesh.
        min_fsdp_size: arrays with fewer elements (of the global shape) are replicated.

    Raises:
        RuleError: a size that is not a positive number, or a name that is not a string.

    Example:
        >>> import numpy as np
        >>> rule = FSDPShardingRule('fsdp', fsdp_axis_size=4, min_fsdp_size=16)
        >>> rule.apply({'w': np.zeros((6, 8)), 'b': np.zeros(8)})
        {'b': P(), 'w': P(None, 'fsdp')}

    Source: Zhao et al., "PyTorch FSDP", VLDB 2023 (arXiv:2304.11277), and Rajbhandari et al.,
    "ZeRO", SC 2020 (arXiv:1910.02054).
    """

    fsdp_axis_name: str | tuple[str, ...] = 'fsdp'
    fsdp_axis_size: int | None = None
    min_fsdp_size: int = 1048576

    def __post_init__(self) -> None:
        if isinstance(self.fsdp_axis_name, list):
            object.__setattr__(self, 'fsdp_axis_name', tuple(self.fsdp_axis_name))
        if not self._axes or not all(isinstance(name, str) for name in self._axes):
            raise RuleError(f'fsdp_axis_name is a mesh axis or a tuple of them, got {self.fsdp_axis_name!r}')
        size = self.fsdp_axis_size
        if size is not None and (not _is_number(size, numbers.Integral) or size < 1):
            raise RuleError(f'fsdp_axis_size is a positive integer or None, got {size!r}')
        if not _is_number(self.min_fsdp_size, numbers.Real):
            raise RuleError(f'min_fsdp_size is a number of elements, got {self.min_fsdp_size!r}')

    @functools.cached_property
    def _axes(self) -> tuple[str, ...]:
        return entry_axes(self.fsdp_axis_name)

    def __repr__(self) -> str:
        size = '' if self.fsdp_axis_size is None else f', fsdp_axis_size={self.fsdp_axis_size}'
        min_size = '' if self.min_fsdp_size == 1048576 else f', min_fsdp_size={self.min_fsdp_size}'
        return f'{type(self).__name__}({self.fsdp_axis_name!r}{size}{min_size})'

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        size = self._axis_size(axis_sizes)  # raises if the mesh does not fit, even if all arrays are small
        answer = functools.partial(self._answer, size=size)
        return list(map(functools.cache(answer), tree.shapes, tree.occupied))

    def _answer(self, shape: tuple[int, ...], occupied: PartitionSpec, size: int | None) -> Answer:
        """Returns the answer about arrays of a shape; no answer if they are too small or not divisible."""
        elements, occupied_entries = math.prod(shape), entries(occupied) if occupied else ()
        if elements < self.min_fsdp_size:
            return self._no_answer(f'{plural(elements, "element")} < min_fsdp_size {self.min_fsdp_size}')
        if occupied_entries and (used := [axis for axis in self._axes if axis in spec_axes(occupied)]):
            return self._no_answer(f'FSDP: {", ".join(used)} in use')
        dim = _largest_divisible(shape, occupied_entries, size)
        if dim is not None:
            spec = PartitionSpec(*[self.fsdp_axis_name if i == dim else None for i in range(len(shape))])
            reason = f'is divisible by {size}' if size else 'has the largest power-of-two divisor'
            return Decision(spec, repr(self), f'dimension {dim} of size {shape[dim]} {reason}')
        if occupied_entries and None not in occupied_entries[: len(shape)]:
            return self._no_answer('FSDP: no dimension is free')
        free = ' free' if any(occupied_entries) else ''
        return self._no_answer(f'no{free} dimension is divisible by {size or "a power of two"}')

    def _no_answer(self, reason: str) -> NoAnswer:
        return NoAnswer(Decision(REPLICATED, repr(self), reason, clauses=((self, 0),)))

    def _axis_size(self, axis_sizes: AxisSizes | None) -> int | None:
        if axis_sizes is None:
            return self.fsdp_axis_size
        for name in self._axes:
            if name not in axis_sizes:
                raise RuleError(f'{self!r}: {unknown_axis_text(name, axis_sizes)}')
        size = math.prod([axis_sizes[name] for name in self._axes])
        if self.fsdp_axis_size not in (None, size):
            raise RuleError(
                f'{self!r}: fsdp_axis_size is {self.fsdp_axis_size}, but the mesh has '
                f'{size} devices along {self.fsdp_axis_name!r}; leave fsdp_axis_size out: '
                'the helper takes it from the mesh'
            )
        return size


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _largest_divisible(shape: tuple[int, ...], occupied: tuple[Any, ...], size: int | None) -> int | None:
    """Returns the first of the largest free dimensions divisible by *size*; None: by a power of two."""
    if size is None:
        scores = [n & -n for n in shape]  # the largest power of two that divides n; 0 for 0
        divisible = [dim for dim, power in enumerate(scores) if power > 1]
    else:
        scores = list(shape)
        divisible = [dim for dim, n in enumerate(shape) if n and n % size == 0]
    free = [dim for dim in divisible if dim >= len(occupied) or occupied[dim] is None]
    return max(free, key=scores.__getitem__, default=None)
