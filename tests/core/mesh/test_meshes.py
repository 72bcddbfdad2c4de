"""Meshes from dimensions, names and devices, on physical topologies and several slices."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from scalax._core.mesh import meshes
from scalax.errors import MeshError
from scalax.sharding import MeshShardingHelper


@dataclasses.dataclass(frozen=True)
class Tpu:
    """The attributes by which JAX orders TPU devices, as its own tests mock them."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    process_index: int = 0
    platform: str = 'tpu'
    device_kind: str = 'TPU v4'


@dataclasses.dataclass(frozen=True)
class HostDevice:
    """A device of a platform without slices, in one of several processes, with gaps in the ids."""

    id: int
    process_index: int
    platform: str = 'cpu'
    device_kind: str = 'cpu'


def tpu_slice(x, y, z, *, slice_index=0, kind='TPU v4', cores=1):
    """The devices of an x * y * z slice in the order of jax.devices(): x varies fastest."""
    positions = [
        (i, j, k, core) for k in range(z) for j in range(y) for i in range(x) for core in range(cores)
    ]
    first = slice_index * len(positions)
    return [
        Tpu(first + n, (i, j, k), core, slice_index, device_kind=kind)
        for n, (i, j, k, core) in enumerate(positions)
    ]


def hosts(processes, devices):
    return [HostDevice(2048 * p + i, p) for p in range(processes) for i in range(devices)]


def moving_coordinates(devices):
    """The coordinates that differ among *devices*."""
    coords = np.array([device.coords for device in devices.flat])
    return [axis for axis in range(3) if len(set(coords[:, axis])) > 1]


# --- Dimensions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('dims', 'count', 'resolved'),
    [
        ((-1,), 8, (8,)),
        ((8,), 8, (8,)),
        ((-1, 2), 8, (4, 2)),
        ((2, -1, 2), 8, (2, 2, 2)),
        ((8, -1), 8, (8, 1)),
        ((-1, 1, 1), 6, (6, 1, 1)),
        ((-1, 7), 7, (1, 7)),
        ((3,), 3, (3,)),
        ((), 1, ()),
        ((np.int64(2), -1), 4, (2, 2)),
    ],
)
def test_dimensions(dims, count, resolved):
    names = [f'axis{i}' for i in range(len(dims))]
    helper = MeshShardingHelper(dims, names, devices=jax.devices()[:count])
    assert helper.axis_dims == resolved == tuple(helper.mesh.shape.values())
    assert helper.axis_names == tuple(names) == helper.mesh.axis_names
    assert all(type(dim) is int for dim in helper.axis_dims)
    # On a platform without topology the devices keep their order.
    assert list(helper.mesh.devices.flat) == jax.devices()[:count]


def test_devices_keep_the_order_of_the_user():
    devices = [jax.devices()[i] for i in (5, 1, 6, 2)]
    for argument in (devices, tuple(devices), np.array(devices).reshape(2, 2)):
        mesh = MeshShardingHelper([2, -1], ['a', 'b'], devices=argument).mesh
        assert list(mesh.devices.flat) == devices


@pytest.mark.parametrize(
    ('axis_types', 'expected'),
    [
        (None, (AxisType.Auto, AxisType.Auto)),
        (AxisType.Explicit, (AxisType.Explicit, AxisType.Explicit)),
        ((AxisType.Auto, AxisType.Explicit), (AxisType.Auto, AxisType.Explicit)),
        ([AxisType.Explicit, AxisType.Auto], (AxisType.Explicit, AxisType.Auto)),
    ],
)
def test_axis_types(axis_types, expected):
    helper = MeshShardingHelper([4, 2], ['a', 'b'], axis_types=axis_types)
    assert helper.axis_types == helper.mesh.axis_types == expected


@pytest.mark.parametrize('types', list(itertools.product([AxisType.Auto, AxisType.Explicit], repeat=2)))
def test_from_mesh(types):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('a', 'b'), axis_types=types)
    helper = MeshShardingHelper.from_mesh(mesh)
    assert helper.mesh is mesh
    assert (helper.axis_dims, helper.axis_names, helper.axis_types) == ((4, 2), ('a', 'b'), types)
    abstract = MeshShardingHelper.from_mesh(AbstractMesh((4, 2), ('a', 'b'), axis_types=types))
    assert (abstract.axis_dims, abstract.axis_types) == ((4, 2), types)


