"""Memory of programs: live bytes at the peak, their sources, and transfers to and from the host.

Tables, programs and expected numbers are written by hand.
"""

import dataclasses
import textwrap

import pytest

from scalax._planning.cost.buffers import largest_buffers
from scalax._planning.cost.host_transfers import host_transfers
from scalax._planning.cost.memory import MemoryTables, assigned_memory, read_layout
from scalax._planning.program.hlo import parse
from scalax.errors import PlanError
from scalax.plan import HARDWARE, Exactness, HostTransfers, Memory, Roofline

KIB = 2**10
REPORT = """
Memory Space: default (color=0)
Total bytes: 26112 (25.50KiB)

Memory Space: vmem (color=1)
Total bytes: 4096 (4.00KiB)

Memory Space: cmem (color=5)
Total bytes: 8192 (8.00KiB)
"""
# Arguments: 4 KiB, whose buffer an output reuses, 2 KiB, and one on the host. Another output of 1 KiB, and a
# constant. Temporaries share 18 KiB: 8 KiB of stacked values for the entire loop; in its body 4 KiB, reused
# by another 4 KiB, and 4 KiB more; before the loop 12 KiB, when the stacked values do not exist.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, page 0, parameter 0, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <1 w @0> (size=4096,offset=0): f32[1024]{0:T(256)}
 value: <9 new @0> (size=4096,offset=0): f32[1024]{0:T(256)}
allocation 1: size 2048, page 0, parameter 1, shape |f32[512]| at ShapeIndex {}:
 value: <2 x @0> (size=2048,offset=0): f32[512]{0:T(256)}
allocation 2: size 1024, page 0, output shape is |f32[256]|, maybe-live-out:
 value: <3 loss @0> (size=1024,offset=0): f32[256]{0:T(256)}
allocation 3: size 512, page 0, constant:
 value: <4 one @0> (size=512,offset=0): f32[128]{0:T(256)}
allocation 4: size 18432, page 0, preallocated-temp:
 value: <5 early @0> (size=12288,offset=0): f32[3072]{0:T(256)}
 value: <6 loop{1} (phi) @0> (size=8192,offset=0): f32[2,1024]{1,0:T(1,128)}
 value: <7 made @0> (size=4096,offset=10240): f32[1024]{0:T(256)}
 value: <8 again @0> (size=4096,offset=10240): f32[1024]{0:T(256)}
 value: <10 loop{} (phi) @0> (size=512,offset=8192): (s32[]{:T(128)}, f32[2,1024]{1,0:T(1,128)})
 value: <11 other @0> (size=4096,offset=14336): f32[1024]{0:T(256)}
allocation 5: size 4096, color 1, page 0, preallocated-temp:
 value: <12 fast @1> (size=4096,offset=0): f32[1024]{0:T(256)S(1)}
allocation 6: size 8192, color 5, page 0, parameter 2, shape |f32[2048]| at ShapeIndex {}:
 value: <13 there @5> (size=8192,offset=0): f32[2048]{0:T(256)S(5)}
"""
# `again` begins where `made` ends, so they share a buffer.
LIVE = """HloLiveRange (max 9):
  BufferLiveRange:
    w{}:0-9
    x{}:0-9
    early{}:1-2
    loop{1}:3-8
    loop{}:3-8
    made{}:4-5
    again{}:5-6
    other{}:5-5
    new{}:7-9
    loss{}:7-9
    one{}:0-9
  Live ranges at 1 (peak):
    early{}: 12288 bytes (cumulative: 12288 bytes)
"""
TABLES = MemoryTables(REPORT, ASSIGNMENT, LIVE)
PROGRAM = """HloModule step, num_partitions=8

FileNames
1 "/home/me/job.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=1}
2 {file_name_id=1 function_name_id=1 line=8 end_line=8 column=1 end_column=1}
3 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=1}

