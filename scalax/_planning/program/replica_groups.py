"""Replica groups of collectives: parsers of their notations, and the mesh axes that they run along.

Groups are an integer array with one row per group. Its elements are indices into the devices of the program,
in the order of ``mesh.devices.flat``. The notations:

- ``{{0,1},{2,3}}``: a list of groups; ``{}`` is one group of all devices;
- ``[2,4]<=[4,2]T(1,0)``: two groups of four from ``arange(8).reshape(4, 2).transpose(1, 0)``;
- ``mesh['a'=4,'b'=2] {'a'}``: along axes of a mesh. The devices may be permuted
  (``mesh[...], device_ids=([4,2]T(1,0)) {'a'}``), and an axis may be a sub-axis (``'a':(2)2``).

A program for several TPU slices is written for one slice, with indices into its devices. Transfers between
slices name devices by id: as groups ``{{100000,200000},...}``, as pairs ``{{100000->200000},...}``, or as
``"{1,2}x{0:7}"``, which groups the devices at the same position of some slices.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from scalax._planning.program.hlo import integers
from scalax.errors import PlanError

Groups = npt.NDArray[np.int64]

_LISTED = re.compile(r'\{(\{[\d, ]*\}(?:, ?\{[\d, ]*\})*)?\}$')
_PAIRS = re.compile(r'\{(\{\d+, ?\d+\}(?:, ?\{\d+, ?\d+\})*)?\}$')
_IOTA = re.compile(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$')
_SIZE, _PART = r"'[^']*'=\d+", r"'[^']*'(?::\(\d+\)\d+)?"
_MESH = re.compile(
    rf'mesh\[({_SIZE}(?:, ?{_SIZE})*)\](?:, device_ids=\((.*)\))? \{{((?:{_PART}(?:, ?{_PART})*)?)\}}$'
)
_AXIS = re.compile(r"'([^']*)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")
_ORDER = re.compile(r'\[([\d,]+)\](?:T\(([\d,]+)\))?$')
_SLICES = re.compile(r'"\{([\d,]+)\}x\{0(?::(\d+))?\}"$')
_DEVICES = re.compile(r'\{(\{\d+(?:(?:,|->)\d+)*\}(?:,\{\d+(?:(?:,|->)\d+)*\})*)\}$')
_IDS_PER_SLICE = 100_000
_WRITTEN = re.compile(
    r'(?:^|[ ,])replica_groups=('
    r"mesh\[(?:'[^']*'|[^\]'])*\](?:, device_ids=\([^ ]*\))? \{(?:'[^']*'|[^}'])*\}"
    r'|\[[^\]]*\]<=\[[^\]]*\](?:T\([^)]*\))?'
    r'|\{(?:\{[^}]*\},? ?)*\}'
    r'|[^ ]*)'
)


def replica_groups_text(attributes: str) -> str | None:
    """Returns the text of the replica groups in the attributes of an instruction; None without groups."""
    match = _WRITTEN.search(attributes)
    return match[1] if match else None


def replica_groups(text: str, devices: int) -> Groups:
    """Parses the replica groups of a collective.

    Args:
        text: the attribute ``replica_groups``.
        devices: the number of devices that the program runs on.

    Raises:
        PlanError: the notation is unknown, or the groups have different sizes.

    Example:
        >>> replica_groups('[2,4]<=[4,2]T(1,0)', 8).tolist()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
        >>> replica_groups("mesh['a'=4,'b'=2] {'a'}", 8).tolist()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    if match := _LISTED.match(text):
        rows = [integers(row) for row in re.findall(r'\{([^{}]*)\}', match[1] or '')]
        rows = [row for row in rows if row] or [list(range(devices))]
        if len({len(row) for row in rows}) > 1:
            raise PlanError(f'the groups of a collective have different sizes: {text}')
        return np.array(rows, np.int64)
    if match := _IOTA.match(text):
        shape, size = integers(match[1]), integers(match[2])
        order = integers(match[3] or '') or [*range(len(size))]
        if len(shape) == 2 and math.prod(shape) == math.prod(size) and sorted(order) == [*range(len(size))]:
            return _iota(size, match[3]).reshape(shape)
    if match := _MESH.match(text):
        # KeyError: an axis that the mesh lacks. ValueError: sizes that are not divisible.
        with contextlib.suppress(KeyError, ValueError):
            return _along_axes(match[1], match[2], match[3])
    raise PlanError(f'the groups of a collective are written in an unknown notation: {text}')