# --- Physical topology ----------------------------------------------------------------------------


def test_each_mesh_axis_takes_entire_physical_axes():
    mesh = meshes.build_mesh((4, 16), ('data', 'tp'), devices=tpu_slice(4, 4, 4))
    assert mesh.devices.shape == (4, 16)
    assert len({device.id for device in mesh.devices.flat}) == 64
    for row in mesh.devices:
        assert len(moving_coordinates(row)) == 2
    for column in mesh.devices.T:
        assert len(moving_coordinates(column)) == 1


def test_a_three_dimensional_mesh_is_the_slice_itself():
    mesh = meshes.build_mesh((4, -1, 2), ('a', 'b', 'c'), devices=tpu_slice(2, 4, 4))
    for axis in range(3):
        for line in np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.devices.shape[axis]):
            assert len(moving_coordinates(line)) == 1


@pytest.mark.parametrize(('kind', 'shape', 'cores'), [('TPU v3', (2, 2, 1), 2), ('TPU v5p', (2, 2, 1), 2)])
def test_chips_with_two_cores(kind, shape, cores):
    devices = tpu_slice(*shape, kind=kind, cores=cores)
    mesh = meshes.build_mesh((4, 2), ('data', 'tp'), devices=devices)
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


def test_splitting_physical_axes_must_be_allowed(snapshot):
    devices = tpu_slice(4, 4, 4)
    with pytest.raises(MeshError) as error:
        meshes.build_mesh((8, 8), ('data', 'tp'), devices=devices)
    message, _, reason = str(error.value).partition(' JAX reports: ')
    snapshot(message)
    assert reason
    mesh = meshes.build_mesh((8, 8), ('data', 'tp'), devices=devices, split_physical_axes=True)
    assert mesh.devices.shape == (8, 8)
    assert len(set(mesh.devices.flat)) == 64


def test_a_box_of_a_slice_keeps_its_topology():
    box = [device for device in tpu_slice(4, 4, 4) if device.coords[0] >= 2 and device.coords[2] < 2]
    mesh = meshes.build_mesh((4, 4), ('data', 'tp'), devices=box)
    assert set(mesh.devices.flat) == set(box)
    assert all(len(moving_coordinates(row)) <= 2 for row in mesh.devices)


def test_devices_that_fill_no_box_keep_their_order():
    few = tpu_slice(4, 4, 4)[:3]
    assert list(meshes.build_mesh((3,), ('data',), devices=few).devices) == few


# --- Several slices -------------------------------------------------------------------------------

SLICES = [device for index in range(4) for device in tpu_slice(2, 2, 2, slice_index=index)]


@pytest.mark.parametrize(
    ('dims', 'dcn', 'slices_of'),
    [
        ((32,), (4,), [[0, 1, 2, 3]]),
        ((4, 8), (4, 1), [[0, 1, 2, 3], [0]]),
        ((8, 4), (4, 1), [[0, 1, 2, 3], [0]]),
        ((-1, 8), (2, 2), [[0, 2], [0, 1]]),
        ((4, 8), (2, -1), [[0, 2], [0, 1]]),
        ((2, 2, 8), (2, 2, 1), [[0, 2], [0, 1], [0]]),
    ],
)
def test_slices_are_along_the_axes_of_dcn_axis_dims(dims, dcn, slices_of):
    names = ['a', 'b', 'c'][: len(dims)]
    mesh = meshes.build_mesh(dims, names, dcn_axis_dims=dcn, devices=SLICES, split_physical_axes=True)
    assert len(set(mesh.devices.flat)) == 32
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    for axis, expected in enumerate(slices_of):
        line = slices[tuple(slice(None) if i == axis else 0 for i in range(len(dims)))]
        assert sorted(set(line)) == expected
        assert list(line) == sorted(line)  # one slice after the other


