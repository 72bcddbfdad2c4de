"""Where operations of HLO pass on rows of the batch."""

import pytest

from scalax._plan.hlo import parse
from scalax._plan.row_rules import Operand, passed_on
from scalax._plan.rows import RowsOfProgram


def instruction_of(text):
    """The last instruction of a computation, and its operands' types."""
    lines = ''.join(f'  {line.strip()}\n' for line in text.strip().splitlines())
    module = parse(f'HloModule m\n\nENTRY %main {{\n{lines}}}\n')
    computation = module.computations['main']
    return computation, list(computation.instructions.values())[-1]


def rows_of(operation, *operands):
    """The dimensions of the result that have rows; those of operands are marked: ``'f32[8*,4]'``."""
    types = [each.replace('*', '') for each in operands]
    lines = [f'%p{i} = {kind} parameter({i})' for i, kind in enumerate(types)]
    names = ', '.join(f'%p{i}' for i, _ in enumerate(types))
    result, _, rest = operation.partition(' ')
    opcode, _, attributes = rest.partition(' ')
    _, instruction = instruction_of(
        '\n'.join([*lines, f'%r = {result} {opcode}({names})' + (f', {attributes}' if attributes else '')])
    )
    given = []
    computation, _ = instruction_of('\n'.join([*lines, '%z = f32[] constant(0)']))
    for i, marked in enumerate(operands):
        [array] = computation.instructions[f'p{i}'].arrays
        dims = marked.partition('[')[2].rstrip(']').split(',')
        rows = tuple(
            ((size, True),) if '*' in dim else () for dim, size in zip(dims, array.dims, strict=False)
        )
        given.append(Operand(array, rows))
    return [tuple(i for i, each in enumerate(rows) if each) for rows in passed_on(instruction, given)]


