"""Parsing of HLO programs: replica groups in every notation, types, loops, and errors for unknown text."""

import jax
import numpy as np
import pytest

from scalax._planning.cost.collectives import collectives
from scalax._planning.hardware.torus import DevicePosition
from scalax._planning.program.call_tree import computation_instances
from scalax._planning.program.exactness import Exactness
from scalax._planning.program.hlo import Array, Instruction, parse
from scalax._planning.program.provenance import Source
from scalax._planning.program.replica_groups import (
    axes_of_groups,
    groups_between_slices,
    replica_groups,
    replica_groups_text,
    source_target_pairs,
)
from scalax.errors import PlanError
from tests.support.hlo_text import ADD, HEAD, MESH, program

COLUMNS = [[0, 2, 4, 6], [1, 3, 5, 7]]  # of a mesh of 4 x 2
ROWS = [[0, 1], [2, 3], [4, 5], [6, 7]]

# All notations that XLA writes: (text, groups)
GROUPS = {
    'listed': ('{{0,2,4,6},{1,3,5,7}}', COLUMNS),
    'listed with blanks': ('{{0,2,4,6}, {1,3,5,7}}', COLUMNS),
    'all': ('{}', [list(range(8))]),
    'all in one': ('{{}}', [list(range(8))]),
    'iota': ('[4,2]<=[8]', ROWS),
    'iota, transposed': ('[2,4]<=[4,2]T(1,0)', COLUMNS),
    'iota in three dimensions': ('[4,2]<=[2,2,2]T(1,0,2)', [[0, 1], [4, 5], [2, 3], [6, 7]]),
    'mesh': ("mesh['fsdp'=4,'tp'=2] {'fsdp'}", COLUMNS),
    'mesh, the other axis': ("mesh['fsdp'=4,'tp'=2] {'tp'}", ROWS),
    'mesh, both': ("mesh['fsdp'=4,'tp'=2] {'fsdp','tp'}", [list(range(8))]),
    'mesh, turned': ("mesh['fsdp'=4,'tp'=2] {'tp','fsdp'}", [[0, 2, 4, 6, 1, 3, 5, 7]]),
    'mesh with an axis of one': ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", COLUMNS),
    'mesh in another order': (
        "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([4,2]T(1,0)) {'axis_0'}",
        [[0, 4, 1, 5], [2, 6, 3, 7]],
    ),
    'mesh of listed devices': ("mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'y'}", [[3, 1], [2, 0]]),
    'mesh with brackets in names': ("mesh['a]'=4,'{b}'=2] {'{b}'}", ROWS),
    'the first part of an axis': ("mesh['x'=8] {'x':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    'the last part of an axis': ("mesh['x'=8] {'x':(4)2}", ROWS),
    'two parts of an axis': ("mesh['x'=8] {'x':(1)2,'x':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
}


@pytest.mark.parametrize(('text', 'groups'), GROUPS.values(), ids=GROUPS)
def test_groups(text, groups):
    attributes = f'channel_id=3, replica_groups={text}, use_global_device_ids=true, to_apply=%add'
    assert replica_groups_text(attributes) == text
    assert replica_groups(text, 8).tolist() == groups


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('{{0,1},{2}}', 'the groups of a collective have different sizes: {{0,1},{2}}'),
        *(
            (text, f'the groups of a collective are written in an unknown notation: {text}')
            for text in (
                *('[2,4]<=8', '[2,4]<=[16]', '[2,2,2]<=[8]', '[2,4]<=[4,2]T(0)', 'V3:[2,4]', '{0,1}'),
                *("mesh['a'=8] {'b'}", 'mesh[a=8] {a}', "mesh['a'=8] {'a', all}", "mesh['a'=8] {'a':(3)2}"),
                *("mesh['a'=4,'b'=2], device_ids=(0,1) {'a'}", "mesh['a'=8], device_ids=([4,2]T(2,1)) {'a'}"),
            )
        ),
    ],
)
def test_unknown_groups(text, message):
    with pytest.raises(PlanError) as error:
        replica_groups(text, 8)
    assert str(error.value) == message


SLICES_OF_TWO = [100000, 100001, 200000, 200001]
BETWEEN_SLICES = {
    'entire slices': ('"{1,2}x{0:1}"', SLICES_OF_TWO, [[0, 2], [1, 3]]),
    'slices of one device': ('"{2,1}x{0}"', [100000, 200000], [[1, 0]]),
    'listed': ('{{100000,200000},{100001,200001}}', SLICES_OF_TWO, [[0, 2], [1, 3]]),
    'pairs': ('{{100000->200001}}', SLICES_OF_TWO, [[0, 3]]),
}


