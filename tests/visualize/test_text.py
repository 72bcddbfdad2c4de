"""Pictures of shardings as text: one array, large meshes, trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from scalax.sharding import TreePathShardingRule
from scalax.visualize import visualize
from tests.support.visualize_cases import HELPER, NUMBERS, POD, leaf, text

# --- One array ------------------------------------------------------------------------------------


def test_grid_with_the_meaning_of_its_numbers(snapshot):
    snapshot(visualize(leaf((8, 16), P('fsdp', 'tp'))))


def test_strip_of_stacked_layers_with_replicas(snapshot):
    snapshot(text(leaf((80, 8192, 1024), P(None, 'fsdp'), dtype=jnp.bfloat16)))


def test_two_axes_on_one_dimension_and_another_order_of_axes(snapshot):
    snapshot(text(leaf((16, 4), P(('tp', 'fsdp')))))


@pytest.mark.parametrize(
    'shape, dimensions',
    [((), ''), ((8, 0), '\ndim 0: 8, unsharded; dim 1: 0, unsharded')],
    ids=['scalar', 'empty'],
)
def test_replicated(shape, dimensions):
    assert (
        text(leaf(shape, P()))
        == f"""\
float32[{','.join(map(str, shape))}]
P(): 1 block of [{','.join(map(str, shape))}], on all 8 devices{dimensions}
┌──────┐
│ 0..7 │
└──────┘"""
    )


def test_three_dimensions(snapshot):
    mesh = AbstractMesh((2, 2, 2), ('x', 'y', 'z'))
    snapshot(visualize(leaf((4, 5, 4, 6), P('x', None, 'y', 'z'), mesh)).to_text(80))


def test_four_dimensions(snapshot):
    mesh = AbstractMesh((2, 2, 2, 4), ('x', 'y', 'z', 'w'))
    drawn = visualize(leaf((4, 2, 6, 8), P('x', 'y', 'z', 'w'), mesh)).to_text(80)
    snapshot(drawn)


def test_dimension_that_does_not_divide_and_memory_elsewhere(snapshot):
    snapshot(text(leaf((5,), P('fsdp'), memory_kind='pinned_host')))


def test_unreduced_blocks_are_not_copies():
    mesh = jax.make_mesh((4, 2), ('fsdp', 'tp'), axis_types=(AxisType.Explicit,) * 2)
    drawn = text(leaf((8,), P('fsdp', unreduced={'tp'}), mesh), width=100).splitlines()
    assert drawn[-4:] == [
        '┌─────┬─────┬─────┬─────┐',
        '│ 0,1 │ 2,3 │ 4,5 │ 6,7 │',
        '└─────┴─────┴─────┴─────┘',
        'unreduced over tp: devices of one block hold terms still to be combined, not copies',
    ]


# --- Large meshes ---------------------------------------------------------------------------------


def test_parts_that_do_not_fit_are_counted():
    drawn = visualize(leaf((8192, 8192), P('data', ('fsdp', 'tp')), POD)).to_text(80).splitlines()
    assert max(map(len, drawn)) == 76
    assert drawn[3] == '              0:128      128:256     256:384     60 more    8064:8192'
    assert drawn[5] == '    0:128 │     0     │     1     │     2     │    ...    │     63    │'
    assert drawn[-7] == '2688:2816 │    1344   │    1345   │    1346   │    ...    │    1407   │'
    assert drawn[-6] == '  41 more │    ...    │    ...    │    ...    │    ...    │    ...    │'
    assert drawn[-5] == '8064:8192 │    4032   │    4033   │    4034   │    ...    │    4095   │'


def test_a_long_dimension_is_along_the_rows():
    drawn = visualize(leaf((8192,), P('data'), POD)).to_text(80).splitlines()
    assert drawn[:4] == [
        'float32[8192]',
        "P('data',): 64 blocks of [128], each on 64 devices",
        'dim 0 ↓ 8192 over data=64',
        '          ┌────────────┐',
    ]
    assert drawn[4] == '    0:128 │   0..63    │'
    assert drawn[26] == '  41 more │    ...     │'
    assert drawn[27] == '8064:8192 │ 4032..4095 │'


def test_many_replicas_are_abbreviated():
    mesh = AbstractMesh((8, 8, 8), ('data', 'fsdp', 'tp'))
    drawn = visualize(leaf((64, 64), P('fsdp', 'tp'), mesh)).to_text(200)
    assert '│  0,64,...,448 (8)  │  1,65,...,449 (8)  │' in drawn
    narrow = visualize(leaf((64, 64), P('fsdp', 'tp'), mesh)).to_text(80)
    assert '│        ...         │  7,71,...,455 (8)  │' in narrow


@pytest.mark.parametrize('width', [60, 79, 100, 213])
def test_no_line_is_wider_than_the_terminal(width, monkeypatch):
    monkeypatch.setenv('COLUMNS', str(width))
    huge = 8 * 10**6
    tree = {
        'a path that is longer than any terminal ' * 8: leaf((8, 8), P('fsdp', 'tp')),
        'long indices': leaf((huge, huge), P('data', 'tp'), POD),
        'replicas': leaf((8, 8), P('tp', 'fsdp'), POD),
        'three': leaf((64, 64, 64), P('fsdp', 'tp', 'data'), POD),
    }
    assert max(map(len, str(visualize(tree)).splitlines())) <= width


def test_blocks_with_long_ranges_are_along_the_rows():
    mesh = AbstractMesh((2, 4), ('x', 'y'))
    drawn = visualize(leaf((8 * 10**12, 4 * 10**12), P('x', 'y'), mesh)).to_text(60).splitlines()
    assert drawn[3:5] == [
        'dim 0 ↓ 8000000000000 over x=2; dim 1 ↓ 4000000000000 over',
        '    y=4',
    ]
    assert drawn[6].strip() == '0:4000000000000, 0:1000000000000 │ 0 │'


# --- Trees ----------------------------------------------------------------------------------------


def test_tree_has_a_picture_for_each_sharding(snapshot):
    layer = {'up': np.zeros((8, 16), np.float32), 'gate': np.zeros((8, 16), np.float32), 'norm': np.zeros(4)}
    params = {'layers': [layer] * 3, 'head': np.zeros((8, 16), np.float16)}
    # P('fsdp', 'tp') and P('fsdp', ('tp',)) are equivalent.
    rules = TreePathShardingRule(('gate', P('fsdp', ('tp',))), ('up|head', P('fsdp', 'tp')), ('', P()))
    snapshot(text(HELPER.abstract(params, rules)))


def test_layers_of_flax_linen_share_a_name():
    params = {f'layers_{i}': {'w': leaf((8,), P('tp')), 'v': leaf((8,), P('tp'))} for i in range(3)}
    (picture,) = visualize({'params': params}).pictures
    assert [member.name for member in picture.members] == ['params/layers_{0..2}/v', 'params/layers_{0..2}/w']
    assert picture.paths[:3] == ('params/layers_0/v', 'params/layers_1/v', 'params/layers_2/v')


def test_fields_of_pictures():
    (picture,) = visualize({'w': leaf((8,), P('tp')), 'v': leaf((8,), P('tp'))}).pictures
    assert picture.paths == ('v', 'w')
    assert picture.blocks.holders == {(0,): (0, 2, 4, 6), (1,): (1, 3, 5, 7)}


def test_each_mesh_explains_its_numbers():
    other = AbstractMesh((2,), ('x',))
    drawn = visualize([leaf((8,), P('tp')), leaf((8,), P('x'), other)]).to_text(120)
    assert [line for line in drawn.splitlines() if line.startswith('Numbers')] == [
        NUMBERS,
        'Numbers are positions, in mesh order, in the abstract mesh (x=2), which has no devices.',
    ]


def test_many_leaves_of_one_sharding_are_counted():
    drawn = visualize({f'leaf {"x" * size}': leaf((1,), P()) for size in range(20)}).to_text(80)
    assert '\n... and 12 more arrays with this sharding\n' in drawn


def test_tree_without_arrays():
    assert str(visualize({'a': None})) == 'There are no arrays in the tree.'
