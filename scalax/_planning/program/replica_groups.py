"""Replica groups of collectives: parsed from each of their notations, and matched against mesh axes.

Groups are an integer array with one row a group. The numbers are positions in the order of the program's
devices, which is that of ``mesh.devices.flat``. The notations:

- ``{{0,1},{2,3}}``: listed; ``{}`` is one group of all;
- ``[2,4]<=[4,2]T(1,0)``: two rows of four, of ``arange(8).reshape(4, 2).transpose(1, 0)``;
- ``mesh['a'=4,'b'=2] {'a'}``: along axes of a mesh. Its devices may be in another order
  (``mesh[...], device_ids=([4,2]T(1,0)) {'a'}``), and an axis may be a part of one (``'a':(2)2``).

The program of several TPU slices is that of one slice; its numbers are positions in a slice. Between slices
devices are named by their ids: ``{{100000,200000},...}``, in pairs ``{{100000->200000},...}``, or
``"{1,2}x{0:7}"``, the devices at the same position of some slices.
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
_IDS_OF_A_SLICE = 100_000
_WRITTEN = re.compile(
    r'(?:^|[ ,])replica_groups=('
    r"mesh\[(?:'[^']*'|[^\]'])*\](?:, device_ids=\([^ ]*\))? \{(?:'[^']*'|[^}'])*\}"
    r'|\[[^\]]*\]<=\[[^\]]*\](?:T\([^)]*\))?'
    r'|\{(?:\{[^}]*\},? ?)*\}'
    r'|[^ ]*)'
)


def written_groups(attributes: str) -> str | None:
    """The text of the groups among the attributes of an instruction; None if there is none."""
    found = _WRITTEN.search(attributes)
    return found[1] if found else None


def replica_groups(text: str, devices: int) -> Groups:
    """The groups of a collective over *devices* devices.

    Args:
        text: the attribute ``replica_groups``.
        devices: how many devices the program runs on.

    Raises:
        PlanError: the notation is unknown, or the groups have different sizes.

    Example:
        >>> replica_groups('[2,4]<=[4,2]T(1,0)', 8).tolist()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
        >>> replica_groups("mesh['a'=4,'b'=2] {'a'}", 8).tolist()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    if found := _LISTED.match(text):
        rows = [integers(row) for row in re.findall(r'\{([^{}]*)\}', found[1] or '')]
        rows = [row for row in rows if row] or [list(range(devices))]
        if len({len(row) for row in rows}) > 1:
            raise PlanError(f'the groups of a collective have different sizes: {text}')
        return np.array(rows, np.int64)
    if found := _IOTA.match(text):
        shape, size = integers(found[1]), integers(found[2])
        order = integers(found[3] or '') or [*range(len(size))]
        if len(shape) == 2 and math.prod(shape) == math.prod(size) and sorted(order) == [*range(len(size))]:
            return _order(size, found[3]).reshape(shape)
    if found := _MESH.match(text):
        # KeyError: no such axis in the mesh. ValueError: sizes that do not divide.
        with contextlib.suppress(KeyError, ValueError):
            return _along_axes(found[1], found[2], found[3])
    raise PlanError(f'the groups of a collective are written in an unknown notation: {text}')


def _along_axes(sizes: str, order: str | None, named: str) -> Groups:
    """The groups along *named* axes of a mesh, or along parts of them."""
    mesh = {name: int(size) for name, size, _, _ in _AXIS.findall(sizes)}
    ids = position = np.arange(math.prod(mesh.values()))
    if order is not None:
        found = _ORDER.match(order)
        ids = np.array(integers(order)) if found is None else _order(integers(found[1]), found[2])
    # A position is the sum over axes of index times stride. The devices of a group agree in the rest of that
    # sum, without the named axes.
    sizes_of_axes = list(mesh.values())
    strides = {name: math.prod(sizes_of_axes[number + 1 :]) for number, name in enumerate(mesh)}
    rest, member, count = position, np.zeros_like(position), 1
    for name, _, before, part in _AXIS.findall(named):
        size = int(part or mesh[name])
        after, remainder = divmod(mesh[name], int(before or 1) * size)
        if remainder:
            raise ValueError('the part of an axis does not divide it')
        step = strides[name] * after
        index = position // step % size
        rest, member, count = rest - index * step, member * size + index, count * size
    return ids.reshape(position.size)[np.lexsort((member, rest))].reshape(np.unique(rest).size, count)


def source_target_pairs(text: str) -> npt.NDArray[np.int64]:
    """The pairs (from, to) of a permutation, one a row; there may be none.

    Raises:
        PlanError: the text is not a list of pairs.
    """
    if not _PAIRS.match(text):
        raise PlanError(f'the pairs of a collective-permute are written in an unknown notation: {text}')
    return np.array(integers(text), np.int64).reshape(-1, 2)


def groups_between_slices(text: str, ids: Sequence[int]) -> Groups:
    """The groups of a transfer between slices.

    Args:
        text: the attribute ``_xla_megascale_target``.
        ids: the ids of the devices of the mesh, in the order of the mesh.

    Raises:
        PlanError: the notation is unknown, or names other devices.

    Example:
        >>> groups_between_slices('"{1,2}x{0:1}"', [100000, 100001, 200000, 200001]).tolist()
        [[0, 2], [1, 3]]
    """
    if found := _SLICES.match(text):
        slices = [
            [place for place, number in enumerate(ids) if number // _IDS_OF_A_SLICE == wanted]
            for wanted in integers(found[1])
        ]
        # The range is that of the positions in a slice, of which all take part.
        if {len(places) for places in slices} == {int(found[2] or 0) + 1}:
            return np.array(slices, np.int64).T
    if found := _DEVICES.match(text):
        places = {number: place for place, number in enumerate(ids)}
        rows = [integers(row) for row in re.findall(r'\{([^{}]*)\}', found[1])]
        with contextlib.suppress(KeyError, ValueError):  # another device; groups of different sizes
            return np.array([[places[number] for number in row] for row in rows], np.int64)
    raise PlanError(f'the slices of a transfer are written in an unknown notation: {text[:200]}')


def _order(shape: list[int], transposed: str | None) -> Groups:
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(integers(transposed)) if transposed else ids).reshape(-1)


def axes_of_groups(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest mesh axes along which the members of every group differ.

    A group may hold only some of the devices along these axes.

    Args:
        groups: one row a group, of positions in ``mesh.devices.flat``.
        sizes: mesh axis name -> size.

    Example:
        >>> axes_of_groups(np.array([[0, 2], [1, 3]]), {'data': 2, 'tp': 2})
        ('data',)
    """
    places = np.stack(np.unravel_index(groups, tuple(sizes.values())))
    varies = (places != places[:, :, :1]).any(axis=(1, 2))
    return tuple(name for name, differs in zip(sizes, varies, strict=True) if differs)


def devices_along(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """The number of devices along several mesh axes together."""
    return math.prod(sizes[axis] for axis in axes)
