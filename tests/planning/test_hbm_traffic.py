"""HBM traffic: compared with counts by hand and with a second reader of the program."""

import re
import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalax._planning.cost.device_cost import device_cost_of
from scalax._planning.program.hlo import parse
from scalax.plan import HARDWARE
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import executable_reader, tpu_compiler
from tests.support.leaves import leaf
from tests.support.random_examples import examples
from tests.support.recorded import names, recorded

F32, BF16, I32 = 4, 2, 4
GPU = MeshShardingHelper([1], ['x'], devices=jax.devices()[:1])


# --- By hand ------------------------------------------------------------------------------------------


def scatter(rows, width, some):
    """Writes new rows to a donated table: the new rows and the indices are read, and the rows written."""
    args = leaf(rows, width), leaf(some, dtype=jnp.int32), leaf(some, width)
    return lambda table, which, new: table.at[which].set(new), args, (0,), some * (2 * width * F32 + I32)


def scatter_add(rows, width, some):
    """Like `scatter`, and the old rows are read."""
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
    """Each token reads all weights; layers pass on the state of a few rows."""

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
    """An update of donated parameters and state moves *passes* arrays of the size of a parameter."""

    def make(size):
        params = {'w': leaf(size, size)}
        state = jax.eval_shape(optimizer.init, params)

        def step(params, state, grads):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return step, (params, state, params), (0, 1), passes * size**2 * F32, 64 * size * F32

    return make


# AdamW reads parameters, gradients and two moments, and writes all except the gradients. Adafactor reads
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


def of_one(function, moved, rows=2048, width=256, donated=()):
    return function, (leaf(rows, width),), donated, rows * width * moved


def fused(x, w):
    return jnp.tanh(jnp.dot(x, w, preferred_element_type=jnp.float32)).astype(jnp.bfloat16)


def elementwise(p, momentum, x):
    """A step with an elementwise gradient: the update reads parameters only once more."""
    momentum = 0.9 * momentum + jax.grad(lambda p: jnp.square(p * x).sum())(p)
    return p - 0.1 * momentum, momentum


def repeated(x):
    for _ in range(1500):
        x = -x
    return x


# Bytes per element of float32. A narrower copy, or another view, of a matmul's operand is not read.
OF_CPUS = {
    'a matmul of one matrix': of_one(lambda x: x.T @ x, 4 + 4 / 8, 2048, 256),
    'elementwise operations on a matmul': (
        fused,
        (leaf(2048, 64, dtype=jnp.bfloat16), leaf(64, 64, dtype=jnp.bfloat16)),
        (),
        2 * (2 * 2048 * 64 + 64**2),
    ),
    'a gradient that is elementwise': (elementwise, (leaf(256, 256),) * 3, (0, 1), 5 * 256**2 * F32),
    'one of two results of a sort': of_one(jnp.argsort, 8),
    'two results of a sort': of_one(lambda x: jax.lax.top_k(x, 128), 4 + 8 / 2),
    'a cast': of_one(lambda x: x.astype(jnp.bfloat16), 4 + 2),
    'another shape': of_one(lambda x: x.reshape(-1), 0, donated=(0,)),
    'operations in a row': of_one(repeated, 8),
    'an update without donation': of_one(lambda x: x.at[3].set(0.0), 8),
}


@pytest.mark.medium
@pytest.mark.parametrize('name', OF_CPUS)
def test_bytes_of_cpu_programs(name):
    function, arguments, donated, moved = OF_CPUS[name]
    counted_bytes = planned(GPU, function, arguments, donated).device_cost.bytes
    assert moved * 0.999 <= counted_bytes <= moved * 1.001 + 1024


def planned(helper, function, arguments, donated):
    step = helper.sjit(function, in_shardings=P(), out_shardings=P(), donate_argnums=donated)
    return helper.plan(step, *arguments)


def check(helper, hardware, function, arguments, donated, moved, between=0):
    """Checks that the plan has at least *moved* bytes, and at most *between* more."""
    roofline = planned(helper, function, arguments, donated).roofline(hardware)
    seconds = moved / hardware.hbm_bytes_per_second
    most = (moved + between) / hardware.hbm_bytes_per_second
    assert seconds * 0.999 <= roofline.hbm <= most * 1.001
    assert roofline.step_seconds.overlapped <= max(most * 1.001, roofline.compute)


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('name', BY_HAND)
def test_bytes_by_hand_on_a_gpu(name):
    """CPU programs, which have no fusions, are compared too."""
    check(GPU, HARDWARE['h100'], *BY_HAND[name])


@pytest.mark.sampled(7)
@pytest.mark.medium
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
    *(st.builds(update_of, SMALL) for update_of in (ADAMW, SGD, MOMENTUM, ADAFACTOR)),
)


@pytest.mark.slow
@examples(60)
@given(SOME)
def test_no_program_is_planned_above_its_bytes(case):
    function, arguments, donated, moved, *between = case
    work = planned(GPU, function, arguments, donated).device_cost
    assert work.bytes <= moved + sum(between) + 1024  # counters, positions and other scalars


