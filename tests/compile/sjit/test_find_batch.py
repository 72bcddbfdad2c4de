"""The mesh axes of a batch: the axes that shard a dimension which all of its arrays have."""

import pytest

from scalax._compile.sjit.find_batch import batch_axes

ROWS, TIME, HEADS = ('data',), ('seq',), ('tp',)


@pytest.mark.parametrize(
    'trails, expected',
    [
        ([(ROWS,)], {'data'}),
        ([(ROWS, TIME)], {'data', 'seq'}),
        ([(ROWS, TIME), (ROWS, TIME, ())], {'data', 'seq'}),
        # The lengths of examples have no time dimension.
        ([(ROWS, TIME), (ROWS,)], {'data'}),
        # A cache, and tokens.
        ([(ROWS, (), HEADS), (ROWS, ())], {'data'}),
        ([(('data', 'fsdp'), (), HEADS), (('data', 'fsdp'), ())], {'data', 'fsdp'}),
        # Axes that jointly shard one dimension stay together.
        ([(ROWS,), (('data', 'fsdp'),)], {'data', 'fsdp'}),
        ([(ROWS,), (('fsdp',),), (('data', 'fsdp'),)], {'data', 'fsdp'}),
        # Time comes first in some arrays.
        ([((), ROWS), (ROWS, ())], {'data'}),
        # They share nothing.
        ([(ROWS,), (HEADS,)], {'data', 'tp'}),
        ([], set()),
    ],
)
def test_axes_of_a_batch(trails, expected):
    assert batch_axes(trails) == expected