@pytest.mark.parametrize(('text', 'ids', 'groups'), BETWEEN_SLICES.values(), ids=BETWEEN_SLICES)
def test_groups_between_slices(text, ids, groups):
    assert groups_between_slices(text, ids).tolist() == groups


@pytest.mark.parametrize(
    'text',
    [
        *('"{1,2}x{0}"', '"{1,2}x{1:1}"', '"{1,2}x{0:2}"', '"{1,3}x{0:1}"'),  # parts of slices; another slice
        *('{{100000,300000}}', '{{100000,200000},{100001}}', 'all', ''),
    ],
)
def test_unknown_groups_between_slices(text):
    with pytest.raises(PlanError) as error:
        groups_between_slices(text, SLICES_OF_TWO)
    assert str(error.value) == f'the slices of a transfer are written in an unknown notation: {text}'


def test_pairs():
    assert source_target_pairs('{{0,1},{1,0}}').tolist() == [[0, 1], [1, 0]]
    assert source_target_pairs('{}').tolist() == []
    for text in ('', '{{}}', '{{0,1,2}}', '{{0,1},{2}}', '[2,2]<=[4]'):
        with pytest.raises(PlanError, match='the pairs of a collective-permute'):
            source_target_pairs(text)


@pytest.mark.parametrize(
    ('groups', 'axes'),
    [
        (COLUMNS, ('fsdp',)),
        (ROWS, ('tp',)),
        ([list(range(8))], ('fsdp', 'tp')),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], ('fsdp',)),  # half of an axis
        ([[0], [1]], ()),
    ],
)
def test_axes(groups, axes):
    assert axes_of_groups(np.array(groups), {'fsdp': 4, 'tp': 2}) == axes


@pytest.mark.parametrize(
    ('dtype', 'dims', 'size'),
    [
        ('f32', (3, 5), 60),
        ('bf16', (3,), 6),
        ('pred', (7,), 7),
        ('u2', (8,), 2),
        ('s4', (3,), 2),
        ('u64', (), 8),
        ('c128', (2,), 32),
        ('f8e4m3fn', (5,), 5),
        ('f4e2m1fn', (3,), 2),
        ('token', (), 0),
        ('s32', (0, 4), 0),
    ],
)
def test_bytes(dtype, dims, size):
    assert Array(dtype, dims).bytes == size


@pytest.mark.parametrize(
    ('written', 'read'),
    [
        ('jit(f)/jvp(Model:x)/dot_general', 'jit(f)/jvp(Model:x)/dot_general'),
        ('jit(f)/transpose(jvp())/(scatter-add:transpose)', 'jit(f)/transpose(jvp())/scatter-add'),
        ('jit(f)/(a,b->c/psum:while/body/reduce_sum:add)', 'jit(f)/a,b->c/psum'),
    ],
)
def test_names_of_operations(written, read):
    assert Instruction('i', 'add', (), (), f'metadata={{op_name="{written}"}}').op_name == read


@pytest.mark.parametrize(
    ('path', 'dtype'), [('0#0', 'f32'), ('0#1', 's32'), ('1', 'bf16'), ('2#0', 'pred'), ('2#1#1', 'u8')]
)
def test_elements_of_tuples_in_a_tuple(path, dtype):
    """XLA for GPUs prints the indices into nested tuples of a kernel's operands."""
    of = '((f32[8]{0}, s32[8]{0}), bf16[8]{0}, (pred[8]{0}, (u4[8]{0}, u8[8]{0})))'
    call = f'%made = {of} custom-call(%p), custom_call_target="many"'
    module = parse(program(call, f'ROOT %out = {dtype}[8]{{0}} negate(%made#{path})'))
    computation = module.computations[module.entry]
    [operand] = computation.instructions['out'].operands
    assert computation.array(operand).dtype == dtype
    assert computation.users['made'] == [computation.instructions['out']]


def test_an_unknown_type():
    with pytest.raises(PlanError) as error:
        _ = Array('q7', (2,)).bytes
    assert str(error.value) == "the compiled program has arrays of an unknown type 'q7'"


def collective_rows(*lines):
    return [(row.kind, row.axes, row.group, row.bytes) for row in collectives(parse(program(*lines)), MESH)]


def test_collectives_without_origin_are_added_by_the_compiler():
    reduce = 'ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add'
    optimized = parse(program(reduce))
    for partitioned, cause in ((reduce, 'sharding'), ('ROOT %c = f32[8]{0} copy(%p)', 'compiler')):
        [row] = collectives(optimized, MESH, (), parse(program(partitioned)))
        assert row.cause == cause


