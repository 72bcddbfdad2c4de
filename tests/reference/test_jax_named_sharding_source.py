"""Conformance with the source of JAX's NamedSharding: what it carries and checks works through scalax.

The tests follow the source from top to bottom and are named for its definitions. The file
tests/e2e/test_named_sharding.py combines these properties with compiled functions and reductions.
"""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax.errors import ShardingError
from scalax.sharding import MeshShardingHelper, with_sharding_constraint

P = PartitionSpec
X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope='module')
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([2, 4], ['x', 'y'])


@pytest.fixture(scope='module')
def sharding(helper: MeshShardingHelper) -> NamedSharding:
    return helper.match_sharding_rule(P('x', 'y'), X)


class TestArrayMapping:
    """The order of mesh axes in one dimension is major to minor."""

    @pytest.mark.medium
    @pytest.mark.parametrize('axes', [('x', 'y'), ('y', 'x')])
    def test_chunks_follow_the_order_of_the_axes(
        self, helper: MeshShardingHelper, axes: tuple[str, str]
    ) -> None:
        placed = helper.shard(X, P(None, axes))
        devices = helper.mesh.devices if axes == ('x', 'y') else helper.mesh.devices.T
        chunks = {shard.device: int(shard.data[0, 0]) for shard in placed.addressable_shards}
        assert [chunks[device] for device in devices.flat] == list(range(8))


class TestNamedSharding:
    def test_example(self) -> None:
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('x', 'y'))
        found = MeshShardingHelper.from_mesh(mesh).match_sharding_rule(P('x', 'y'), X)
        assert found == NamedSharding(mesh, P('x', 'y'))
        assert (found.mesh, found.spec) == (mesh, P('x', 'y'))

    @pytest.mark.parametrize(
        'spec', [P(), P(None, 'x'), P('y'), P(('x', 'y')), P('x', 'y'), P((), 'x')], ids=str
    )
    def test_each_element_partitions_its_dimension(
        self, helper: MeshShardingHelper, spec: PartitionSpec
    ) -> None:
        placed = helper.shard(X, spec)
        expected = NamedSharding(helper.mesh, spec).devices_indices_map(X.shape)
        assert {shard.device: shard.index for shard in placed.addressable_shards} == expected

    def test_repr(self, sharding: NamedSharding) -> None:
        assert repr(sharding) == repr(
            NamedSharding(sharding.mesh, P('x', 'y'), memory_kind=sharding.memory_kind)
        )

    def test_reduce(self) -> None:
        """Only a mesh without devices can be pickled, in JAX too."""
        helper = MeshShardingHelper.from_mesh(AbstractMesh((2, 4), ('x', 'y')))
        sharding = helper.match_sharding_rule(P('x', 'y'), X)
        assert pickle.loads(pickle.dumps(sharding)) == sharding

    def test_memory_kind(self, helper: MeshShardingHelper) -> None:
        host = NamedSharding(helper.mesh, P('x'), memory_kind='pinned_host')
        assert helper.match_sharding_rule(host, X).memory_kind == 'pinned_host'
        assert helper.shard(X, host).sharding.memory_kind == 'pinned_host'

    def test_hash_and_eq(self, helper: MeshShardingHelper, sharding: NamedSharding) -> None:
        again = MeshShardingHelper([2, 4], ['x', 'y']).match_sharding_rule(P('x', 'y'), X)
        assert again == sharding and hash(again) == hash(sharding)
        for other in (P('y', 'x'), NamedSharding(helper.mesh, P('x', 'y'), memory_kind='pinned_host')):
            assert helper.match_sharding_rule(other, X) != sharding

    def test_check_compatible_aval(self, helper: MeshShardingHelper) -> None:
        for tree, entries, rank in (({'w': X}, P('x', None, 'y'), 2), ({'w': np.float32(0)}, P('x'), 0)):
            with pytest.raises(ShardingError) as caught:
                helper.match_sharding_rule(entries, tree)
            count = f'{len(entries)} entr{"y" if len(entries) == 1 else "ies"}'
            assert f'the spec has {count}, the array {rank} dimensions' in str(caught.value)
            assert '  w: float32' in str(caught.value)

    def test_devices(self, sharding: NamedSharding) -> None:
        assert sharding.num_devices == 8
        assert sharding.device_set == sharding.addressable_devices == set(jax.devices())
        assert sharding.is_fully_addressable

    def test_devices_of_an_abstract_mesh(self) -> None:
        helper = MeshShardingHelper.from_mesh(AbstractMesh((2, 4), ('x', 'y')))
        abstract = helper.match_sharding_rule(P('x'), X)
        assert abstract.num_devices == 8
        for name in ('device_set', 'is_fully_addressable', 'addressable_devices'):
            with pytest.raises(ValueError, match='AbstractMesh'):
                getattr(abstract, name)

    @pytest.mark.parametrize(
        ('sizes', 'spec', 'expected'),
        [((2, 4), P(), True), ((2, 4), P('x'), False), ((8, 1), P('y'), True), ((8, 1), P('x'), False)],
    )
    def test_is_fully_replicated(self, sizes: tuple[int, int], spec: PartitionSpec, expected: bool) -> None:
        helper = MeshShardingHelper(sizes, ['x', 'y'])
        assert helper.match_sharding_rule(spec, X).is_fully_replicated is expected
        assert helper.shard(X, spec).is_fully_replicated is expected

    def test_with_memory_kind(self, helper: MeshShardingHelper, sharding: NamedSharding) -> None:
        assert helper.shard(X, sharding.with_memory_kind('pinned_host')).sharding.memory_kind == 'pinned_host'

    def test_update(self, helper: MeshShardingHelper, sharding: NamedSharding) -> None:
        updated = sharding.update(spec=P(None, 'y'))
        assert helper.shard(X, updated).sharding == NamedSharding(helper.mesh, P(None, 'y'))

    def test_unconstrained_dimensions_are_open_for_the_compiler(self, helper: MeshShardingHelper) -> None:
        def step(x: jax.Array) -> jax.Array:
            return with_sharding_constraint(x + 1, P('x', P.UNCONSTRAINED))

        assert re.search(r'sharding_constraint.*\[\{"x"\}, \{\?\}\]', helper.sjit(step).lower(X).as_text())