def _along_axes(sizes: str, order: str | None, axes: str) -> Groups:
    """Returns the groups along mesh axes or sub-axes."""
    mesh = {name: int(size) for name, size, _, _ in _AXIS.findall(sizes)}
    ids = position = np.arange(math.prod(mesh.values()))
    if order is not None:
        match = _ORDER.match(order)
        ids = np.array(integers(order)) if match is None else _iota(integers(match[1]), match[2])
    # A position is the sum over axes of index times stride. The devices of a group have the same offset: that
    # sum without the axes of the groups.
    axis_sizes = list(mesh.values())
    strides = {name: math.prod(axis_sizes[i + 1 :]) for i, name in enumerate(mesh)}
    offset, member, count = position, np.zeros_like(position), 1
    for name, _, outer, sub_axis in _AXIS.findall(axes):
        size = int(sub_axis or mesh[name])
        inner, remainder = divmod(mesh[name], int(outer or 1) * size)
        if remainder:
            raise ValueError('the sub-axis does not divide its axis')
        stride = strides[name] * inner
        index = position // stride % size
        offset, member, count = offset - index * stride, member * size + index, count * size
    return ids.reshape(position.size)[np.lexsort((member, offset))].reshape(np.unique(offset).size, count)


def source_target_pairs(text: str) -> npt.NDArray[np.int64]:
    """Parses the (source, target) pairs of a permutation, one per row; there may be none.

    Raises:
        PlanError: the text is not a list of pairs.
    """
    if not _PAIRS.match(text):
        raise PlanError(f'the pairs of a collective-permute are written in an unknown notation: {text}')
    return np.array(integers(text), np.int64).reshape(-1, 2)


def groups_between_slices(text: str, ids: Sequence[int]) -> Groups:
    """Parses the groups of a transfer between slices.

    Args:
        text: the attribute ``_xla_megascale_target``.
        ids: the ids of the devices of the mesh, in the order of the mesh.

    Raises:
        PlanError: the notation is unknown, or names other devices.

    Example:
        >>> groups_between_slices('"{1,2}x{0:1}"', [100000, 100001, 200000, 200001]).tolist()
        [[0, 2], [1, 3]]
    """
    if match := _SLICES.match(text):
        slices = [
            [index for index, device_id in enumerate(ids) if device_id // _IDS_PER_SLICE == slice_index]
            for slice_index in integers(match[1])
        ]
        # All devices of the slices take part, so the range is that of the positions in a slice.
        if {len(devices) for devices in slices} == {int(match[2] or 0) + 1}:
            return np.array(slices, np.int64).T
    if match := _DEVICES.match(text):
        index_of = {device_id: index for index, device_id in enumerate(ids)}
        rows = [integers(row) for row in re.findall(r'\{([^{}]*)\}', match[1])]
        with contextlib.suppress(KeyError, ValueError):  # an unknown device; groups of different sizes
            return np.array([[index_of[device_id] for device_id in row] for row in rows], np.int64)
    raise PlanError(f'the slices of a transfer are written in an unknown notation: {text[:200]}')


def _iota(shape: list[int], transposed: str | None) -> Groups:
    """Returns ``arange(prod(shape)).reshape(shape)``, transposed and flattened."""
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(integers(transposed)) if transposed else ids).reshape(-1)


def axes_of_groups(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of groups differ.

    A group may contain only some of the devices along these axes.

    Args:
        groups: one row per group, of indices into ``mesh.devices.flat``.
        sizes: mesh axis name -> size.

    Example:
        >>> axes_of_groups(np.array([[0, 2], [1, 3]]), {'data': 2, 'tp': 2})
        ('data',)
    """
    coordinates = np.stack(np.unravel_index(groups, tuple(sizes.values())))
    varies = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    return tuple(name for name, differs in zip(sizes, varies, strict=True) if differs)


def devices_along(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Returns the number of devices along several mesh axes together."""
    return math.prod(sizes[axis] for axis in axes)
