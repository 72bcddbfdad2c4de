"""Tests that `scalax/_jax/kernels` reads the equations of Pallas kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.published.decoder import has_cudnn
from scalax._jax import kernels
from tests.support.contracts import contract, equation_in

X = np.arange(64, dtype=np.float32).reshape(16, 4)
ROWS = pl.BlockSpec((4, 4), lambda i: (i, 0))
WHOLE = pl.BlockSpec((16, 4), lambda i: (0, 0))
PURPOSE = 'to run kernels on the rows of each device'


def double(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = 2 * x_ref[...]


def doubled_rows(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = 2 * x_ref[:4]


def numbered(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] + pl.program_id(0)


def adding(x_ref: Any, out_ref: Any, scratch_ref: Any) -> None:
    scratch_ref[...] += x_ref[...]
    out_ref[...] = scratch_ref[...]


def in_place(x_ref: Any, out_ref: Any) -> None:
    x_ref[...] = 2 * x_ref[...]
    out_ref[...] = x_ref[...]


def kernel(body: Any = double, *, in_spec: Any = ROWS, out_spec: Any = ROWS, **options: Any) -> Any:
    options = {'grid': (4,), **options}
    return pl.pallas_call(
        body, jax.ShapeDtypeStruct(X.shape, X.dtype), in_specs=[in_spec], out_specs=out_spec, **options
    )


def equation_of(*args: Any, **options: Any) -> Any:
    return equation_in('pallas_call', kernel(*args, **options), X)


def test_the_grid_and_the_blocks() -> None:
    with contract('has the grid and the blocks of a kernel in its grid mapping', PURPOSE):
        equation = equation_of()
        assert kernels.grid(equation) == (4,)
        assert [kernels.array_shape(block) for block in kernels.block_mappings_of(equation)] == [(16, 4)] * 2
        assert [kernels.grid_dims(block) for block in kernels.block_mappings_of(equation)] == [{0: 0}, {0: 0}]
        assert kernels.grid_dims(kernels.block_mappings_of(equation_of(doubled_rows, in_spec=WHOLE))[0]) == {}


def test_prefetched_scalars_come_first() -> None:
    in_spec = pl.BlockSpec((4, 4), lambda i, order: (order[i], 0))
    out_spec = pl.BlockSpec((4, 4), lambda i, order: (i, 0))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(4,), in_specs=[in_spec], out_specs=out_spec
    )
    fun = pl.pallas_call(
        lambda order, *refs: double(*refs), jax.ShapeDtypeStruct(X.shape, X.dtype), grid_spec=spec
    )
    with contract('counts prefetched scalars, puts them first and gives them no block', PURPOSE):
        equation = equation_in('pallas_call', fun, np.arange(4, dtype=np.int32), X)
        assert (
            kernels.count_index_operands(equation) == 1 and kernels.count_index_operands(equation_of()) == 0
        )
        assert [kernels.grid_dims(block) for block in kernels.block_mappings_of(equation)] == [{}, {0: 0}]
        assert [var.aval.shape for var in equation.invars] == [(4,), (16, 4)]
        assert [var.aval.shape for var in kernels.kernel_jaxpr(equation).invars] == [(4,), (4, 4), (4, 4)]


def test_the_jaxpr_of_a_step() -> None:
    with contract('has the jaxpr of a step of a kernel', 'to count its operations'):
        names = [equation.primitive.name for equation in kernels.kernel_jaxpr(equation_of()).eqns]
        assert 'mul' in names


@pytest.mark.parametrize('interpret', [True, False])
def test_kernels_have_an_interpret_parameter(interpret: bool) -> None:
    with contract('says whether a kernel is interpreted', 'to leave such a one to the compiler'):
        assert kernels.is_interpreted(equation_of(interpret=interpret)) is interpret


STEPS = {
    # behaviour of a kernel: arguments of `kernel`, whether its grid can be split over devices
    'each step has a block': ({}, True),
    'all steps have one result': ({'in_spec': WHOLE, 'out_spec': WHOLE}, False),
    'a step reads its program_id': ({'body': numbered}, False),
}


@pytest.mark.parametrize('case', STEPS)
def test_which_grids_can_be_split(case: str) -> None:
    options, expected = STEPS[case]
    with contract(f'shows where of a kernel {case}', PURPOSE):
        assert kernels.can_split_grid(equation_of(**options), 0, 2) is expected


def test_effects_name_the_arguments_a_kernel_writes() -> None:
    with contract('names the arguments that a kernel writes to in its effects', PURPOSE):
        assert kernels._written(equation_of()) == {1}
        assert kernels._written(equation_of(in_place)) == {0, 1}


def test_scratch_memory() -> None:
    from jax.experimental.pallas import tpu as pltpu

    with contract('has the scratch memory of a kernel, and which dimensions are parallel', PURPOSE):
        scratch: Any = {'scratch_shapes': [pltpu.VMEM((4, 4), jnp.float32)]}
        assert not kernels.can_split_grid(equation_of(adding, **scratch), 0, 2)
        compiler_params = pltpu.CompilerParams(dimension_semantics=('parallel',))
        assert kernels.can_split_grid(equation_of(adding, **scratch, compiler_params=compiler_params), 0, 2)


def test_grid_dimensions_that_vmap_adds_can_be_split() -> None:
    with contract('says which dimensions of a grid jax.vmap has added', PURPOSE):
        equation = equation_in('pallas_call', jax.vmap(kernel(numbered)), np.stack([X] * 2))
        [added] = [step for step, size in enumerate(kernels.grid(equation)) if size == 2]
        assert kernels.can_split_grid(equation, added, 2)
        assert not kernels.can_split_grid(equation, 1 - added, 2)


def test_kernels_with_input_output_aliases() -> None:
    with contract('has input_output_aliases among the parameters of a kernel', PURPOSE):
        assert kernels.can_split_grid(equation_of(input_output_aliases={0: 0}), 0, 2)
        assert not kernels.can_split_grid(
            equation_of(doubled_rows, input_output_aliases={0: 0}, in_spec=WHOLE), 0, 2
        )


@pytest.mark.medium
def test_a_part_of_a_kernel_runs() -> None:
    cost = pl.CostEstimate(flops=64, transcendentals=0, bytes_accessed=512)
    with contract('runs a kernel with fewer steps and smaller arrays', PURPOSE):
        equation = equation_of(interpret=True, cost_estimate=cost)

        def run_part(x: Any) -> Any:
            params = {**equation.params, **kernels.split_grid_params(equation, {0: 2})}
            return equation.primitive.bind(x, **params)

        results = jax.jit(run_part)(X[:8])
        np.testing.assert_array_equal(results[0], 2 * X[:8])
        part = equation_in('pallas_call', run_part, X[:8])
        assert kernels.split_grid_params(equation, {0: 2})['grid_mapping'].grid == (2,)
        assert part.params['cost_estimate'].flops == 32
        assert kernels.grid(part) == (2,)


def test_the_jaxprs_of_an_interpreted_kernel() -> None:
    with contract('keeps jaxprs of the steps and of the blocks of a kernel', 'to run kernels on blocks'):
        equation, seen = equation_of(interpret=True), list[Any]()

        def change(jaxpr: Any) -> Any:
            seen.append(jaxpr)
            return jaxpr

        changed = kernels.interpreted_params(equation, {'interpret': True}, change)
        assert {*changed} == {'interpret', 'jaxpr', 'grid_mapping'} and len(seen) == 3
        rebuilt = equation.replace(params={**equation.params, **changed})
        assert kernels.grid(rebuilt) == kernels.grid(equation)


@pytest.mark.skipif(not has_cudnn(), reason='JAX traces attention of cuDNN where that is')
def test_the_sizes_of_attention_by_cudnn() -> None:
    query, key = np.zeros((2, 128, 8, 64), 'bfloat16'), np.zeros((2, 256, 4, 64), 'bfloat16')

    def loss(query: Any, key: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, key, implementation='cudnn').sum()

    with contract('calls attention of cuDNN as it did', 'to count its operations'):
        for name in ('dot_product_attention_fwd_wrapper', 'dot_product_attention_bwd_wrapper'):
            assert name in kernels.ATTENTION
            equation = equation_in(name, jax.grad(loss), query, key)
            assert kernels.attention_sizes(equation) == (2 * 8 * 128 * 256, 64, 64)
            assert kernels.attention_heads_dim(equation) == 2
            assert not kernels.has_attention_dropout(equation)
            assert kernels.is_attention_gradient(equation) == ('bwd' in name)
            assert len(equation.invars) == (13 if 'bwd' in name else 10)
