"""Kernels of Pallas run on each device with its own rows, where the grid shows that rows are apart."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, AxisType

from scalax._follow.kernels import dealt_steps, equation_on_rows, shards_of
from scalax._jax.equations import opened
from scalax._jax.kernels import run_part
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P
from tests.support.following import MESH, equations, rows_at

ROWS = jnp.arange(16 * 8 * 32, dtype='float32').reshape(16, 8, 32) / 1000
RULE = FSDPShardingRule(min_fsdp_size=1)


@pytest.fixture
def helper():
    return MeshShardingHelper([8], ['fsdp'])


@pytest.fixture
def grid():
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def sine(x, out):
    out[...] = jnp.sin(x[...])


def sines(x, kernel=sine, **options):
    """A kernel over the rows of (B, S, D)."""
    row = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0, 0))
    options = {'grid': (len(x),), 'in_specs': [row], 'out_specs': row, 'interpret': True} | options
    return pl.pallas_call(kernel, like(x), **options)(x)


def run(helper, fun, x, weights=None, rule=RULE, **options):
    """The results of a function on the mesh, and how its rows were followed."""
    args = (x,) if weights is None else (weights, x)
    placed = (P('fsdp'),) if weights is None else (rule, P('fsdp'))
    step = helper.sjit(fun, in_shardings=placed, batch_argnums=len(args) - 1, **options)
    with jax.default_matmul_precision('highest'):
        result = step(*args)
        expected = jax.jit(fun)(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), result, expected)
    return step.followed(*args), result


def kernels(followed):
    return [(each.array, each.spec) for each in followed.kept if each.primitive == 'pallas_call']


def is_lost(followed):
    return 'pallas_call' in {each.primitive for each in followed.lost}


def test_each_device_runs_it_on_its_rows(helper):
    followed, result = run(helper, sines, ROWS)
    assert kernels(followed) == [('float32[16,8,32]', P('fsdp', None, None))]
    assert not followed.lost
    assert result.sharding.spec == P('fsdp')


def in_parts(fun, trails, mesh, *args):
    """The results of a kernel, computed part by part as each device of a mesh would."""
    equation = kernel_in(fun, *args)
    over = dealt_steps(equation, trails, mesh, has_rows)
    specs = mesh_specs(equation_on_rows(equation, over, mesh))
    parts = []
    for index in np.ndindex(*mesh.shape.values()):
        device = dict(zip(mesh.shape, index, strict=True))
        operands = [part(arg, spec, device, mesh) for arg, spec in zip(args, specs[0], strict=True)]
        parts.append((device, run_part(equation, operands, shards_of(over, mesh))))
    found = [np.full(var.aval.shape, np.nan, var.aval.dtype) for var in equation.outvars]
    for device, results in parts:
        for whole, spec, result in zip(found, specs[1], results, strict=True):
            whole[slices(whole, spec, device, mesh)] = result
    return found


def kernel_in(fun, *args):
    """The equation of the kernel of a function."""
    every = equations(jax.make_jaxpr(fun)(*args))
    [equation] = [each for each in every if each.primitive.name == 'pallas_call']
    return equation


def has_rows(trail):
    return ('fsdp',) in trail


def split_in(fun, trails, *args, mesh=MESH):
    """How the steps of the kernel of a function are dealt."""
    return dealt_steps(kernel_in(fun, *args), trails, mesh, has_rows)


def mesh_specs(equation):
    return equation.params['in_specs'], equation.params['out_specs']


def slices(array, spec, device, mesh):
    """Where the part of an array lies that a device has."""
    found = []
    for size, axis in zip(array.shape, (*spec, *[None] * array.ndim), strict=False):
        part = size // mesh.shape[axis] if axis else size
        start = device[axis] * part if axis else 0
        found.append(slice(start, start + part))
    return tuple(found)


def part(array, spec, device, mesh):
    return array[slices(array, spec, device, mesh)]


@pytest.mark.medium
def test_devices_compute_the_whole_together():
    [result] = in_parts(sines, [rows_at(0, 3)], MESH, ROWS)
    np.testing.assert_allclose(result, jnp.sin(ROWS), rtol=1e-6)


@pytest.mark.medium
def test_devices_of_two_axes_compute_the_whole_together():
    mesh = AbstractMesh((4, 2), ('fsdp', 'tp'), axis_types=(AxisType.Auto,) * 2)
    x = ROWS.reshape(16, 4, 2, 32)
    args = x, jnp.arange(128.0).reshape(4, 32), jnp.full((1,), 3.0)
    trails = [(('fsdp',), ('tp',), (), ()), (('tp',), ()), ()]
    results = in_parts(heads_and_scale, trails, mesh, *args)
    for result, expected in zip(results, heads_and_scale(*args), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_the_kernel_of_a_device_takes_its_part_of_the_steps(helper):
    compiled = functools.partial(sines, interpret=False)  # traced, not run: there is no TPU
    step = helper.sjit(compiled, in_shardings=P('fsdp'), batch_argnums=0)
    [mapped] = [each for each in equations(step.trace(ROWS).jaxpr) if each.primitive.name == 'shard_map']
    assert mapped.params['in_specs'] == (P('fsdp', None, None),)
    [kernel] = opened(mapped.params['jaxpr']).eqns
    assert kernel.params['grid_mapping'].grid == (2,)
    assert [var.aval.shape for var in (*kernel.invars, *kernel.outvars)] == [(2, 8, 32)] * 2
    assert kernels(step.followed(ROWS)) == [('float32[16,8,32]', P('fsdp', None, None))]


@pytest.mark.medium
@pytest.mark.skipif(not importlib.util.find_spec('libtpu'), reason='compiles for TPUs')
def test_the_compiler_for_tpus_takes_it():
    def loss(weights, x):
        return jnp.mean(sines((x @ weights).reshape(64, 8, 128), interpret=False))

    helper = MeshShardingHelper.from_topology('v5e:2x4', [-1], ['fsdp'])
    args = jnp.ones((128, 128)), jax.ShapeDtypeStruct((512, 128), 'float32')
    options = {'in_shardings': (RULE, P('fsdp'))}
    moved = helper.plan(helper.sjit(loss, **options), *args, quick=True).collectives
    assert {each.kind for each in moved} == {'all-gather', 'all-reduce'}  # weights; the mean
    with pytest.raises(NotImplementedError, match='Mosaic kernels cannot be automatically partitioned'):
        helper.plan(helper.sjit(loss, **options, batch_argnums=()), *args, quick=True)


def columns_in_order(order, x):
    """Grid of rows and parts of columns; numbers, read before, say which part comes first."""
    given = pl.BlockSpec((1, 8, 8), lambda i, j, order: (i, 0, order[j]))
    taken = pl.BlockSpec((1, 8, 8), lambda i, j, order: (i, 0, j))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(len(x), 4), in_specs=[given], out_specs=taken
    )
    kernel = pl.pallas_call(lambda order, *refs: sine(*refs), like(x), grid_spec=spec, interpret=True)
    return kernel(order, x)


@pytest.mark.medium
def test_numbers_that_choose_other_blocks(helper):
    order = jnp.array([2, 0, 3, 1], 'int32')
    expected = jnp.sin(ROWS.reshape(16, 8, 4, 8)[:, :, order].reshape(ROWS.shape))
    [result] = in_parts(columns_in_order, [(), rows_at(0, 3)], MESH, order, ROWS)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    followed, _ = run(helper, lambda x: columns_in_order(order, x), ROWS)
    assert kernels(followed) == [('float32[16,8,32]', P('fsdp', None, None))]
    # Numbers of each row are not those of a device.
    assert split_in(columns_in_order, [rows_at(0, 1), rows_at(0, 3)], order, ROWS) == {}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec('libtpu'), reason='compiles for TPUs')
@pytest.mark.parametrize('segments', [False, True])
def test_splash_attention(segments):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    heads, length = 2, 256
    mask = splash.MultiHeadMask([splash.CausalMask((length, length)) for _ in range(heads)])
    attention = splash.make_splash_mha_single_device(mask)

    def attended(q, k, v, ids):
        return attention(q, k, v, segment_ids=splash.SegmentIds(ids, ids) if segments else None)

    def loss(weights, x, ids):
        q, k, v = (jnp.einsum('btd,dhk->bhtk', x, weights[name]) for name in 'qkv')
        return jnp.mean(jax.vmap(attended)(q, k, v, ids) ** 2)

    helper = MeshShardingHelper.from_topology('v5e:2x4', [-1], ['fsdp'])
    weights = {name: jax.ShapeDtypeStruct((128, heads, 128), 'float32') for name in 'qkv'}
    batch = jax.ShapeDtypeStruct((16, length, 128), 'float32'), jax.ShapeDtypeStruct((16, length), 'int32')
    step = helper.sjit(jax.grad(loss), in_shardings=(RULE, P('fsdp'), P('fsdp')), out_shardings=RULE)
    assert not step.followed(weights, *batch).lost
    size = 4 * 3 * 128 * heads * 128  # of the weights, in bytes
    assert (
        sum(row.count * row.bytes for row in helper.plan(step, weights, *batch, quick=True).collectives)
        < 16 * size
    )


def heads_and_scale(x, weights, scale):
    """Grid of rows and heads, (B, H, S, D); the weights of a head, (H, D), and a scale for all."""
    heads, size = x.shape[1], x.shape[3]
    part = pl.BlockSpec((None, None, *x.shape[2:]), lambda i, j: (i, j, 0, 0))

    def kernel(x, weights, scale, out, total):
        out[...] = x[...] * weights[...] * scale[0]
        total[...] = jnp.sum(x[...]).reshape(1, 1)

    return pl.pallas_call(
        kernel,
        (like(x), jax.ShapeDtypeStruct((*x.shape[:2], 1, 1), x.dtype)),
        grid=(len(x), heads),
        in_specs=[
            part,
            pl.BlockSpec((1, size), lambda i, j: (j, 0)),
            pl.BlockSpec((1,), lambda i, j: (0,)),
        ],
        out_specs=(part, pl.BlockSpec((None, None, 1, 1), lambda i, j: (i, j, 0, 0))),
        interpret=True,
    )(x, weights, scale)


@pytest.mark.medium
def test_mesh_axes_of_the_heads_split_it_too(grid):
    """The heads come out of a product over tp, and are blocks of the second dimension of the grid."""

    def layer(weights, x):
        heads = (x @ weights['up']).reshape(*x.shape[:2], 4, -1).swapaxes(1, 2)
        return heads_and_scale(heads, weights['scale'], jnp.full((1,), 3.0))

    rule = TreePathShardingRule(('up', P('fsdp', 'tp')), ('scale', P('tp')))
    weights = {'up': jnp.ones((32, 64)) / 32, 'scale': jnp.arange(64.0).reshape(4, 16)}
    followed, _ = run(grid, layer, ROWS, weights, rule)
    assert kernels(followed) == [
        ('float32[16,4,8,16]', P('fsdp', 'tp', None, None)),
        ('float32[16,4,1,1]', P('fsdp', 'tp', None, None)),
    ]


@pytest.mark.medium
def test_in_loops_checkpoints_and_custom_gradients(helper):
    @jax.custom_vjp
    def sin(x):
        return sines(x)

    sin.defvjp(lambda x: (sines(x), x), lambda x, g: (g * sines(x + jnp.pi / 2),))

    def loss(weights, x):
        def layer(x, w):
            return jax.checkpoint(sin)(x @ w), None

        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    weights = jnp.stack([jnp.eye(32), jnp.eye(32) / 2])
    followed, _ = run(helper, jax.value_and_grad(loss), ROWS, weights)
    assert {spec for _, spec in kernels(followed)} == {P('fsdp', None, None)}
    assert not followed.lost


@pytest.mark.medium
def test_the_dimension_that_vmap_adds(helper):
    def kernel(x, out):
        out[...] = x[...] + pl.program_id(0)  # of the sequence, the second dimension of the grid

    def example(x):
        part = pl.BlockSpec((2, 32), lambda i: (i, 0))
        call = pl.pallas_call(kernel, like(x), grid=(4,), in_specs=[part], out_specs=part, interpret=True)
        return call(x)

    followed, _ = run(helper, jax.vmap(example), ROWS)
    assert kernels(followed) == [('float32[16,8,32]', P('fsdp', None, None))]


def test_several_rows_in_a_block(helper):
    block = pl.BlockSpec((2, 8, 32), lambda i: (i, 0, 0))
    fun = functools.partial(sines, grid=(8,), in_specs=[block], out_specs=block)
    followed, _ = run(helper, fun, ROWS)
    assert kernels(followed)


def test_an_aliased_operand(helper):
    followed, _ = run(helper, functools.partial(sines, input_output_aliases={0: 0}), ROWS)
    assert kernels(followed)


def test_a_cost_estimate_is_that_of_a_device(helper):
    cost = pl.CostEstimate(flops=800, transcendentals=80, bytes_accessed=1600)
    fun = functools.partial(sines, cost_estimate=cost, interpret=False)
    step = helper.sjit(fun, in_shardings=P('fsdp'), batch_argnums=0)
    [kernel] = [each for each in equations(step.trace(ROWS).jaxpr) if each.primitive.name == 'pallas_call']
    found = kernel.params['cost_estimate']
    assert (found.flops, found.transcendentals, found.bytes_accessed) == (100, 10, 200)


def scratch(x, **options):
    """Sums over a second dimension of the grid, in scratch memory."""

    def kernel(x, out, total):
        @pl.when(pl.program_id(1) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...]
        out[...] = total[...]

    part = pl.BlockSpec((1, 1, 32), lambda i, j: (i, j, 0))
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((len(x), 1, 32), x.dtype),
        grid=x.shape[:2],
        in_specs=[part],
        out_specs=pl.BlockSpec((1, 1, 32), lambda i, j: (i, 0, 0)),
        scratch_shapes=[pltpu.VMEM((1, 1, 32), 'float32')],
        interpret=True,
        **options,
    )(x)


@pytest.mark.medium
def test_scratch_memory_where_steps_are_said_to_be_parallel(helper):
    params = pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary'))
    followed, _ = run(helper, functools.partial(scratch, compiler_params=params), ROWS)
    assert kernels(followed)


def numbered(x, out):
    out[...] = x[...] + pl.program_id(0)


def accumulated(x, out):
    @pl.when(pl.program_id(0) == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    out[...] += x[...]


def summed(x):
    """All rows are added up in one block."""
    whole = pl.BlockSpec((1, *x.shape[1:]), lambda i: (0, 0, 0))
    of = jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    row = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0, 0))
    return pl.pallas_call(accumulated, of, grid=(len(x),), in_specs=[row], out_specs=whole, interpret=True)(x)


def neighbours(x):
    """Each step reads the block behind its own."""
    count = len(x)
    row = pl.BlockSpec((1, *x.shape[1:]), lambda i: ((i + 1) % count, 0, 0))
    return sines(x, in_specs=[row])


def chosen(x):
    """Numbers, read before the kernel runs, choose the blocks."""
    row = pl.BlockSpec((1, *x.shape[1:]), lambda i, numbers: (numbers[i], 0, 0))
    spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(len(x),), in_specs=[row], out_specs=row)
    call = pl.pallas_call(lambda numbers, *refs: sine(*refs), like(x), grid_spec=spec, interpret=True)
    return call(jnp.arange(len(x))[::-1], x)


def padded(x):
    """The last block is not full."""
    block = pl.BlockSpec((3, *x.shape[1:]), lambda i: (i, 0, 0))
    return sines(x, grid=(8,), in_specs=[block], out_specs=block)


def without_a_grid(x):
    return pl.pallas_call(sine, like(x), interpret=True)(x)


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    'fun',
    [
        pytest.param(functools.partial(sines, kernel=numbered), id='it asks for its step'),
        pytest.param(scratch, id='scratch memory'),
        *[pytest.param(fun, id=fun.__name__) for fun in (summed, neighbours, chosen, padded, without_a_grid)],
    ],
)
def test_any_other_kernel_is_left_alone(helper, fun):
    followed, _ = run(helper, fun, ROWS)
    assert not kernels(followed)
    assert is_lost(followed)


def sums_in_place(x, total):
    """The rows seen so far, added up in an operand."""

    def kernel(x, total, out):
        @pl.when(x[0, 0, 0] > -1)
        def _():
            total[...] += x[...]

        out[...] = total[...]

    row = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0, 0))
    whole = pl.BlockSpec((1, *x.shape[1:]), lambda i: (0, 0, 0))
    call = pl.pallas_call(
        kernel, like(x), grid=(len(x),), in_specs=[row, whole], out_specs=row, interpret=True
    )
    return call(x, total)


def test_an_operand_that_steps_change_keeps_them_together():
    assert split_in(sums_in_place, [rows_at(0, 3), ()], ROWS, ROWS[:1]) == {}
    assert split_in(sums_in_place, [rows_at(0, 3), rows_at(0, 3)], ROWS, ROWS[:1]) == {}


def test_a_kernel_that_asks_for_a_named_dimension_of_its_grid():
    def kernel(x, out):
        out[...] = x[...] + jax.lax.axis_index('i').astype('float32')

    fun = functools.partial(sines, kernel=kernel, grid=(('i', 16),), interpret=False)
    assert split_in(fun, [rows_at(0, 3)], ROWS) == {}
    named = functools.partial(sines, grid=(('i', 16),), interpret=False)
    assert split_in(named, [rows_at(0, 3)], ROWS) == {0: ('fsdp',)}


def test_parallel_steps_as_jax_names_them_and_under_vmap():
    params = pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY))
    fun = functools.partial(scratch, compiler_params=params)
    assert split_in(fun, [rows_at(0, 3)], ROWS) == {0: ('fsdp',)}
    examples = jnp.stack([ROWS, ROWS])
    assert split_in(jax.vmap(fun), [rows_at(1, 4)], examples) == {1: ('fsdp',)}


def test_axes_of_rows_come_first():
    mesh = AbstractMesh((4, 2), ('fsdp', 'tp'), axis_types=(AxisType.Auto,) * 2)
    row = pl.BlockSpec((1, 8, 32), lambda i: (i, 0, 0))

    def kernel(w, x, out):
        out[...] = w[...] * x[...]

    def fun(w, x):
        return pl.pallas_call(kernel, like(x), grid=(16,), in_specs=[row, row], out_specs=row)(w, x)

    found = split_in(fun, [rows_at(0, 3, ('tp',)), rows_at(0, 3)], ROWS, ROWS, mesh=mesh)
    assert found == {0: ('fsdp',)}


def test_few_rows_of_a_kernel_are_followed(helper):
    """JAX would refuse the kernel."""

    def fun(weights, x, interpret):
        return sines((x @ weights).reshape(8, 1, 64), interpret=interpret)

    step = helper.sjit(fun, in_shardings=(RULE, P('fsdp')), static_argnums=2, batch_argnums=1)
    args = jnp.ones((64, 64)), jnp.ones((8, 64))
    assert kernels(step.followed(*args, False)) == [('float32[8,1,64]', P('fsdp', None, None))]
    assert [each.array for each in step.followed(*args, True).moved] == ['float32[64,64]']


def test_rows_that_a_kernel_does_not_walk_over(helper):
    """The sequence is sharded, and whole in each block."""

    def fun(x):
        return sines(x)

    step = helper.sjit(fun, in_shardings=P(None, 'fsdp'), batch_argnums=0)
    np.testing.assert_allclose(step(ROWS), jnp.sin(ROWS), rtol=1e-5)
    assert is_lost(step.followed(ROWS))


@pytest.mark.medium
def test_without_rows_nothing_is_done(helper):
    def fun(weights, x):
        return sines(weights) + x

    followed, _ = run(helper, fun, ROWS, ROWS)
    assert not kernels(followed)
    assert not followed.lost
