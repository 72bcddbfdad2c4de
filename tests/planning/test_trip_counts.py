"""Trip counts of loops in jaxprs and programs, and the largest of several branches."""

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._planning.cost.collective_instances import collective_instances
from scalax._planning.cost.device_cost import DeviceCost, device_cost_of, flops_of
from scalax._planning.cost.flops import count_flops, while_trip_count
from scalax._planning.program.call_tree import computation_instances
from scalax._planning.program.hlo import parse
from scalax.plan import Exactness, Flops, ScopeCost
from tests.support.leaves import leaf

EXACT, AT_LEAST, AT_MOST, ABOUT = Exactness
X = leaf(4, 4)
TABLE = np.arange(1, 101)
ONE = 2 * 4**3  # FLOPs of an iteration's matmul


def loop(test, step, *first, dtype=None):
    """A loop over integers and a matrix, with a matmul in each iteration."""

    def fun(x):
        start = [number if dtype is None else dtype(number) for number in first]
        return jax.lax.while_loop(
            lambda c: test(c[1], *c[0]), lambda c: (step(*c[0]), jnp.tanh(c[1] @ c[1])), (tuple(start), x)
        )[1]

    return fun


def while_(test, step, start, dtype=None):
    """A `loop` over one integer, whose condition does not read the matrix."""
    return loop(lambda x, i: test(i), lambda i: (step(i),), start, dtype=dtype)


def small(x):
    """A condition that depends on the values of the matrix."""
    return x[0, 0] < 9


@jax.jit
def beside_a_key(key, number):
    return jax.random.split(key), number + 2


