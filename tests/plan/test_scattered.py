"""All-reduces of which each device keeps its own part, as the partitioner and as users write them."""

import pytest

from scalax._plan.collectives import collectives
from scalax._plan.hlo import parse
from tests.support.hlo_text import MESH, program


def sliced(*lines, start='%at', taken=2):
    return program(
        '%r = f32[8]{0} all-reduce(%p), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add',
        '%me = u32[] partition-id()',
        *lines,
        f'ROOT %s = f32[{taken}]{{0}} dynamic-slice(%r, {start}), dynamic_slice_sizes={{{taken}}}',
    )


def table(values):
    """The partitioner's own way: where each device's part begins, in a table."""
    found = '%found = s32[1]{0} dynamic-slice(%table, %me), dynamic_slice_sizes={1}'
    return f'%table = s32[8]{{0}} constant({values})', found, '%at = s32[] reshape(%found)'


def computed(size, modulo):
    """As users compute the place along a mesh axis."""
    constants = (f'%{n} = u32[] constant({v})' for n, v in (('size', size), ('modulo', modulo), ('two', 2)))
    return (
        *constants,
        '%over = u32[] divide(%me, %size)',
        '%place = u32[] remainder(%over, %modulo)',
        '%at = u32[] multiply(%place, %two)',
    )


# Parts of a sum over the devices 0, 2, 4, 6 and 1, 3, 5, 7
SLICES = {
    'a table': (sliced(*table('{0, 0, 2, 2, 4, 4, 6, 6}')), True),
    'in another order': (sliced(*table('{6, 0, 2, 2, 4, 4, 0, 6}')), True),
    'a long table': (sliced(*table('{...}')), True),
    'along another axis': (sliced(*table('{0, 2, 0, 2, 4, 6, 4, 6}')), False),
    'between the parts': (sliced(*table('{1, 1, 3, 3, 5, 5, 0, 0}')), False),
    'computed': (sliced(*computed(2, 4)), True),
    'computed along another axis': (sliced(*computed(1, 4)), False),
    'the same everywhere': (sliced('%at = s32[] constant(2)'), False),
    'by zero': (sliced(*computed(0, 4)), False),
    'from an argument': (sliced('%q = s32[] parameter(1)', start='%q'), False),
    # Each line doubles the ways to the number of the device; a few of these would take for ever.
    'doubled': (
        sliced(
            '%d0 = u32[] add(%me, %me)',
            *(f'%d{n + 1} = u32[] add(%d{n}, %d{n})' for n in range(60)),
            start='%d60',
        ),
        False,
    ),
    'a larger part': (sliced(*table('{0, 0, 2, 2, 4, 4, 4, 4}'), taken=4), False),
}


@pytest.mark.parametrize(('text', 'scattered'), SLICES.values(), ids=SLICES)
def test_sums_of_which_each_device_keeps_its_part(text, scattered):
    assert [row.scattered for row in collectives(parse(text), MESH)] == [scattered]
