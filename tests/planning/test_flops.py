"""FLOPs, compared with counts by hand, with XLA, and with formulas for decoders."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

from examples.llama import model
from scalax.plan import Exactness, Flops, count_flops, count_model_flops
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.leaves import leaf

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def counted(fun, *arguments):
    return count_flops(jax.jit(fun).trace(*arguments).jaxpr)


def flops(fun, *arguments):
    """Returns the FLOPs of a function in which all operations can be counted."""
    counted_flops = counted(fun, *arguments)
    assert counted_flops.exactness is Exactness.EXACT
    return counted_flops.count


# --- Single operations ----------------------------------------------------------------------------


def conv(x, w, strides=(1, 1), padding='VALID', **more):
    return jax.lax.conv_general_dilated(x, w, strides, padding, **more)


IMAGES, KERNEL = leaf(5, 3, 10, 9), leaf(7, 3, 4, 2)
OUTPUTS = 5 * 7 * 7 * 8  # for a convolution without padding

# name -> (function, arguments, FLOPs). Each is one operation of XLA, too.
OPERATIONS = {
    'matrices': (jnp.matmul, (leaf(3, 5), leaf(5, 7)), 2 * 3 * 5 * 7),
    'several at once': (jnp.matmul, (leaf(4, 3, 5), leaf(4, 5, 7)), 2 * 4 * 3 * 5 * 7),
    'two contracted': (
        functools.partial(jnp.einsum, 'bijk,bjkl->bil'),
        (leaf(2, 3, 4, 5), leaf(2, 4, 5, 6)),
        2 * 2 * 3 * 4 * 5 * 6,
    ),
    'integers': (jnp.matmul, (leaf(3, 5, dtype=jnp.int8), leaf(5, 7, dtype=jnp.int8)), 210),
    'nothing to contract': (jnp.matmul, (leaf(3, 0), leaf(0, 7)), 0),
    'convolution': (conv, (IMAGES, KERNEL), 2 * OUTPUTS * 3 * 4 * 2),
    'convolution with strides': (
        functools.partial(conv, strides=(2, 3)),
        (IMAGES, KERNEL),
        2 * 5 * 7 * (4 * 3) * 3 * 4 * 2,
    ),
    'convolution of groups': (
        functools.partial(conv, feature_group_count=3),
        (IMAGES, leaf(6, 1, 4, 2)),
        2 * (5 * 6 * 7 * 8) * 4 * 2,
    ),
    'convolution of batch groups': (
        functools.partial(conv, batch_group_count=5),
        (IMAGES, leaf(10, 3, 4, 2)),
        2 * (1 * 10 * 7 * 8) * 3 * 4 * 2,
    ),
    # 10 x 9 elements have 10 x 9 x 3 x 3 pairs, minus the pairs in the padding.
    'convolution with padding': (
        functools.partial(conv, padding='SAME'),
        (IMAGES, leaf(7, 3, 3, 3)),
        2 * 5 * 7 * 3 * (10 * 3 - 2) * (9 * 3 - 2),
    ),
    'transposed convolution': (
        functools.partial(conv, padding=((2, 2), (1, 1)), lhs_dilation=(2, 1)),
        (leaf(5, 3, 4, 6), leaf(7, 3, 3, 2)),
        # Dilated input rows are at 0, 2, 4, 6: each meets all three kernel rows, and both kernel columns.
        2 * 5 * 7 * 3 * (4 * 3) * (6 * 2),
    ),
    'convolution with a dilated kernel': (
        functools.partial(conv, rhs_dilation=(2, 1)),
        (IMAGES, leaf(7, 3, 3, 2)),
        2 * 5 * 7 * (6 * 8) * 3 * 3 * 2,
    ),
    'convolution in one dimension': (
        functools.partial(conv, strides=(1,)),
        (leaf(2, 3, 8), leaf(4, 3, 5)),
        2 * 2 * 4 * 4 * 3 * 5,
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize(('fun', 'arguments', 'expected'), OPERATIONS.values(), ids=OPERATIONS)
def test_operations(fun, arguments, expected):
    assert flops(fun, *arguments) == expected
    compiled = jax.jit(fun).lower(*arguments).compile().cost_analysis()
    if expected:
        assert compiled['flops'] == expected


# name -> (function, arguments, FLOPs) of operations that XLA counts differently, or not at all.
OTHERS = {
    'vectors': (jnp.dot, (leaf(9), leaf(9)), 2 * 9),
    'outer product': (functools.partial(jnp.einsum, 'i,j->ij'), (leaf(4), leaf(6)), 0),
    'bfloat16': (jnp.matmul, (leaf(3, 5, dtype=jnp.bfloat16), leaf(5, 7, dtype=jnp.bfloat16)), 210),
    'complex matrices': (
        jnp.matmul,
        (leaf(3, 5, dtype=jnp.complex64), leaf(5, 7, dtype=jnp.complex64)),
        840,
    ),
    # Each of 8 rows is multiplied by the matrix of its group.
    'ragged': (jax.lax.ragged_dot, (leaf(8, 4), leaf(3, 4, 6), leaf(3, dtype=jnp.int32)), 2 * 8 * 4 * 6),
    'ragged, to the rows': (
        jax.grad(lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes).sum()),
        (leaf(8, 4), leaf(3, 4, 6), leaf(3, dtype=jnp.int32)),
        2 * 8 * 4 * 6,
    ),
    'ragged, to the matrices': (
        jax.grad(lambda w, x, sizes: jax.lax.ragged_dot(x, w, sizes).sum()),
        (leaf(3, 4, 6), leaf(8, 4), leaf(3, dtype=jnp.int32)),
        2 * 8 * 4 * 6,
    ),
    'FFT': (jnp.fft.fft, (leaf(3, 64, dtype=jnp.complex64),), 3 * 5 * 64 * 6),
    'FFT of real numbers': (jnp.fft.rfft2, (leaf(3, 8, 16),), 3 * 5 * 128 * 7 // 2),
    'FFT to real numbers': (
        functools.partial(jnp.fft.irfft, n=64),
        (leaf(33, dtype=jnp.complex64),),
        5 * 64 * 3,
    ),
    'elementwise': (lambda x: jnp.tanh(x * x).sum(), (leaf(9, 9),), 0),
    'sorted': (jnp.sort, (leaf(9),), 0),
    'scattered': (lambda x: x.at[2].add(1.0), (leaf(9),), 0),
}


@pytest.mark.parametrize(('fun', 'arguments', 'expected'), OTHERS.values(), ids=OTHERS)
def test_other_operations(fun, arguments, expected):
    assert flops(fun, *arguments) == expected


# --- Loops, branches and calls: x is 4 x 4, so one matmul has 128 FLOPs -----------------------------

X = leaf(4, 4)
ONE = 2 * 4**3


def product(x):
    return jnp.tanh(x @ x)


def loop(stop, step=1, start=0):
    """Counts its iterations; each has one matmul."""
    return lambda x: jax.lax.while_loop(
        lambda c: c[0] < stop, lambda c: (c[0] + step, product(c[1])), (start, x)
    )[1]


def endless(x):
    return jax.lax.while_loop(lambda x: x[0, 0] < 9, product, x)


@jax.custom_vjp
def own_gradient(x):
    return product(x)


own_gradient.defvjp(lambda x: (own_gradient(x), x), lambda x, g: (g @ x @ x,))


@jax.custom_jvp
def own_tangent(x):
    return product(x)


own_tangent.defjvp(lambda x, t: (own_tangent(x[0]), t[0] @ x[0] @ x[0]))


def linear(x):
    return jax.custom_derivatives.linear_call(lambda r, x: r @ x, lambda r, g: r.T @ g, x, x)


def scanned(length, body=product):
    return lambda x: jax.lax.scan(lambda x, _: (body(x), None), x, length=length)[0]


def on_grid(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...]

    return pl.pallas_call(kernel, out_shape=x, grid=(3, 2), interpret=True)(x)


# name -> (function of a 4 x 4 matrix, matmuls)
EXACT = {
    'jit': (jax.jit(product), 1),
    'jit twice': (lambda x: jax.jit(product)(jax.jit(product)(x)), 2),
    'checkpoint': (jax.checkpoint(product), 1),
    'vmap': (lambda x: jax.vmap(product)(jnp.stack([x] * 3)), 3),
    'named': (jax.named_call(product, name='p'), 1),
    'composite': (jax.lax.composite(product, name='a.b'), 1),
    'custom_vjp': (own_gradient, 1),
    'custom_jvp': (own_tangent, 1),
    'gradient of custom_vjp': (jax.grad(lambda x: (own_gradient(x) ** 2).sum()), 3),
    'gradient of custom_jvp': (jax.grad(lambda x: (own_tangent(x) ** 2).sum()), 3),
    'linear_call': (linear, 1),
    'scan of 4': (scanned(4), 4),
    'scan of 16': (scanned(16), 16),
    'scan of length 0': (scanned(0), 0),
    'scan in scan': (scanned(3, scanned(5)), 15),
    'scan over arrays': (
        lambda x: jax.lax.scan(lambda c, y: (c @ y, y @ y), x, jnp.stack([x] * 3)),
        3 * 2,
    ),
    'map': (lambda x: jax.lax.map(lambda row: row @ x, x), 1),
    'fori_loop': (lambda x: jax.lax.fori_loop(2, 7, lambda i, x: product(x), x), 5),
    'while': (loop(9), 9),
    'while in steps': (loop(9, step=2, start=1), 4),
    'while never': (loop(3, start=3), 0),
    'while without matmuls': (lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, jnp.tanh, x), 0),
    'equal branches': (lambda x: jax.lax.cond(x[0, 0] > 0, product, lambda x: x @ x, x), 1),
    'platforms': (lambda x: jax.lax.platform_dependent(x, cpu=product, default=product), 1),
    'a kernel on a grid': (on_grid, 6),
}


@pytest.mark.parametrize(('fun', 'products'), EXACT.values(), ids=EXACT)
def test_loops_and_calls(fun, products):
    assert flops(fun, X) == products * ONE


def solved(x):
    return jax.scipy.sparse.linalg.cg(lambda v: x @ v, x[0], maxiter=3)[0]


@dataclasses.dataclass(frozen=True)
class Holder:
    deep: tuple


def held(name, count):
    """Binds an unknown primitive that contains jaxprs of one matmul each."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, **_: x)
    inner = jax.make_jaxpr(product)(np.ones((4, 4), np.float32))

    def fun(x):
        return primitive.bind(x, held=('text', Holder((inner,) * count)))

    return fun


