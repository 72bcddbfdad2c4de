"""Topologies without a TPU: the calls of the compiler, and the errors if it is missing or wrong."""

import glob
import importlib.metadata
import importlib.util
import os

import jax
import pytest
from jax.experimental import topologies

from scalax._core.mesh.topologies import NO_TPU_MACHINE, suggest
from scalax.errors import MeshError, MissingDependencyError
from scalax.sharding import MeshShardingHelper

NAMES = list(NO_TPU_MACHINE)


@pytest.fixture
def described(monkeypatch):
    """Pretends that the compiler is installed. The test sets the function that replaces it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, 'find_spec', lambda name: object() if name == 'libtpu' else find(name)
    )
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: '0.0.1')
    monkeypatch.setattr(glob, 'glob', lambda pattern: [])
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def replace(function):
        monkeypatch.setattr(topologies, 'get_topology_desc', function)

    yield replace
    for name in NAMES:
        os.environ.pop(name, None)


class Topology:
    """The result of the compiler: here, the devices of this machine."""

    devices = jax.devices()


def ask():
    return MeshShardingHelper.from_topology('v5e:2x5', [-1], ['x'])


def test_without_the_compiler(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(MissingDependencyError) as raised:
        ask()
    assert str(raised.value) == (
        'TPU topologies need the TPU compiler, which is published for Linux: pip install "jax[tpu]"'
    )


def test_with_a_compiler_of_another_jax(described):
    message = 'INTERNAL: Mismatched PJRT plugin PJRT API version (0.40) and framework PJRT API version 0.90).'

    def fails(**_):
        raise RuntimeError(message)

    described(fails)
    with pytest.raises(MissingDependencyError) as raised:
        ask()
    assert str(raised.value) == (
        f'{message}\nlibtpu 0.0.1 does not work with JAX {jax.__version__}: '
        'pip install "jax[tpu]" installs a matching version'
    )


def test_an_unknown_topology(described, snapshot):
    def fails(**_):
        raise ValueError('no such thing')

    described(fails)
    with snapshot.raises(MeshError):
        ask()


@pytest.mark.parametrize(
    ('topology', 'bounds'),
    [
        ('v5e:1x1', (1, 1, 1)),
        ('v6e:1x2', (1, 2, 1)),
        ('v5e:1x16', None),
        ('v5e:2x2', None),
        ('v5p:1x1x2', None),
    ],
)
def test_fewer_chips_than_a_host_has(described, topology, bounds):
    """Older compilers would assume four chips per host."""
    options_of_call = {}
    described(lambda **options: options_of_call.update(options) or Topology)
    MeshShardingHelper.from_topology(topology, [-1], ['x'], mesh_axis_splitting=True)
    assert options_of_call.get('chips_per_host_bounds') == bounds


@pytest.mark.parametrize(('topology', 'kind'), [('v4:2x2x1', 'megacore'), ('v5p:2x2x1', None)])
def test_two_cores_of_v4_are_one_device(described, topology, kind):
    """As on real machines. For v5p the compiler does so by default, without a name for it."""
    options_of_call = {}
    described(lambda **options: options_of_call.update(options) or Topology)
    MeshShardingHelper.from_topology(topology, [-1], ['x'], mesh_axis_splitting=True)
    assert options_of_call.get('chip_config_name') == kind


@pytest.mark.parametrize('name', ['', None, 4])
def test_a_topology_without_a_name(described, name):
    described(lambda **_: Topology)
    with pytest.raises(MeshError) as raised:
        MeshShardingHelper.from_topology(name, [-1], ['x'])
    assert str(raised.value) == (
        f"a topology has a name, such as 'v5p:4x4x4' or 'h100:4x8', got {name!r}: `python -m scalax "
        'topologies` lists them'
    )


@pytest.mark.parametrize('slices', [0, -1, 2.0, '2', True])
def test_slices_that_cannot_be_counted(described, slices):
    described(lambda **_: Topology)
    with pytest.raises(MeshError) as raised:
        MeshShardingHelper.from_topology('v5e:2x2', [-1], ['x'], num_slices=slices)
    assert str(raised.value) == f'num_slices is a positive integer, got {slices!r}'


@pytest.mark.parametrize('name', ['v5e:0x0', 'v5e:2x0', 'v5p:2x00x2', 'v5e=0x2', 'v5e_0x2'])
def test_a_side_without_chips_is_rejected_before_the_compiler(described, name):
    described(lambda **_: pytest.fail('the compiler divides by zero'))
    with pytest.raises(
        MeshError, match=f'^the TPU compiler does not support the topology {name!r}: a side of 0 chips'
    ):
        MeshShardingHelper.from_topology(name, [-1], ['x'])


@pytest.mark.parametrize(
    ('name', 'slice_'),
    [
        *(('v4-8', 'v4:2x2x1'), ('v5litepod-16', 'v5e:4x4'), ('v5p-128', 'v5p:4x4x4')),
        *(('v6e-256', 'v6e:16x16'), ('v5p:4x4x44', 'v5p:4x4x4')),
    ],
)
def test_suggestions(name, slice_):
    assert suggest(name).startswith(f'did you mean {slice_!r}')


def test_the_compiler_is_quiet_without_a_tpu(described, monkeypatch):
    seen = {}

    def describe(**options):
        seen.update(options, environment={name: os.environ.get(name) for name in NAMES})
        return Topology

    described(describe)
    monkeypatch.setenv('TPU_LOG_DIR', 'mine')
    assert ask().mesh.size == len(jax.devices())
    assert (seen['platform'], seen['topology_name']) == ('tpu', 'v5e:2x5')
    assert seen['environment'] == {**NO_TPU_MACHINE, 'TPU_LOG_DIR': 'mine'}


def test_the_settings_of_a_tpu_machine_are_left_alone(described, monkeypatch):
    described(lambda **_: Topology)
    monkeypatch.setattr(glob, 'glob', lambda pattern: ['/dev/accel0'])
    ask()
    assert not {name for name in NAMES if name in os.environ}
