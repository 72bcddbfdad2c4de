"""Conformance with the notebook "Mastering JAX Shardings": its examples, written with scalax.

The tests follow the notebook, section by section, on its mesh of 4 x 2 devices. docs/axis_types.md is the
page for users. `reshard`, `auto_axes` and `explicit_axes` are JAX's own: inside of a compiled function they
need specs alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes, explicit_axes, reshard

from scalax.errors import ShardingError
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    TreePathShardingRule,
    with_sharding_constraint,
)
from scalax.testing import assert_collectives

P = PartitionSpec
AUTO = MeshShardingHelper([4, 2], ['dp', 'mp'])
EXPLICIT = MeshShardingHelper([4, 2], ['dp', 'mp'], axis_types=AxisType.Explicit)
MIXED = MeshShardingHelper([4, 2], ['dp', 'mp'], axis_types=[AxisType.Explicit, AxisType.Auto])
DATA = np.arange(32, dtype=np.float32).reshape(8, 4)


def type_of(x: jax.Array) -> str:
    """Returns the type without the name of its class, which releases of JAX print or not."""
    return str(jax.typeof(x)).removeprefix('ShapedArray(').removesuffix(')')


def test_prerequisites_and_setup() -> None:
    assert dict(AUTO.mesh.shape) == {'dp': 4, 'mp': 2}
    np.testing.assert_array_equal(EXPLICIT.mesh.device_ids, np.arange(8).reshape(4, 2))
    assert EXPLICIT.mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)
    assert AUTO.mesh.axis_types == (AxisType.Auto, AxisType.Auto)


class TestDefiningAndApplyingShardingBlueprints:
    """## Part 1"""

    @pytest.mark.parametrize(
        ('shape', 'spec', 'block'),
        [
            ((8, 4), P(None, None), (8, 4)),
            ((8, 4), P('dp', None), (2, 4)),
            ((8, 4), P(None, 'mp'), (8, 2)),
            ((8, 4), P('dp', 'mp'), (2, 2)),
            ((8,), P(None), (8,)),
            ((8,), P('dp'), (2,)),
            ((8,), P(('dp', 'mp')), (1,)),
            ((4, 8, 3, 3), P('mp', 'dp', None, None), (2, 2, 3, 3)),
        ],
        ids=str,
    )
    def test_1a_partition_spec(
        self, shape: tuple[int, ...], spec: PartitionSpec, block: tuple[int, ...]
    ) -> None:
        for helper in (AUTO, EXPLICIT):
            placed = helper.shard(np.zeros(shape, np.float32), spec)
            assert {shard.data.shape for shard in placed.addressable_shards} == {block}

    def test_1a_constraint_an_axis_shards_one_dimension(self) -> None:
        with pytest.raises(ShardingError, match="mesh axis 'dp' is used more than once"):
            AUTO.shard(np.zeros((8, 8)), P('dp', 'dp'))

    def test_1a_constraint_sizes_divide(self) -> None:
        with pytest.raises(ShardingError, match='dimension 0 of size 6'):
            AUTO.shard(np.zeros((6, 8)), P('dp'))

    @pytest.mark.parametrize('helper', [AUTO, EXPLICIT], ids=['auto', 'explicit'])
    def test_1b_named_sharding(self, helper: MeshShardingHelper) -> None:
        sharding = helper.match_sharding_rule(P('dp', 'mp'), DATA)
        assert isinstance(sharding, NamedSharding)
        assert (sharding.mesh, sharding.spec) == (helper.mesh, P('dp', 'mp'))

    @pytest.mark.parametrize(
        ('helper', 'expected'),
        [(EXPLICIT, 'float32[8@dp,4@mp]'), (AUTO, 'float32[8,4]'), (MIXED, 'float32[8@dp,4]')],
        ids=['explicit', 'auto', 'mixed'],
    )
    def test_1c_explicitly_sharded_arrays(self, helper: MeshShardingHelper, expected: str) -> None:
        placed = helper.shard(DATA, P('dp', 'mp'))
        assert type_of(placed) == expected
        assert placed.sharding == NamedSharding(helper.mesh, P('dp', 'mp'))
        assert placed.devices() == set(jax.devices())

    def test_1c_reshard(self) -> None:
        """JAX's `reshard` needs a mesh; in a compiled function that is the mesh of the helper."""
        moved = EXPLICIT.sjit(lambda x: reshard(x, P('dp', 'mp')))(DATA)
        assert type_of(moved) == 'float32[8@dp,4@mp]'
        np.testing.assert_array_equal(moved, DATA)

    def test_1d_introspecting_sharded_arrays(self) -> None:
        explicit, auto = (helper.shard(DATA, P('dp', 'mp')) for helper in (EXPLICIT, AUTO))
        assert explicit.sharding.mesh.axis_names == auto.sharding.mesh.axis_names == ('dp', 'mp')
        assert explicit.sharding.spec == auto.sharding.spec == P('dp', 'mp')
        assert jax.typeof(explicit).sharding.spec == P('dp', 'mp')
        assert jax.typeof(auto).sharding.spec == P(None, None)

    @pytest.mark.parametrize('helper', [AUTO, EXPLICIT], ids=['auto', 'explicit'])
    def test_1e_visualizing_sharding(self, helper: MeshShardingHelper) -> None:
        picture = str(helper.visualize(helper.shard(DATA, P('dp', 'mp'))))
        assert "P('dp', 'mp'): 8 blocks of [2,2], each on 1 device" in picture
        for row in range(4):
            assert f'{2 * row}:{2 * row + 2} │  {2 * row}  │  {2 * row + 1}  │' in picture

    def test_1e_visualizing_a_replicated_array(self) -> None:
        replicated = EXPLICIT.shard(DATA, P(None, None))
        assert type_of(replicated) == 'float32[8,4]'
        assert '1 block of [8,4], on all 8 devices' in str(EXPLICIT.visualize(replicated))