LINES = """FileNames
1 "/home/me/job.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=1}
2 {file_name_id=1 function_name_id=1 line=8 end_line=8 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

"""
LINE_7, LINE_8 = (Source(file='/home/me/job.py', line=line, function='layer') for line in (7, 8))

UP = 'op_name="jit(f)/annotation(up)/sin"'


@pytest.mark.parametrize(
    ('partitioned', 'optimized', 'source'),
    [
        ('stack_frame_id=1', 'stack_frame_id=2', LINE_7),
        ('stack_frame_id=1', '', LINE_7),
        ('', 'stack_frame_id=2', LINE_8),
        (UP, f'{UP} stack_frame_id=2', LINE_8._replace(annotation='up')),
        ('', '', Source()),
    ],
)
def test_the_source_comes_from_the_partitioned_program(partitioned, optimized, source):
    """In the optimized program a collective may have the line of another one that it was merged with."""

    def module(metadata):
        reduce = 'ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add, '
        return parse(program(f'{reduce}metadata={{{metadata}}}').replace(HEAD, HEAD + LINES))

    [row] = collectives(module(optimized), MESH, (), module(partitioned))
    assert row.source == source


def test_an_argument_that_is_moved_is_the_source():
    def module(metadata):
        gather = 'ROOT %r = f32[16]{0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}'
        text = program(gather).replace('parameter(0)\n  ROOT', f'parameter(0){metadata}\n  ROOT')
        return parse(text.replace(HEAD, HEAD + LINES))

    partitioned, optimized = module(', metadata={op_name="w"}'), module(', metadata={stack_frame_id=1}')
    [row] = collectives(optimized, MESH, (), partitioned)
    assert row.source == Source(operand='w')


# (instruction, kind, axes, group size, bytes of the full array)
KINDS = {
    'all-reduce': (
        'ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add',
        ('all-reduce', ('fsdp',), 4, 32),
    ),
    'all-reduce of several': (
        'ROOT %r = (f32[8]{0}, bf16[4]{0}) all-reduce(%p, %p), replica_groups={{0,2,4,6},{1,3,5,7}}',
        ('all-reduce', ('fsdp',), 4, 40),
    ),
    'all-gather': (
        'ROOT %r = f32[32]{0} all-gather(%p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}',
        ('all-gather', ('fsdp',), 4, 128),
    ),
    'reduce-scatter': (
        'ROOT %r = f32[2]{0} reduce-scatter(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add',
        ('reduce-scatter', ('fsdp',), 4, 32),
    ),
    'all-to-all': (
        'ROOT %r = f32[8]{0} all-to-all(%p), replica_groups=[4,2]<=[8], dimensions={0}',
        ('all-to-all', ('tp',), 2, 64),
    ),
    'collective-permute': (
        'ROOT %r = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}',
        ('collective-permute', ('tp',), 2, 64),
    ),
    'collective-broadcast': (
        'ROOT %r = f32[8]{0} collective-broadcast(%p), replica_groups=[4,2]<=[8]',
        ('collective-broadcast', ('tp',), 2, 32),
    ),
    'reduce-scatter, asynchronous': (
        'ROOT %r = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%p), replica_groups={{0,2,4,6},{1,3,5,7}}',
        ('reduce-scatter', ('fsdp',), 4, 32),
    ),
    'all-to-all, asynchronous': (
        'ROOT %r = ((f32[8]{0}), f32[8]{0}) all-to-all-start(%p), replica_groups=[4,2]<=[8], dimensions={0}',
        ('all-to-all', ('tp',), 2, 64),
    ),
    'part of an axis': (
        'ROOT %r = f32[8]{0} all-reduce(%p), replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=%add',
        ('all-reduce', ('fsdp',), 2, 32),
    ),
    'layouts of a TPU': (
        'ROOT %r = bf16[16,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), replica_groups=[4,2]<=[8]',
        ('all-gather', ('tp',), 2, 4096),
    ),
}


@pytest.mark.parametrize(('line', 'expected'), KINDS.values(), ids=KINDS)
def test_kinds(line, expected):
    assert collective_rows(line) == [expected]


@pytest.mark.parametrize(
    'line',
    [
        'ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add',
        'ROOT %r = f32[8]{0} collective-permute(%p), source_target_pairs={}',
        'ROOT %r = f32[8]{0} collective-permute(%p), source_target_pairs={{3,3}}',
    ],
)
def test_groups_of_one_send_nothing(line):
    assert collective_rows(line) == []


