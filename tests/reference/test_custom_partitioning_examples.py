"""Conformance with the examples of custom partitioning, each written with `scalax.custom_op`.

The tests follow the document, heading by heading. docs/custom_ops.md is the page for users.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax.custom_op import FactorContext, sharded_op
from scalax.errors import RuleError
from scalax.sharding import MeshShardingHelper
from scalax.testing import assert_collectives

P = PartitionSpec
X = np.arange(32, dtype=np.float32).reshape(4, 8)


@pytest.fixture(scope='module')
def helper() -> MeshShardingHelper:
    """Four simulated devices, as the document's set-up has them."""
    return MeshShardingHelper([2, 2], ['batch', 'vocab'], devices=jax.devices()[:4])


@sharded_op('b c, -> b c')
def scale(ctx: FactorContext, x: jax.Array, factor: jax.Array) -> jax.Array:
    assert factor.shape == ()
    return x * factor


@sharded_op('b c -> b c')
def add_index(ctx: FactorContext, x: jax.Array) -> jax.Array:
    return x + 100 * (ctx.index('b') + ctx.index('c'))


@sharded_op('b v, b -> b k, b k', reduction_factors=('v',))
def top_k(ctx: FactorContext, logits: jax.Array, counts: jax.Array, *, k: int) -> Any:
    block = logits.shape[-1]
    values, tokens = jax.lax.top_k(logits, min(k, block))
    tokens = tokens + ctx.index('v') * block
    values = ctx.all_gather(values, 'v', axis=1, tiled=True)
    tokens = ctx.all_gather(tokens, 'v', axis=1, tiled=True)
    values, best = jax.lax.top_k(values, k)
    chosen = jnp.arange(k) < counts[:, None]
    return jnp.where(chosen, values, -jnp.inf), jnp.take_along_axis(tokens, best, axis=1)


def test_setup(helper: MeshShardingHelper) -> None:
    assert helper.mesh.size == 4
    assert len(helper.shard(X, P('batch', 'vocab')).addressable_shards) == 4


class TestScalarArrayHandling:
    """### 1. Scalar Array Handling"""

    @pytest.mark.parametrize('spec', [P(), P('batch'), P(None, 'vocab'), P('batch', 'vocab')], ids=str)
    def test_only_shaped_arrays_affect_the_output_sharding(
        self, helper: MeshShardingHelper, spec: PartitionSpec
    ) -> None:
        out = scale(helper.shard(X, spec), helper.shard(np.float32(3), P()))
        assert out.sharding.is_equivalent_to(NamedSharding(helper.mesh, spec), 2)
        np.testing.assert_array_equal(out, 3 * X)

    def test_scalars_are_replicated(self, helper: MeshShardingHelper) -> None:
        assert helper.shard(np.float32(3), P()).sharding.is_fully_replicated

    def test_scalars_need_no_communication(self, helper: MeshShardingHelper) -> None:
        step = helper.sjit(scale, in_shardings=(P('batch', 'vocab'), P()))
        assert_collectives(step, X, np.float32(3), all_gather=0, all_reduce=0, all_to_all=0)

    def test_an_array_of_parameters_is_sharded_with_its_factor(self, helper: MeshShardingHelper) -> None:
        blocks = []

        @sharded_op('b c, c -> b c')
        def scale_columns(ctx: FactorContext, x: jax.Array, factors: jax.Array) -> jax.Array:
            blocks.append(factors.shape)
            return x * factors

        factors = np.arange(8, dtype=np.float32)
        out = scale_columns(helper.shard(X, P('batch', 'vocab')), factors)
        np.testing.assert_array_equal(out, X * factors)
        assert blocks[-1] == (4,)


class TestAxisIndexInCustomPartitioning:
    """### 2. Axis Index in Custom Partitioning"""

    def test_example_output(self, helper: MeshShardingHelper) -> None:
        out = add_index(helper.shard(np.zeros((4, 8), np.int32), P('batch', 'vocab')))
        added = {shard.device: np.unique(shard.data).tolist() for shard in out.addressable_shards}
        assert [added[device] for device in helper.mesh.devices.flat] == [[0], [100], [100], [200]]

    def test_axes_of_one_dimension_accumulate(self, helper: MeshShardingHelper) -> None:
        out = add_index(helper.shard(np.zeros((4, 8), np.int32), P(('batch', 'vocab'))))
        assert np.asarray(out)[:, 0].tolist() == [0, 100, 200, 300]

    def test_axis_index_of_jax_inside_of_the_operation(self, helper: MeshShardingHelper) -> None:
        @sharded_op('b c -> b c')
        def add_axis_index(ctx: FactorContext, x: jax.Array) -> jax.Array:
            return x + sum((jax.lax.axis_index(name) for name in ctx.axis_names('b')), 0)

        out = add_axis_index(helper.shard(np.zeros((4, 8), np.int32), P('batch')))
        assert np.asarray(out)[:, 0].tolist() == [0, 0, 1, 1]

    def test_compiled_and_not_compiled(self, helper: MeshShardingHelper) -> None:
        """JAX's custom_partitioning needs jax.jit; an operation of scalax does not."""
        placed = helper.shard(X, P('batch', 'vocab'))
        np.testing.assert_array_equal(jax.jit(add_index)(placed), add_index(placed))


