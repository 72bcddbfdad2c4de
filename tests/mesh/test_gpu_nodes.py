"""Topologies of GPUs: their names, the CPU devices that stand for them, and what is said of wrong ones."""

import pickle

import jax
import pytest

from scalax._mesh.gpu_nodes import GPUS_OF_NODE, Nodes, gpu_nodes
from scalax.errors import MeshError
from scalax.sharding import MeshShardingHelper


def helper_of(topology, dims=(-1,), names=('x',), **options):
    return MeshShardingHelper.from_topology(topology, list(dims), list(names), **options)


@pytest.mark.parametrize(
    ('topology', 'slices', 'nodes'),
    [
        ('h100:8', 1, Nodes('h100', 1, 8)),
        ('h200:4x8', 1, Nodes('h200', 4, 8)),
        ('h200:4x8', 4, Nodes('h200', 4, 8)),
        ('b200:8', 16, Nodes('b200', 16, 8)),
        ('h100:1', 1, Nodes('h100', 1, 1)),
    ],
)
def test_names(topology, slices, nodes):
    assert gpu_nodes(topology, slices) == nodes
    assert gpu_nodes(topology, slices).size == nodes.count * nodes.each


@pytest.mark.parametrize('topology', ['v5p:4x4x4', 'h10:8', 'H100:8', 'cpu:8', ''])
def test_other_names(topology):
    assert gpu_nodes(topology) is None


def test_examples_are_topologies():
    assert all(gpu_nodes(f'{kind}:4x{most}') for kind, most in GPUS_OF_NODE.items())


@pytest.mark.parametrize(
    ('topology', 'slices'),
    [
        *(('h100', 1), ('h100:', 1), ('h100:0', 1), ('h100:4x4x8', 1), ('h100:8 ', 1), ('h100:-1', 1)),
        *(('h100:16', 1), ('h100:2x12', 1), ('h100:99999999999999999999', 1)),
        *(('h100:4x8', 2), ('a100:8', 1), ('v100:8', 1), ('H100:8', 1), ('gb200:72', 1)),
    ],
)
def test_wrong_names(topology, slices, snapshot):
    with snapshot.raises(MeshError):
        helper_of(topology, num_slices=slices)


def test_too_few_devices(snapshot):
    with snapshot.raises(MeshError):
        helper_of('h100:4x8')


def test_without_cpu_devices(monkeypatch):
    def none(**_):
        raise RuntimeError("Unknown backend: 'cpu' requested")

    monkeypatch.setattr(jax, 'local_devices', none)
    with pytest.raises(MeshError, match=r'^.h100:8. has 8 GPUs, .* and JAX has 0: call') as raised:
        helper_of('h100:8')
    assert str(raised.value).endswith(
        'before anything uses JAX, and let it have CPUs, as with JAX_PLATFORMS=cpu. '
        "JAX says: Unknown backend: 'cpu' requested"
    )


def test_nodes_are_filled_in_the_order_of_the_mesh():
    helper = helper_of('h100:2x4', [2, 4], ['data', 'tp'])
    assert helper.simulates.kind == 'h100'
    assert helper.simulates.nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert [*helper.mesh.devices.flat] == jax.devices()[:8]


@pytest.mark.parametrize('topology', ['h100:2x4', 'h100:4'])
def test_a_mesh_axis_from_node_to_node(topology):
    helper = helper_of(topology, [4, 2], ['tp', 'data'], dcn_axis_dims=[1, 2], num_slices=2)
    assert helper.simulates.nodes == (0, 1) * 4


def test_nodes_that_no_mesh_axis_takes(snapshot):
    with snapshot.raises(MeshError):
        helper_of('h100:4x2', [4, 2], ['tp', 'data'], dcn_axis_dims=[1, 2])


def test_some_of_the_devices():
    assert helper_of('h200:2').simulates == ('h200', (0, 0))


def test_a_pickled_helper_stands_for_the_same():
    helper = helper_of('h100:2x4', on_indivisible='replicate')
    again = pickle.loads(pickle.dumps(helper))
    assert again.simulates == helper.simulates
    assert again.on_indivisible == 'replicate'


def test_other_helpers_stand_for_nothing():
    helper = MeshShardingHelper([-1], ['x'])
    assert helper.simulates is None
    assert MeshShardingHelper.from_mesh(helper_of('h100:8').mesh).simulates is None
    assert pickle.loads(pickle.dumps(helper)).simulates is None
