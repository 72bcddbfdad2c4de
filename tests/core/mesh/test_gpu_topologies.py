"""Topologies of GPUs: their names, the calls of the compiler, and error messages."""

import importlib.metadata
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from scalax._core.mesh import gpu_topologies
from scalax._core.mesh.gpu_targets import TARGETS, target_config
from scalax._core.mesh.gpu_topologies import (
    GPU_KINDS,
    GPUTopology,
    gpu_topology,
    is_gpu_topology,
    plugin_fault,
)
from scalax._planning.hardware.torus import positions_of
from scalax.errors import MeshError, MissingDependencyError
from scalax.plan import HARDWARE
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import gpu_compiler


def helper_of(topology, dims=(-1,), names=('x',), **options):
    return MeshShardingHelper.from_topology(topology, list(dims), list(names), **options)


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('topology', 'slices', 'expected'),
    [
        ('h100:8', 1, GPUTopology('h100', 1, 1, 8)),
        ('h100:8', 16, GPUTopology('h100', 16, 1, 8)),
        ('h200:4x8', 1, GPUTopology('h200', 4, 1, 8)),
        ('h200:4x8', 4, GPUTopology('h200', 4, 1, 8)),
        ('h200:4x1x8', 1, GPUTopology('h200', 4, 1, 8)),
        ('h100-nvl:4x2', 1, GPUTopology('h100-nvl', 4, 1, 2)),
        ('gh200:8x4', 1, GPUTopology('gh200', 8, 1, 4)),
        ('gb200:4', 1, GPUTopology('gb200', 1, 1, 4)),
        ('gb200:18x4', 1, GPUTopology('gb200', 1, 18, 4)),
        ('gb200:18x4', 8, GPUTopology('gb200', 8, 18, 4)),
        ('gb300:4x18x4', 4, GPUTopology('gb300', 4, 18, 4)),
        ('mine/gpu.txtpb:2x3x16', 1, GPUTopology('mine/gpu.txtpb', 2, 3, 16)),
        ('gpu.txtpb:3x16', 1, GPUTopology('gpu.txtpb', 1, 3, 16)),
    ],
)
def test_names(topology, slices, expected):
    assert is_gpu_topology(topology)
    assert gpu_topology(topology, slices) == expected


@pytest.mark.parametrize('topology', ['v5p:4x4x4', 'h10:8', 'H100:8', 'cpu:8', '', 'v100:8', 'mine:8'])
def test_other_names(topology):
    assert not is_gpu_topology(topology)


@pytest.mark.parametrize(
    ('topology', 'slices'),
    [
        *(('h100', 1), ('h100:', 1), ('h100:0', 1), ('h100:1x4x4x8', 1), ('h100:8 ', 1), ('h100:-1', 1)),
        *(('h100:16', 1), ('h100:2x12', 1), ('h100:99999999999999999999', 1), ('h100:2x4x8', 1)),
        *(('h100:4x8', 2), ('gb200:4x18x4', 2), ('gb200:72', 1), ('gb200:36x4', 1), ('h100-pcie:8', 1)),
        ('gb200:0x4', 1),
        *(
            ('v100:8', 1),
            ('H100:8', 1),
            ('h10:8', 1),
            ('mi300x:8', 1),
            ('mi355:2x8', 1),
            ('mi300x', 1),
            ('MI300X:8', 1),
        ),
    ],
)
def test_wrong_names(topology, slices, snapshot):
    with snapshot.raises(MeshError):
        helper_of(topology, num_slices=slices)


def test_every_kind_has_a_target():
    assert [*GPU_KINDS] == [*TARGETS]


@pytest.mark.parametrize('kind', GPU_KINDS)
def test_the_memory_of_data_sheets_is_less_than_that_of_the_target(kind):
    assert 0.9 < HARDWARE[kind].hbm_bytes / TARGETS[kind].memory_bytes <= 1
    assert HARDWARE[kind].hbm_bytes_per_second == pytest.approx(TARGETS[kind].memory_rate, rel=0.05)


# --- The compiler -----------------------------------------------------------------------------------