class TestCustomPartitioning:
    """### Custom Partitioning, ### Partitioning Callbacks: JAX's own, in a compiled function of scalax"""

    def test_def_partition_with_both_callbacks(self, helper: MeshShardingHelper) -> None:
        blocks: list[tuple[int, ...]] = []

        @custom_partitioning
        def row_sums(x: jax.Array) -> jax.Array:
            return x.sum(axis=-1)

        def infer_sharding(mesh: Mesh, operands: Any, result: Any) -> NamedSharding:
            return NamedSharding(mesh, P(operands[0].sharding.spec[0]))

        def partition(mesh: Mesh, operands: Any, result: Any) -> Any:
            spec = operands[0].sharding.spec
            axes = spec[1] if len(spec) > 1 else None

            def on_block(x: jax.Array) -> jax.Array:
                blocks.append(x.shape)
                return jax.lax.psum(x.sum(axis=-1), axes) if axes else x.sum(axis=-1)

            return mesh, on_block, NamedSharding(mesh, P(spec[0])), (operands[0].sharding,)

        row_sums.def_partition(
            infer_sharding_from_operands=infer_sharding, partition=partition, sharding_rule='b v -> b'
        )
        out = helper.sjit(row_sums, in_shardings=P('batch', 'vocab'))(X)
        np.testing.assert_array_equal(out, X.sum(axis=1))
        assert out.sharding.is_equivalent_to(NamedSharding(helper.mesh, P('batch')), 1)
        assert blocks[-1] == (2, 4)


class TestShardyShardingRules:
    """### Shardy Sharding Rules"""

    def test_two_array_inputs(self, helper: MeshShardingHelper) -> None:
        @sharded_op('b v, k -> b k', need_replication_factors=('v',))
        def take(ctx: FactorContext, x: jax.Array, tokens: jax.Array) -> jax.Array:
            return x[:, tokens]

        tokens = np.array([1, 6])
        out = take(helper.shard(X, P('batch', 'vocab')), tokens)
        np.testing.assert_array_equal(out, X[:, tokens])
        assert out.sharding.is_equivalent_to(NamedSharding(helper.mesh, P('batch')), 2)

    def test_an_array_and_a_scalar(self, helper: MeshShardingHelper) -> None:
        @sharded_op('b v, -> b k', reduction_factors=('v',))
        def repeat_sum(ctx: FactorContext, x: jax.Array, scale: jax.Array) -> jax.Array:
            return ctx.psum(x.sum(axis=1, keepdims=True), 'v') * scale * jnp.ones(3)

        out = repeat_sum(helper.shard(X, P('batch', 'vocab')), 2.0)
        np.testing.assert_array_equal(out, 2 * X.sum(axis=1, keepdims=True) * np.ones(3))

    def test_a_factor_without_a_result_says_what_becomes_of_it(self) -> None:
        """On purpose stricter than Shardy: `'b v, -> b k'` alone does not say who sums over `v`."""
        with pytest.raises(RuleError, match="'v' is in no result: reduction_factors="):
            sharded_op('b v, -> b k')


class TestPartitionSpec:
    """### PartitionSpec"""

    @pytest.mark.parametrize(
        ('spec', 'shape'), [(P('batch', 'vocab'), (2, 4)), (P('batch', None), (2, 8)), (P(), (4, 8))], ids=str
    )
    def test_blocks(self, helper: MeshShardingHelper, spec: PartitionSpec, shape: tuple[int, int]) -> None:
        assert {shard.data.shape for shard in helper.shard(X, spec).addressable_shards} == {shape}


class TestRealWorldUsage:
    """## Real-World Usage in Tallax: top-k of sharded logits, with a number of candidates for each row"""

    @pytest.mark.medium
    @pytest.mark.parametrize('spec', [P(), P('batch'), P(None, 'vocab'), P('batch', 'vocab')], ids=str)
    def test_sharded_logits_and_batched_k(self, helper: MeshShardingHelper, spec: PartitionSpec) -> None:
        logits = np.random.default_rng(0).permutation(32).astype(np.float32).reshape(4, 8)
        counts = np.array([1, 2, 3, 3])
        values, tokens = top_k(helper.shard(logits, spec), counts, k=3)
        expected, expected_tokens = jax.lax.top_k(logits, 3)
        chosen = np.arange(3) < counts[:, None]
        np.testing.assert_array_equal(values, np.where(chosen, expected, -np.inf))
        np.testing.assert_array_equal(tokens, expected_tokens)

    def test_all_gathers_move_candidates_alone(self, helper: MeshShardingHelper) -> None:
        logits = np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32)
        step = helper.sjit(lambda x, n: top_k(x, n, k=3), in_shardings=(P('batch', 'vocab'), P('batch')))
        plan = helper.plan(step, logits, np.full(4, 3))
        assert 0 < sum(plan.totals[('vocab',)].values()) <= 2 * 4 * 2 * 3 * 4
