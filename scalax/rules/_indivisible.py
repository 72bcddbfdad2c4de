"""`on_indivisible`: policies for a dimension that is not divisible by its mesh axes.

A rule has a policy, and the helper has one for bare specs. ``'error'`` raises an error that names the leaf;
``'replicate'`` drops mesh axes from the right until the dimension is divisible; ``'warn'`` does the same,
with a warning. If several rules shard dimensions of one array, the strictest policy applies.
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
    """Returns *value* if it is a policy, and raises RuleError otherwise."""
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
    """Applies the strictest policy to the dimensions of a spec that are not divisible.

    Args:
        spec: the spec, valid otherwise.
        shape: the shape of the array.
        axes: the axes of the mesh.
        policies: the policies of the rules that sharded a dimension.
        origin: the rule, for warnings.
        pads: whether the compiler pads the array, as it does with values inside a compiled function.

    Returns:
        The spec to use, the faults, and the warnings.
    """
    indivisible = spec_validation.indivisible_dims(spec, shape, axes)
    if not indivisible:
        return spec, [], []
    policy = min(policies, key=_STRICTEST_FIRST.index)
    faults = [spec_validation.divisibility_fault(dim, names, shape, axes) for dim, names in indivisible]
    any_explicit = any(axes.types[name] is AxisType.Explicit for _, names in indivisible for name in names)
    if policy == 'error' and (any_explicit or not pads):
        return spec, faults, []
    problem = f'{partition_specs.text(spec)} from {origin}: {"; ".join(fault.detail for fault in faults)}'
    if policy == 'error':
        warning = f'{problem}; XLA pads it, and computes some operations wrong there (jnp.nonzero)'
        return spec, [], [warning]
    reduced = spec_validation.drop_indivisible(spec, shape, axes)
    return reduced, [], [f'{problem}; {partition_specs.text(reduced)} is used'] if policy == 'warn' else []
