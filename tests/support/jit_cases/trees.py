"""Pytrees: containers, None, user-defined nodes, and objects that are not leaves."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.jit_cases import M, X, case, error_of, traced


class Pair(NamedTuple):
    """A named tuple, like an optimizer state."""

    first: Any
    second: Any = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=['w', 'b'], meta_fields=['name'])
@dataclasses.dataclass
class Layer:
    """A dataclass with a static field."""

    w: Any
    b: Any = None
    name: str = 'layer'


@jax.tree_util.register_pytree_node_class
class Node:
    """A node without keys."""

    def __init__(self, *children, label=0):
        self.children, self.label = children, label

    def tree_flatten(self):
        return self.children, self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label=label)


@jax.tree_util.register_pytree_with_keys_class
class Keyed(Node):
    """A node with keys."""

    def tree_flatten_with_keys(self):
        keys = map(jax.tree_util.GetAttrKey, 'abcdef')
        return tuple(zip(keys, self.children, strict=False)), self.label


@jax.tree_util.register_pytree_node_class
class Checked(Node):
    """A node that inspects its children."""

    def __init__(self, *children, label=0):
        assert all(hasattr(child, 'shape') for child in children), 'arrays only'
        super().__init__(*children, label=label)


TREES = {
    'none': None,
    'empty tuple': (),
    'empty dict': {},
    'empty list': [],
    'nested empty': {'a': [], 'b': ((), {}), 'c': None},
    'none among leaves': {'a': X, 'b': None, 'c': [None, X]},
    'list': [X, M],
    'tuple': (X, (M, (X,))),
    'dict': {'b': X, 'a': M},
    'dict of numbers': {2: X, 1: M, 10: X},
    'dict of tuples': {(1, 'a'): X, (0, 'b'): M},
    'ordered dict': collections.OrderedDict([('b', X), ('a', M)]),
    'default dict': collections.defaultdict(list, {'b': X, 'a': M}),
    'named tuple': Pair(X, Pair(M)),
    'dataclass': Layer(X, None, 'first'),
    'dataclass of dataclasses': Layer(Layer(X), {'a': Layer(M, X)}),
    'node': Node(X, M, label='n'),
    'keyed node': Keyed(X, None, M),
    'checking node': [Checked(jnp.asarray(X))],
    'partial': jax.tree_util.Partial(jnp.add, X),
    'deep': functools.reduce(lambda tree, _: [tree], range(50), X),
    'strange keys': {'a/b': X, '': M, '0': X, ' ': M, "'": X},
    'same leaf twice': [X, X],
}


@case(variants=TREES)
def there_and_back(jit, tree):
    def same(tree):
        traced(jax.tree.structure(tree))
        return jax.tree.map(lambda leaf: leaf + 1, tree)

    compiled = jit(same)
    return compiled(tree), compiled(tree)


@case(variants=TREES)
def as_it_is(jit, tree):
    return jit(lambda x, tree: (tree, x))(X, tree)


@case(variants=TREES)
def made_inside(jit, tree):
    return jit(lambda: tree)()


@case
def other_structures_in_turn(jit):
    compiled = jit(lambda tree: (traced(jax.tree.structure(tree)), jax.tree.map(jnp.sin, tree))[1])
    return [compiled(tree) for tree in (X, [X], (X,), {'a': X}, [X], X, None, {'a': X})]


@case
def order_of_a_dict(jit):
    compiled = jit(lambda tree: (traced(), dict(tree.items()))[1])
    return compiled({'b': X, 'a': M}), compiled({'a': M, 'b': X})


@case
def order_of_an_ordered_dict(jit):
    compiled = jit(lambda tree: (traced(list(tree)), tree)[1])
    ordered = collections.OrderedDict
    return compiled(ordered(b=X, a=M)), compiled(ordered(a=M, b=X))


@case
def keys_that_are_equal(jit):
    compiled = jit(lambda tree: (traced(), tree)[1])
    return compiled({1: X}), compiled({1.0: X}), compiled({True: X})


@case(raises=True)
def keys_that_cannot_be_sorted(jit):
    return jit(lambda tree: tree)({1: X, 'a': X})


@case
def static_field(jit):
    compiled = jit(lambda layer: (traced(layer.name), layer)[1])
    return compiled(Layer(X, name='a')), compiled(Layer(X, name='b')), compiled(Layer(X, name='a'))


@case
def static_field_that_cannot_be_hashed(jit):
    return jit(lambda layer: layer.w)(Layer(X, name=[1]))


@case
def static_field_array(jit):
    compiled = jit(lambda layer: layer.w)
    return compiled(Layer(X, name=M)), error_of(compiled, Layer(X, name=M.copy()))


@case
def node_label(jit):
    compiled = jit(lambda node: (traced(node.label), node.children)[1])
    return compiled(Node(X, label=1)), compiled(Node(X, label=2)), compiled(Node(X, label=True))


@case
def node_that_looks_at_its_children(jit):
    compiled = jit(lambda node: (traced(), node.children[0] + 1)[1])
    node = Checked(jnp.asarray(X))
    return compiled(node), compiled(node)


@case
def partial_as_an_argument(jit):
    compiled = jit(lambda f, x: (traced(), f(x))[1])
    partial = jax.tree_util.Partial
    return (
        compiled(partial(jnp.add, 1.0), X),
        compiled(partial(jnp.add, 2.0), X),
        compiled(partial(jnp.sin), X),
    )


@case
def partial_of_it(jit):
    return jax.tree_util.Partial(jit(lambda a, b: a - b), X)(1.0)


@case
def none_and_something(jit):
    compiled = jit(lambda x: (traced(), 0 if x is None else x + 1)[1])
    return compiled(None), compiled(X), compiled(None), compiled(X)


@case
def number_of_leaves_changes(jit):
    compiled = jit(lambda xs: (traced(len(xs)), sum(xs))[1])
    return [compiled([X] * n) for n in (1, 3, 0, 1, 3)]


@case
def many_leaves(jit):
    return jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree))({f'k{i}': i for i in range(300)})


@case(
    variants={
        'string': 'a',
        'object': object(),
        'function': abs,
        'bytes': b'a',
        'dtype': np.dtype('f4'),
        'set': {1},
    },
    meant={'error': 'error classes'},
    raises=True,
)
def no_leaf(jit, thing):
    return jit(lambda x, thing: x)(X, [thing])


@case(
    variants={
        'string array': np.array(['a']),
        'object array': np.array([None, 1]),
        'record': np.zeros(2, [('a', 'f4')]),
        'date': np.array(['2020-01-01'], 'datetime64[D]'),
        'masked': np.ma.masked_array([1, 2], [0, 1]),
    },
    meant={'error': 'error classes'},
    raises=True,
)
def array_that_jax_does_not_take(jit, thing):
    return jit(lambda x: x)(thing)


@case(
    variants={'string': 'a', 'object': object(), 'function': abs, 'type': int, 'dict item': {'a': 'b'}},
    raises=True,
)
def output_that_is_no_array(jit, thing):
    return jit(lambda x: (x, thing))(X)


@case
def output_with_the_function_of_an_argument(jit):
    return jit(lambda x: jax.tree_util.Partial(jnp.add, x))(X)(1.0)


@case(raises=True)
def node_whose_flatten_raises(jit):
    class Broken:
        pass

    def flatten(_):
        raise ZeroDivisionError('broken')

    jax.tree_util.register_pytree_node(Broken, flatten, lambda *_: Broken())
    return jit(lambda x: x)(Broken())


@case(raises=True)
def node_whose_unflatten_raises(jit):
    class Broken:
        pass

    def unflatten(*_):
        raise ZeroDivisionError('broken')

    jax.tree_util.register_pytree_node(Broken, lambda _: ((X,), None), unflatten)
    return jit(lambda x: X)(Broken())


@case
def tree_argument_mutated_inside(jit):
    def f(tree):
        tree['new'] = tree['a'] + 1
        return tree

    argument = {'a': X}
    return jit(f)(argument), argument


@case
def list_argument_mutated_between(jit):
    held = [X]
    compiled = jit(lambda xs: sum(xs))
    first = compiled(held)
    held.append(X)
    return first, compiled(held)
