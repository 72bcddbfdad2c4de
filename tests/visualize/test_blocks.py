"""Blocks compared with JAX: on real devices in any order, JAX reports the same devices for each block."""

from __future__ import annotations

import math

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax.visualize import visualize
from scalax.visualize._blocks import Blocks, blocks_of
from tests.support.random_examples import examples

AXES = ('a', 'b', 'c', 'd')


@st.composite
def shardings(draw: st.DrawFn) -> tuple[NamedSharding, tuple[int, ...]]:
    """Draws a sharding over some devices in any order, and a shape that is divisible."""
    count = len(jax.devices())
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        sizes.append(draw(st.integers(1, count // math.prod(sizes))))
    order = draw(st.permutations(jax.devices()))[: math.prod(sizes)]
    names = AXES[: len(sizes)]
    kind = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    mesh = Mesh(np.array(order).reshape(sizes), names, axis_types=(kind,) * len(sizes))
    free = list(draw(st.permutations(names)))
    spec, shape = [], []
    for _ in range(draw(st.integers(0, 4))):
        entry_axes = [free.pop() for _ in range(draw(st.integers(0, len(free))))]
        spec.append(tuple(entry_axes) or None)
        shape.append(draw(st.integers(0, 3)) * math.prod(mesh.shape[name] for name in entry_axes))
    return NamedSharding(mesh, PartitionSpec(*spec)), tuple(shape)


def by_range(blocks: Blocks) -> dict[tuple[tuple[int, int], ...], set[int]]:
    """Returns the devices of each part. Empty parts of a dimension count as one, because they are equal."""
    devices_by_part: dict[tuple[tuple[int, int], ...], set[int]] = {}
    for index, devices in blocks.holders.items():
        part = tuple(
            dimension.ranges[number] for dimension, number in zip(blocks.dimensions, index, strict=True)
        )
        devices_by_part.setdefault(part, set()).update(devices)
    return devices_by_part


def expected(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[tuple[tuple[int, int], ...], set[int]]:
    devices_by_part: dict[tuple[tuple[int, int], ...], set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        part = tuple(
            (part.indices(size)[0], part.indices(size)[1]) for part, size in zip(index, shape, strict=True)
        )
        devices_by_part.setdefault(part, set()).add(device.id)
    return devices_by_part


@pytest.mark.medium
@hypothesis.given(shardings())
@examples(500)
def test_blocks_agree_with_jax(case: tuple[NamedSharding, tuple[int, ...]]) -> None:
    sharding, shape = case
    blocks = blocks_of(sharding, shape)
    assert by_range(blocks) == expected(sharding, shape)
    # Every device is in one block, and the devices of a block are in mesh order.
    order = [device.id for device in sharding.mesh.devices.flat]
    assert blocks.devices == tuple(order)
    assert sorted(device for group in blocks.holders.values() for device in group) == sorted(order)
    for group in blocks.holders.values():
        assert sorted(group, key=order.index) == list(group)


@hypothesis.given(shardings())
@examples(100)
def test_abstract_meshes_give_positions_for_devices(case: tuple[NamedSharding, tuple[int, ...]]) -> None:
    sharding, shape = case
    real = blocks_of(sharding, shape)
    abstract = blocks_of(NamedSharding(sharding.mesh.abstract_mesh, sharding.spec), shape)
    order = [device.id for device in sharding.mesh.devices.flat]
    named = {index: tuple(order[position] for position in group) for index, group in abstract.holders.items()}
    assert named == real.holders
    assert abstract.dimensions == real.dimensions


@hypothesis.given(shardings(), st.integers(60, 120))
@examples(100)
def test_everything_can_be_drawn(case: tuple[NamedSharding, tuple[int, ...]], width: int) -> None:
    sharding, shape = case
    picture = visualize({'w': jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)})
    assert max(map(len, picture.to_text(width).splitlines())) <= width
    assert picture._repr_html_()


@pytest.mark.parametrize('size', range(10))
def test_blocks_that_do_not_divide_follow_the_padding(size: int) -> None:
    mesh = AbstractMesh((4,), ('a',))
    (dimension,) = blocks_of(NamedSharding(mesh, PartitionSpec('a')), (size,)).dimensions
    padded = np.arange(-(-size // 4) * 4).reshape(4, -1)
    kept = [[row for row in part.tolist() if row < size] for part in padded]
    assert [list(range(*bounds)) for bounds in dimension.ranges] == kept


def test_no_device_is_needed_for_a_large_mesh() -> None:
    mesh = AbstractMesh((64, 8, 8), ('data', 'fsdp', 'tp'))
    blocks = blocks_of(NamedSharding(mesh, PartitionSpec('tp', 'data')), (8, 128))
    assert len(blocks.holders) == 512
    assert blocks.at((3, 1)) == tuple(64 + 8 * fsdp + 3 for fsdp in range(8))
    assert blocks.slices((3, 1)) == '[3:4, 2:4]'