%body (state: (s32[], f32[2,1024])) -> (s32[], f32[2,1024]) {
  %state = (s32[], f32[2,1024]) parameter(0)
  %made = f32[1024] custom-call(%state#0), custom_call_target="Sort", metadata={stack_frame_id=1}
  %again = f32[1024] copy(%made)
  %other = f32[1024] negate(%again), metadata={stack_frame_id=2}
  %stack = f32[2,1024] custom-call(%state#1, %other), custom_call_target="Put", metadata={stack_frame_id=2}
  ROOT %next = (s32[], f32[2,1024]) tuple(%state#0, %stack)
}

%condition (seen: (s32[], f32[2,1024])) -> pred[] {
  %seen = (s32[], f32[2,1024]) parameter(0)
  ROOT %less = pred[] custom-call(%seen#0), custom_call_target="Less"
}

ENTRY %main (w: f32[1024], x: f32[512], there: f32[2048]) -> (f32[1024], f32[256]) {
  %w = f32[1024] parameter(0), metadata={op_name="params[\\'w\\']"}
  %x = f32[512] parameter(1), metadata={op_name="x"}
  %there = f32[2048]{0:T(256)S(5)} parameter(2), metadata={op_name="there"}
  %one = f32[128] constant({...})
  %zero = s32[] constant(0)
  %early = f32[3072] custom-call(%x), custom_call_target="Early", metadata={stack_frame_id=1}
  %empty = f32[2,1024] custom-call(), custom_call_target="AllocateBuffer"
  %start = (s32[], f32[2,1024]) tuple(%zero, %empty)
  %loop = (s32[], f32[2,1024]) while(%start), condition=%condition, body=%body
  %new = f32[1024] custom-call(%w, %loop#1), custom_call_target="New", metadata={stack_frame_id=2}
  %loss = f32[256] custom-call(%x, %one), custom_call_target="Loss", metadata={stack_frame_id=2}
  ROOT %result = (f32[1024], f32[256]) tuple(%new, %loss)
}
"""


def test_memory_is_that_of_the_layout():
    memory = assigned_memory(read_layout(TABLES))
    held = (4 + 2 + 1) * KIB + 512 + 8 * KIB + 512 + 4 * KIB + 4 * KIB
    assert memory == Memory(
        arguments=6 * KIB,
        outputs=1 * KIB,
        temporaries=26112 - 7 * KIB,
        donated=4 * KIB,
        estimated=False,
        peak=held,
        host=8 * KIB,
    )
    assert (memory.total, memory.total - memory.peak) == (26112, 1536)  # two gaps


def test_on_gpus_all_spaces_except_host_memory_are_device_memory():
    """Collectives use a separate memory space there: here 4 KiB, as long as the loop runs."""
    live = LIVE.replace('    one{}:0-9\n', '    one{}:0-9\n    fast{}:3-8\n')
    apart, together = (
        read_layout(MemoryTables(REPORT, ASSIGNMENT, live), one_memory) for one_memory in (False, True)
    )
    memory, more = assigned_memory(apart), assigned_memory(together)
    assert (more.total - memory.total, more.peak - memory.peak) == (4 * KIB, 4 * KIB)
    assert (more.arguments, more.outputs, more.host) == (memory.arguments, memory.outputs, memory.host)


def test_buffers_have_lines_and_arguments():
    layout = read_layout(TABLES)
    rows = largest_buffers(layout, parse(PROGRAM))
    assert [(row.bytes, row.count, row.array, str(row.source)) for row in rows] == [
        (8 * KIB, 1, 'f32[2,1024]', 'job.py:8 layer'),  # the result of an iteration
        (4 * KIB, 1, 'f32[1024]', 'job.py:7 layer'),  # a copy of that line's result
        (4 * KIB, 1, 'f32[1024]', 'job.py:8 layer'),
        (4 * KIB, 1, 'f32[1024]', "argument params['w']"),
        (2 * KIB, 1, 'f32[512]', 'argument x'),
        (1 * KIB, 1, 'f32[256]', 'job.py:8 layer'),
        (512, 1, '', 'job.py:8 layer'),
        (512, 1, 'f32[128]', 'job.py:8 layer'),
    ]
    assert sum(row.bytes for row in rows) == assigned_memory(layout).peak


def test_source_of_a_value_from_a_call_in_a_loop():
    call = '\n  ROOT %all = (s32[], f32[2,1024]) custom-call(%next), custom_call_target="All", '
    program = PROGRAM.replace('ROOT %next', '%next').replace(
        'tuple(%state#0, %stack)', f'tuple(%state#0, %stack){call}metadata={{stack_frame_id=1}}'
    )
    stack, *_ = largest_buffers(read_layout(TABLES), parse(program))
    assert (stack.array, str(stack.source)) == ('f32[2,1024]', 'job.py:7 layer')


@pytest.mark.parametrize('notation', ['%state#1', '%kept'])
def test_source_of_unchanged_loop_state(notation):
    """Whether a tuple element is an operand, or a separate instruction."""
    element = '  %kept = f32[2,1024] get-tuple-element(%state), index=1\n'
    program = PROGRAM.replace('tuple(%state#0, %stack)', f'tuple(%state#0, {notation})')
    program = program.replace('  %made =', f'{element}  %made =')
    program = program.replace('"AllocateBuffer"', '"AllocateBuffer", metadata={stack_frame_id=3}')
    rows = largest_buffers(read_layout(TABLES), parse(program))
    assert (rows[0].array, str(rows[0].source)) == ('f32[2,1024]', 'job.py:9 layer')


def test_equal_arrays_are_one_row():
    twice = ASSIGNMENT.replace('<8 again @0>', '<8 made.1 @0>').replace('<11 other @0>', '<11 made.2 @0>')
    live = LIVE.replace('again{}', 'made.1{}').replace('other{}', 'made.2{}')
    program = PROGRAM.replace('%again', '%made.1').replace('%other', '%made.2')
    program = program.replace('negate(%made.1), metadata={stack_frame_id=2}', 'copy(%made)')
    program = program.replace('custom-call(%state#1, %made.2)', 'custom-call(%state#1)')
    rows = largest_buffers(read_layout(MemoryTables(REPORT, twice, live)), parse(program))
    assert [(row.bytes, row.count, row.array, str(row.source)) for row in rows[:2]] == [
        (8 * KIB, 1, 'f32[2,1024]', 'job.py:8 layer'),
        (8 * KIB, 2, 'f32[1024]', 'job.py:7 layer'),
    ]


def test_buffers_without_a_source():
    rows = largest_buffers(read_layout(TABLES), parse(PROGRAM.partition('%body')[0] + EMPTY))
    assert {str(row.source) for row in rows} == {'not known'}
    assert sum(row.bytes for row in rows) >= 0.99 * assigned_memory(read_layout(TABLES)).peak


EMPTY = 'ENTRY %main (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n'


@pytest.mark.parametrize(
    'tables',
    [
        TABLES._replace(report=''),
        TABLES._replace(assignment=''),
        TABLES._replace(live=''),
        TABLES._replace(assignment='allocation 0: 12 bytes\n'),
        TABLES._replace(assignment=ASSIGNMENT.replace('<7 made @0>', '<7 made>')),
        TABLES._replace(live=LIVE.replace('    made{}:4-5\n', '')),
    ],
)
def test_tables_in_an_unknown_form(tables):
    with pytest.raises(PlanError, match='in an unknown form'):
        read_layout(tables)


# --- The host -------------------------------------------------------------------------------------

HOST = 'f32[8,1024]{1,0:T(8,128)S(5)}'


def moves(entry, *computations):
    body = textwrap.indent(textwrap.dedent(entry).strip('\n'), '  ')
    others = [textwrap.dedent(computation).strip('\n') for computation in computations]
    main = f'ENTRY %main (p: f32[1024]) -> f32[] {{\n{body}\n}}\n'
    return host_transfers(parse('\n\n'.join(['HloModule made, num_partitions=8', *others, main])))


def test_copies_to_and_from_the_host():
    transfers = moves(
        f"""
        %p = {HOST} parameter(0)
        %in = (f32[8,1024]{{1,0:T(8,128)}}, {HOST}, u32[]{{:S(2)}}) copy-start(%p)
        %here = f32[8,1024]{{1,0:T(8,128)}} copy-done(%in)
        %fast = f32[8,1024]{{1,0:T(8,128)S(1)}} copy(%here)
        %there = {HOST} copy(%p)
        %pair = (f32[2,1024]{{1,0:T(8,128)}}, f32[4,1024]{{1,0:T(8,128)}}) custom-call(%here)
        ROOT %out = f32[4,1024]{{1,0:T(8,128)S(5)}} copy(%pair#1)
        """
    )
    # 32 KiB are read and 16 KiB written; copies within one memory do not count.
    assert transfers == HostTransfers(to_host=16 * KIB, from_host=32 * KIB)


def test_unknown_transfers_make_counts_lower_bounds():
    transfers = moves(
        f"""
        %p = {HOST} parameter(0)
        %here = f32[8,1024]{{1,0:T(8,128)}} copy(%p)
        ROOT %back = {HOST} reverse(%here), dimensions={{0}}
        """
    )
    assert transfers == HostTransfers(from_host=32 * KIB, exactness=Exactness.AT_LEAST)


def test_slices_in_loops_count_each_iteration():
    """Seven iterations write 4 KiB each, asynchronously, and read 8 KiB."""
    state = f'(s32[]{{:T(128)}}, {HOST})'
    transfers = moves(
        f"""
        %p = f32[1024] parameter(0)
        %zero = s32[] constant(0)
        %buffer = {HOST} custom-call(), custom_call_target="AllocateBuffer"
        %start = {state} tuple(%zero, %buffer)
        ROOT %loop = {state} while(%start), condition=%condition, body=%body
        """,
        f"""
        %write (a: {HOST}, b: f32[1,1024], c: s32[]) -> {HOST} {{
          %a = {HOST} parameter(0)
          %b = f32[1,1024]{{1,0:T(8,128)}} parameter(1)
          %c = s32[] parameter(2)
          ROOT %put = {HOST} dynamic-update-slice(%a, %b, %c, %c)
        }}
        """,
        f"""
        %body (state: {state}) -> {state} {{
          %state = {state} parameter(0)
          %new = f32[1,1024]{{1,0:T(8,128)}} custom-call(), custom_call_target="New"
          %begun = (({HOST}, f32[1,1024]{{1,0}}), {HOST}) async-start(%state#1, %new, %state#0), calls=%write
          %done = {HOST} async-done(%begun)
          %read = f32[2,1024]{{1,0:T(8,128)}} dynamic-slice(%done, %state#0, %state#0)
          %one = s32[] constant(1)
          %more = s32[] add(%state#0, %one)
          ROOT %next = {state} tuple(%more, %done)
        }}
        """,
        f"""
        %condition (seen: {state}) -> pred[] {{
          %seen = {state} parameter(0)
          %seven = s32[] constant(7)
          ROOT %less = pred[] compare(%seen#0, %seven), direction=LT
        }}
        """,
    )
    assert transfers == HostTransfers(to_host=7 * 4 * KIB, from_host=7 * 8 * KIB, exactness=Exactness.EXACT)


def test_the_link_to_the_host_bounds():
    """Both directions overlap, so the longer one is the bound; serially they add up."""
    roofline = Roofline(HARDWARE['v5e'], 8, 1e15, 1.0, 0.5, (), to_host=2.0, from_host=3.0)
    assert roofline.parts == {'compute': 1.0, 'hbm': 0.5, 'host:out': 2.0, 'host:in': 3.0}
    assert (roofline.bottleneck, roofline.step_seconds) == ('host:in', (3.0, 6.5))
    without = dataclasses.replace(roofline, to_host=0.0, from_host=0.0)
    assert without.parts == {'compute': 1.0, 'hbm': 0.5}