def test_processes_are_the_granules_where_devices_have_no_slice_index():
    mesh = meshes.build_mesh((4, 8), ('data', 'tp'), dcn_axis_dims=(4, 1), devices=hosts(4, 8))
    assert [{device.process_index for device in row} for row in mesh.devices] == [{0}, {1}, {2}, {3}]


def test_granules_are_sorted_independently_of_the_order_of_devices():
    devices = hosts(2, 4)
    first, second = (
        meshes.build_mesh((2, 4), ('data', 'tp'), dcn_axis_dims=(2, 1), devices=ordered)
        for ordered in (devices, devices[4:] + devices[:4])
    )
    assert np.array_equal(first.devices, second.devices)


def test_slices_of_chips_with_two_cores():
    devices = [d for index in (1, 0) for d in tpu_slice(2, 2, 1, kind='TPU v4', cores=2, slice_index=index)]
    mesh = meshes.build_mesh((2, 8), ('data', 'tp'), dcn_axis_dims=(2, 1), devices=devices)
    assert [{device.slice_index for device in row} for row in mesh.devices] == [{0}, {1}]
    assert len(set(mesh.devices.flat)) == 16


@pytest.mark.parametrize(
    ('dims', 'dcn', 'devices'),
    [
        ((4, 8), (3, 1), SLICES),
        ((4, 8), (-1, 3), SLICES),
        ((4, 8), (2, 1), hosts(4, 8)),
        ((2, 16), (4, 1), SLICES),
        ((16, 8), (2, 1), [device for index in range(2) for device in tpu_slice(4, 4, 4, slice_index=index)]),
        ((4, 8), (4,), SLICES),
        ((4, 7), (4, 1), [*SLICES[:7], *SLICES[8:15], *SLICES[16:22], *SLICES[24:]]),
    ],
)
def test_slices_that_do_not_fit(dims, dcn, devices, snapshot):
    with pytest.raises(MeshError) as error:
        meshes.build_mesh(dims, ('a', 'b'), dcn_axis_dims=dcn, devices=devices)
    snapshot(str(error.value).partition(' JAX reports: ')[0])


# --- Dimensions and devices that do not fit ------------------------------------------------------


FITS = ': give one of the dimensions as -1, or some of the devices as devices=...'