# --- By a second reader ---------------------------------------------------------------------------------


@pytest.mark.sampled(7)
@pytest.mark.medium
@pytest.mark.parametrize('name', names())
def test_recorded_programs_move_no_more_than_their_arrays(name):
    """The second reader counts all operands and results as moved, which is the maximum."""
    recording = recorded(name)
    most = executable_reader.read(recording.executable, recording.mesh, recording.slices).hbm
    work = device_cost_of(parse(recording.optimized))
    assert 0 < work.bytes <= most
    assert sum(work.bytes_by_phase.values()) == work.bytes


# --- As they are read -------------------------------------------------------------------------------------

KIB = 2**10


def counted(entry, *computations):
    """Returns the bytes of an optimized program with these lines in its entry computation."""
    body = textwrap.indent(textwrap.dedent(entry).strip('\n'), '  ')
    others = [textwrap.dedent(text).strip('\n') for text in computations]
    main = f'ENTRY %main (p: f32[256,256]) -> f32[] {{\n{body}\n}}\n'
    return device_cost_of(parse('\n\n'.join(['HloModule made, is_scheduled=true', *others, main]))).bytes


CASES = {
    # f32[256,256] is 256 KiB, a row of it 1 KiB.
    'an elementwise operation': ('ROOT %a = f32[256,256] negate(%p)', 2 * 256),
    'an operand that occurs twice': ('ROOT %a = f32[256,256] add(%p, %p)', 2 * 256),
    'in the vector memory': ('ROOT %a = f32[256,256]{1,0:S(1)} negate(%p)', 256),
    'a copy into the vector memory': (
        """
        %s = (f32[256,256]{1,0:S(1)}, f32[256,256], u32[]) copy-start(%p)
        %d = f32[256,256]{1,0:S(1)} copy-done(%s)
        ROOT %a = f32[256,256]{1,0:S(1)} negate(%d)
        """,
        256,
    ),
    'a slice': ('ROOT %a = f32[2,256] slice(%p), slice={[0:2], [0:256]}', 2 * 2),
    'a slice that is updated': (
        """
        %u = f32[2,256] slice(%p), slice={[0:2], [0:256]}
        %z = s32[]{:S(6)} constant(0)
        ROOT %a = f32[256,256] dynamic-update-slice(%p, %u, %z, %z)
        """,
        2 * 2 + 2 * 2,
    ),
    'names': ('%b = f32[65536] bitcast(%p)\nROOT %t = (f32[65536], f32[256,256]) tuple(%b, %p)', 0),
    'an allocation': ('ROOT %a = f32[256,256] custom-call(), custom_call_target="AllocateBuffer"', 0),
    'a kernel': ('ROOT %a = f32[2,256] custom-call(%p), custom_call_target="tpu_custom_call"', 2),
    'a kernel in place': (
        'ROOT %a = f32[256,256] custom-call(%p), custom_call_target="tpu_custom_call", '
        'output_to_operand_aliasing={{}: (0, {})}',
        0,
    ),
    'a library': (
        'ROOT %a = (f32[256,256], s8[4194304]) custom-call(%p), custom_call_target="__cublas$gemm"',
        2 * 256,
    ),
    'a collective': (
        """
        %s = (f32[256,256], f32[1024,256]) all-gather-start(%p), replica_groups={}, dimensions={0}
        ROOT %d = f32[1024,256] all-gather-done(%s)
        """,
        5 * 256,
    ),
}
PARAMETER = '%p = f32[256,256] parameter(0)\n'


STARTED = {
    'an asynchronous slice, as GPUs write it': (
        """
        %z = s32[] constant(0)
        %s = ((f32[256,256], s32[]), f32[2,256], u32[]) fusion-start(%p, %z), kind=kLoop, calls=%sliced
        ROOT %d = f32[2,256] fusion-done(%s)
        """,
        2 * 2,
        """
        %sliced (i: f32[256,256], n: s32[]) -> f32[2,256] {
          %i = f32[256,256] parameter(0)
          %n = s32[] parameter(1)
          %c = s32[] constant(0)
          ROOT %r = f32[2,256] dynamic-slice(%i, %n, %c), dynamic_slice_sizes={2,256}
        }
        """,
    ),
    'an asynchronous update in place': (
        """
        %u = f32[2,256] slice(%p), slice={[0:2], [0:256]}
        %z = s32[] constant(0)
        %s = ((f32[256,256], f32[2,256], s32[]), f32[256,256], u32[]) async-start(%p, %u, %z), calls=%updated
        ROOT %d = f32[256,256] async-done(%s)
        """,
        2 * 2 + 2 * 2,
        """
        %updated (i: f32[256,256], j: f32[2,256], n: s32[]) -> f32[256,256] {
          %i = f32[256,256] parameter(0)
          %j = f32[2,256] parameter(1)
          %n = s32[] parameter(2)
          ROOT %r = f32[256,256] dynamic-update-slice(%i, %j, %n, %n)
        }
        """,
    ),
}


