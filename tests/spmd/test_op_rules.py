"""Each primitive on local shards: the combined results of all devices match one device."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax._jax.equations import CALLS, Literal, call_jaxpr, open_jaxpr, shape_of
from scalax._jax.rewriting import rebind, resized_params
from scalax._spmd.placements.op_rules import Op, strategy
from scalax._spmd.placements.placement import REPLICATE, SUM, Partial, Shard, local_shape

pytestmark = pytest.mark.medium

NHWC = ('NHWC', 'HWIO', 'NHWC')


def conv(groups=1, padding='SAME', strides=(1, 1)):
    return lambda x, k: lax.conv_general_dilated(
        x, k, strides, padding, dimension_numbers=NHWC, feature_group_count=groups
    )


def conv_in_batch_groups(groups):
    return lambda x, k: lax.conv_general_dilated(
        x, k, (1, 1), 'SAME', dimension_numbers=NHWC, batch_group_count=groups
    )


def kernel_gradient(groups):
    """The gradient of a kernel as JAX writes it, with examples contracted."""

    def gradient(x, g):
        zero = jnp.zeros((3, 3, 8 // groups, 8))
        return jax.linear_transpose(lambda k: conv(groups)(x, k), zero)(g)[0]

    return gradient


def looked_up(table, indices):
    return lax.gather(
        table,
        indices,
        lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)),
        (1, table.shape[1]),
        mode='clip',
    )


def batched_lookup(rows, indices):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    return lax.gather(rows, indices, numbers, (1, 1), mode='clip')


def added_rows(table, indices, updates):
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lax.scatter_add(table, indices, updates, numbers, mode='drop')


def largest_rows(table, indices, updates):
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lax.scatter_max(table, indices, updates, numbers, mode='drop')


def batched_scatter(rows, indices, updates):
    numbers = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
    return lax.scatter(rows, indices, updates, numbers, mode='drop')


def positive(x):
    return jnp.einsum('...ij,...kj->...ik', x, x) + 4 * jnp.eye(x.shape[-1])


F, INT, B = 'float32', 'int32', 'bool'
# name -> the function of one primitive, and the shapes of its operands, with dtypes if not float32.
CASES = {
    'tanh': (jnp.tanh, (8, 4)),
    'add': (lax.add, (8, 4), (8, 4)),
    'add a scalar': (lambda x: x + 2.0, (8, 4)),
    'sub': (lax.sub, (8, 4), (8, 4)),
    'mul': (lax.mul, (8, 4), (8, 4)),
    'div': (lax.div, (8, 4), (8, 4)),
    'max': (lax.max, (8, 4), (8, 4)),
    'neg': (lax.neg, (8, 4)),
    'select_n': (lambda c, x, y: lax.select_n(c, x, y), ((8, 4), B), (8, 4), (8, 4)),
    'clamp': (lambda x: lax.clamp(-0.5, x, 0.5), (8, 4)),
    'narrower': (lambda x: lax.convert_element_type(x, 'bfloat16'), (8, 4)),
    'wider': (lambda x: lax.convert_element_type(x, F), ((8, 4), 'bfloat16')),
    'to integers': (lambda x: lax.convert_element_type(x, INT), (8, 4)),
    'integer division': (lax.div, ((8, 4), INT), ((8, 4), INT)),
    'transpose': (lambda x: lax.transpose(x, (2, 0, 1)), (8, 4, 12)),
    'merge': (lambda x: lax.reshape(x, (32, 3)), (8, 4, 3)),
    'split': (lambda x: lax.reshape(x, (4, 2, 3)), (8, 3)),
    'reshape across': (lambda x: lax.reshape(x, (8, 12)), (12, 8)),
    'merge in another order': (lambda x: lax.reshape(x, (3, 32), dimensions=(1, 2, 0)), (4, 3, 8)),
    'squeeze': (lambda x: lax.squeeze(x, (1,)), (8, 1, 4)),
    'broadcast': (lambda x: lax.broadcast_in_dim(x, (8, 3, 4), (0, 2)), (8, 4)),
    'expand': (lambda x: lax.broadcast_in_dim(x, (8, 1, 4), (0, 2)), (8, 4)),
    'reduce_sum': (lambda x: lax.reduce_sum(x, (0,)), (8, 4)),
    'reduce_sum of features': (lambda x: lax.reduce_sum(x, (1,)), (8, 4)),
    'reduce_max': (lambda x: lax.reduce_max(x, (0,)), (8, 4)),
    'reduce_min': (lambda x: lax.reduce_min(x, (1,)), (8, 4)),
    'reduce_prod': (lambda x: lax.reduce_prod(x, (0,)), (8, 4)),
    'reduce_or': (lambda x: lax.reduce_or(x, (0,)), ((8, 4), B)),
    'reduce_and': (lambda x: lax.reduce_and(x, (0,)), ((8, 4), B)),
    'argmax': (lambda x: lax.argmax(x, 1, INT), (8, 4)),
    'argmax of examples': (lambda x: lax.argmax(x, 0, INT), (8, 4)),
    'cumsum': (lambda x: lax.cumsum(x, 1), (8, 4)),
    'cumsum of examples': (lambda x: lax.cumsum(x, 0), (8, 4)),
    'rev': (lambda x: lax.rev(x, (1,)), (8, 4)),
    'rev of examples': (lambda x: lax.rev(x, (0,)), (8, 4)),
    'sort': (lambda x: lax.sort(x, dimension=1), (8, 4)),
    'sort of examples': (lambda x: lax.sort(x, dimension=0), (8, 4)),
    'sort of pairs': (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (8, 4), (8, 4)),
    'top_k': (lambda x: lax.top_k(x, 2), (8, 4)),
    'slice': (lambda x: lax.slice(x, (0, 1), (8, 3)), (8, 4)),
    'slice of examples': (lambda x: lax.slice(x, (2, 0), (6, 4)), (8, 4)),
    'strided': (lambda x: lax.slice(x, (0, 0), (8, 4), (1, 2)), (8, 4)),
    'pad': (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 1))), (8, 4)),
    'pad with ones': (lambda x: lax.pad(x, 1.0, ((0, 0, 0), (1, 2, 0))), (8, 4)),
    'pad of an empty array': (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (2, 0, 0))), (8, 0)),
    'pad of examples': (lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))), (8, 4)),
    'concatenate': (lambda x, y: lax.concatenate((x, y), 1), (8, 4), (8, 4)),
    'concatenate examples': (lambda x, y: lax.concatenate((x, y), 0), (8, 4), (8, 4)),
    'dynamic_slice': (lambda x: lax.dynamic_slice(x, (0, 1), (8, 2)), (8, 4)),
    'dynamic_update_slice': (lambda x, y: lax.dynamic_update_slice(x, y, (0, 1)), (8, 4), (8, 2)),
    'matmul': (lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))), (8, 4), (4, 12)),
    'weight gradient': (lambda x, g: lax.dot_general(x, g, (((0,), (0,)), ((), ()))), (8, 4), (8, 12)),
    'batched matmul': (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
        *((8, 4, 12), (8, 12, 4)),
    ),
    'conv': (conv(), (8, 4, 4, 8), (3, 3, 8, 8)),
    'strided conv': (conv(padding='VALID', strides=(2, 2)), (8, 8, 8, 4), (3, 3, 4, 8)),
    'grouped conv': (conv(4), (8, 4, 4, 8), (3, 3, 2, 8)),
    'depthwise conv': (conv(8), (8, 4, 4, 8), (3, 3, 1, 8)),
    'gradient of a kernel': (kernel_gradient(1), (8, 4, 4, 8), (8, 4, 4, 8)),
    'gradient of a grouped kernel': (kernel_gradient(4), (8, 4, 4, 8), (8, 4, 4, 8)),
    'gradient of a depthwise kernel': (kernel_gradient(8), (8, 4, 4, 8), (8, 4, 4, 8)),
    'kernel of each example': (conv(8), (2, 4, 4, 16), (3, 3, 2, 24)),
    'kernel gradient of each example': (conv_in_batch_groups(8), (16, 4, 4, 2), (3, 3, 2, 24)),
    'gather': (looked_up, (12, 4), ((8, 1), INT)),
    'batched gather': (batched_lookup, (8, 4), ((8, 1), INT)),
    'scatter-add': (added_rows, (12, 4), ((8, 1), INT), (8, 4)),
    'scatter-max': (largest_rows, (12, 4), ((8, 1), INT), (8, 4)),
    'batched scatter': (batched_scatter, (8, 4), ((8, 1), INT), (8,)),
    'max pooling': (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), 'SAME'),
        (8, 4, 4, 4),
    ),
    'sum pooling': (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID'),
        (8, 4, 4, 4),
    ),
    'fft': (lambda x: lax.fft(x, 'RFFT', (4,)), (8, 4)),
    'cholesky': (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (8, 4, 4)),
    'eigh': (lambda x: lax.linalg.eigh(x, symmetrize_input=False, sort_eigenvalues=False)[1:], (8, 4, 4)),
    'triangular_solve': (lambda a, b: lax.linalg.triangular_solve(a, b, lower=True), (8, 4, 4), (8, 4, 4)),
    'triangular_solve on the right': (lambda a, b: lax.linalg.triangular_solve(a, b), (8, 8), (8, 8)),
    'triangular_solve on the left': (
        *(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), (8, 8), (8, 8)),
    ),
    'optimization_barrier': (lambda x, y: lax.optimization_barrier((x, y)), (8, 4), (4, 8)),
    'integer_pow': (lambda x: lax.integer_pow(x, 3), (8, 4)),
    'reduce_precision': (lambda x: lax.reduce_precision(x, 5, 10), (8, 4)),
}
MADE_POSITIVE = {name for name in CASES if name.startswith(('cholesky', 'eigh', 'triangular_solve'))}


def equation_of(name):
    """Returns the equation of a case; equations before it only compute constants."""
    fun, *operands = CASES[name]
    shapes = [shape if isinstance(shape[0], tuple) else (shape, F) for shape in operands]
    jaxpr = open_jaxpr(jax.make_jaxpr(fun)(*[jax.ShapeDtypeStruct(*shape) for shape in shapes]))
    eqns = jaxpr.eqns
    while eqns[-1].primitive.name in CALLS:
        eqns = open_jaxpr(call_jaxpr(eqns[-1])).eqns
    return next((shape for shape in eqns if shape.primitive.name == name), eqns[-1])


def values_of(equation, name, rng):
    """Returns values of the operands, and None for literals."""
    values = []
    for atom in equation.invars:
        if isinstance(atom, Literal):
            values.append(np.asarray(atom.val, atom.aval.dtype))
        elif atom.aval.dtype == bool:
            values.append(rng.random(shape_of(atom)) < 0.7)
        elif jnp.issubdtype(atom.aval.dtype, jnp.integer):
            values.append(rng.integers(1, 4, shape_of(atom)).astype(atom.aval.dtype))
        else:
            values.append(np.asarray(rng.normal(size=shape_of(atom)), atom.aval.dtype))
    if name in MADE_POSITIVE:
        values[0] = np.asarray(positive(values[0]))
    return values


def options(atom, parts):
    """Returns the placements that an operand may have."""
    shards = [
        Shard(dim, is_state)
        for dim, size in enumerate(shape_of(atom))
        if size % parts == 0 and size > 1
        for is_state in (False, True)
    ]
    sums = [SUM] if jnp.issubdtype(atom.aval.dtype, jnp.floating) else []
    return [REPLICATE] if isinstance(atom, Literal) else [REPLICATE, *shards, *sums]


def blocks(value, placement, parts, rng):
    """Returns the local values of all devices."""
    if isinstance(placement, Shard):
        return np.split(value, parts, placement.dim)
    if placement == SUM:
        terms = [np.asarray(rng.normal(size=value.shape), value.dtype) for _ in range(parts - 1)]
        return [*terms, (value - sum(terms)).astype(value.dtype)]
    return [value] * parts


def together(device_blocks, placement):
    """Returns the value whose local values these are."""
    if isinstance(placement, Shard):
        return np.concatenate(device_blocks, placement.dim)
    if isinstance(placement, Partial):
        return {'sum': np.add, 'max': np.maximum, 'min': np.minimum}[placement.reduce_op].reduce(
            device_blocks
        )
    for block in device_blocks[1:]:
        np.testing.assert_array_equal(block, device_blocks[0])
    return device_blocks[0]


def run(equation, values, placements, results, parts, rng):
    """Returns the combined results of all devices."""
    held = [blocks(*pair, parts, rng) for pair in zip(values, placements, strict=True)]
    shapes = [
        local_shape(shape_of(x), (p,), (parts,)) for x, p in zip(equation.invars, placements, strict=True)
    ]
    outs = [local_shape(shape_of(x), (p,), (parts,)) for x, p in zip(equation.outvars, results, strict=True)]
    changed, device_results = resized_params(equation, shapes, outs), []
    for device in range(parts):
        got = rebind(equation, *[jnp.asarray(operand_blocks[device]) for operand_blocks in held], **changed)
        got = got if equation.primitive.multiple_results else [got]
        assert [x.shape for x in got] == outs
        device_results.append([np.asarray(x) for x in got])
    return [together(*pair) for pair in zip(zip(*device_results, strict=True), results, strict=True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize('parts', [2, 4])
@pytest.mark.parametrize('name', CASES)
def test_results_on_local_shards_are_shards_of_the_results(name, parts):
    equation, rng = equation_of(name), np.random.default_rng(len(name))
    values = values_of(equation, name, rng)
    expected = rebind(equation, *map(jnp.asarray, values))
    expected = expected if equation.primitive.multiple_results else [expected]
    every = [*itertools.product(*[options(atom, parts) for atom in equation.invars])]
    random.Random(0).shuffle(every)
    checked = set()
    for placements in every[:40]:
        if len(checked) == 12 // parts:
            break
        zeros = tuple([isinstance(x, Literal) and x.val == 0 for x in equation.invars])
        chosen_strategy = strategy(Op(equation, placements, parts, zeros))
        if chosen_strategy is None or chosen_strategy in checked:
            continue
        checked.add(chosen_strategy)
        for got, want in zip(run(equation, values, *chosen_strategy[:2], parts, rng), expected, strict=True):
            scale = max(1.0, float(np.abs(np.nan_to_num(np.asarray(want, 'complex64'))).max(initial=0)))
            np.testing.assert_allclose(
                np.asarray(got, 'complex64') / scale, np.asarray(want, 'complex64') / scale, atol=2e-5
            )
    assert any({*chosen_strategy.operands} - {REPLICATE} for chosen_strategy in checked)


X, W = Shard(0), Shard(0, is_state=True)
# case -> placements of the operands, and of the results (None: all operands are gathered).
EXPECTED = [
    ('matmul', (X, REPLICATE), (X,)),
    ('matmul', (X, W), (X,)),
    ('matmul', (Shard(1), REPLICATE), (SUM,)),
    ('matmul', (SUM, REPLICATE), None),  # three times as large: the sum is reduced first
    ('weight gradient', (X, X), (SUM,)),
    ('batched matmul', (X, X), (X,)),
    ('conv', (X, REPLICATE), (X,)),
    ('grouped conv', (X, W), (X,)),
    ('grouped conv', (REPLICATE, Shard(3, True)), None),
    ('depthwise conv', (X, W), (X,)),
    ('kernel of each example', (Shard(3), REPLICATE), (Shard(3),)),
    ('kernel of each example', (REPLICATE, Shard(3)), (Shard(3),)),
    ('kernel gradient of each example', (X, Shard(3)), (Shard(3),)),
    ('gradient of a kernel', (X, X), (SUM,)),
    ('gradient of a grouped kernel', (X, X), (SUM,)),
    ('gradient of a depthwise kernel', (X, X), (SUM,)),
    ('gather', (W, X), (X,)),
    ('scatter-add', (REPLICATE, X, X), (SUM,)),
    ('scatter-max', (REPLICATE, X, X), (Partial('max'),)),
    ('batched gather', (X, X), (X,)),
    ('batched scatter', (X, X, X), (X,)),
    ('top_k', (X,), (X, X)),
    ('sort', (X,), (X,)),
    ('sort of examples', (X,), None),
    ('cumsum', (X,), (X,)),
    ('cumsum of examples', (X,), None),
    ('cumsum of examples', (SUM,), (SUM,)),
    ('argmax', (X,), (X,)),
    ('argmax of examples', (X,), None),
    ('reduce_max', (X,), (Partial('max'),)),
    ('reduce_or', (X,), (Partial('max'),)),
    ('reduce_and', (X,), (Partial('min'),)),
    ('reduce_prod', (X,), None),
    ('max pooling', (X,), (X,)),
    ('fft', (X,), (X,)),
    ('cholesky', (X,), (X,)),
    ('triangular_solve', (X, X), (X,)),
    ('triangular_solve on the right', (REPLICATE, X), (X,)),
    ('triangular_solve on the left', (REPLICATE, X), None),
    ('triangular_solve on the left', (REPLICATE, Shard(1)), (Shard(1),)),
    ('merge', (X,), (X,)),
    ('split', (X,), (X,)),
    ('merge in another order', (Shard(2),), (Shard(1),)),
    ('merge in another order', (X,), (Shard(1),)),
    ('broadcast', (SUM,), None),
    ('expand', (SUM,), (SUM,)),
    ('wider', (SUM,), None),
    ('narrower', (SUM,), None),
    ('add', (SUM, SUM), (SUM,)),
    ('add', (SUM, REPLICATE), None),
    ('mul', (SUM, REPLICATE), (SUM,)),
    ('mul', (SUM, SUM), None),
    ('tanh', (SUM,), None),
    ('pad with ones', (SUM, REPLICATE), None),
    ('pad of an empty array', (X, REPLICATE), (X,)),
    ('pad of examples', (SUM, REPLICATE), (SUM,)),
    ('optimization_barrier', (X, SUM), (X, SUM)),
]


@pytest.mark.parametrize('name, placements, results', EXPECTED, ids=[f'{n}-{p}' for n, p, _ in EXPECTED])
def test_placements_of_results(name, placements, results):
    equation = equation_of(name)
    zeros = tuple([isinstance(x, Literal) and x.val == 0 for x in equation.invars])
    chosen_strategy = strategy(Op(equation, placements, 2, zeros))
    assert (chosen_strategy and chosen_strategy.results) == results


# A sum over microbatches is incomplete before the last one: it may be accumulated, but not used otherwise.
IN_TURN = [
    ('matmul', (Shard(1), REPLICATE), (SUM,)),
    ('matmul', (SUM, REPLICATE), (SUM,)),
    ('reduce_max', (X,), None),
    ('sort of examples', (X,), None),
    ('broadcast', (SUM,), (SUM,)),
    ('wider', (SUM,), (SUM,)),
    ('narrower', (SUM,), (SUM,)),
    ('add', (SUM, REPLICATE), (SUM,)),
    ('add', (SUM, X), None),
    ('mul', (SUM, SUM), None),
    ('tanh', (SUM,), None),
]


@pytest.mark.parametrize('name, placements, results', IN_TURN, ids=[f'{n}-{p}' for n, p, _ in IN_TURN])
def test_placements_of_results_of_microbatches(name, placements, results):
    equation = equation_of(name)
    chosen_strategy = strategy(Op(equation, placements, 2, (False,) * len(placements), is_microbatched=True))
    assert (chosen_strategy and chosen_strategy.results) == results