# name -> (function of a 4 x 4 matrix, matmuls, exactness)
BOUNDED = {
    'while of unknown length': (endless, 1, Exactness.AT_LEAST),
    'while with a condition that computes': (
        lambda x: jax.lax.while_loop(lambda x: (x @ x)[0, 0] < 9, product, x),
        1 + 2,
        Exactness.AT_LEAST,
    ),
    'from an argument': (
        lambda x: jax.lax.fori_loop(0, x[0, 0].astype(int), lambda i, x: product(x), x),
        1,
        Exactness.AT_LEAST,
    ),
    'branches unlike': (
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: product(product(x)), product, x),
        2,
        Exactness.AT_MOST,
    ),
    'a switch': (
        lambda x: jax.lax.switch(x[0, 0].astype(int), [jnp.tanh, product, scanned(7)], x),
        7,
        Exactness.AT_MOST,
    ),
    'a branch in a loop': (
        lambda x: jax.lax.while_loop(
            lambda x: x[0, 0] < 9, lambda x: jax.lax.cond(x[0, 0] > 0, product, jnp.tanh, x), x
        ),
        1,
        Exactness.APPROXIMATE,
    ),
    'linear algebra': (lambda x: jnp.linalg.cholesky(x @ x), 1, Exactness.AT_LEAST),
    'an unknown primitive': (held('unheard', 1), 1, Exactness.AT_LEAST),
    'an unknown primitive of several': (held('unheard', 2), 2, Exactness.APPROXIMATE),
    **{
        f"another library's {name}": (held(name, 1), 1, Exactness.AT_LEAST)
        for name in ('scan', 'while', 'cond', 'jit', 'shard_map', 'pallas_call')
    },
    "another library's composite": (held('composite', 1), 1, Exactness.EXACT),
    "another library's linear_call": (held('linear_call', 1), 1, Exactness.EXACT),
}


