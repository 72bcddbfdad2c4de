"""Positions of devices in a torus and the links between them, with fake devices in many meshes."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from scalax._planning.hardware.torus import (
    DevicePosition,
    Route,
    Torus,
    positions_of,
    positions_on_torus,
    route_of,
    torus_of,
)
from scalax._planning.time.collective_time import collective_seconds, link_fraction
from scalax.errors import PlanError
from scalax.plan import HARDWARE, Hardware, TorusSegment

V5E, V5P = HARDWARE['v5e'], HARDWARE['v5p']


@dataclasses.dataclass
class Device:
    """The attributes of a TPU device in JAX."""

    coords: tuple[int, ...]
    core_on_chip: int = 0
    process_index: int = 0


@dataclasses.dataclass
class SliceDevice(Device):
    slice_index: int = 0


@dataclasses.dataclass
class Plain:
    """The attributes of a CPU device in JAX."""

    process_index: int = 0


def chips(*shape, cores=1, slices=1):
    """Returns the devices of slices of this shape, last axis first, as in a mesh over all of them."""
    return [
        SliceDevice(coords, core, slice_index=index)
        for index in range(slices)
        for coords in itertools.product(*map(range, shape))
        for core in range(cores)
    ]


def route(mesh, axes, positions, hardware):
    """Returns the route between the devices of a group along mesh axes; all groups have the same."""
    grid = np.arange(len(positions)).reshape(tuple(mesh.values()))
    group_dims = [i for i, name in enumerate(mesh) if name in axes]
    rest = [i for i in range(grid.ndim) if i not in group_dims]
    torus = torus_of(positions, hardware)
    groups = grid.transpose([*rest, *group_dims]).reshape(-1, math.prod(mesh[axis] for axis in axes))
    [result] = {route_of([positions[i] for i in group], torus, ' x '.join(axes)) for group in groups}
    return result


def ring(axis, length, stride=1):
    return TorusSegment(axis, length, ring=True, stride=stride)


def line(axis, length, stride=1):
    return TorusSegment(axis, length, ring=False, stride=stride)


def test_device_positions():
    assert positions_of([Device([1, 2, 0], 1, 7)]) == (DevicePosition(0, (1, 2, 0), 1),)
    assert positions_of([SliceDevice((1, 2, 0), slice_index=3)]) == (DevicePosition(3, (1, 2, 0)),)
    assert positions_of([Plain(5)]) == (DevicePosition(5),)


# --- Rings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'shape', 'rings'),
    [
        # From https://jax-ml.github.io/scaling-book/tpus, "TPU Networking".
        ('v5p', (4, 4, 4), (True, True, True)),
        ('v5p', (4, 4, 8), (True, True, True)),
        ('v5p', (16, 20, 28), (True, True, True)),
        ('v5p', (2, 2, 1), (False, False, False)),
        ('v5p', (2, 2, 2), (False, False, False)),
        ('v5p', (2, 2, 4), (False, False, False)),
        ('v4', (4, 4, 4), (True, True, True)),
        # MaxText's table of slices, src/maxtext/utils/accelerator_to_spec_map.py.
        ('tpu7x', (4, 4, 4), (True, True, True)),
        ('tpu7x', (12, 16, 24), (True, True, True)),
        ('tpu7x', (2, 4, 4), (False, False, False)),
        ('v5e', (16, 16), (True, True)),
        ('v5e', (8, 16), (False, True)),
        ('v5e', (4, 8, 1), (False, False, False)),
        ('v6e', (4, 4), (False, False)),
    ],
)
def test_which_axes_are_rings(name, shape, rings):
    torus = torus_of(positions_of(chips(*shape)), HARDWARE[name])
    assert (torus.extents, torus.rings, torus.devices_per_chip) == (shape, rings, 1)


def test_hardware_with_unknown_rings(snapshot):
    hardware = dataclasses.replace(HARDWARE['tpu7x'], name='mine', ring_multiple=None)
    torus = torus_of(positions_of(chips(1, 1, 1, cores=2)), hardware)
    assert torus == Torus((1, 1, 1), 2, (False, False, False))
    with snapshot.raises(PlanError):
        torus_of(positions_of(chips(4, 4, 4)), hardware)


def test_a_torus_of_more_axes():
    with pytest.raises(PlanError) as error:
        torus_of(positions_of(chips(4, 4, 4)), V5E)
    assert str(error.value) == "the devices are along 3 axes of a torus (4x4x4), but that of 'v5e' has 2"


# --- Routes ---------------------------------------------------------------------------------------

CUBE = positions_of(chips(4, 4, 4))
LONG = positions_of(chips(4, 16))

# case -> (mesh, axes, positions, hardware, segments)
ROUTES = {
    'one axis each': ({'a': 4, 'b': 4, 'c': 4}, ('b',), CUBE, V5P, (ring(1, 4),)),
    'two axes': ({'a': 16, 'b': 4}, ('a',), CUBE, V5P, (ring(0, 4), ring(1, 4))),
    'all axes': ({'a': 64}, ('a',), CUBE, V5P, (ring(0, 4), ring(1, 4), ring(2, 4))),
    'two mesh axes together': (
        {'a': 16, 'b': 4},
        ('a', 'b'),
        CUBE,
        V5P,
        (ring(0, 4), ring(1, 4), ring(2, 4)),
    ),
    'without wrap-around': ({'a': 4, 'b': 16}, ('a',), LONG, V5E, (line(0, 4),)),
    'with wrap-around': ({'a': 4, 'b': 16}, ('b',), LONG, V5E, (ring(1, 16),)),
    # One torus axis is split into two mesh axes: the inner gets segments, the outer every fourth chip.
    'segments': ({'a': 4, 'b': 4, 'c': 4}, ('c',), LONG, V5E, (line(1, 4),)),
    'interleaved': ({'a': 4, 'b': 4, 'c': 4}, ('b',), LONG, V5E, (ring(1, 4, stride=4),)),
    'both of them': ({'a': 4, 'b': 4, 'c': 4}, ('b', 'c'), LONG, V5E, (ring(1, 16),)),
    'interleaved without wrap-around': (
        {'a': 2, 'b': 4, 'c': 16},
        ('a',),
        positions_of(chips(8, 16)),
        V5E,
        (line(0, 2, stride=4),),
    ),
    'an axis and a segment': ({'a': 8, 'b': 8}, ('b',), CUBE, V5P, (line(1, 2), ring(2, 4))),
    'an axis and an interleaved one': (
        {'a': 8, 'b': 8},
        ('a',),
        CUBE,
        V5P,
        (ring(0, 4), ring(1, 2, stride=2)),
    ),
    'an axis of one': ({'a': 1, 'b': 64}, ('a',), CUBE, V5P, ()),
}


@pytest.mark.parametrize(('mesh', 'axes', 'positions', 'hardware', 'segments'), ROUTES.values(), ids=ROUTES)
def test_routes(mesh, axes, positions, hardware, segments):
    result = route(mesh, axes, positions, hardware)
    devices = math.prod(mesh[axis] for axis in axes)
    assert result == Route(1, devices, devices, segments)


def test_the_order_of_a_mesh_does_not_matter():
    """A mesh need not follow the coordinates: here it goes around squares, and zigzags through them."""
    square = [DevicePosition(0, (x, y)) for x, y in [(0, 0), (1, 0), (1, 1), (0, 1)]]
    assert route({'a': 4}, ('a',), square, V5E).segments == (line(0, 2), line(1, 2))


def test_two_devices_a_chip():
    positions = positions_of(chips(4, 4, 4, cores=2))
    v4 = HARDWARE['v4']
    cores = route({'a': 64, 'b': 2}, ('b',), positions, v4)
    assert cores == Route(1, 2, 1, (), 1)
    # Both devices of a chip send over its links, each for a separate group ...
    assert route({'a': 4, 'b': 32}, ('a',), positions, v4) == Route(
        1, 4, 4, (ring(0, 4),), groups_sharing_links=2
    )
    # ... or for one.
    assert route({'a': 16, 'b': 8}, ('b',), positions, v4) == Route(
        1, 8, 4, (ring(2, 4),), groups_sharing_links=1
    )


def test_slices():
    positions = positions_of(chips(4, 4, slices=3))
    assert route({'a': 3, 'b': 4, 'c': 4}, ('a',), positions, V5E) == Route(3, 1, 1, ())
    assert route({'a': 3, 'b': 4, 'c': 4}, ('a', 'c'), positions, V5E) == Route(3, 4, 4, (line(1, 4),))
    assert route({'a': 12, 'b': 4}, ('a',), positions, V5E) == Route(3, 4, 4, (line(0, 4),))


def test_no_torus():
    switch = Hardware('switch', torus_axes=0, ring_multiple=0)
    positions = positions_of([Plain(process) for process in range(2) for _ in range(4)])
    assert route({'a': 2, 'b': 4}, ('b',), positions, switch) == Route(1, 4, 4, ())
    assert route({'a': 2, 'b': 4}, ('a',), positions, switch) == Route(2, 1, 1, ())


# Chips that do not form an evenly spaced box: (chips, segments of the box around them, groups that share it)
OTHERS = {
    'a corner': ([(0, 0), (0, 1), (1, 0)], (line(0, 2), line(1, 2)), 2),
    'a diagonal': ([(0, 0), (1, 1)], (line(0, 2), line(1, 2)), 2),
    'uneven': ([(0, 0), (1, 0), (4, 0)], (line(0, 5),), 2),
    'two of a row, two of the next': ([(0, 0), (0, 2), (1, 1), (1, 3)], (line(0, 2), line(1, 4)), 2),
    'all along a ring': ([(0, 0), (15, 0), (1, 0)], (ring(0, 16),), 6),
}


@pytest.mark.parametrize(('coords', 'segments', 'sharing'), OTHERS.values(), ids=OTHERS)
def test_other_forms_share_the_box_around_them(coords, segments, sharing):
    result = route_of([DevicePosition(0, at) for at in coords], Torus((16, 4), 1, (True, False)), 'tp')
    assert result == Route(1, len(coords), len(coords), segments, sharing)


def test_different_chips():
    group = [DevicePosition(0, (0, 0), 0), DevicePosition(0, (0, 0), 1), DevicePosition(0, (1, 0), 0)]
    with pytest.raises(PlanError) as error:
        route_of(group, Torus((16, 4), 2, (True, False)), 'tp')
    assert str(error.value) == (
        'some chips have one device along tp, others 2: the time of their collectives is unknown'
    )


def test_different_slices():
    group = [DevicePosition(0, (0, 0)), DevicePosition(0, (1, 0)), DevicePosition(1, (0, 0))]
    with pytest.raises(PlanError) as error:
        route_of(group, Torus((16, 4), 1, (True, False)), 'tp')
    assert (
        str(error.value)
        == 'the devices along tp have different positions in one slice or node than in another'
    )


# --- Absent devices -------------------------------------------------------------------------------


def test_device_positions_on_a_torus():
    mesh = {'data': 2, 'fsdp': 16, 'tp': 4}
    positions = positions_on_torus({'tp': 4, 'fsdp': (4, 4)}, mesh, V5P)
    assert len(set(positions)) == 128
    assert route(mesh, ('fsdp',), positions, V5P).segments == (ring(1, 4), ring(2, 4))
    assert route(mesh, ('tp',), positions, V5P).segments == (ring(0, 4),)
    assert route(mesh, ('data',), positions, V5P) == Route(2, 1, 1, ())


@pytest.mark.parametrize(
    ('torus', 'message'),
    [
        ({'fdsp': 4}, "torus= names 'fdsp', which is not an axis of the mesh (did you mean 'fsdp'?)"),
        ({'fsdp': (4, 2)}, "torus={'fsdp': (4, 2)} has 8 chips, but the mesh axis 'fsdp' has 16"),
        ({'fsdp': (2, 8), 'tp': 4}, "torus= uses 3 axes, but the torus of 'v5e' has 2"),
    ],
)
def test_torus_that_does_not_fit(torus, message):
    with pytest.raises(PlanError) as error:
        positions_on_torus(torus, {'fsdp': 16, 'tp': 4}, V5E)
    assert str(error.value) == message


# --- Times that are not in the book (see test_roofline) --------------------------------------------

V = 1e9  # bytes
W = 4.5e10  # v5e, one direction


def seconds(kind, *segments, chips=None, array_bytes=V, sharing=1, hardware=V5E):
    size = chips or math.prod(item.length for item in segments)
    return collective_seconds(kind, array_bytes, Route(1, size, size, segments, sharing), hardware, 1).ici


TIMES = {
    'ring': (('all-gather', ring(0, 16)), V / (2 * W)),
    'reduce-scatter': (('reduce-scatter', ring(0, 16)), V / (2 * W)),
    'all-reduce': (('all-reduce', ring(0, 16)), 2 * V / (2 * W)),
    'all-to-all': (('all-to-all', ring(0, 16)), V / (2 * W) / 4),
    'ragged all-to-all': (('ragged-all-to-all', ring(0, 16)), V / (2 * W) / 4),
    'permute': (('collective-permute', ring(0, 16)), V / 16 / W),
    'broadcast': (('collective-broadcast', ring(0, 16)), V / (2 * W)),
    'line': (('all-gather', line(0, 4)), 3 * (V / 4) / W),
    'line, all-reduce': (('all-reduce', line(0, 4)), 2 * 3 * (V / 4) / W),
    'line, all-to-all': (('all-to-all', line(0, 4)), V / 4 / W),
    'two rings': (('all-gather', ring(0, 16), ring(1, 16)), V / (4 * W)),
    # Half of the chips exchange a quarter of V with the others, over two links in each of 16 rings.
    'two rings, all-to-all': (('all-to-all', ring(0, 16), ring(1, 16)), V / 4 / (2 * 16 * W)),
    'two lines': (('all-gather', line(0, 4), line(1, 2)), V * 7 / 8 / (2 * W)),
    'a ring and a line': (('all-gather', ring(0, 16), line(1, 2)), V / (3 * W)),
    # Four groups share every link.
    'interleaved': (('all-gather', ring(0, 4, stride=4)), 4 * V / (2 * W)),
    'interleaved, permute': (('collective-permute', ring(0, 4, stride=4)), 4 * (V / 4) / W),
    'interleaved, all-to-all': (('all-to-all', ring(0, 4, stride=4)), 4 * V / (2 * W) / 4),
}


@pytest.mark.parametrize(('call', 'expected'), TIMES.values(), ids=TIMES)
def test_times(call, expected):
    assert seconds(*call) == pytest.approx(expected)
    assert seconds(*call, sharing=2) == pytest.approx(2 * expected)


@pytest.mark.parametrize(
    ('kind', 'segments', 'hops'),
    [
        ('all-gather', (ring(0, 16),), 8),
        ('all-reduce', (ring(0, 16),), 16),
        ('all-gather', (line(0, 4),), 3),
        ('all-gather', (ring(0, 16), ring(1, 4, stride=4)), 16),
        ('all-to-all', (line(0, 4), line(1, 2)), 4),
        ('collective-permute', (ring(0, 16),), 1),
    ],
)
def test_the_least_time(kind, segments, hops):
    assert seconds(kind, *segments, array_bytes=8) == pytest.approx(hops * 1e-6)


@pytest.mark.parametrize(
    ('kind', 'segments', 'part'),
    [
        ('collective-permute', (ring(0, 4),), 1 / 2),
        ('collective-permute', (), 1),
        ('all-gather', (ring(0, 4),), 1),
    ],
)
def test_a_permute_uses_a_part_of_the_links(kind, segments, part):
    assert link_fraction(kind, Route(1, 16, 16, segments)) == part


def test_times_inside_a_chip():
    v4 = HARDWARE['v4']
    times = collective_seconds('all-reduce', V, Route(1, 2, 1, ()), v4, 2)
    assert times == (0, 0, 2 * V / 1.2e12)
    # The two devices of a tpu7x chip have a separate link: half of the array comes from the other device.
    times = collective_seconds('all-reduce', V, Route(1, 2, 1, ()), HARDWARE['tpu7x'], 2)
    assert times == (0, 0, pytest.approx(2 * V / 2 / 5.4e11))


def test_times_between_slices():
    share = 2.5e10 / 8  # per v5e chip
    alone = Route(4, 1, 1, ())
    assert collective_seconds('all-reduce', V, alone, V5E, 1).dcn == pytest.approx(2 * V * 3 / 4 / share)
    assert collective_seconds('all-gather', V, alone, V5E, 1).dcn == pytest.approx(V * 3 / 4 / share)
    assert collective_seconds('all-to-all', V, alone, V5E, 1).dcn == pytest.approx(V / 4 * 3 / 4 / share)
    assert collective_seconds('collective-permute', V, alone, V5E, 1).dcn == pytest.approx(V / 4 / share)
    # In a permute, possibly only the chips at the edge of a slice send.
    edge = collective_seconds('collective-permute', V, alone, V5E, 1, senders=1)
    assert edge.dcn == pytest.approx(V / 4 / 2.5e10)
    # Four chips of each slice receive a share of the data each, and exchange it.
    together = collective_seconds('all-gather', V, Route(4, 4, 4, (line(0, 4),)), V5E, 1)
    assert together.dcn == pytest.approx(V * 3 / 4 / (4 * share))
    assert together.ici == pytest.approx(3 * (V / 4) / W)
    # With two devices per chip, each has half of the chip's share.
    assert collective_seconds('all-gather', V, alone, V5E, 2).dcn == pytest.approx(2 * V * 3 / 4 / share)


def test_times_through_a_switch():
    switch = Hardware('switch', torus_axes=0, ici_bytes_per_second=4e11)
    route = Route(1, 8, 8, ())
    assert collective_seconds('all-gather', V, route, switch, 1).ici == pytest.approx(V * 7 / 8 / 4e11)
    assert collective_seconds('all-reduce', V, route, switch, 1).ici == pytest.approx(2 * V * 7 / 8 / 4e11)
    assert collective_seconds('all-to-all', V, route, switch, 1).ici == pytest.approx(V / 8 * 7 / 8 / 4e11)
    assert collective_seconds('collective-permute', V, route, switch, 1).ici == pytest.approx(V / 8 / 4e11)
    assert collective_seconds('all-gather', 8, route, switch, 1).ici == pytest.approx(1e-6)


@pytest.mark.parametrize(
    'route',
    [
        Route(1, 4, 4, (ring(0, 4),)),
        Route(2, 1, 1, ()),
        Route(1, 2, 1, ()),
    ],
    ids=['links', 'slices', 'chip'],
)
def test_times_without_specs(route, snapshot):
    with snapshot.raises(PlanError):
        collective_seconds('all-gather', V, route, Hardware('mine'), 1)