MIXED = {'x': AxisType.Auto, 'y': AxisType.Explicit}


class TestCheckPspec:
    """What JAX refuses is a ShardingError that names the leaf."""

    @pytest.mark.parametrize(
        ('types', 'spec', 'expected'),
        [
            ({}, P('x', 'x'), "mesh axis 'x' is used more than once (dimensions 0, 1)"),
            ({}, P(('y', 'y')), "mesh axis 'y' is used more than once (dimensions 0, 0)"),
            ({}, P('z'), "the mesh has no axis 'z' (known: 'x', 'y')"),
            (MIXED, P(('x', 'y')), 'dimension 0 mixes mesh axes of types Auto and Explicit'),
            (
                dict.fromkeys('xy', AxisType.Explicit),
                P('x', unreduced={'z'}),
                "the mesh has no axis 'z' (known: 'x', 'y')",
            ),
            (
                {},
                P('x', unreduced={'y'}),
                "unreduced or reduced axes ('y') on a mesh that has axes of type Auto ('x', 'y')",
            ),
            (
                dict.fromkeys('xy', AxisType.Explicit),
                P('x', reduced={'z'}),
                "the mesh has no axis 'z' (known: 'x', 'y')",
            ),
            (
                {},
                P('x', reduced={'y'}),
                "unreduced or reduced axes ('y') on a mesh that has axes of type Auto ('x', 'y')",
            ),
        ],
        ids=[
            'check_unique_resources',
            'check_unique_resources in a tuple',
            'check_mesh_resource_axis',
            'axis types of a tuple',
            'unreduced axis of the mesh',
            'unreduced axis of type Explicit',
            'reduced axis of the mesh',
            'reduced axis of type Explicit',
        ],
    )
    def test_specs_that_are_refused(
        self, types: dict[str, AxisType], spec: PartitionSpec, expected: str
    ) -> None:
        helper = MeshShardingHelper([2, 4], ['x', 'y'], axis_types=[*types.values()] or None)
        for call in (helper.match_sharding_rule, lambda rules, tree: helper.shard(tree, rules)):
            with pytest.raises(ShardingError) as caught:
                call({'layer': {'w': spec}}, {'layer': {'w': X}})
            assert '  layer/w: float32[8, 8]' in str(caught.value)
            assert expected in str(caught.value)

    def test_unconstrained_on_a_mesh_without_auto_axes(self) -> None:
        """On purpose not an error in a constraint: the dimension keeps the Explicit axes of its type."""
        helper = MeshShardingHelper([2, 4], ['x', 'y'], axis_types=AxisType.Explicit)

        @helper.sjit(in_shardings=P('x'))
        def step(x: jax.Array) -> jax.Array:
            kept = with_sharding_constraint(jnp.sin(x), P(P.UNCONSTRAINED, 'y'))
            assert jax.typeof(kept).sharding.spec == P('x', 'y')
            return kept

        assert step(X).sharding.spec == P('x', 'y')