@pytest.mark.parametrize(('fun', 'products', 'exactness'), BOUNDED.values(), ids=BOUNDED)
def test_bounds(fun, products, exactness):
    assert counted(fun, X) == Flops(products * ONE, exactness)


@pytest.mark.parametrize(
    'multiply',
    [
        jax.nn.scaled_matmul,
        lambda a, b, of_a, of_b: jax.lax.scaled_dot(
            a, b, lhs_scale=of_a, rhs_scale=of_b, dimension_numbers=(((2,), (2,)), ((0,), (0,)))
        ),
    ],
    ids=['scaled_matmul', 'scaled_dot'],
)
def test_scaled_matmuls_are_not_counted(multiply):
    matrix, scales = leaf(1, 128, 128, dtype='float8_e4m3fn'), leaf(1, 128, 4, dtype='float8_e8m0fnu')
    assert counted(multiply, matrix, matrix, scales, scales) == Flops(0, Exactness.AT_LEAST)


def test_a_solver_is_counted_as_it_runs():
    """Conjugate gradients with at most three iterations.

    One matrix-vector and two vector-vector products of size 4, before the loop and in each iteration.
    """
    assert counted(solved, X) == Flops((1 + 3) * (2 * 4 * 4 + 2 * 2 * 4), Exactness.AT_MOST)