@pytest.mark.parametrize(
    'operation, operands, expected',
    [
        ('f32[8,4] add', ['f32[8*,4]', 'f32[8,4]'], (0,)),
        ('f32[8,4] add', ['f32[8,4]', 'f32[8,4]'], ()),
        ('f32[8,4] tanh', ['f32[8*,4]'], (0,)),
        ('f32[4,8] transpose dimensions={1,0}', ['f32[8*,4]'], (1,)),
        ('f32[2,8,4] broadcast dimensions={1,2}', ['f32[8*,4]'], (1,)),
        ('f32[8] reduce dimensions={1}, to_apply=%add', ['f32[8*,4]', 'f32[]'], (0,)),
        ('f32[4] reduce dimensions={0}, to_apply=%add', ['f32[8*,4]', 'f32[]'], ()),
        # Merged and taken apart.
        ('f32[32] reshape', ['f32[8*,4]'], (0,)),
        ('f32[2,4,4] reshape', ['f32[8*,4]'], (0, 1)),
        ('f32[4,2,4] reshape', ['f32[4,8*]'], (1, 2)),
        ('f32[5,3] reshape', ['f32[3*,5]'], ()),
        # One row on each device.
        ('f32[4,8] reshape', ['f32[1*,4,8]'], (0,)),
        ('f32[4,8] reshape', ['f32[4,1*,8]'], (0,)),
        ('f32[4,1,8] reshape', ['f32[4,1*,8]'], (1,)),
        ('f32[1,4,8] reshape', ['f32[1*,4,8]'], (0,)),
        ('f32[4,6,8] reshape', ['f32[4,1*,6*,8]'], (1,)),
        # Products: what is contracted is summed.
        ('f32[8,5] dot lhs_contracting_dims={1}, rhs_contracting_dims={0}', ['f32[8*,4]', 'f32[4,5]'], (0,)),
        ('f32[4,5] dot lhs_contracting_dims={0}, rhs_contracting_dims={0}', ['f32[8*,4]', 'f32[8*,5]'], ()),
        (
            'f32[8,3,5] dot lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, '
            'rhs_contracting_dims={1}',
            ['f32[8*,3,4]', 'f32[8*,4,5]'],
            (0,),
        ),
        (
            'f32[8,5] ragged-dot lhs_contracting_dims={1}, rhs_contracting_dims={1}, lhs_ragged_dims={0}, '
            'rhs_group_dims={0}',
            ['f32[8*,4]', 'f32[3,4,5]', 's32[3]'],
            (0,),
        ),
        (
            'f32[3,4,5] ragged-dot lhs_contracting_dims={0}, rhs_contracting_dims={0}, lhs_ragged_dims={0}',
            ['f32[8*,4]', 'f32[8*,5]', 's32[3]'],
            (),
        ),
        (
            'f32[8,6,6,5] convolution window={size=3x3}, dim_labels=b01f_01io->b01f',
            ['f32[8*,8,8,4]', 'f32[3,3,4,5]'],
            (0,),
        ),
        (  # The gradient of the kernel: the examples are its input features.
            'f32[4,3,3,5] convolution window={size=6x6}, dim_labels=f01b_i01o->b01f',
            ['f32[8*,8,8,4]', 'f32[8*,6,6,5]'],
            (),
        ),
        # Look-ups
        (
            'f32[8,4] gather offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, '
            'index_vector_dim=1, slice_sizes={1,4}',
            ['f32[100,4]', 's32[8*,1]'],
            (0,),
        ),
        (
            'f32[3,8] gather offset_dims={1}, collapsed_slice_dims={1}, start_index_map={1}, '
            'index_vector_dim=1, slice_sizes={8,1}',
            ['f32[8*,100]', 's32[3,1]'],
            (1,),
        ),
        (  # The gradient of an embedding
            'f32[100,4] scatter update_window_dims={1}, inserted_window_dims={0}, '
            'scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add',
            ['f32[100,4]', 's32[8*,1]', 'f32[8*,4]'],
            (),
        ),
        (
            'f32[8,100] scatter update_window_dims={0}, inserted_window_dims={1}, '
            'scatter_dims_to_operand_dims={1}, index_vector_dim=1, to_apply=%add',
            ['f32[8,100]', 's32[3,1]', 'f32[8*,3]'],
            (0,),
        ),
        # Pieces
        ('f32[2,4] slice slice={[0:2], [0:4]}', ['f32[8*,4]'], (0,)),
        ('f32[1,8] dynamic-slice dynamic_slice_sizes={1,8}', ['f32[5,8*]', 's32[]', 's32[]'], (1,)),
        ('f32[5,8] dynamic-update-slice', ['f32[5,8]', 'f32[1,8*]', 's32[]', 's32[]'], (1,)),
        ('f32[16,4] concatenate dimensions={0}', ['f32[8*,4]', 'f32[8,4]'], (0,)),
        ('f32[8,6] pad padding=0_0x1_1', ['f32[8*,4]', 'f32[]'], (0,)),
        # Between devices
        ('f32[64,4] all-gather dimensions={0}', ['f32[8*,4]'], (0,)),
        ('f32[8,4] all-reduce to_apply=%add', ['f32[8*,4]'], (0,)),
        ('f32[2,4] reduce-scatter dimensions={0}, to_apply=%add', ['f32[8*,4]'], (0,)),
        ('f32[8,16,3] all-to-all dimensions={1}', ['f32[8*,16,3]'], (0, 1)),
        ('f32[16,2,3] all-to-all dimensions={0}', ['f32[16*,2*,3]'], (1,)),
        ('f32[16,1,3] all-to-all dimensions={0}', ['f32[16*,1,3]'], (1,)),
        ('f32[16,1,1,3] all-to-all dimensions={0}', ['f32[16,1*,1,3]'], (0, 2)),
        # What is not known
        ('f32[8,5] custom-call custom_call_target="kernel"', ['f32[8*,4]'], (0,)),
        ('f32[5] custom-call custom_call_target="kernel"', ['f32[8*,4]'], ()),
    ],
)
def test_rules(operation, operands, expected):
    assert rows_of(operation, *operands) == [expected]


def test_several_results():
    operation = '(f32[8],s32[8]) sort dimensions={0}, to_apply=%less'
    assert rows_of(operation, 'f32[8*]', 's32[8]') == [(0,), (0,)]
    operation = '(f32[8],s32[8]) reduce dimensions={1}, to_apply=%most'
    assert rows_of(operation, 'f32[8*,4]', 's32[8,4]', 'f32[]', 's32[]') == [(0,), (0,)]


def test_a_merged_dimension_is_taken_apart_as_it_was_merged():
    """Of steps and rows, a sum over the rows leaves no rows."""
    program = """
HloModule m, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[3,8,4]) -> f32[3,4] {
  %x = f32[3,8,4] parameter(0), metadata={op_name="x"}
  %zero = f32[] constant(0)
  %flat = f32[24,4] reshape(%x)
  %moved = f32[24,4] all-reduce(%flat), replica_groups={}, to_apply=%add
  %apart = f32[3,8,4] reshape(%moved)
  %sums = f32[3,4] reduce(%apart, %zero), dimensions={1}, to_apply=%add
  ROOT %total = f32[3,4] all-reduce(%sums), replica_groups={}, to_apply=%add
}
"""
    module = parse(program.strip())
    computation = module.computations['main']
    rows = RowsOfProgram(module, {'x': (1,)})
    found = {name: rows.moved_by(computation, computation.instructions[name]) for name in ('moved', 'total')}
    assert found == {'moved': 'moved', 'total': ''}
