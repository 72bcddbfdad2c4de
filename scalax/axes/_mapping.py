"""The active mapping and mesh, and the patterns that name dimensions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from scalax._core.context import active_helper, constraints
from scalax.errors import MeshError, RuleError, checked_flag
from scalax.rules import LogicalAxisShardingRule
from scalax.rules._einops_pattern import Pattern, parse

Size = int | np.integer
Entry = str | Sequence[str] | None
ResourceMapping = Mapping[str, Entry]
"""Logical axis name -> a mesh axis, several of them, or None, as a dict; haliax's name for it."""

AxisMapping = ResourceMapping | Sequence[tuple[str, Entry]] | LogicalAxisShardingRule
"""Logical axis name -> a mesh axis, several of them, or None: a dict, pairs, or a rule."""


@contextlib.contextmanager
def axis_mapping(mapping: AxisMapping, merge: bool = False, **names: Entry) -> Iterator[None]:
    """Context in which a mapping of logical axes to mesh axes is active, in this thread.

    Args:
        mapping: logical axis name -> mesh axis, a tuple of them, or None. Dimensions of other names are not
            sharded. With a `LogicalAxisShardingRule`, its `axis_names` and `strict` apply too.
        merge: add to the mapping that is active outside, instead of replacing it. For a name that both have,
            the *inner* mapping takes precedence. (In haliax the outer one does.)
        **names: more names by keyword: logical axis name = mesh axis. They override *mapping*.

    Raises:
        RuleError: a mapping of another form.

    Example:
        >>> from scalax.axes import physical_axis_name
        >>> with axis_mapping({'batch': 'data', 'mlp': 'tp'}):
        ...     with axis_mapping({'mlp': None, 'embed': 'fsdp'}, merge=True):
        ...         [physical_axis_name(name) for name in ('batch', 'mlp', 'embed')]
        ['data', None, 'fsdp']
        >>> with axis_mapping({'batch': 'data'}, mlp='tp'):
        ...     physical_axis_name('mlp')
        'tp'
    """
    checked_flag('merge', merge)
    inner, outer = as_rule(mapping), active_helper.current_mapping()
    if names:
        inner = merge_mappings(dataclasses.replace(as_rule(names), strict=inner.strict), inner)
    if merge and outer is not None:
        inner = merge_mappings(inner, outer)
    with active_helper.activate_mapping(inner):
        yield


def as_rule(mapping: AxisMapping) -> LogicalAxisShardingRule:
    """Converts a mapping to a rule. Dimensions with other names, or without names, are not sharded."""
    if isinstance(mapping, LogicalAxisShardingRule):
        return mapping
    return LogicalAxisShardingRule(mapping, strict=False)


def merge_mappings(inner: LogicalAxisShardingRule, outer: LogicalAxisShardingRule) -> LogicalAxisShardingRule:
    """Returns the pairs of *inner*, and the pairs of *outer* with other names."""
    names = {name for name, _ in inner.axis_mapping}
    return dataclasses.replace(
        inner,
        axis_mapping=(*inner.axis_mapping, *(pair for pair in outer.axis_mapping if pair[0] not in names)),
        axis_names=(*inner.axis_names, *outer.axis_names),
        strict=inner.strict and outer.strict,
    )


def active_mapping(mapping: AxisMapping | None) -> LogicalAxisShardingRule | None:
    """Returns *mapping* as a rule, or the active mapping if it is None."""
    return active_helper.current_mapping() if mapping is None else as_rule(mapping)


def active_mesh(mesh: Any) -> Mesh | AbstractMesh | None:
    """Returns *mesh*, or else the mesh of the active helper, or that of ``jax.set_mesh``.

    Returns None without any mesh.

    Raises:
        MeshError: *mesh* is not a mesh or a helper.
    """
    if mesh is not None:
        mesh = getattr(mesh, 'mesh', mesh)  # a helper's mesh
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise MeshError(f'mesh is a Mesh, an AbstractMesh or a MeshShardingHelper, got {mesh!r}')
        return mesh
    context = active_helper.current()
    if context is not None:
        return context.helper.mesh
    ambient = constraints.ambient_mesh()
    return None if ambient.empty else ambient


def required_mesh(mesh: Any, function: str) -> Mesh | AbstractMesh:
    """Returns the active mesh (see `active_mesh`); raises MeshError for *function* if there is none."""
    result = active_mesh(mesh)
    if result is None:
        raise MeshError(
            f'{function} needs a mesh, and none is active: call it inside sjit or '
            '`with helper.get_context():`, or pass mesh=helper.mesh'
        )
    return result


def dimensions_of(axes: Any) -> tuple[Pattern, str]:
    """Returns the named dimensions as a pattern, and as the text that messages show.

    A string is a pattern. The name of a haliax axis, and a key of a dict of names and sizes, name one
    dimension and may be any text.

    Raises:
        RuleError: *axes* is neither a pattern, nor haliax axes, nor a sequence of these, nor such a dict.
    """
    if isinstance(axes, str):
        return parse(axes), axes
    if is_axis(axes):
        return Pattern(((axes.name,),)), axes.name
    if is_shape_dict(axes):
        return Pattern(tuple((name,) for name in axes)), ' '.join(axes)
    if not isinstance(axes, Sequence) or not all(isinstance(axis, str) or is_axis(axis) for axis in axes):
        raise RuleError(
            "dimensions are named by a string such as 'batch embed', by haliax axes, by a sequence of these, "
            f'or by a dict of names and sizes, got {axes!r}'
        )
    if not any(map(is_axis, axes)):
        return dimensions_of(' '.join(axes))
    parts = [dimensions_of(axis) for axis in axes]
    if any(pattern.ellipsis is not None for pattern, _ in parts):
        raise RuleError(f"'...' and haliax axes cannot be combined, got {axes!r}")
    dimensions = tuple(dimension for pattern, _ in parts for dimension in pattern.dimensions)
    return Pattern(dimensions), ' '.join(text for _, text in parts)


def is_shape_dict(value: Any) -> bool:
    """Whether a value is a dict of dimension names and sizes, which may be None as in haliax."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(size, Size | None) for name, size in value.items()
    )


def is_axis(value: Any) -> bool:
    """Whether a value is a haliax Axis; duck-typed, because haliax need not be installed."""
    return isinstance(getattr(value, 'name', None), str) and isinstance(getattr(value, 'size', None), Size)