def test_custom_calls_with_computations_count():
    call = 'ROOT %r = f32[8]{0} custom-call(%p), custom_call_target="x", called_computations={%add, %inner}'
    inner = program('ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add')
    inner = inner[inner.index('ENTRY') :].replace('ENTRY %main', '%inner')
    [row] = collectives(parse(program(call).replace('ENTRY', f'{inner}\nENTRY')), MESH)
    assert (row.axes, row.count, row.exactness) == (('tp',), 1, Exactness.APPROXIMATE)


# Two slices of two chips of two devices each: (instruction, networks)
NETWORKS = {
    'the devices of a chip': ('all-reduce(%p), replica_groups=[4,2]<=[8]', ('chip',)),
    'the chips of a slice': ('all-reduce(%p), replica_groups={{0,2},{1,3},{4,6},{5,7}}', ('ici',)),
    'slices': ('all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0)', ('dcn',)),
    'all along an axis': ('all-reduce(%p), replica_groups=[2,4]<=[4,2]T(1,0)', ('ici', 'dcn')),
    'all devices': ('all-reduce(%p), replica_groups=[1,8]<=[8]', ('ici', 'dcn')),
    'the same cores of a slice': ('collective-permute(%p), source_target_pairs={{0,2},{2,0}}', ('ici',)),
    'a ring': ('collective-permute(%p), source_target_pairs={{0,2},{2,4},{4,6},{6,0}}', ('ici', 'dcn')),
    'a part of a ring': ('collective-permute(%p), source_target_pairs={{2,4},{3,3}}', ('dcn',)),
}