def test_loops_with_primitives_of_other_libraries():
    """The condition of the loop is unknown."""
    for name in ('add', 'divide', 'jit'):
        primitive = Primitive(name)
        primitive.def_abstract_eval(lambda x, y: x)

        def loop(x, primitive=primitive):
            return jax.lax.while_loop(
                lambda c: c[0] < 9, lambda c: (primitive.bind(c[0], 2), c[1] @ c[1]), (1, x)
            )

        assert counted(loop, X).exactness is Exactness.AT_LEAST


def test_a_dot_general_of_another_library_is_not_counted():
    primitive = Primitive('dot_general')
    primitive.def_abstract_eval(lambda x, y: x)
    assert counted(lambda x: primitive.bind(x, x), X) == Flops(0)


def test_sums():
    least, most = Flops(3, Exactness.AT_LEAST), Flops(4, Exactness.AT_MOST)
    assert least + Flops(2) == Flops(5, Exactness.AT_LEAST)
    assert least + most == Flops(7, Exactness.APPROXIMATE)
    assert Flops(0, Exactness.AT_LEAST) + Flops(2) == Flops(2, Exactness.AT_LEAST)
    assert Flops(0).times(5, Exactness.AT_LEAST) == Flops(0)
    assert least.times(0) == Flops(0)


# --- Unused results -------------------------------------------------------------------------------


def unused(x):
    product(x)
    return x


def unused_in_a_loop(x):
    """The stacked results, the second state, and the values that only it needs are unused."""

    def body(state, _):
        a, b, c = state
        return (a @ a, b @ c, c @ c), a @ b

    return jax.lax.scan(body, (x, x, x), length=5)[0][0]


def used_a_round_later(x):
    """The second state is not returned, but the first state reads it in the next iteration."""

    def body(state, _):
        return (state[1], state[1] @ state[1]), None

    return jax.lax.scan(body, (x, x), length=5)[0][0]


@pytest.mark.parametrize(
    ('fun', 'products'), [(unused, 0), (unused_in_a_loop, 5), (used_a_round_later, 5), (jax.jit(unused), 0)]
)
def test_unused_results_are_not_counted(fun, products):
    assert flops(fun, X) == products * ONE


def test_effects_are_kept():
    def printed(x):
        jax.debug.print('{}', product(x))
        return x

    assert flops(printed, X) == ONE


# --- Forward, backward, recomputed ----------------------------------------------------------------


def layers(body):
    def loss(w, x):
        return jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0].sum()

    return jax.grad(loss)


@pytest.mark.parametrize('count', [4, 16])
def test_remat_adds_the_forward_once(count):
    def layer(w, x):
        return jnp.tanh(x @ w)

    layer_flops, arguments = 2 * 8 * 5 * 5, (leaf(count, 5, 5), leaf(8, 5))
    saved, again = (counted(layers(body), *arguments) for body in (layer, jax.checkpoint(layer)))
    assert (saved.count, again.count) == (3 * count * layer_flops, 4 * count * layer_flops)
    parts = {'forward': count * layer_flops, 'backward': 2 * count * layer_flops}
    assert saved.by_phase == parts
    assert again.by_phase == {**parts, 'recomputed': count * layer_flops}


