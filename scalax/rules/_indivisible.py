"""The decision about a dimension that does not divide by its mesh axes: the policies `on_indivisible`.

A rule has a policy, and the helper has one for bare specs. ``'error'``: an error that names the leaf;
``'replicate'``: mesh axes are dropped from the right until the dimension divides; ``'warn'``: the same, with
a warning. Where several rules placed dimensions of one array, the strictest policy counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from jax.sharding import AxisType, PartitionSpec

from scalax._core.pytree import partition_specs, spec_validation
from scalax.errors import RuleError

OnIndivisible = Literal['error', 'replicate', 'warn']
_STRICTEST_FIRST: tuple[OnIndivisible, ...] = ('error', 'warn', 'replicate')


def checked_policy(value: str) -> OnIndivisible:
    """Returns *value* if it is a policy for dimensions that do not divide, else raises RuleError."""
    for policy in _STRICTEST_FIRST:
        if value == policy:
            return policy
    raise RuleError(f"on_indivisible is 'error', 'replicate' or 'warn', got {value!r}")


def apply_policy(
    spec: PartitionSpec,
    shape: tuple[int, ...],
    axes: partition_specs.MeshAxes,
    policies: Iterable[OnIndivisible],
    origin: str,
    pads: bool,
) -> tuple[PartitionSpec, list[spec_validation.Fault], list[str]]:
    """What a policy makes of a spec that has no other faults.

    Args:
        spec: the spec that was decided.
        shape: the shape of the array.
        axes: the axes of the mesh.
        policies: those of the rules that placed dimensions; the strictest counts.
        origin: who decided, for warnings.
        pads: whether the compiler pads, as it does for values inside of a compiled function.

    Returns:
        The spec to use; what is wrong with it; and what to warn about.
    """
    uneven = spec_validation.indivisible_dims(spec, shape, axes)
    if not uneven:
        return spec, [], []
    policy = min(policies, key=_STRICTEST_FIRST.index)
    faults = [spec_validation.divisibility_fault(dim, names, shape, axes) for dim, names in uneven]
    in_types = any(axes.types[name] is AxisType.Explicit for _, names in uneven for name in names)
    if policy == 'error' and (in_types or not pads):
        return spec, faults, []
    said = f'{partition_specs.text(spec)} from {origin}: {"; ".join(fault.detail for fault in faults)}'
    if policy == 'error':
        return (
            spec,
            [],
            [f'{said}; XLA pads it, and computes some operations wrong there (jnp.nonzero)'],
        )
    reduced = spec_validation.drop_indivisible(spec, shape, axes)
    return reduced, [], [f'{said}; {partition_specs.text(reduced)} is used'] if policy == 'warn' else []
