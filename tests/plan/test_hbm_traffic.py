"""The bytes that a device moves from and to its memory: by hand, by a second reader, and as they are read."""

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalax._plan.hlo import parse
from scalax._plan.hlo_cost import work_of
from scalax.plan import HARDWARE
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import executable_reader, tpu_compiler
from tests.support.leaves import leaf
from tests.support.recorded import names, recorded

F32, BF16, I32 = 4, 2, 4
GPU = MeshShardingHelper([1], ['x'], devices=jax.devices()[:1])


# --- By hand ------------------------------------------------------------------------------------------


def scatter(rows, width, some):
    """New rows of a table, which is donated: they are read and written, and their numbers are read."""
    args = leaf(rows, width), leaf(some, dtype=jnp.int32), leaf(some, width)
    return lambda table, which, new: table.at[which].set(new), args, (0,), some * (2 * width * F32 + I32)


def scatter_add(rows, width, some):
    """As `scatter`, and the old rows are read."""
    _, args, donated, moved = scatter(rows, width, some)
    return lambda table, which, new: table.at[which].add(new), args, donated, moved + some * width * F32


def gather(rows, width, some):
    args = leaf(rows, width), leaf(some, dtype=jnp.int32)
    return lambda table, which: table[which], args, (), some * (2 * width * F32 + I32)


def cache(layers, batch, length):
    """One position of a cache of keys, which is donated."""
    new = leaf(layers, batch, 1, 8, 128, dtype=jnp.bfloat16)
    args = leaf(layers, batch, length, 8, 128, dtype=jnp.bfloat16), new, leaf(dtype=jnp.int32)

    def write(cache, new, position):
        return jax.lax.dynamic_update_slice(cache, new, (0, 0, position, 0, 0))

    return write, args, (0,), 2 * new.size * BF16 + I32


def attention(batch, length):
    """One query: all keys and values are read; scores are written and read up to five times."""
    query, keys = leaf(batch, 8, 128, dtype=jnp.bfloat16), leaf(batch, length, 8, 128, dtype=jnp.bfloat16)

    def attend(q, k, v):
        scores = jnp.einsum('bhk,bthk->bht', q, k, preferred_element_type=jnp.float32)
        return jnp.einsum('bht,bthk->bhk', jax.nn.softmax(scores).astype(jnp.bfloat16), v)

    return (
        attend,
        (query, keys, keys),
        (),
        2 * keys.size * BF16 + 2 * query.size * BF16,
        10 * batch * 8 * length * F32,
    )


def decode(batch, tokens=64, layers=8, width=4096):
    """Each token reads all weights; the state of a few rows goes from layer to layer."""

    def loop(weights, x):
        def token(x, _):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0], None

        return jax.lax.scan(token, x, length=tokens)[0]

    weights, x = leaf(layers, width, width, dtype=jnp.bfloat16), leaf(batch, width, dtype=jnp.bfloat16)
    products = tokens * layers
    return (
        loop,
        (weights, x),
        (),
        products * (width**2 + 2 * batch * width) * BF16,
        products * 6 * batch * width * F32,
    )


def update(optimizer, passes):
    """An update of donated parameters and state: *passes* arrays of the size of a parameter are moved."""

    def make(size):
        params = {'w': leaf(size, size)}
        state = jax.eval_shape(optimizer.init, params)

        def step(params, state, grads):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return step, (params, state, params), (0, 1), passes * size**2 * F32, 64 * size * F32

    return make


# AdamW reads parameters, gradients and two moments, and writes all but the gradients. Adafactor reads
# gradients and parameters up to three times, for the sums that scale them.
ADAMW, SGD, MOMENTUM, ADAFACTOR = (
    update(optax.adamw(1e-3), 7),
    update(optax.sgd(1e-3), 3),
    update(optax.sgd(1e-3, momentum=0.9), 5),
    update(optax.adafactor(1e-3), 3),
)
BY_HAND = {
    'scatter': scatter(2**19, 1024, 1024),
    'scatter_add': scatter_add(2**19, 1024, 1024),
    'gather': gather(2**19, 1024, 1024),
    'cache': cache(4, 8, 4096),
    'attention': attention(8, 4096),
    'decode 1': decode(1),
    'decode 2': decode(2),
    'decode 8': decode(8),
    'adamw': ADAMW(8192),
    'sgd': SGD(8192),
    'momentum': MOMENTUM(8192),
    'adafactor': (*ADAFACTOR(8192)[:4], 4 * 8192**2 * F32),
}


def planned(helper, function, arguments, donated):
    step = helper.sjit(function, in_shardings=P(), out_shardings=P(), donate_argnums=donated)
    return helper.plan(step, *arguments)


def check(helper, hardware, function, arguments, donated, moved, between=0):
    """The plan has the bytes that have to be moved, and at most what values in between may take more."""
    roofline = planned(helper, function, arguments, donated).roofline(hardware)
    seconds = moved / hardware.hbm_bytes_per_second
    most = (moved + between) / hardware.hbm_bytes_per_second
    assert seconds * 0.999 <= roofline.hbm <= most * 1.001
    assert roofline.step_seconds.bound <= max(most * 1.001, roofline.compute)


@pytest.mark.parametrize('name', BY_HAND)
def test_bytes_by_hand_on_a_gpu(name):
    """With CPU programs, which have no fusions."""
    check(GPU, HARDWARE['h100'], *BY_HAND[name])


@tpu_compiler.needed
@pytest.mark.parametrize('name', BY_HAND)
def test_bytes_by_hand_on_a_tpu(name):
    helper = MeshShardingHelper.from_topology('v5p:2x2x1', [-1], ['x'])
    check(helper, HARDWARE['v5p'], *BY_HAND[name])


SMALL = st.integers(1, 64)
SOME = st.one_of(
    st.builds(scatter, st.integers(64, 4096), SMALL, SMALL),
    st.builds(scatter_add, st.integers(64, 4096), SMALL, SMALL),
    st.builds(gather, st.integers(64, 4096), SMALL, SMALL),
    st.builds(cache, st.integers(1, 4), st.integers(1, 8), SMALL),
    st.builds(attention, st.integers(1, 8), SMALL),
    st.builds(decode, st.integers(1, 8), st.integers(1, 6), st.integers(1, 4), st.integers(1, 64)),
    *(st.builds(made, SMALL) for made in (ADAMW, SGD, MOMENTUM, ADAFACTOR)),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SOME)
def test_no_program_is_planned_above_its_bytes(case):
    function, arguments, donated, moved, *between = case
    work = planned(GPU, function, arguments, donated).work
    assert work.bytes <= moved + sum(between) + 1024  # counters, positions and other numbers


# --- By a second reader ---------------------------------------------------------------------------------


@pytest.mark.parametrize('name', names())
def test_recorded_programs_move_no_more_than_their_arrays(name):
    """The second reader takes all operands and results for moved; that is the most that can be."""
    recording = recorded(name)
    most = executable_reader.read(recording.executable, recording.mesh, recording.slices).hbm
    found = work_of(parse(recording.optimized)).bytes
    assert 0 < found <= most
    assert sum(work_of(parse(recording.optimized)).bytes_by_part.values()) == found
