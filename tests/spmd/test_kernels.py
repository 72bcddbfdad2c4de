"""Pallas kernels on local shards: each device runs the part of the grid for its own examples."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from scalax._jax.equations import all_equations
from scalax.sharding import BatchPartitioning, MeshShardingHelper, TreePathShardingRule
from tests.spmd.test_partition import array
from tests.support import tpu_compiler
from tests.support.partitioned import FSDP, HSDP, TP, P, assert_equal, collectives, partitioned, state_spec

pytestmark = pytest.mark.medium

ROWS = array(16, 8, 32)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def sine(x, out):
    out[...] = jnp.sin(x[...])


def sines(x, kernel=sine, **options):
    """A kernel over the rows of (B, S, D)."""
    row = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0, 0))
    options = {'grid': (len(x),), 'in_specs': [row], 'out_specs': row, 'interpret': True} | options
    return pl.pallas_call(kernel, like(x), **options)(x)


def columns_in_order(order, x):
    """Grid of rows and blocks of columns; prefetched scalars select the first block."""
    in_spec = pl.BlockSpec((1, 8, 8), lambda i, j, order: (i, 0, order[j]))
    out_spec = pl.BlockSpec((1, 8, 8), lambda i, j, order: (i, 0, j))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(len(x), 4), in_specs=[in_spec], out_specs=out_spec
    )
    kernel = pl.pallas_call(lambda order, *refs: sine(*refs), like(x), grid_spec=spec, interpret=True)
    return kernel(order, x)


def heads_and_scale(x, weights, scale):
    """Grid of rows and heads, (B, H, S, D); the weights of a head, (H, D), and a shared scale."""
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


def numbered(x, out):
    out[...] = x[...] + pl.program_id(0)


def accumulated(x, out):
    @pl.when(pl.program_id(0) == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    out[...] += x[...]


def summed(x):
    """Sums all rows in one block."""
    all_rows = pl.BlockSpec((1, *x.shape[1:]), lambda i: (0, 0, 0))
    of = jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    row = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0, 0))
    return pl.pallas_call(
        accumulated, of, grid=(len(x),), in_specs=[row], out_specs=all_rows, interpret=True
    )(x)


def neighbours(x):
    """Each step reads the block after its block."""
    count = len(x)
    row = pl.BlockSpec((1, *x.shape[1:]), lambda i: ((i + 1) % count, 0, 0))
    return sines(x, in_specs=[row])


def chosen(x):
    """Prefetched scalars select the blocks."""
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


def sums_in_place(x, total):
    """Accumulates the rows so far in an operand."""

    def kernel(x, total, out):
        @pl.when(x[0, 0, 0] > -1)
        def _():
            total[...] += x[...]

        out[...] = total[...]

    row = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0, 0))
    all_rows = pl.BlockSpec((1, *x.shape[1:]), lambda i: (0, 0, 0))
    call = pl.pallas_call(
        kernel, like(x), grid=(len(x),), in_specs=[row, all_rows], out_specs=row, interpret=True
    )
    return call(x, total)


def kernels(step):
    return [equation for equation in all_equations(step.jaxpr) if equation.primitive.name == 'pallas_call']


def check(fun, mesh=FSDP):
    """Returns the step of a function of examples, whose values match one device."""
    step, run = partitioned(lambda _, x: fun(x), {}, ROWS, mesh)
    assert_equal(run(), jax.jit(fun)(ROWS))
    return step


def vmapped(x):
    """A kernel for one example, which reads its program_id along the sequence."""

    def kernel(x, out):
        out[...] = x[...] + pl.program_id(0)

    def example(x):
        part = pl.BlockSpec((2, 32), lambda i: (i, 0))
        return pl.pallas_call(kernel, like(x), grid=(4,), in_specs=[part], out_specs=part, interpret=True)(x)

    return jax.vmap(example)(x)


def of_heads(x):
    return heads_and_scale(x.reshape(16, 4, 2, 32), jnp.ones((4, 32)), jnp.full((1,), 3.0))


def parallel_scratch(x):
    params = pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary'))
    return scratch(x, compiler_params=params)


def in_order(x):
    return columns_in_order(jnp.array([2, 0, 3, 1], 'int32'), x)


PAIRS = pl.BlockSpec((2, 8, 32), lambda i: (i, 0, 0))
APART = {
    'rows': sines,
    'an aliased operand': functools.partial(sines, input_output_aliases={0: 0}),
    'vmapped': vmapped,
    'heads': of_heads,
    'scratch memory of parallel steps': parallel_scratch,
    'indices that select other blocks': in_order,
}
TOGETHER = {
    'it reads its program_id': functools.partial(sines, kernel=numbered),
    'scratch memory': scratch,
    'an operand that steps change': lambda x: sums_in_place(x, jnp.zeros((1, 8, 32))),
    **{fun.__name__: fun for fun in (summed, neighbours, chosen, padded, without_a_grid)},
}


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.parametrize('name', APART)
def test_each_device_runs_a_kernel_on_its_examples(name, mesh):
    step = check(APART[name], mesh)
    assert not collectives(step)
    assert kernels(step)[0].params['grid_mapping'].grid[0] == 2


@pytest.mark.parametrize('name', TOGETHER)
def test_other_kernels_gather_all_examples(name):
    step = check(TOGETHER[name])
    assert collectives(step) == {'all_gather examples gathered for pallas_call': 1}


def test_heads_over_another_axis_split_a_kernel_too():
    """Heads come from a matmul over tp, and are blocks of the second grid dimension."""

    def layer(weights, x):
        heads = (x @ weights['up']).reshape(*x.shape[:2], 4, -1).swapaxes(1, 2)
        return heads_and_scale(heads, weights['scale'], jnp.full((1,), 3.0))

    weights = {'scale': array(4, 16), 'up': array(32, 64)}
    step, run = partitioned(layer, weights, ROWS, TP, specs=[P('tp'), P('fsdp', 'tp')])
    assert_equal(run(), jax.jit(layer)(weights, ROWS))
    [kernel] = kernels(step)
    assert kernel.params['grid_mapping'].grid == (4, 2)
    assert collectives(step) == {"all_gather weight ['up'] for dot_general": 1}


def merged_heads(x):
    """A kernel whose grid walks over examples and heads in one dimension: (B, H, S, D) -> (B * H, S, D)."""
    merged = x.reshape(-1, *x.shape[2:])
    return sines(merged).reshape(x.shape)


def sines_and_row_sums(x):
    """Two results, of which one has a dimension of one element."""
    merged = x.reshape(-1, *x.shape[2:])

    def kernel(x, out, sums):
        out[...] = jnp.sin(x[...])
        sums[...] = jnp.sum(x[...], -1, keepdims=True)

    blocks = [pl.BlockSpec((1, x.shape[2], size), lambda i: (i, 0, 0)) for size in (x.shape[3], 1)]
    types = like(merged), jax.ShapeDtypeStruct((*merged.shape[:2], 1), x.dtype)
    call = pl.pallas_call(
        kernel, types, grid=(len(merged),), in_specs=blocks[:1], out_specs=blocks, interpret=True
    )
    out, sums = call(merged)
    return out.reshape(x.shape) + sums.reshape(*x.shape[:3], 1)


def sum_of_merged(x):
    """The result is used with its dimensions merged, and apart."""
    out = sines(x.reshape(-1, *x.shape[2:]))
    return out.reshape(x.shape) + jnp.mean(out)


def pairs(x):
    """Blocks of two heads, which are added up."""

    def kernel(x, out):
        out[...] = x[...] + jnp.sum(x[...], 0, keepdims=True)

    merged = x.reshape(-1, *x.shape[2:])
    pair = pl.BlockSpec((2, *merged.shape[1:]), lambda i: (i, 0, 0))
    out = sines(merged, kernel=kernel, grid=(len(merged) // 2,), in_specs=[pair], out_specs=pair)
    return out.reshape(x.shape)


@pytest.mark.parametrize(
    ('kernel', 'heads', 'gathers'),
    [
        (merged_heads, 4, False),
        (sines_and_row_sums, 4, False),
        (sum_of_merged, 4, True),  # XLA merges them for the mean
        (pairs, 4, False),
        (pairs, 2, True),  # a device has one head of two examples, which are no pair
    ],
)
def test_heads_that_are_merged_with_examples_are_not_gathered(kernel, heads, gathers):
    def step(weights, x):
        """Heads of a product go through a kernel, and are summed by another product."""
        y = (x @ weights['value']).reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
        return kernel(y).swapaxes(1, 2).reshape(*x.shape[:2], -1) @ weights['output']

    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    rule = TreePathShardingRule(('output', P('tp', 'fsdp')), ('value', P('fsdp', 'tp')))
    weights = {'output': array(64, 32), 'value': array(32, 64)}
    options = {'in_shardings': (rule, P('fsdp')), 'out_shardings': P('fsdp')}
    partitioned_step = helper.sjit(step, **options)
    assert_equal([partitioned_step(weights, ROWS)], jax.jit(step)(weights, ROWS))
    totals = helper.plan(partitioned_step, weights, ROWS).totals
    assert bool(set(totals['tp',]) - {'all-reduce'}) == gathers
    assert 'all-to-all' not in totals['fsdp',]


@pytest.mark.parametrize('name', ['indices that select other blocks', 'neighbours'])
def test_a_kernel_on_a_mesh_with_another_axis(name):
    step = check((APART | TOGETHER)[name], TP)
    assert kernels(step)[0].params['grid_mapping'].grid[0] == (4 if name in APART else 16)


@tpu_compiler.newest
def test_a_kernel_for_tpus_on_a_mesh_with_another_axis():
    """The compiler cannot partition kernels, and JAX rejects a kernel that it would have to partition."""
    options = {'in_shardings': P('fsdp'), 'batch_argnums': 0}
    pod = MeshShardingHelper.from_topology('v5e:2x4', [4, 2], ['fsdp', 'tp'])
    x = jax.ShapeDtypeStruct((64, 8, 128), 'float32')

    def fun(x):
        return sines(x, interpret=False)

    assert not pod.plan(pod.sjit(fun, **options, partitioning=BatchPartitioning()), x, quick=True).totals
    with pytest.raises(NotImplementedError, match='Mosaic kernels cannot be automatically partitioned'):
        pod.plan(pod.sjit(fun, in_shardings=P('fsdp'), batch_argnums=()), x, quick=True)


def test_blocks_of_two_examples():
    fun = functools.partial(sines, grid=(8,), in_specs=[PAIRS], out_specs=PAIRS)
    assert not collectives(check(fun))


def test_in_loops_checkpoints_and_custom_gradients():
    @jax.custom_vjp
    def sin(x):
        return sines(x)

    sin.defvjp(lambda x: (sines(x), x), lambda x, g: (g * sines(x + jnp.pi / 2),))

    def loss(w, x):
        def layer(x, w):
            return jax.checkpoint(sin)(x @ w), None

        return jnp.mean(jax.lax.scan(layer, x, w['layers'])[0] ** 2)

    state, fun = {'layers': array(2, 32, 32)}, jax.value_and_grad(loss)
    step, run = partitioned(fun, state, ROWS, result_specs=[P(), state_spec((2, 32, 32))])
    assert_equal(run(), jax.jit(fun)(state, ROWS))
    assert not any(row.what == 'examples' for row in step.collective_rows)
    assert {kernel.params['grid_mapping'].grid for kernel in kernels(step)} == {(2,)}


def test_a_cost_estimate_is_per_device():
    cost = pl.CostEstimate(flops=800, transcendentals=80, bytes_accessed=1600)
    fun = functools.partial(sines, cost_estimate=cost, interpret=False)  # not run without a TPU
    step, _ = partitioned(lambda _, x: fun(x), {}, ROWS)
    estimate = kernels(step)[0].params['cost_estimate']
    assert (estimate.flops, estimate.transcendentals, estimate.bytes_accessed) == (100, 10, 200)
