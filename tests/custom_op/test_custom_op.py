"""Sharded operations give the same values for all shardings of the operands, under every transformation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from scalax.custom_op import FactorContext, sharded_op
from scalax.errors import ArgumentError
from scalax.sharding import MeshShardingHelper
from scalax.testing import assert_collectives, assert_no_recompile
from tests.support.placements import count_equal_placements

P = PartitionSpec
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
Array = jax.Array


def mesh_of(*types: AxisType) -> Mesh:
    """Returns a 2x2 mesh with axes of these types."""
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('x', 'y'), axis_types=types)


MESHES = {'auto': (AUTO, AUTO), 'explicit': (EXPLICIT, EXPLICIT), 'mixed': (EXPLICIT, AUTO)}


@pytest.fixture(params=MESHES)
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return mesh_of(*MESHES[request.param])


def put(mesh: Mesh, x: Any, *spec: Any) -> Array:
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


NUMBERS = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
LABELS = np.array([7, 0, 3, 5])


@sharded_op('b c, -> b', reduction_factors=('c',))
def sums(ctx: FactorContext, x: Array, scale: Array) -> Array:
    return ctx.psum(scale * x.sum(axis=-1), 'c')


@sharded_op('b c -> b c, b')
def softmax(ctx: FactorContext, x: Array) -> tuple[Array, Array]:
    top = ctx.pmax(x.max(axis=-1), 'c')
    odds = jnp.exp(x - top[:, None])
    return odds / ctx.psum(odds.sum(axis=-1), 'c')[:, None], top


@sharded_op('b v, b -> b', reduction_factors=('v',))
def picked(ctx: FactorContext, x: Array, labels: Array) -> Array:
    columns = jnp.arange(x.shape[-1]) + ctx.index('v') * x.shape[-1]
    return ctx.psum(jnp.where(columns == labels[:, None], x, 0).sum(axis=-1), 'v')


@sharded_op('b v -> b k, b k', reduction_factors=('v',))
def largest(ctx: FactorContext, x: Array, *, k: int) -> tuple[Array, Array]:
    values, at = jax.lax.top_k(x, min(k, x.shape[-1]))
    at = at + ctx.index('v') * x.shape[-1]
    values, at = (ctx.all_gather(array, 'v', axis=1, tiled=True) for array in (values, at))
    values, order = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(at, order, axis=1)


@sharded_op('a b c -> a b', need_replication_factors=('c',))
def lengths(ctx: FactorContext, x: Array) -> Array:
    return jnp.sqrt((x * x).sum(axis=-1))


@sharded_op('b _ 2 -> b')
def fixed(ctx: FactorContext, x: Array) -> Array:
    return x.sum(axis=(1, 2))


@sharded_op('b c -> c b')
def transposed(ctx: FactorContext, x: Array) -> Array:
    return x.T


@sharded_op('a b -> b a')
def exchanged(ctx: FactorContext, x: Array) -> Array:
    """Transposes, after an all_to_all and its inverse."""
    parts = ctx.all_to_all(x, 'a', 1, 0, tiled=True)
    return ctx.all_to_all(parts, 'a', 0, 1, tiled=True).T


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    'a scalar': (sums, (NUMBERS, 2.0), {}),
    'several results': (softmax, (NUMBERS,), {}),
    'an index': (picked, (NUMBERS, LABELS), {}),
    'a static argument': (largest, (NUMBERS,), {'k': 3}),
    'three dimensions': (lengths, (NUMBERS.reshape(2, 2, 8),), {}),
    'no name': (fixed, (NUMBERS.reshape(4, 4, 2),), {}),
    'another order': (transposed, (NUMBERS,), {}),
    'all to all': (exchanged, (NUMBERS,), {}),
    'bfloat16': (softmax, (NUMBERS.astype(jnp.bfloat16),), {}),
}


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('types', [(AUTO,), (EXPLICIT,)], ids=['auto', 'explicit'])
@pytest.mark.parametrize('name', CALLS)
def test_every_sharding_gives_the_same_values(name: str, types: tuple[AxisType, ...]) -> None:
    op, operands, static = CALLS[name]
    line = Mesh(np.array(jax.devices()[:2]), ('x',), axis_types=types)
    arrays = tuple(map(jnp.asarray, operands))
    assert count_equal_placements(functools.partial(op, **static), arrays, line) > 1


@pytest.mark.slow
def test_every_sharding_on_a_mesh_of_two_axes(mesh: Mesh) -> None:
    # Each mesh axis shards rows, columns or neither; axes of different types do not share a dimension.
    count = 9 if len(set(mesh.axis_types)) == 1 else 7
    assert count_equal_placements(norms, (NUMBERS,), mesh) == count


# --- Contexts --------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize(
    ('spec', 'expected'),
    [
        (P('x', 'y'), P('x')),
        (P(('x', 'y')), P(('x', 'y'))),
        (P(None, ('x', 'y')), P()),
        (P('y'), P('y')),
        (P(), P()),
    ],
    ids=str,
)
@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_results_are_sharded_by_the_rule(spec: PartitionSpec, expected: PartitionSpec, types: str) -> None:
    x = put(mesh_of(*MESHES[types]), NUMBERS, *spec)
    total = sums(x, 1.0)
    assert total.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, expected), 1)
    np.testing.assert_allclose(total, NUMBERS.sum(axis=-1), rtol=1e-5)


def test_no_mesh_at_all() -> None:
    np.testing.assert_allclose(sums(NUMBERS, 3), 3 * NUMBERS.sum(axis=-1), rtol=1e-5)
    assert len(softmax(NUMBERS)[0].sharding.device_set) == 1


def recording() -> tuple[Callable[..., Any], list[Any]]:
    """Returns an operation, and a list of the arguments of its function in each trace."""
    seen: list[Any] = []

    @sharded_op('b c -> b c')
    def same(ctx: FactorContext, x: Array) -> Array:
        seen.append((ctx.axis_names('c'), ctx.size('c'), ctx.size('b') > 1, x.shape))
        return x

    return same, seen


@pytest.mark.medium
@pytest.mark.parametrize('how', ['eagerly', 'jit', 'vmap'])
def test_the_function_sees_blocks(mesh: Mesh, how: str) -> None:
    same, seen = recording()
    if how == 'vmap':
        jax.vmap(same)(put(mesh, NUMBERS[None], None, 'x'))
    else:
        (jax.jit(same) if how == 'jit' else same)(put(mesh, NUMBERS, 'x'))
    assert seen[-1] == ((), 1, True, (2, 8))


def test_dimensions_that_do_not_divide_are_unsharded() -> None:
    same, seen = recording()
    mesh = mesh_of(AUTO, AUTO)

    @jax.jit
    def padded(x: Array) -> Array:
        return same(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('x', 'y'))))

    np.testing.assert_array_equal(padded(np.ones((3, 8))), np.ones((3, 8)))
    assert seen[-1] == (('y',), 2, False, (3, 4))


@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_operands_that_disagree(types: str) -> None:
    mesh = mesh_of(*MESHES[types])
    total = picked(put(mesh, NUMBERS, 'x'), put(mesh, LABELS, 'y'))
    np.testing.assert_array_equal(total, NUMBERS[np.arange(4), LABELS])
    if types == 'explicit':  # over Auto axes the compiler decides
        assert total.sharding.spec == P('x')  # like the largest


@pytest.mark.medium
def test_inside_sjit(mesh: Mesh) -> None:
    helper = MeshShardingHelper.from_mesh(mesh)
    compiled = helper.sjit(lambda x: sums(2 * x, 1.0), in_shardings=P('x', 'y'))
    np.testing.assert_allclose(compiled(NUMBERS), 2 * NUMBERS.sum(axis=-1), rtol=1e-5)
    assert compiled(NUMBERS).sharding.is_equivalent_to(NamedSharding(mesh, P('x')), 1)
    assert_collectives(compiled, NUMBERS, all_reduce={'y': 1}, all_gather=0, all_to_all=0)


@pytest.mark.medium
def test_an_ambient_mesh(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        x = jax.device_put(NUMBERS, P('x', 'y'))
        np.testing.assert_allclose(jax.jit(sums)(x, 1.0), NUMBERS.sum(axis=-1), rtol=1e-5)
        np.testing.assert_allclose(sums(x, 1.0), NUMBERS.sum(axis=-1), rtol=1e-5)


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('manual', [{'x', 'y'}, {'x'}], ids=['fully', 'partly'])
@pytest.mark.parametrize('check_vma', [True, False])
def test_inside_shard_map_the_operands_are_blocks(mesh: Mesh, manual: set[str], check_vma: bool) -> None:
    @jax.jit
    def mapped(x: Array) -> Array:
        return jax.shard_map(
            lambda block: sums(block, 1.0),
            mesh=mesh,
            in_specs=P(None, 'x'),
            out_specs=P('x'),
            axis_names=manual,
            check_vma=check_vma,
        )(x)

    x = put(mesh, NUMBERS, None, 'x')
    halves = NUMBERS.reshape(4, 2, 4).sum(axis=-1).T.reshape(-1)  # the sum of each block, not of the array
    np.testing.assert_allclose(mapped(x), halves, rtol=1e-5)
    grads = jax.jit(jax.grad(lambda x: (mapped(x) ** 2).sum()))(x)
    assert grads.shape == x.shape


def test_an_operation_inside_an_operation(mesh: Mesh) -> None:
    @sharded_op('b c -> b', reduction_factors=('c',))
    def outer(ctx: FactorContext, x: Array) -> Array:
        return ctx.psum(sums(x, 1.0), 'c')

    np.testing.assert_allclose(outer(put(mesh, NUMBERS, 'x')), NUMBERS.sum(axis=-1), rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize('table', [jnp.arange(8.0), np.arange(8.0, dtype=np.float32)], ids=['jax', 'numpy'])
def test_the_function_closes_over_an_array(mesh: Mesh, table: Any) -> None:
    @sharded_op('b c -> b c', need_replication_factors=('c',))
    def times(ctx: FactorContext, x: Array) -> Array:
        return x * table + jnp.array([1.0, 2, 3, 4, 5, 6, 7, 8])

    expected = NUMBERS * np.arange(8) + np.arange(1, 9)
    np.testing.assert_allclose(times(put(mesh, NUMBERS, 'x')), expected, rtol=1e-5)


def test_the_function_closes_over_a_traced_value() -> None:
    @jax.jit
    def scaled(x: Array, scale: Array) -> Array:
        @sharded_op('b c -> b c')
        def times(ctx: FactorContext, x: Array) -> Array:
            return scale * x

        return times(x)

    np.testing.assert_allclose(scaled(put(mesh_of(AUTO, AUTO), NUMBERS, 'x'), 2.0), 2 * NUMBERS)


@pytest.mark.medium
def test_the_data_of_a_key_is_an_operand(mesh: Mesh) -> None:
    @sharded_op('_ _, b c -> b c')
    def noisy(ctx: FactorContext, data: Array, x: Array) -> Array:
        return x + jax.random.uniform(jax.random.wrap_key_data(data)[1])

    keys = jax.random.split(jax.random.key(0), 2)
    expected = NUMBERS + jax.random.uniform(keys[1])
    noise = jax.jit(noisy)(jax.random.key_data(keys), put(mesh, NUMBERS, 'x'))
    np.testing.assert_allclose(noise, expected, rtol=1e-6)
    with pytest.raises(ArgumentError, match="operand 'data' holds typed PRNG keys"):
        noisy(keys, NUMBERS)


def test_it_is_compiled_once_for_each_static_argument() -> None:
    x = put(mesh_of(AUTO, AUTO), NUMBERS, 'x', 'y')
    largest(x, k=2)
    with assert_no_recompile(jax.jit(largest)):
        largest(x, k=2)
    assert largest(x, k=1)[0].shape == (4, 1)
    assert largest(x, k=2)[0].shape == (4, 2)


def test_static_arguments_come_in_any_order() -> None:
    traces = []

    @sharded_op('b -> b')
    def scaled(ctx: FactorContext, x: Array, *, by: float, plus: float) -> Array:
        traces.append((by, plus))
        return x * by + plus

    ones = np.ones(2, np.float32)
    scaled(ones, by=2.0, plus=1.0)
    count = len(traces)
    assert scaled(ones, plus=1.0, by=2.0)[0] == 3
    assert len(traces) == count
    assert scaled(ones, plus=2.0, by=1.0)[0] == 3
    assert len(traces) > count


def test_static_arguments_that_are_equal_but_of_other_types() -> None:
    @sharded_op('b -> b')
    def named(ctx: FactorContext, x: Array, *, how: Any) -> Array:
        return x + (10 if how is True else 0)

    ones = np.ones(2, np.float32)
    assert [named(ones, how=how)[0] for how in (1, True, 1.0, True)] == [1, 11, 1, 11]


def test_abstract_operands() -> None:
    structs = jax.eval_shape(softmax, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    assert [struct.shape for struct in structs] == [(4, 8), (4,)]
    where = NamedSharding(mesh_of(AUTO, AUTO), P('x', 'y'))
    struct = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=where)
    compiled = jax.jit(softmax).lower(struct).compile()
    np.testing.assert_allclose(compiled(jax.device_put(NUMBERS, where))[1], NUMBERS.max(axis=-1))


# --- Under transformations -------------------------------------------------------------------------


@sharded_op('b c -> b', reduction_factors=('c',))
def norms(ctx: FactorContext, x: Array) -> Array:
    return jnp.sqrt(ctx.psum((x * x).sum(axis=-1), 'c'))


@sharded_op('b c -> b', reduction_factors=('c',))
def norms_by_hand(ctx: FactorContext, x: Array) -> Array:
    return jnp.sqrt(ctx.psum((x * x).sum(axis=-1), 'c'))


@sharded_op('b c, b, b -> b c')
def norms_backward(ctx: FactorContext, x: Array, norm: Array, cotangent: Array) -> Array:
    return x * (cotangent / norm)[:, None]


norms_by_hand.defvjp(lambda x: (norms_by_hand(x),) * 2, norms_backward)


def looped(op: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Array) -> Array:
        return jax.lax.scan(lambda carry, _: (carry + op(x * carry.sum()), None), jnp.ones(4), length=2)[0]

    return run


TRANSFORMATIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    'grad': lambda op: jax.grad(lambda x: (op(x) ** 3).sum()),
    'vjp of vmap': lambda op: jax.grad(lambda x: (jax.vmap(op)(jnp.stack([x, 2 * x])) ** 2).sum()),
    'vmap of grad': lambda op: lambda x: jax.vmap(jax.grad(lambda y: op(y).sum()))(jnp.stack([x, 2 * x]))[1],
    'vmap of vmap': lambda op: lambda x: jax.vmap(jax.vmap(op))(jnp.stack([x, 2 * x])[:, None]),
    'vmap, last': lambda op: lambda x: jax.vmap(op, in_axes=2, out_axes=1)(jnp.stack([x, 2 * x], axis=2)),
    'scan': looped,
    'grad of scan': lambda op: jax.grad(lambda x: looped(op)(x).sum()),
    'checkpoint': lambda op: jax.grad(lambda x: (jax.checkpoint(lambda y: op(jnp.sin(y)))(x) ** 2).sum()),
}


def reference(x: Array) -> Array:
    return jnp.sqrt((x * x).sum(axis=-1))


@functools.cache
def transformed_reference(name: str) -> Array:
    return jax.jit(TRANSFORMATIONS[name](reference))(NUMBERS)


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('op', [norms, norms_by_hand], ids=['plain gradient', 'defvjp'])
@pytest.mark.parametrize('name', TRANSFORMATIONS)
@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_transformations(types: str, name: str, op: Callable[..., Any]) -> None:
    mesh = mesh_of(*MESHES[types])
    transformed, expected = TRANSFORMATIONS[name](op), transformed_reference(name)
    x = put(mesh, NUMBERS, 'x', 'y')
    np.testing.assert_allclose(jax.jit(transformed)(x), expected, rtol=2e-5, atol=1e-5)
    if types == 'auto':  # otherwise JAX needs a mesh for gradients outside jit
        np.testing.assert_allclose(transformed(x), expected, rtol=2e-5, atol=1e-5)


def test_the_users_gradient_is_partitioned_by_its_rule() -> None:
    helper = MeshShardingHelper.from_mesh(mesh_of(AUTO, AUTO))
    step = helper.sjit(jax.grad(lambda x: norms_by_hand(x).sum()), in_shardings=P('x', 'y'))
    assert_collectives(step, NUMBERS, all_reduce={'y': 1}, all_gather=0, all_to_all=0)
    assert step(NUMBERS).sharding.spec == P('x', 'y')


def test_a_mapped_dimension_is_sharded_like_any_other() -> None:
    mesh = mesh_of(AUTO, AUTO)
    x = put(mesh, np.stack([NUMBERS, NUMBERS]), 'x', None, 'y')
    total = jax.jit(jax.vmap(norms))(x)
    assert total.sharding.is_equivalent_to(NamedSharding(mesh, P('x')), 2)
    helper = MeshShardingHelper.from_mesh(mesh)
    step = helper.sjit(jax.vmap(norms), in_shardings=P('x', None, 'y'))
    assert_collectives(step, np.asarray(x), all_reduce={'y': 1}, all_gather=0)


@pytest.mark.medium
def test_gradients_over_axes_of_both_types() -> None:
    x = put(mesh_of(EXPLICIT, AUTO), NUMBERS, 'x', 'y')
    expected = jax.grad(lambda x: (reference(x) ** 2).sum())(NUMBERS)
    for op in (norms, norms_by_hand):
        grad = jax.jit(jax.grad(lambda x, op=op: (op(x) ** 2).sum()))(x)
        np.testing.assert_allclose(grad, expected, rtol=2e-5)


@pytest.mark.medium
@pytest.mark.parametrize('op', [norms, norms_by_hand], ids=['plain gradient', 'defvjp'])
def test_second_derivatives(op: Callable[..., Any]) -> None:
    def of(fun: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda x: jnp.sin(jax.grad(lambda y: fun(y).sum())(x)).sum())

    x = put(mesh_of(AUTO, AUTO), NUMBERS, 'x', 'y')
    np.testing.assert_allclose(jax.jit(of(op))(x), of(reference)(NUMBERS), rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_a_mapped_dimension_that_is_sharded_in_its_type() -> None:
    for types in ((EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)):
        x = put(mesh_of(*types), np.stack([NUMBERS, NUMBERS]), 'x', None, 'y')
        norm = jax.jit(jax.vmap(norms))(x)
        np.testing.assert_allclose(np.asarray(norm)[1], reference(NUMBERS), rtol=1e-5)
        assert jax.typeof(norm).sharding.spec[0] == 'x'
        grad = jax.jit(jax.grad(lambda x: (jax.vmap(norms_by_hand)(x) ** 2).sum()))(x)
        np.testing.assert_allclose(np.asarray(grad)[0], 2 * NUMBERS, rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_collectives_under_vmap(types: str) -> None:
    pair = np.stack([NUMBERS, NUMBERS[::-1]])
    x = put(mesh_of(*MESHES[types]), pair, None, 'x', 'y')
    tokens = jax.jit(jax.vmap(lambda row: largest(row, k=3)[1]))(x)
    np.testing.assert_array_equal(tokens, jax.lax.top_k(pair, 3)[1])
    np.testing.assert_array_equal(jax.jit(jax.vmap(exchanged))(x), np.swapaxes(pair, 1, 2))


@pytest.mark.medium
def test_operands_without_a_gradient(mesh: Mesh) -> None:
    x = put(mesh, NUMBERS, 'x')
    grad = jax.jit(jax.grad(lambda x: (picked(x, LABELS) ** 2).sum()))(x)
    expected = np.zeros_like(NUMBERS)
    expected[np.arange(4), LABELS] = 2 * NUMBERS[np.arange(4), LABELS]
    np.testing.assert_allclose(grad, expected, rtol=1e-5)


@pytest.mark.parametrize('types', [AUTO, EXPLICIT], ids=['auto', 'explicit'])
def test_custom_partitioning_of_jax_works_inside_sjit(types: AxisType) -> None:
    blocks: list[tuple[int, ...]] = []

    @custom_partitioning
    def doubled(x: Array) -> Array:
        return 2 * x

    def on_block(x: Array) -> Array:
        blocks.append(x.shape)
        return 2 * x

    def partition(mesh: Mesh, operands: Any, result: Any) -> Any:
        return mesh, on_block, result.sharding, (operands[0].sharding,)

    doubled.def_partition(partition=partition, sharding_rule='b c -> b c')
    helper = MeshShardingHelper([4, 2], ['a', 'b'], axis_types=types)
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    out = helper.sjit(doubled, in_shardings=P('a', 'b'))(x)
    np.testing.assert_array_equal(out, 2 * x)
    assert out.sharding.spec == P('a', 'b')
    assert blocks[-1] == (2, 4)
