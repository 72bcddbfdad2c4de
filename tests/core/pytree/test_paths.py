"""Leaf paths, leaf properties, and the flattened form of a tree that rules see."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from scalax._core.pytree.paths import (
    NamedTree,
    _path_strings,
    describe_leaf,
    element_bits,
    has_foreign_dtype,
    join,
    key_string,
    leaf_shape,
    path_string,
)

Point = collections.namedtuple('Point', ['x', 'y'])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: object
    bias: object


@jax.tree_util.register_pytree_node_class
class Unnamed:
    """A node without key paths: JAX numbers its children."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


TREES = [
    ({'layers': [{'w': 1.0}, {'w': 2.0}]}, ['layers/0/w', 'layers/1/w']),
    (Point(1.0, (2.0, 3.0)), ['x', 'y/0', 'y/1']),
    ({'l': Layer(1.0, 2.0)}, ['l/kernel', 'l/bias']),
    (Unnamed(1.0, {'a': 2.0}), ['0', '1/a']),
    ({1: 1.0, 2: 2.0}, ['1', '2']),
    (collections.OrderedDict(b=1.0, a=2.0), ['b', 'a']),
    ({'a/b': 1.0, 'a': {'b': 2.0}}, ['a/b', 'a/b']),
    ({'': 1.0}, ['']),
    (1.0, ['']),
    ({'x': None, 'y': 1.0, 'z': {}, 'w': ()}, ['y']),
    ({}, []),
]


@pytest.mark.parametrize(('tree', 'paths'), TREES)
def test_leaf_paths(tree, paths):
    assert NamedTree.of(tree).paths == paths


@pytest.mark.parametrize('tree', [tree for tree, _ in TREES])
def test_leaf_paths_match_keystr(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    for path, _ in flat:
        expected = jax.tree_util.keystr(path, simple=True, separator='/')
        assert path_string(path) == expected
        assert path_string(path, '.') == jax.tree_util.keystr(path, simple=True, separator='.')


def test_keys_of_unknown_types_are_printed():
    assert key_string('plain') == 'plain'
    assert path_string((DictKey(3), SequenceKey(1), GetAttrKey('w'), 'plain')) == '3/1/w/plain'


class Spoken:
    """A key of another library, whose attribute `key` is not its name."""

    def __init__(self, key):
        self.key = key

    def __str__(self):
        return f'<{self.key}>'


def test_a_leaf_path_does_not_depend_on_the_rest_of_the_tree():
    alone = [((Spoken('w'),), 0), ((DictKey('v'),), 1)]
    for more in ([], [((SequenceKey(0),), 2)], [((DictKey(3),), 2)]):
        paths = [path for path, _ in [*alone, *more]]
        assert _path_strings(paths)[:2] == [path_string(path) for path in paths[:2]] == ['<w>', 'v']


@pytest.mark.parametrize(
    ('prefix', 'path', 'joined'),
    [
        ('a', 'b', 'a/b'),
        (None, 'b', 'b'),
        ('a', None, 'a'),
        (None, None, None),
        # An empty key is a key.
        ('', 'b', '/b'),
        ('a', '', 'a/'),
        ('', '', '/'),
        ('', None, ''),
    ],
)
def test_join(prefix, path, joined):
    assert join(prefix, path) == joined


@pytest.mark.parametrize(
    ('leaf', 'shape', 'text'),
    [
        (np.zeros((2, 3), np.float32), (2, 3), 'w: float32[2, 3]'),
        (jax.ShapeDtypeStruct((4,), 'bfloat16'), (4,), 'w: bfloat16[4]'),
        (np.float32(1), (), 'w: float32[]'),
        (3, (), 'w: Python int'),
        (True, (), 'w: Python bool'),
        (1j, (), 'w: Python complex'),
        ('text', None, 'w: str'),
        (len, None, 'w: builtin_function_or_method'),
        (collections.Counter, None, 'w: type'),
        (collections.deque(), None, 'w: collections.deque'),
    ],
)
def test_leaves_are_described_for_messages(leaf, shape, text):
    assert leaf_shape(leaf) == shape
    assert describe_leaf('w', leaf) == text


def test_typed_keys_are_described():
    keys = jax.random.split(jax.random.key(0), 8)
    assert (leaf_shape(keys), describe_leaf('rng', keys)) == ((8,), 'rng: key<fry>[8]')


class OfAnotherLibrary:
    shape, dtype = (2,), object()


@pytest.mark.parametrize(
    ('dtype', 'bits'),
    [
        *((np.dtype('bool'), 8), (np.dtype('int2'), 2), (np.dtype('int4'), 4), (np.dtype('uint4'), 4)),
        *((np.dtype('float4_e2m1fn'), 4), (np.dtype('float8_e4m3fn'), 8), (np.dtype('bfloat16'), 16)),
        *((np.dtype('complex64'), 64), (jax.random.key(0).dtype, 64), (jax.dtypes.float0, 0)),
    ],
)
def test_bits_on_a_device(dtype, bits):
    assert element_bits(dtype) == bits


@pytest.mark.parametrize(
    ('leaf', 'foreign'),
    [
        (np.zeros(2, dtype), foreign)
        for foreign, dtypes in {
            False: ['float32', 'int4', 'bfloat16', 'float8_e4m3fn', 'bool', 'complex64', 'uint8'],
            True: ['O', 'U3', 'S3', 'M8[s]', 'm8[s]', [('a', 'f4')], 'V4'],
        }.items()
        for dtype in dtypes
    ]
    + [(1.0, False), ('text', False), (jax.random.key(0), False), (OfAnotherLibrary(), True)],
)
def test_dtypes_that_jax_lacks(leaf, foreign):
    assert has_foreign_dtype(leaf) is foreign


class Oddly:
    """A leaf whose shape is not a tuple, as in some libraries."""

    shape, dtype = [2, 3], np.dtype('float32')


def test_shapes_are_tuples():
    tree = NamedTree.of({'a': Oddly(), 'b': np.zeros(4), 'c': 1.0, 'd': 'text'})
    assert tree.shapes == [(2, 3), (4,), (), ()]


def test_the_tree_of_a_named_tree_is_the_tree():
    tree = {'a': [np.zeros(2), None], 'b': Point(1.0, 2.0)}
    named = NamedTree.of(tree)
    assert len(named) == 3
    assert named.tree['a'][0] is tree['a'][0]
    assert jax.tree.structure(named.tree) == jax.tree.structure(tree) == named.treedef


def test_a_selection_knows_its_full_tree():
    named = NamedTree.of({'a': 1.0, 'b': np.zeros(2), 'c': np.zeros(3)}, 'params')
    part = named.select([2, 0])
    assert (part.paths, part.shapes, part.indices) == (['c', 'a'], [(3,), ()], [2, 0])
    assert part.select([1]).root() == (named, [0])
    assert [part.describe(i) for i in range(2)] == ['params/c: float64[3]', 'params/a: Python float']