class TestShardingPropagationAndCompilerInteraction:
    """## Part 2"""

    def test_2a_explicit_propagation(self) -> None:
        types = {}

        @EXPLICIT.sjit(in_shardings=(P('dp', 'mp'), P('mp'), P('dp')))
        def step(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
            results = jnp.sin(a), c + c, jnp.zeros_like(a), jnp.zeros((8, 4), a.dtype)
            types.update(zip('abc', map(type_of, (a, b, c)), strict=True))
            types.update(zip(['sin', 'add', 'like', 'zeros'], map(type_of, results), strict=True))
            return results

        step(DATA, np.ones((4, 5), np.float32), np.ones((8, 5), np.float32))
        assert types == {
            'a': 'float32[8@dp,4@mp]',
            'b': 'float32[4@mp,5]',
            'c': 'float32[8@dp,5]',
            'sin': 'float32[8@dp,4@mp]',
            'add': 'float32[8@dp,5]',
            'like': 'float32[8@dp,4@mp]',
            'zeros': 'float32[8,4]',
        }

    def test_2a_shardings_that_differ_are_an_error_of_jax(self) -> None:
        step = EXPLICIT.sjit(lambda x, y: x + y, in_shardings=(P('dp'), P('mp')))
        with pytest.raises(Exception, match='shard'):
            step(DATA, DATA)

    def test_2b_out_sharding(self) -> None:
        cube = np.arange(24, dtype=np.float32).reshape(4, 2, 3)

        @EXPLICIT.sjit(in_shardings=P('dp', 'mp', None))
        def merge(x: jax.Array) -> jax.Array:
            merged = jax.lax.reshape(x, (4, 6), out_sharding=P('dp', 'mp'))
            assert type_of(merged) == 'float32[4@dp,6@mp]'
            return merged

        merged = merge(cube)
        np.testing.assert_array_equal(merged, cube.reshape(4, 6))
        assert merged.sharding == NamedSharding(EXPLICIT.mesh, P('dp', 'mp'))

    @pytest.mark.medium
    def test_2c_grad_has_the_sharding_of_the_weights(self) -> None:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.dot(x, w) ** 2)

        w, x = np.ones((4, 6), np.float32), DATA
        for helper in (AUTO, EXPLICIT):
            grad = helper.sjit(
                jax.grad(loss), in_shardings=(P(None, 'mp'), P('dp')), out_shardings=P(None, 'mp')
            )
            np.testing.assert_allclose(grad(w, x), jax.grad(loss)(w, x), rtol=1e-5)
            assert grad(w, x).sharding.spec == P(None, 'mp')

    def test_2c_vmap_keeps_shardings(self) -> None:
        step = EXPLICIT.sjit(jax.vmap(jnp.sin), in_shardings=P('dp', 'mp'))
        assert type_of(step(DATA)) == 'float32[8@dp,4@mp]'

    def test_2c_scan_keeps_the_sharding_of_the_carry(self) -> None:
        def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            assert type_of(carry) == 'float32[4@mp]'
            return carry + x, carry

        @EXPLICIT.sjit(in_shardings=(P('mp'), P(None, 'mp')))
        def loop(carry: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax.lax.scan(body, carry, xs)

        total, sums = loop(np.zeros(4, np.float32), DATA)
        np.testing.assert_allclose(total, DATA.sum(axis=0))
        assert (type_of(total), type_of(sums)) == ('float32[4@mp]', 'float32[8,4@mp]')

    def test_2d_automatic_resharding(self) -> None:
        step = AUTO.sjit(lambda x: x, in_shardings=P('dp'), out_shardings=P())
        assert_collectives(step, DATA, all_gather={'dp': 1})

    def test_2e_with_sharding_constraint(self) -> None:
        """Of a helper's functions, the constraint takes specs and rules, and Explicit axes are resharded."""
        for helper in (AUTO, EXPLICIT, MIXED):
            step = helper.sjit(lambda x: with_sharding_constraint(x, P(None, 'mp')), in_shardings=P('dp'))
            out = step(DATA)
            np.testing.assert_array_equal(out, DATA)
            assert out.sharding.is_equivalent_to(NamedSharding(helper.mesh, P(None, 'mp')), 2)

    def test_2e_the_constraint_of_jax(self) -> None:
        step = AUTO.sjit(lambda x: jax.lax.with_sharding_constraint(x, P('dp', 'mp')), in_shardings=P())
        assert step(DATA).sharding.is_equivalent_to(NamedSharding(AUTO.mesh, P('dp', 'mp')), 2)


class TestShardMap:
    """## Part 3"""

    @pytest.mark.parametrize('helper', [AUTO, EXPLICIT], ids=['auto', 'explicit'])
    def test_3b_spmd_programming(self, helper: MeshShardingHelper) -> None:
        shapes = []

        def add(x: jax.Array, y: jax.Array) -> jax.Array:
            shapes.append((x.shape, y.shape))
            return x + y

        x = np.arange(48, dtype=np.float32).reshape(8, 6)
        mapped = helper.shard_map(add, (P('dp', 'mp'), P('dp', 'mp')), P('dp', 'mp'))
        out = mapped(x, np.full((8, 6), 2, np.float32))
        np.testing.assert_array_equal(out, x + 2)
        assert out.sharding.spec == P('dp', 'mp')
        assert set(shapes) == {((2, 3), (2, 3))}

    def test_3b_blocks_that_do_not_fit(self) -> None:
        mapped = AUTO.shard_map(lambda x, y: x + y, (P('dp', 'mp'), P('dp')), P('dp', 'mp'))
        with pytest.raises(TypeError, match=r'\(2, 3\).*\(2, 6\)'):
            mapped(np.zeros((8, 6), np.float32), np.zeros((8, 6), np.float32))

    def test_3b_shard_map_of_jax_inside_of_sjit(self) -> None:
        mapped = jax.shard_map(lambda x: 2 * x, in_specs=P('dp'), out_specs=P('dp'))
        np.testing.assert_array_equal(AUTO.sjit(mapped)(DATA), 2 * DATA)

    def test_3c_in_specs_and_out_specs_are_trees(self) -> None:
        def swap(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {'a': tree['b'], 'b': tree['a']}

        specs = {'a': P('dp'), 'b': P(None, 'mp')}
        out = AUTO.shard_map(swap, (specs,), {'a': specs['b'], 'b': specs['a']})({'a': DATA, 'b': 2 * DATA})
        np.testing.assert_array_equal(out['a'], 2 * DATA)
        assert out['a'].sharding.is_equivalent_to(NamedSharding(AUTO.mesh, specs['b']), 2)

    def test_3d_psum(self) -> None:
        total = AUTO.shard_map(lambda x: jax.lax.psum(x, 'dp'), P('dp', None), P(None, None))(DATA)
        np.testing.assert_array_equal(total, [[48, 52, 56, 60], [64, 68, 72, 76]])

    def test_3d_all_gather(self) -> None:
        def gather(x: jax.Array) -> jax.Array:
            return jax.lax.all_gather(x, 'dp', tiled=True)

        mapped = AUTO.shard_map(gather, P('dp'), P('dp'))
        assert mapped(DATA).shape == (32, 4)

    def test_3d_reduce_scatter(self) -> None:
        def scatter(x: jax.Array) -> jax.Array:
            return jax.lax.psum_scatter(x, 'dp', scatter_dimension=1, tiled=True)

        out = AUTO.shard_map(scatter, P('dp', None), P(None, 'dp'))(DATA)
        np.testing.assert_array_equal(out, DATA.reshape(4, 2, 4).sum(axis=0))

    def test_3d_all_to_all(self) -> None:
        def exchange(x: jax.Array) -> jax.Array:
            return jax.lax.all_to_all(x, 'dp', split_axis=1, concat_axis=0, tiled=True)

        out = AUTO.shard_map(exchange, P('dp', None), P(None, 'dp'))(DATA)
        np.testing.assert_array_equal(out, DATA)


class TestAdvancedShardingTechniques:
    """## Part 4"""

    def test_4a_mixing_sharding_modes(self) -> None:
        types = []

        @MIXED.sjit(in_shardings=P('dp', 'mp'), out_shardings=P('dp', 'mp'))
        def step(x: jax.Array) -> jax.Array:
            types.append(type_of(x))
            return x + 1

        assert step(DATA).sharding == NamedSharding(MIXED.mesh, P('dp', 'mp'))
        assert types == ['float32[8@dp,4]']

    def test_4b_auto_axes(self) -> None:
        types = {}

        def double(y: jax.Array) -> jax.Array:
            types['inside'] = type_of(y), jax.sharding.get_abstract_mesh().axis_types
            return y * 2

        @EXPLICIT.sjit(in_shardings=P('dp', 'mp'))
        def step(x: jax.Array) -> jax.Array:
            z = auto_axes(double, axes='dp', out_sharding=P('dp', 'mp'))(jnp.sin(x))
            types['after'] = type_of(z)
            return z + 1

        np.testing.assert_allclose(step(DATA), np.sin(DATA) * 2 + 1, rtol=1e-5)
        assert types['inside'] == ('float32[8,4@mp]', (AxisType.Auto, AxisType.Explicit))
        assert types['after'] == 'float32[8@dp,4@mp]'

    def test_4c_explicit_axes(self) -> None:
        types = {}

        def double(y: jax.Array) -> jax.Array:
            types['inside'] = type_of(y), type_of(y * 2), jax.sharding.get_abstract_mesh().axis_types
            return y * 2

        @AUTO.sjit(in_shardings=P('dp', 'mp'))
        def step(x: jax.Array) -> jax.Array:
            z = explicit_axes(double, axes=('dp', 'mp'), in_sharding=P('dp', 'mp'))(jnp.sin(x))
            types['after'] = type_of(z)
            return z + 1

        np.testing.assert_allclose(step(DATA), np.sin(DATA) * 2 + 1, rtol=1e-5)
        sharded = 'float32[8@dp,4@mp]'
        assert types['inside'] == (sharded, sharded, (AxisType.Explicit, AxisType.Explicit))
        assert types['after'] == 'float32[8,4]'

    def test_4d_concrete_and_type_specified_sharding(self) -> None:
        placed = MIXED.shard(DATA, P('dp', 'mp'))
        assert placed.sharding.spec == P('dp', 'mp')
        assert jax.typeof(placed).sharding.spec == P('dp', None)

    @pytest.mark.medium
    def test_4e_fsdp(self) -> None:
        """Parameters are sharded over the data-parallel axis, gathered for use; gradients are reduced."""
        helper = MeshShardingHelper([-1], ['dp'])
        rule = FSDPShardingRule('dp', min_fsdp_size=0)

        def step(w: jax.Array, x: jax.Array) -> jax.Array:
            return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

        w, x = np.full((64, 32), 0.01, np.float32), np.ones((256, 64), np.float32)
        compiled = helper.sjit(step, in_shardings=(rule, P('dp')), out_shardings=rule)
        np.testing.assert_allclose(compiled(w, x), jax.jit(step)(w, x), rtol=1e-4)
        assert compiled(w, x).sharding.spec == P('dp')
        assert set(helper.plan(compiled, w, x).totals) == {('dp',)}

    def test_4e_tensor_parallelism(self) -> None:
        """Columns of the first matrix, rows of the second one, and one sum over the model-parallel axis."""
        params = {
            'w1': np.full((4, 16), 0.1, np.float32),
            'b1': np.zeros(16, np.float32),
            'w2': np.full((16, 4), 0.1, np.float32),
            'b2': np.zeros(4, np.float32),
        }
        rule = TreePathShardingRule(
            ('w1', P(None, 'mp')), ('b1', P('mp')), ('w2', P('mp', None)), ('b2', P())
        )

        def mlp(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            hidden = jax.nn.gelu(x @ params['w1'] + params['b1'])
            return hidden @ params['w2'] + params['b2']

        step = AUTO.sjit(mlp, in_shardings=(rule, P('dp')), out_shardings=P('dp'))
        np.testing.assert_allclose(step(params, DATA), jax.jit(mlp)(params, DATA), rtol=1e-4)
        assert_collectives(step, params, DATA, all_reduce={'mp': 1}, all_gather=0)