@pytest.mark.parametrize(('entry', 'moved', 'called'), STARTED.values(), ids=STARTED)
def test_traffic_of_asynchronous_operations(entry, moved, called):
    assert counted(PARAMETER + textwrap.dedent(entry).strip('\n'), called) == moved * KIB + I32


@pytest.mark.parametrize(('entry', 'moved'), CASES.values(), ids=CASES)
def test_instructions(entry, moved):
    assert counted(PARAMETER + textwrap.dedent(entry).strip('\n')) == moved * KIB


FUSED = {
    'a slice': (['%s = f32[2,256] slice(%x), slice={[0:2], [0:256]}', '%r = f32[2,256] negate(%s)'], 2, 2),
    'a slice of an intermediate': (
        ['%n = f32[256,256] negate(%x)', '%r = f32[2,256] slice(%n), slice={[0:2], [0:256]}'],
        2,
        2,
    ),
    'a sum': (['%r = f32[256] reduce(%x, %z), dimensions={1}, to_apply=%plus'], 256, 1),
    'a slice of a sum': (
        [
            '%n = f32[256,256] reduce(%x, %z), dimensions={}, to_apply=%plus',
            '%r = f32[2,256] slice(%n), slice={[0:2], [0:256]}',
        ],
        256,
        2,
    ),
    'a broadcast': (['%r = f32[4,256,256] broadcast(%x), dimensions={1,2}'], 256, 4 * 256),
    'an update in place': (
        [
            '%s = f32[2,256] slice(%x), slice={[0:2], [0:256]}',
            '%r = f32[256,256] dynamic-update-slice(%x, %s, %z, %z)',
        ],
        2,
        2,
    ),
    'an update of an intermediate': (
        [
            '%n = f32[256,256] negate(%x)',
            '%s = f32[2,256] slice(%x), slice={[0:2], [0:256]}',
            '%r = f32[256,256] dynamic-update-slice(%n, %s, %z, %z)',
        ],
        256,
        256,
    ),
    'an unchanged operand': (
        ['%n = f32[256,256] negate(%x)', '%r = (f32[256,256], f32[256,256]) tuple(%x, %n)'],
        256,
        256,
    ),
}


@pytest.mark.parametrize(('lines', 'read', 'written'), FUSED.values(), ids=FUSED)
@pytest.mark.parametrize('nested', [False, True])
def test_fusions(lines, read, written, nested):
    """Alone, and inside another fusion that reads the same of its operand."""
    type_ = re.match('%r = (.*?) [a-z-]+[(]', lines[-1])[1]
    body = ['%x = f32[256,256] parameter(0)', '%z = f32[]{:S(6)} constant(0)', *lines]
    inner = '\n'.join(['%fused (x: f32[256,256]) -> f32[] {', *[f'  {line}' for line in body], '}'])
    inner = inner.replace('  %r =', '  ROOT %r =')
    outer = '%outer (y: f32[256,256]) -> f32[] {\n  %y = f32[256,256] parameter(0)\n'
    outer += f'  ROOT %f = {type_} fusion(%y), kind=kLoop, calls=%fused\n}}'
    entry = f'{PARAMETER}ROOT %a = {type_} fusion(%p), kind=kLoop, calls={"%outer" if nested else "%fused"}'
    assert counted(entry, *([outer] if nested else []), inner) == (read + written) * KIB


def test_traffic_of_a_loop():
    """Weights of eight layers, one of which is read in each of eight iterations."""
    loop = """
        %body (s: (s32[], f32[8,256,256])) -> (s32[], f32[8,256,256]) {
          %s = (s32[]{:S(6)}, f32[8,256,256]) parameter(0)
          %o = s32[]{:S(6)} constant(1)
          %i = s32[]{:S(6)} add(%s#0, %o)
          %w = f32[1,256,256]{2,1,0:S(1)} dynamic-slice(%s#1, %s#0, %o, %o), dynamic_slice_sizes={1,256,256}
          ROOT %t = (s32[]{:S(6)}, f32[8,256,256]) tuple(%i, %s#1)
        }
        """
    test = """
        %test (s: (s32[], f32[8,256,256])) -> pred[] {
          %s = (s32[]{:S(6)}, f32[8,256,256]) parameter(0)
          %n = s32[]{:S(6)} constant(8)
          ROOT %c = pred[]{:S(6)} compare(%s#0, %n), direction=LT
        }
        """
    entry = """
        %w = f32[8,256,256] parameter(0)
        %z = s32[]{:S(6)} constant(0)
        %s = (s32[], f32[8,256,256]) tuple(%z, %w)
        ROOT %l = (s32[], f32[8,256,256]) while(%s), condition=%test, body=%body
        """
    assert counted(entry, loop, test) == 8 * 256 * KIB