@pytest.mark.parametrize(('operation', 'networks'), NETWORKS.values(), ids=NETWORKS)
def test_networks(operation, networks):
    module = parse(program(f'ROOT %r = f32[8]{{0}} {operation}'))
    positions = [DevicePosition(i // 4, (i // 2 % 2, 0, 0), i % 2) for i in range(8)]
    assert [row.networks for row in collectives(module, MESH, positions)] == [networks]
    # For devices without positions it is unknown.
    assert [row.networks for row in collectives(module, MESH, [DevicePosition(0)] * 8)] == [()]


# (text, the message)
REFUSED = {
    'no program': ('{}', "this is not an HLO module: it begins with '{}'"),
    'no entry': (HEAD, 'the HLO module has no entry computation'),
    'a torn one': (
        program('ROOT %r = f32[8]{0} copy(%p)').removesuffix('}\n'),
        "the HLO module ends inside computation 'main'",
    ),
    'a computation in an unknown form': (
        program('ROOT %r = f32[8]{0} copy(%p)').replace('%add (', '%add [new] ('),
        "this line of an HLO module begins no computation: '%add [new] (x: f32[], y: f32[]) -> f32[] {'",
    ),
    'a computation that is not there': (
        program('ROOT %r = f32[8]{0} call(%p), to_apply=%gone'),
        "'r' calls 'gone', which the HLO module does not have",
    ),
    'no groups': (
        program('ROOT %r = f32[8]{0} all-reduce(%p), to_apply=%add'),
        'a collective without groups: r to_apply=%add',
    ),
    'more devices': (
        program('ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[2,8]<=[16], to_apply=%add'),
        'the groups of a collective do not fit 8 devices: [2,8]<=[16]',
    ),
    'groups of replicas': (
        program('ROOT %r = f32[8]{0} all-reduce(%p), replica_groups={{0}}, channel_id=1, to_apply=%add'),
        'the groups of a collective do not fit 8 devices: {{0}}',
    ),
    'pairs of more devices': (
        program('ROOT %r = f32[8]{0} collective-permute(%p), source_target_pairs={{0,8}}'),
        'the groups of a collective do not fit 8 devices: {{0,8}}',
    ),
    'a program of some devices': (
        program('ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[2,2]<=[4], to_apply=%add').replace(
            'num_partitions=8', 'num_partitions=4'
        ),
        'a program of 4 devices is not that of a slice of the mesh',
    ),
    'a new kind': (
        program('ROOT %r = f32[8]{0} all-scatter(%p), replica_groups=[4,2]<=[8]'),
        "the program holds 'all-scatter': devices send something to one another in an unknown way",
    ),
    'from one to another': (
        program('ROOT %r = token[] send(%p, %p), channel_id=1'),
        "the program holds 'send': devices send something to one another in an unknown way",
    ),
    'a new kind between slices': (
        program(
            '%t = token[] after-all()',
            'ROOT %r = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, '
            'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
            '_xla_megascale_transfer_type="ALL_SCATTER"}',
        ),
        "the program sends something between slices in an unknown way: 'ALL_SCATTER'",
    ),
    'a new notation': (
        program('ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=rings(2), to_apply=%add'),
        'the groups of a collective are written in an unknown notation: rings(2),',
    ),
}


@pytest.mark.parametrize(('text', 'message'), REFUSED.values(), ids=REFUSED)
def test_rejected_programs(text, message):
    with pytest.raises(PlanError) as error:
        collectives(parse(text), MESH)
    assert str(error.value) == message


def loop(test, step='%next = s32[] add(%i, %one)', start='constant(2)', attributes=''):
    """A loop that runs one all-reduce."""
    return (
        f'{HEAD}{ADD}%cond (c: (s32[], f32[8], s32[])) -> pred[] {{\n'
        '  %c = (s32[], f32[8]{0}, s32[]) parameter(0)\n'
        '  %i = s32[] get-tuple-element(%c), index=0\n'
        '  %n = s32[] get-tuple-element(%c), index=2\n'
        '  %ten = s32[] constant(10)\n'
        f'  ROOT %test = pred[] {test}\n}}\n\n'
        '%body (b: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {\n'
        '  %b = (s32[], f32[8]{0}, s32[]) parameter(0)\n'
        '  %i = s32[] get-tuple-element(%b), index=0\n'
        '  %x = f32[8]{0} get-tuple-element(%b), index=1\n'
        '  %one = s32[] constant(1)\n  %three = s32[] constant(3)\n'
        f'  {step}\n'
        '  %r = f32[8]{0} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add\n'
        '  ROOT %out = (s32[], f32[8]{0}, s32[]) tuple(%next, %r, %b#2)\n}\n\n'
        'ENTRY %main (p: f32[8], m: s32[]) -> f32[8] {\n'
        '  %p = f32[8]{0} parameter(0)\n'
        '  %m = s32[] parameter(1)\n'
        f'  %start = s32[] {start}\n  %seven = s32[] constant(7)\n'
        '  %init = (s32[], f32[8]{0}, s32[]) tuple(%start, %p, %seven)\n'
        f'  %w = (s32[], f32[8]{{0}}, s32[]) while(%init), condition=%cond, body=%body{attributes}\n'
        '  ROOT %y = f32[8]{0} get-tuple-element(%w), index=1\n}\n'
    )


LOOPS = {
    'to a constant': (loop('compare(%i, %ten), direction=LT'), 8, Exactness.EXACT),
    'to a carried value': (loop('compare(%i, %n), direction=LT'), 5, Exactness.EXACT),
    'in threes': (
        loop('compare(%i, %ten), direction=LT', '%next = s32[] add(%three, %i)'),
        3,
        Exactness.EXACT,
    ),
    'never': (loop('compare(%i, %ten), direction=LT', start='constant(12)'), 0, Exactness.EXACT),
    'written down': (
        loop('compare(%i, %i), direction=NE', attributes=', backend_config={"known_trip_count":{"n":"6"}}'),
        6,
        Exactness.EXACT,
    ),
    'from an argument': (loop('compare(%i, %ten), direction=LT', start='copy(%m)'), 1, Exactness.AT_LEAST),
    'in another way': (loop('compare(%i, %ten), direction=NE'), 8, Exactness.EXACT),
    'by another step': (
        loop('compare(%i, %ten), direction=LT', '%next = s32[] multiply(%i, %three)'),
        2,
        Exactness.EXACT,
    ),
    'of the same value': (loop('compare(%i, %i), direction=EQ'), 1, Exactness.AT_LEAST),
    'by an unknown operation': (
        loop('compare(%i, %ten), direction=LT', '%next = s32[] popcnt(%i)'),
        1,
        Exactness.AT_LEAST,
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize(('text', 'count', 'counted'), LOOPS.values(), ids=LOOPS)
def test_loops(text, count, counted):
    rows = collectives(parse(text), MESH)
    assert [(row.count, row.exactness) for row in rows] == ([(count, counted)] if count else [])


def test_combined_exactness():
    exact, least, most, about = Exactness
    assert exact.combine(exact) is exact
    assert exact.combine(least) is least
    assert most.combine(most) is most
    assert least.combine(most) is about


def test_every_computation_of_a_real_program_is_read():
    def fun(x):
        return jax.lax.fori_loop(
            0, 3, lambda i, x: jax.lax.cond(x[0] > i, lambda x: x + 1, lambda x: x, x), x
        )

    text = jax.jit(fun).lower(np.ones(4, np.float32)).compile().as_text()
    module = parse(text)
    assert module.partitions == 1
    assert {visit.computation.name for visit in computation_instances(module)} == set(module.computations)
    assert max(visit.count for visit in computation_instances(module)) >= 3