@pytest.fixture
def described(monkeypatch):
    """Pretends that the compiler is installed. The test sets the function that replaces it."""
    monkeypatch.setattr(
        gpu_topologies, 'installed_plugins', lambda: {'jax-cuda12-pjrt': importlib.metadata.version('jaxlib')}
    )
    return lambda function: monkeypatch.setattr(topologies, 'get_topology_desc', function)


def test_the_compiler_gets_the_description_of_the_gpus(described):
    options_of_call = {}
    described(
        lambda **options: options_of_call.update(options) or topologies.TopologyDescription(jax.devices())
    )
    helper_of('gb200:2x18x4')
    assert options_of_call == {
        'platform': 'cuda',
        'topology_name': '',
        'target_config': target_config('gb200'),
        'topology': '2x18x4',
    }


def test_without_the_compiler(monkeypatch):
    monkeypatch.setattr(gpu_topologies, 'installed_plugins', dict)
    with pytest.raises(MissingDependencyError) as raised:
        helper_of('h100:8')
    assert str(raised.value) == (
        'topologies of GPUs need the compiler for GPUs, which is published for Linux: '
        'pip install "jax[cuda12-local]" (no GPU is needed)'
    )


def test_with_two_compilers(monkeypatch):
    monkeypatch.setattr(
        gpu_topologies, 'installed_plugins', lambda: dict.fromkeys(gpu_topologies.PLUGINS, '1.0')
    )
    with pytest.raises(MissingDependencyError) as raised:
        helper_of('h100:8')
    assert str(raised.value) == (
        'jax-cuda12-pjrt and jax-cuda13-pjrt are installed, and JAX loads only one of them: '
        'pip uninstall jax-cuda12-pjrt'
    )


def test_with_the_compiler_of_another_jax(monkeypatch):
    monkeypatch.setattr(gpu_topologies, 'installed_plugins', lambda: {'jax-cuda13-pjrt': '0.1'})
    with pytest.raises(MissingDependencyError) as raised:
        helper_of('h100:8')
    jaxlib = importlib.metadata.version('jaxlib')
    assert str(raised.value) == (
        f'jax-cuda13-pjrt 0.1 does not fit jaxlib {jaxlib}: pip install jax-cuda13-plugin=={jaxlib}'
    )


def test_a_compiler_that_jax_does_not_load(described):
    def fails(**_):
        raise NotImplementedError('topology not implemented for cuda')

    described(fails)
    with pytest.raises(MissingDependencyError) as raised:
        helper_of('h100:8')
    assert str(raised.value) == (
        'JAX did not load the compiler for GPUs (topology not implemented for cuda): on a machine without '
        'GPUs set JAX_PLATFORMS=cpu before anything uses JAX'
    )


def test_a_topology_that_the_compiler_refuses(described):
    def fails(**_):
        raise RuntimeError('FAILED_PRECONDITION: no')

    described(fails)
    with pytest.raises(MeshError) as raised:
        helper_of('h100:8')
    assert str(raised.value) == (
        "the compiler for GPUs does not support the topology 'h100:8': FAILED_PRECONDITION: no"
    )


def test_valid_compilers():
    assert plugin_fault({}, '1') is None
    assert plugin_fault({'jax-cuda12-pjrt': '1'}, '1') is None


@pytest.mark.parametrize(
    ('plugin', 'jaxlib', 'fits'),
    [
        ('0.12.0', '0.12.0+cuda12.local', True),
        ('0.12.1.dev20261101', '0.12.1.dev20261102', True),
        ('0.12.0.1', '0.12.0', False),
        ('0.12.0', '0.12.1', False),
    ],
)
def test_versions_are_compared_as_jax_does(plugin, jaxlib, fits):
    """By their release parts, like ``check_plugin_version`` in jaxlib/plugin_support.py."""
    assert (plugin_fault({'jax-cuda12-pjrt': plugin}, jaxlib) is None) is fits


