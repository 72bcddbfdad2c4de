"""Trees of equal structure with different leaf paths."""

import dataclasses

import jax
import pytest
from jax.tree_util import DictKey, GetAttrKey

from scalax._core.pytree.ambiguous_paths import ambiguous_nodes, ambiguous_paths


class Label:
    """Static data that is always equal, whatever its text."""

    def __init__(self, text):
        self.text = text

    def __eq__(self, other):
        return isinstance(other, Label)

    def __hash__(self):
        return 0


@jax.tree_util.register_pytree_with_keys_class
class Labelled:
    """A node whose label is the name of its child."""

    def __init__(self, child, label='x'):
        self.child, self.label = child, Label(label)

    def tree_flatten_with_keys(self):
        return [(DictKey(self.label.text), self.child)], self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label.text)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: object
    label: Label = dataclasses.field(metadata={'static': True})


@jax.tree_util.register_pytree_with_keys_class
class Renamed(Layer):
    """A dataclass whose children have other names than its fields."""

    def tree_flatten_with_keys(self):
        return [(GetAttrKey(self.label.text), self.kernel)], self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label)


@pytest.mark.parametrize(
    ('tree', 'paths'),
    [
        ({'a': 1, 'b': [2, 3]}, None),
        ({'a': 1, 'b': Labelled(2)}, ('a', 'b/x')),
        ({'a': [1, 2], 'b': [Labelled(3)]}, ('a/0', 'a/1', 'b/0/x')),  # one leaf, some levels down
        ([Labelled(1), Labelled(2, 'y')], ('0/x', '1/y')),
        ({'a': 1, 'b': Layer(2, Label('x'))}, None),
        ({'a': 1, 'b': Renamed(2, Label('x'))}, ('a', 'b/x')),
    ],
    ids=['lists and dicts', 'beside a leaf', 'deeper', 'two', 'fields', 'other names than fields'],
)
def test_ambiguous_paths(tree, paths):
    assert ambiguous_paths(tree, ambiguous_nodes(jax.tree.structure(tree))) == paths


def test_positions_of_ambiguous_nodes():
    tree = {'a': [1, 2], 'b': [Labelled(3)], 'c': Labelled(4)}
    nodes = ambiguous_nodes(jax.tree.structure(tree))
    assert [(kind, depth, firsts) for kind, _, depth, firsts in nodes] == [
        (Labelled, 2, [2]),
        (Labelled, 1, [3]),
    ]