# name -> (function, trip count, exactness)
LOOPS = {
    'less': (while_(lambda i: i < 9, lambda i: i + 2, 1), 4, EXACT),
    'less or equal': (while_(lambda i: i <= 7, lambda i: i + 2, 1), 4, EXACT),
    'down to': (while_(lambda i: i >= 0, lambda i: i - 1, 6), 7, EXACT),
    'down': (while_(lambda i: i > 0, lambda i: i - 3, 7), 3, EXACT),
    'down, unsigned': (while_(lambda i: i > 0, lambda i: i - 1, 5, jnp.uint32), 5, EXACT),
    'unlike': (while_(lambda i: i != 12, lambda i: i + 3, 0), 4, EXACT),
    'unlike, passed by': (while_(lambda i: i != 10, lambda i: i + 3, 0, jnp.int8), 174, EXACT),
    'up to the end of its type': (while_(lambda i: i < 127, lambda i: i + 2, 1, jnp.int8), 63, EXACT),
    'like': (while_(lambda i: i == 3, lambda i: i + 1, 3), 1, EXACT),
    'reversed': (while_(lambda i: jax.lax.gt(9, i), lambda i: 2 + i, 1), 4, EXACT),
    'never': (while_(lambda i: i < 3, lambda i: i + 1, 3), 0, EXACT),
    'doubled': (while_(lambda i: i < 100, lambda i: i * 2, 1), 7, EXACT),
    'halved': (while_(lambda i: i > 0, lambda i: jax.lax.div(i, 2), 100), 7, EXACT),
    'halved by an operator': (while_(lambda i: i > 0, lambda i: i // 2, 100), 7, EXACT),
    'halved by an operator, unsigned': (while_(lambda i: i > 0, lambda i: i // 2, 9, jnp.uint32), 4, EXACT),
    'halved below zero': (while_(lambda i: i != -1, lambda i: i // 2, -100), 7, EXACT),
    'divided towards zero': (while_(lambda i: i < 0, lambda i: jax.lax.div(i, 2), -100), 7, EXACT),
    'a remainder below zero': (while_(lambda i: jax.lax.rem(i, 5) != -3, lambda i: i - 1, 0), 3, EXACT),
    'a remainder by an operator': (while_(lambda i: i % 5 != 2, lambda i: i - 1, 0), 3, EXACT),
    'the least number by minus one': (
        while_(lambda i: jax.lax.div(i, jnp.int8(-1)) < 0, lambda i: i + 1, -128, jnp.int8),
        1,
        EXACT,
    ),
    'by zero': (while_(lambda i: jax.lax.div(9, i) < 9, lambda i: i + 1, 0), 1, AT_MOST),
    'a line': (while_(lambda i: 3 * i + 1 < 20, lambda i: i + 1, 0), 7, EXACT),
    'not': (while_(lambda i: ~(i >= 5), lambda i: i + 1, 0), 5, EXACT),
    'either': (while_(lambda i: (i < 3) | (i < 6), lambda i: i + 1, 0), 6, EXACT),
    'both': (while_(lambda i: (i < 9) & (i < 6), lambda i: i + 1, 0), 6, EXACT),
    'inside of an array': (while_(lambda i: (i >= 0) & (i < 9), lambda i: i + 1, 0), 9, EXACT),
    'a bound of the state': (
        loop(lambda x, i, n: i < n, lambda i, n: (i + 1, n), 0, 5),
        5,
        EXACT,
    ),
    'a step of the state': (
        loop(lambda x, i, n: i < 10, lambda i, n: (i + n, n), 0, 3),
        4,
        EXACT,
    ),
    'two counters that meet': (
        loop(lambda x, i, j: i < j, lambda i, j: (i + 1, j - 2), 0, 12),
        4,
        EXACT,
    ),
    'a step that grows': (  # 0, 1, 3, 6, 10
        loop(lambda x, i, n: i < 10, lambda i, n: (i + n, n + 1), 0, 1),
        4,
        EXACT,
    ),
    'two counters that are swapped': (
        loop(lambda x, i, j: i < 6, lambda i, j: (j, i + 3), 0, 1),  # 0, 1, 3, 4, 6
        4,
        EXACT,
    ),
    'a choice': (while_(lambda i: i < 10, lambda i: jax.lax.select(i < 4, i + 1, i + 3), 0), 6, EXACT),
    'from a constant that is computed': (
        lambda x: while_(lambda i: i < 9, lambda i: i + 1, jax.lax.mul(jnp.int32(2), 1) - 2)(x),
        9,
        EXACT,
    ),
    'from a call with a key': (
        lambda x: while_(lambda i: i < 9, lambda i: i + 1, beside_a_key(jax.random.key(0), 1)[1])(x),
        6,
        EXACT,
    ),
    'or until something happens': (
        loop(lambda x, i: (i < 6) & small(x), lambda i: (i + 1,), 0),
        6,
        AT_MOST,
    ),
    'or until another condition': (
        loop(lambda x, i: small(x) & ((i < 6) & (i < 8)), lambda i: (i + 1,), 0),
        6,
        AT_MOST,
    ),
    'or until a long table ends it': (  # which is not printed
        loop(lambda x, i: (i < 6) & (jnp.asarray(TABLE)[i] > 0), lambda i: (i + 1,), 0),
        6,
        AT_MOST,
    ),
    'and something, but never': (loop(lambda x, i: small(x) & (i < 0), lambda i: (i + 1,), 0), 0, EXACT),
    'as long as something happens': (
        loop(lambda x, i: (i < 6) | small(x), lambda i: (i + 1,), 0),
        1,
        AT_LEAST,
    ),
    'of data': (lambda x: jax.lax.while_loop(small, lambda x: jnp.tanh(x @ x), x), 1, AT_LEAST),
    'from data': (lambda x: while_(lambda i: i < 9, lambda i: i + 1, x[0, 0].astype(int))(x), 1, AT_LEAST),
    'to data': (lambda x: while_(lambda i: i < x[0, 0], lambda i: i + 1, 0)(x), 1, AT_LEAST),
    'for ever': (while_(lambda i: i < 9, lambda i: i - 0, 0), 1, AT_LEAST),
    'of reals': (while_(lambda r: r < 3.0, lambda r: r + 1.0, 0.0), 1, AT_LEAST),
    'with growing steps': (
        while_(lambda i: i < 10**9, lambda i: jax.lax.select(i < 4, i + 1, i + 2), 0),
        1,
        AT_LEAST,
    ),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize(('fun', 'rounds', 'exactness'), LOOPS.values(), ids=LOOPS)
def test_trip_counts_of_loops(fun, rounds, exactness):
    traced = jax.jit(fun).trace(X)
    expected = Flops(rounds * ONE, exactness)
    began = time.process_time()
    assert count_flops(traced.jaxpr) == expected
    program = device_cost_of(parse(traced.lower().compiler_ir(dialect='hlo').as_hlo_text()))
    assert (program.flops, program.exactness) == (expected.count, expected.exactness)
    assert time.process_time() - began < 30  # it ends; a busy machine takes longer


def as_optimized(text):
    """Returns the program with ``%state#1`` for tuple elements, as the TPU compiler prints it."""
    element = re.compile(r'^ +(\S+) = \S+ get-tuple-element\(([^)]+)\), index=(\d+).*\n', re.MULTILINE)
    computations = text.split('\n\n')
    for number, computation in enumerate(computations):
        for name, source, index in element.findall(computation):
            computation = re.sub(rf'(?<=[( ]){re.escape(name)}(?=[,)])', f'{source}#{index}', computation)
        computations[number] = element.sub('', computation)
    return '\n\n'.join(computations)


@pytest.mark.medium
@pytest.mark.parametrize(('fun', 'rounds', 'exactness'), LOOPS.values(), ids=LOOPS)
def test_trip_counts_of_optimized_programs(fun, rounds, exactness):
    text = as_optimized(jax.jit(fun).lower(X).compiler_ir(dialect='hlo').as_hlo_text())
    assert not re.search(r'^  (?!ROOT ).* get-tuple-element\(', text, re.MULTILINE)
    program = device_cost_of(parse(text))
    assert (program.flops, program.exactness) == (rounds * ONE, exactness)


def test_a_loop_of_an_equation_alone():
    """Without the jaxpr around the loop, only its literals are known."""
    traced = jax.jit(while_(lambda i: i <= 7, lambda i: i + 2, 1)).trace(X)
    [equation] = [equation for equation in traced.jaxpr.eqns if equation.primitive.name == 'while']
    assert while_trip_count(equation) == (4, EXACT)


@pytest.mark.medium
@pytest.mark.parametrize('start', [0, 5])
def test_many_iterations(start):
    """Scans of any length are solved; other loops are run for up to 10,000 iterations."""
    traced = jax.jit(while_(lambda i: i < 10**9, lambda i: i + 4, start)).trace(X)
    assert count_flops(traced.jaxpr) == Flops(ONE, AT_LEAST)
    text = traced.lower().compiler_ir(dialect='hlo').as_hlo_text()
    for notation in (text, as_optimized(text)):
        program = device_cost_of(parse(notation))
        assert (program.flops, program.exactness) == ((10**9 - start + 3) // 4 * ONE, EXACT)


def test_many_operations_between_state_and_test():
    """Each line doubles the number of paths from the condition to the counter."""

    def test(i):
        for _ in range(25):
            i = i + i
        return i < 2**30

    fun = while_(test, lambda i: i + 1, 0)
    assert count_flops(jax.jit(fun).trace(X).jaxpr) == Flops(32 * ONE)


@pytest.mark.medium
def test_integers_of_long_computations_are_unknown():
    def test(i):
        for _ in range(2000):
            i = i + 1
        return i < 2003

    assert count_flops(jax.jit(while_(test, lambda i: i + 1, 0)).trace(X).jaxpr) == Flops(ONE, AT_LEAST)


# --- Branches -------------------------------------------------------------------------------------


def products(count):
    def fun(x):
        for _ in range(count):
            x = jnp.tanh(x @ x)
        return x

    return fun


def switch(*counts):
    return lambda x: jax.lax.switch(x[0, 0].astype(int), [products(count) for count in counts], x)


def in_scan(body, length=5):
    return lambda x: jax.lax.scan(lambda x, _: (body(x), None), x, length=length)[0]


def one_of(*functions):
    return lambda x: jax.lax.switch(x[0, 0].astype(int), functions, x)


# name -> (function, matmuls, exactness)
BRANCHES = {
    'different ones': (switch(1, 4, 2), 4, AT_MOST),
    'equal ones': (switch(3, 3), 3, EXACT),
    'in a loop': (in_scan(switch(1, 2)), 10, AT_MOST),
    'in a branch': (one_of(switch(1, 2), products(1), switch(3, 3)), 3, AT_MOST),
    'a loop in a branch': (one_of(products(4), in_scan(products(1), 6)), 6, AT_MOST),
    'beside another one': (lambda x: switch(1, 2)(switch(3, 0)(x)), 5, AT_MOST),
    'in a loop of unknown length': (
        lambda x: jax.lax.while_loop(small, switch(1, 2), x),
        2,
        ABOUT,
    ),
}


@pytest.mark.parametrize(('fun', 'count', 'exactness'), BRANCHES.values(), ids=BRANCHES)
def test_the_largest_branch_counts(fun, count, exactness):
    traced = jax.jit(fun).trace(X)
    assert count_flops(traced.jaxpr) == Flops(count * ONE, exactness)
    # A float32 4 x 4 matrix times itself: one matrix is read, and one written.
    work = device_cost_of(parse(traced.lower().compiler_ir(dialect='hlo').as_hlo_text()))
    assert dataclasses.replace(work, by_scope=()) == DeviceCost(
        count * ONE,
        count * 2 * 64,
        exactness,
        by_phase={'other': count * ONE},
        bytes_by_phase={'other': count * 2 * 64},
    )


def test_each_measure_has_its_largest_branch():
    """The matmul of large matrices has the most FLOPs; the matmuls of small ones have the most bytes."""

    def large(x):
        return x @ x

    def thin(x):
        return sum(x[:, n : n + 1] @ x[:1] for n in range(3))

    x = leaf(64, 64)
    text = jax.jit(one_of(large, thin)).lower(x).compiler_ir(dialect='hlo').as_hlo_text()
    # 64 x 1 by 1 x 64, three times: 3 x (64 + 64 + 4096) numbers; the large one 2 x 4096.
    work = dataclasses.replace(device_cost_of(parse(text)), by_scope=())
    moved = 3 * 4 * (64 + 64 + 4096)
    assert work == DeviceCost(
        2 * 64**3, moved, AT_MOST, {'other': 2 * 64**3}, bytes_by_phase={'other': moved}
    )


def test_without_a_measure_all_branches_come():
    text = jax.jit(switch(1, 4, 2)).lower(X).compiler_ir(dialect='hlo').as_hlo_text()
    module = parse(text)

    def counted(*measure):
        return [
            (visit.count, visit.exactness)
            for visit in computation_instances(module, *measure)
            for instruction in visit.computation.instructions.values()
            if instruction.opcode == 'dot'
        ]

    assert counted() == [(1, AT_MOST)] * 7
    assert counted(flops_of) == [(1, AT_MOST)] * 4


# --- Optimized programs ---------------------------------------------------------------------------

# The TPU compiler's form of two matmuls: a window of two over a kernel of two, where each output uses one
# position. And a kernel.
OPTIMIZED = """HloModule jit_f, num_partitions=8

%products (a: bf16[16,32], b: bf16[32,2,8]) -> bf16[16,2,8] {
  %a = bf16[16,32]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = bf16[32,2,8]{2,0,1:T(8,128)(2,1)S(1)} parameter(1)
  %c = bf16[16,32,1]{1,0,2:T(8,128)(2,1)} bitcast(%a)
  ROOT %d = bf16[16,2,8]{2,0,1} convolution(%c, %b), \
    window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_i0o->b0f, \
    metadata={op_name="jit(f)/jvp()/dot_general"}
}

%heads (a: bf16[4,16,8], b: bf16[4,8,16]) -> bf16[4,16,16] {
  %a = bf16[4,16,8]{2,1,0} parameter(0)
  %b = bf16[4,8,16]{2,1,0} parameter(1)
  ROOT %c = bf16[4,16,16]{2,1,0} convolution(%a, %b), \
    window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf, \
    metadata={op_name="jit(f)/transpose(jvp())/dot_general"}
}

ENTRY %main (a: bf16[16,32], b: bf16[32,2,8], q: bf16[4,16,8], k: bf16[4,8,16]) -> bf16[16,2,8] {
  %a = bf16[16,32]{1,0} parameter(0)
  %b = bf16[32,2,8]{2,1,0} parameter(1)
  %q = bf16[4,16,8]{2,1,0} parameter(2)
  %k = bf16[4,8,16]{2,1,0} parameter(3)
  %s = bf16[4,16,16]{2,1,0} fusion(%q, %k), kind=kOutput, calls=%heads, metadata={op_name="jit(f)/jvp()/exp"}
  %o = bf16[16,32]{1,0} custom-call(%a, %s), custom_call_target="tpu_custom_call", \
    metadata={op_name="jit(f)/pallas_call"}
  ROOT %r = bf16[16,2,8]{2,1,0} fusion(%o, %b), kind=kOutput, calls=%products
}
"""


def test_matmuls_of_an_optimized_program():
    two, heads = 2 * 16 * 32 * (2 * 8), 4 * 2 * 16 * 8 * 16
    moved = {
        'forward': 2 * (16 * 32 + 32 * 16 + 16 * 16),
        'backward': 2 * 4 * (16 * 8 + 8 * 16 + 16 * 16),
    }
    # A fusion has the name of another operation inside it.
    parts = {'forward': two, 'backward': heads}
    scopes = (ScopeCost('', 'backward', heads, 0), ScopeCost('', 'forward', two, 0))
    work = device_cost_of(parse(OPTIMIZED))
    assert tuple(dataclasses.replace(row, bytes=0) for row in work.by_scope) == scopes
    totals = dataclasses.replace(work, by_scope=())
    total = sum(moved.values())
    assert totals == DeviceCost(two + heads, total, EXACT, parts, kernels=1, bytes_by_phase=moved)


@pytest.mark.parametrize('target', ['__cublas$lt$groupedMatmul', '__cudnn$norm', '__gpu$xla.gpu.triton'])
def test_library_calls_are_kernels(target):
    program = OPTIMIZED.replace('tpu_custom_call', target)
    assert device_cost_of(parse(program)) == device_cost_of(parse(OPTIMIZED))
    assert device_cost_of(parse(OPTIMIZED.replace('tpu_custom_call', 'Sharding'))).kernels == 0


def test_calls_from_the_compiler_contain_full_names():
    """The compiler for tpu7x moves an all-gather into a call; both have the name of the operation."""
    name = 'jit(f)/jvp()/squeeze'
    groups = 'channel_id=8, replica_groups={{0,1}}, dimensions={0}'
    text = f"""HloModule m, is_scheduled=true, num_partitions=2

%gather (a: f32[4]) -> f32[8] {{
  %a = f32[4]{{0}} parameter(0)
  ROOT %g = f32[8]{{0}} all-gather(%a), {groups}, metadata={{op_name="{name}"}}
}}

ENTRY %main (a: f32[4]) -> f32[8] {{
  %a = f32[4]{{0}} parameter(0)
  ROOT %c = f32[8]{{0}} call(%a), to_apply=%gather, metadata={{op_name="{name}"}}
}}
"""
    [run] = collective_instances(parse(text))
    assert run.op_name == name


def fused(name, channel, *, begins=False, ends=False):
    """A fusion that starts an all-gather, continues it beside other work, or waits for its end."""
    gather = f'all-gather(%i), channel_id={channel}, replica_groups=[1,8]<=[8], dimensions={{0}}'
    if begins:
        return f"""
%{name} (i: f32[256]) -> (f32[256], f32[2048]) {{
  %i = f32[256]{{0}} parameter(0)
  %g = f32[2048]{{0}} {gather}
  ROOT %s = (f32[256]{{0}}, f32[2048]{{0}}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}
"""
    root = 'custom-call(%o, %g), custom_call_target="AsyncCollectiveDone"' if ends else 'copy(%o)'
    return f"""
%{name} (i: f32[256], o: f32[2048]) -> f32[2048] {{
  %i = f32[256]{{0}} parameter(0)
  %o = f32[2048]{{0}} parameter(1)
  %g = f32[2048]{{0}} {gather}
  ROOT %s = f32[2048]{{0}} {root}
}}
"""


STATE = '(s32[], f32[256]{0}, f32[2048]{0})'
BESIDE_A_LOOP = f"""HloModule made, is_scheduled=true, num_partitions=8
{fused('begin', 7, begins=True)}{fused('goes_on', 7)}
{fused('end', 7, ends=True)}{fused('own', 8, begins=True)}
%body (state: (s32[], f32[256], f32[2048])) -> (s32[], f32[256], f32[2048]) {{
  %state = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[256]{{0}} get-tuple-element(%state), index=1
  %o = f32[2048]{{0}} get-tuple-element(%state), index=2
  %n = f32[2048]{{0}} fusion(%x, %o), kind=kLoop, calls=%goes_on
  %own.1 = (f32[256]{{0}}, f32[2048]{{0}}) fusion(%x), kind=kCustom, calls=%own
  ROOT %t = {STATE} tuple(%i, %x, %n)
}}

%test (state: (s32[], f32[256], f32[2048])) -> pred[] {{
  %state = {STATE} parameter(0)
  ROOT %p = pred[] constant(true)
}}

ENTRY %main (x: f32[256]) -> f32[2048] {{
  %x = f32[256]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %first = (f32[256]{{0}}, f32[2048]{{0}}) fusion(%x), kind=kCustom, calls=%begin
  %a = f32[256]{{0}} get-tuple-element(%first), index=0
  %b = f32[2048]{{0}} get-tuple-element(%first), index=1
  %state = {STATE} tuple(%zero, %a, %b)
  %loop = {STATE} while(%state), condition=%test, body=%body, \
    backend_config={{"known_trip_count":{{"n":"5"}}}}
  %c = f32[256]{{0}} get-tuple-element(%loop), index=1
  %d = f32[2048]{{0}} get-tuple-element(%loop), index=2
  ROOT %last = f32[2048]{{0}} fusion(%c, %d), kind=kCustom, calls=%end
}}
"""


def test_a_collective_beside_a_loop_counts_once():
    """On TPUs an all-gather may last for all iterations of a loop, each of which has a clone of it."""
    channels = [
        (instance.channel, instance.parent.count) for instance in collective_instances(parse(BESIDE_A_LOOP))
    ]
    assert sorted(channels) == [('7', 1), ('8', 5)]