# --- A GPU that a file describes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    'text',
    [
        '',
        'nonsense',
        target_config('h100').replace('core_count', 'cores'),
        target_config('h100').replace('threads_per_warp: 32', 'threads_per_warp: 0'),
        target_config('h100').replace('clock_rate_ghz: 1.98', 'clock_rate_ghz:0.0'),
        target_config('h100').replace('core_count: 132', 'core_count: -3'),
        target_config('h100').replace('core_count: 132', '# core_count: 132'),
        re.sub('cuda_compute_capability .*', 'cuda_compute_capability {}', target_config('h100')),
        target_config('h100').replace('core_count', 'cores').replace('ghz: 1.98', 'ghz: nan'),
    ],
    ids=[
        *('empty', 'nonsense', 'no cores', 'warps of no threads', 'no clock', 'negative', 'comment'),
        *('no compute capability', 'two faults'),
    ],
)
def test_invalid_target_configs(described, tmp_path, text, snapshot):
    described(lambda **_: pytest.fail('the compiler would crash'))
    path = tmp_path / 'mine.txtpb'
    path.write_text(text, encoding='utf-8')
    with pytest.raises(MeshError) as raised:
        helper_of(f'{path}:1x8')
    snapshot(str(raised.value).replace(str(tmp_path), '.'))


def test_a_target_config_that_does_not_exist(described, snapshot):
    described(lambda **_: pytest.fail('there is nothing to compile for'))
    with snapshot.raises(MeshError):
        helper_of('nowhere/mine.txtpb:1x8')


def test_a_target_config_that_is_not_text(described, tmp_path):
    described(lambda **_: pytest.fail('there is nothing to compile for'))
    path = tmp_path / 'mine.txtpb'
    path.write_bytes(b'\xff\xfe\x00')
    with pytest.raises(MeshError, match=r"mine\.txtpb' cannot be read: .* can't decode byte 0xff"):
        helper_of(f'{path}:1x8')


# --- With the compiler ------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.sampled(7)
@gpu_compiler.needed
@pytest.mark.parametrize('kind', GPU_KINDS)
def test_every_kind_compiles(kind):
    limits = GPU_KINDS[kind]
    helper = helper_of(f'{kind}:2x1x{limits.gpus_per_host}', [2, -1], ['data', 'tp'])
    assert {device.device_kind for device in helper.mesh.devices.flat} == {TARGETS[kind].device_kind}
    step = helper.sjit(lambda x: jnp.tanh(x @ x), in_shardings=P('data', 'tp'), out_shardings=P('data'))
    compiled = step.lower(jax.ShapeDtypeStruct((512, 512), 'bfloat16')).compile()
    assert 'all-gather' in compiled.as_text()


@gpu_compiler.needed
@pytest.mark.parametrize(('topology', 'domains'), [('h100:2x4', 2), ('gb200:2x4', 1), ('gb200:2x2x2', 2)])
def test_domains_are_slices(topology, domains):
    helper = helper_of(topology)
    positions = positions_of(helper.mesh.devices.flat)
    assert [position.slice for position in positions] == [i * domains // 8 for i in range(8)]
    assert not any(position.coords for position in positions)


@gpu_compiler.needed
def test_mesh_axes_over_domains():
    helper = helper_of('h100:4', [4, 2], ['tp', 'data'], dcn_axis_dims=[1, 2], num_slices=2)
    assert [position.slice for position in positions_of(helper.mesh.devices.flat)] == [0, 1] * 4
    with pytest.raises(
        MeshError, match=re.escape('must multiply to the number of NVLink domains, which is 4')
    ):
        helper_of('h100:4x2', [4, 2], ['tp', 'data'], dcn_axis_dims=[1, 2])


@gpu_compiler.needed
def test_a_gpu_that_a_file_describes(tmp_path):
    path = tmp_path / 'mine.txtpb'
    text = target_config('h100').replace('NVIDIA H100 80GB HBM3', 'Mine')
    path.write_text(text.replace('{ major: 9 minor: 0', '{\n minor: 0\n major: 9'), encoding='utf-8')
    helper = helper_of(f'{path}:2x1x16')
    assert {device.device_kind for device in helper.mesh.devices.flat} == {'Mine'}
    path.write_text(target_config('h100') + '\nnonsense: 1', encoding='utf-8')
    with pytest.raises(MeshError, match=r'Failed to parse GpuTargetConfigProto.* The compiler wrote'):
        helper_of(f'{path}:2x1x16')