@pytest.mark.parametrize(
    ('dims', 'names', 'message'),
    [
        ((4, 4), ('data', 'tp'), f'mesh (data=4, tp=4) needs 16 devices, there are 8{FITS}'),
        ((3,), ('data',), f'mesh (data=3) needs 3 devices, there are 8{FITS}'),
        (
            (-1, 3),
            ('data', 'tp'),
            'mesh (data=-1, tp=3): 8 devices are not divisible by 3, the product of the given dimensions',
        ),
        (
            (2, -1, 16),
            ('a', 'b', 'c'),
            'mesh (a=2, b=-1, c=16): 8 devices are not divisible by 32, the product of the given dimensions',
        ),
        ((), (), f'mesh () needs 1 device, there are 8{FITS}'),
        ((-1, -1), ('data', 'tp'), 'axis dimensions are positive, or -1 once, got (-1, -1)'),
        ((0, 8), ('data', 'tp'), 'axis dimensions are positive, or -1 once, got (0, 8)'),
        ((-2, 4), ('data', 'tp'), 'axis dimensions are positive, or -1 once, got (-2, 4)'),
        (
            (4, 2),
            ('data',),
            "axis_dims (4, 2) and axis_names ('data',) differ in length: every axis has one dimension and "
            'one name',
        ),
        (
            (4, 2),
            ('data', 'data'),
            "axis names must differ, but ('data', 'data') repeats 'data'",
        ),
        ((8,), 'data', "axis_names is a sequence of names, such as ['data', 'model'], got 'data'"),
        (8, ('data',), 'axis_dims is a sequence of integers, such as [4, 2], got 8'),
        (None, ('data',), 'axis_dims is a sequence of integers, such as [4, 2], got None'),
        ((8,), None, "axis_names is a sequence of names, such as ['data', 'model'], got None"),
        ((8.0,), ('data',), 'axis dimensions are integers, got 8.0 in (8.0,)'),
        ((True, 8), ('data', 'tp'), 'axis dimensions are integers, got True in (True, 8)'),
        ((8,), ('',), "axis names are non-empty strings, got ('',)"),
        ((8,), (1,), 'axis names are non-empty strings, got (1,)'),
    ],
)
def test_dimensions_that_do_not_fit(dims, names, message):
    with pytest.raises(MeshError) as error:
        MeshShardingHelper(dims, names)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'devices': []}, 'devices is empty: a mesh needs at least one device'),
        ({'devices': ['d', 'd']}, 'devices contains a device more than once'),
        (
            {'axis_types': 'auto'},
            "axis_types is one jax.sharding.AxisType for all axes or one for each of ('data',), got 'auto'",
        ),
        (
            {'axis_types': (AxisType.Auto, AxisType.Auto)},
            "axis_types is one jax.sharding.AxisType for all axes or one for each of ('data',), "
            'got (Auto, Auto)',
        ),
        ({'dcn_axis_dims': 1}, "dcn_axis_dims has one entry for each of the axes ('data',), got 1"),
        ({'dcn_axis_dims': [1, 1]}, "dcn_axis_dims has one entry for each of the axes ('data',), got (1, 1)"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(MeshError) as error:
        MeshShardingHelper([8 if 'devices' not in options else -1], ['data'], **options)
    assert str(error.value) == message


def test_error_about_one_missing_device_uses_the_singular():
    with pytest.raises(MeshError) as error:
        MeshShardingHelper([2], ['data'], devices=jax.devices()[:1])
    assert str(error.value) == f'mesh (data=2) needs 2 devices, there is 1{FITS}'


def test_from_mesh_takes_meshes_only():
    with pytest.raises(MeshError) as error:
        MeshShardingHelper.from_mesh([4, 2])
    assert str(error.value) == 'from_mesh takes a Mesh or an AbstractMesh, got list'


def test_a_mesh_of_mock_devices_resolves():
    mesh = meshes.build_mesh((4, -1), ('data', 'tp'), devices=tpu_slice(4, 4, 1))
    helper = MeshShardingHelper.from_mesh(mesh)
    sharding = helper.match_sharding_rule(P('data', 'tp'), jax.ShapeDtypeStruct((8, 8), 'float32'))
    assert sharding.shard_shape((8, 8)) == (2, 2)


def test_several_slices_need_slice_indices(snapshot):
    devices = [device for n in range(4) for device in tpu_slice(2, 2, 2, slice_index=n)]
    with snapshot.raises(MeshError):
        meshes.build_mesh((2, 16), ('data', 'tp'), devices=devices)
    split = meshes.build_mesh((2, 16), ('data', 'tp'), devices=devices, split_physical_axes=True)
    assert list(split.devices.flat) == devices


def test_manual_and_empty_meshes_are_rejected():
    message = 'axes of type Manual exist inside shard_map only: use Auto or Explicit'
    manual = AbstractMesh((8,), ('a',), axis_types=(AxisType.Manual,))
    for make in (
        lambda: MeshShardingHelper([8], ['a'], axis_types=AxisType.Manual),
        lambda: MeshShardingHelper.from_mesh(manual),
    ):
        with pytest.raises(MeshError) as error:
            make()
        assert str(error.value) == message
    with pytest.raises(MeshError, match='from_mesh got the empty mesh'):
        MeshShardingHelper.from_mesh(jax.sharding.get_mesh())


def test_devices_of_a_pickled_mesh_that_jax_cannot_open():
    parts = 'gone', np.arange(2), ('data',), (AxisType.Auto,)
    with pytest.raises(MeshError) as raised:
        meshes.unpickled(parts)
    with pytest.raises(RuntimeError) as of_jax:
        jax.devices('gone')
    assert str(raised.value) == (
        "a pickled helper uses 2 'gone' devices, and the devices with ids 0, 1 do not exist here: load it "
        "where JAX has the same devices (on a CPU, jax.config.update('jax_num_cpu_devices', n)), or make a "
        f'helper there. JAX reports: {of_jax.value}'
    )
