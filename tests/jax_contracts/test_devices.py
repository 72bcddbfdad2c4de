"""Tests that `scalax/_jax/devices` reads the attributes of devices."""

import importlib.util
from typing import Any

import jax
import numpy as np
import pytest

from scalax._core.mesh.topologies import topology_devices
from scalax._jax import devices as of
from tests.support import gpu_compiler
from tests.support.contracts import contract


def test_missing_platforms_give_a_message() -> None:
    with contract(
        'raises a RuntimeError about platforms that it does not have', 'to say which devices it needs'
    ):
        devices, message = of.devices_of('tpu')
        assert not devices and 'tpu' in message
        assert of.devices_of('cpu') == (jax.devices(), '')


def test_cpu_devices_have_no_coords() -> None:
    with contract('gives simulated devices no place, and no slice or the first', 'to tell hosts apart'):
        for device in jax.devices():
            assert of.slice_of(device) in (None, 0)
            assert (of.coords_of(device), of.core_of(device)) == ((), 0)


@pytest.fixture(scope='module')
def slices() -> Any:
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('the TPU compiler is not installed')
    return topology_devices('v5e:2x4', 2)


def test_tpu_devices_have_slices_and_coords(slices: Any) -> None:
    with contract('says of TPU devices in which slice and where in the torus they are', 'to lay meshes out'):
        assert {of.slice_of(device) for device in slices} == {0, 1}
        assert {of.coords_of(device) for device in slices} == {(x, y, 0) for x in range(2) for y in range(4)}
        assert {of.core_of(device) for device in slices} == {0}


@gpu_compiler.needed
def test_gpus_have_nvlink_domains() -> None:
    with contract('says of GPUs in which NVLink domain they are, first of their coords', 'to lay meshes out'):
        domains = [
            (of.slice_of(device), of.coords_of(device)) for device in topology_devices('gb200:2x3x4', 1)
        ]
        assert domains == [(i // 12, ()) for i in range(24)]


def test_devices_that_fill_no_box_are_used_in_their_order(slices: Any) -> None:
    first_slice = [device for device in slices if of.slice_of(device) == 0]
    square = topology_devices('v5e:4x4', 1)
    with contract('asserts that devices fill a box, and refuses parts of axes', 'to lay meshes out'):
        assert {*of.mesh_order((2, 4), first_slice, False).flat} == {*first_slice}
        assert of.mesh_order((3,), first_slice[:3], False).tolist() == first_slice[:3]
        with pytest.raises(NotImplementedError):
            of.mesh_order((8, 2), square, False)
        assert of.mesh_order((8, 2), square, True).shape == (8, 2)
    order = of.mesh_order((2, 4), jax.devices(), False)
    assert isinstance(order, np.ndarray)