CONFIG = model.ModelConfig(width=64, layers=4, heads=4, kv_heads=2, vocabulary=96)


@dataclasses.dataclass(frozen=True)
class Llama8B(model.ModelConfig):
    """https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json"""

    width: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256

    @property
    def hidden(self) -> int:
        return 14336


DECODERS = {
    'small': (CONFIG, 8, 32),
    'deep': (dataclasses.replace(CONFIG, layers=16), 8, 32),
    'long': (CONFIG, 2, 512),
    'LLaMA-3 8B': (Llama8B(), 4, 4096),
}


def gradient(config, batch, sequence):
    """Returns the FLOPs of a gradient of the example's decoder, its parameters, and those of its layers."""
    params = jax.eval_shape(functools.partial(model.init_params, config=config), jax.random.key(0))

    def loss(params, tokens):
        return jnp.square(model.forward(params, tokens, config)).mean()

    return counted(jax.grad(loss), params, leaf(batch, sequence, dtype=jnp.int32)), params


def size(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize(('config', 'batch', 'sequence'), DECODERS.values(), ids=DECODERS)
def test_decoders(config, batch, sequence, monkeypatch):
    """6 x parameters x tokens, and 12 x sequence x width x layers per token for attention.

    https://jax-ml.github.io/scaling-book/transformers, "Global FLOPs and Params Calculation". The embedding
    is a lookup, without FLOPs.
    """
    tokens = batch * sequence
    attention = 12 * sequence * config.width * config.layers * tokens
    again, params = gradient(config, batch, sequence)
    monkeypatch.setattr(jax, 'checkpoint', lambda fun: fun)
    flops_of_gradient, _ = gradient(config, batch, sequence)
    needed = 6 * size(params) * tokens - 6 * size(params['embed']) * tokens + attention
    assert flops_of_gradient.count == pytest.approx(needed, rel=0.01)
    # The last matmul of a recomputed layer is not needed.
    weights = size(params['layers']) - size(params['layers']['down'])
    assert again.count - flops_of_gradient.count == pytest.approx(
        2 * weights * tokens + attention / 3, rel=0.01
    )
    assert again.by_phase['recomputed'] == again.count - flops_of_gradient.count
    assert flops_of_gradient.by_phase['backward'] == 2 * flops_of_gradient.by_phase['forward']


@pytest.mark.medium
def test_scans_of_4_and_16_layers():
    few, many = (gradient(dataclasses.replace(CONFIG, layers=layers), 8, 32)[0].count for layers in (4, 16))
    head = 6 * 96 * 64 * 8 * 32
    assert (many - head) == 4 * (few - head)


# --- On several devices ---------------------------------------------------------------------------


def blocks(axes, spec):
    return HELPER.shard_map(lambda x: x @ x.T, spec, spec, axis_names=axes, check_vma=False)


@pytest.mark.parametrize(
    ('fun', 'expected'),
    [
        (blocks({'fsdp', 'tp'}, P(('fsdp', 'tp'))), 8 * 2 * 2 * 2 * 16),  # 8 blocks of 2 x 16
        (blocks({'fsdp'}, P('fsdp')), 4 * 2 * 4 * 4 * 16),
        (blocks({'fsdp', 'tp'}, P('fsdp')), 8 * 2 * 4 * 4 * 16),  # all devices along tp compute the same
    ],
    ids=['all axes', 'one axis', 'replicated along one'],
)
def test_shard_map(fun, expected):
    assert flops(fun, leaf(16, 16)) == expected


def test_a_plan_has_the_operations_of_all_devices():
    def step(w, x):
        return x @ w

    step_flops = 2 * 16 * 64 * 32
    divided = HELPER.plan(
        HELPER.sjit(step, in_shardings=(P(None, 'tp'), P('fsdp'))), leaf(64, 32), leaf(16, 64)
    )
    assert (divided.flops, divided.flops_exactness) == (step_flops, Exactness.EXACT)
    assert divided.device_cost.flops == step_flops // 8
    # Reads 4 x 64 of x and 64 x 16 of w, and writes 4 x 16.
    assert divided.device_cost.bytes == 4 * (4 * 64 + 64 * 16 + 4 * 16)
    twice = HELPER.plan(HELPER.sjit(step, in_shardings=(P(), P('fsdp'))), leaf(64, 32), leaf(16, 64))
    assert (twice.flops, twice.device_cost.flops) == (step_flops, step_flops // 4)
    alone = HELPER.plan(step, leaf(64, 32), leaf(16, 64))
    assert (alone.flops, alone.device_cost.flops, alone.devices) == (step_flops, step_flops, 1)


def attention_primitive(name, results):
    """The primitive that JAX traces cuDNN attention to, for environments without cuDNN."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *operands, layout: [operands[i] for i in results])
    return primitive


@pytest.mark.parametrize('layout', [0, 1])
@pytest.mark.parametrize('which', ['', 'fp8_'])
def test_attention_of_cudnn_counts_as_attention_in_jax(layout, which):
    """All pairs; the gradient has two matmuls for each, and recomputes the scores."""
    forward = attention_primitive(f'dot_product_attention_{which}fwd_wrapper', [0])
    backward = attention_primitive(f'dot_product_attention_{which}bwd_wrapper', [0, 1, 2])

    @jax.custom_vjp
    def by_cudnn(*qkv):
        return forward.bind(*qkv, layout=layout)[0]

    by_cudnn.defvjp(
        lambda *qkv: (by_cudnn(*qkv), qkv), lambda qkv, grad: backward.bind(*qkv, grad, layout=layout)
    )

    def in_jax(*qkv):
        swapped = [jnp.moveaxis(x, 1, 2) if layout else x for x in qkv]
        output = jax.nn.dot_product_attention(*swapped)
        return jnp.moveaxis(output, 1, 2) if layout else output

    query, key = ((2, 8, 128, 64), (2, 4, 256, 64)) if layout else ((2, 128, 8, 64), (2, 256, 4, 64))
    cudnn_jaxpr, jax_jaxpr = (
        jax.jit(jax.value_and_grad(lambda *qkv, f=f: jnp.square(f(*qkv)).sum(), argnums=(0, 1, 2)))
        .trace(*(leaf(*shape) for shape in (query, key, key)))
        .jaxpr
        for f in (by_cudnn, in_jax)
    )
    matmul_flops = 2 * 2 * 8 * 128 * 256 * 64
    assert count_flops(cudnn_jaxpr).by_phase == {
        'forward': 2 * matmul_flops,
        'backward': 4 * matmul_flops,
        'recomputed': matmul_flops,
    }
    assert count_flops(cudnn_jaxpr) == Flops(7 * matmul_flops)
    assert count_model_flops(cudnn_jaxpr) == count_model_flops(jax_jaxpr) == 6 * matmul_flops


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('name', OPERATIONS)
def test_the_program_takes_as_many_operations_as_the_function(name):
    fun, arguments, expected = OPERATIONS[name]
    assert HELPER.plan(fun, *arguments).device_cost.flops == expected


def test_the_program_of_a_transform():
    plan = HELPER.plan(jnp.fft.fft, leaf(3, 64, dtype=jnp.complex64))
    assert plan.device_cost.flops == plan.flops == 3 * 5 * 64 * 6


def test_loops_of_a_program():
    plan = HELPER.plan(HELPER.sjit(scanned(6), in_shardings=P(None, 'tp')), leaf(64, 64))
    assert plan.flops == 6 * 2 * 64**3
    assert plan.device_cost.exactness is Exactness.EXACT
    unknown = HELPER.plan(HELPER.sjit(endless, in_shardings=P('fsdp')), leaf(64, 64))
    assert (unknown.flops_exactness, unknown.device_cost.exactness) == (
        Exactness.AT_LEAST,
        Exactness.AT_LEAST,
    )
    assert str(unknown).splitlines()[1] == '>=524 kFLOPs in one call, on all devices together'
    assert unknown.to_dict()['flops_exactness'] == 'at least'
