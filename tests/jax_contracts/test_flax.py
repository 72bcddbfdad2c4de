"""Tests that `scalax/_jax/flax` reads boxes of other libraries and modules of flax.nnx."""

from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scalax._jax import flax as of
from tests.support.contracts import contract

X = np.ones((4, 8), np.float32)


def test_boxes_of_linen() -> None:
    nn = pytest.importorskip('flax.linen')
    with contract('has *names* in boxes of linen', 'to know dimensions of models', library='flax'):
        box = nn.Partitioned(X, names=('embed', None))
        assert of.is_box(box) and of.names_of_box(box) == ('embed', None)


def test_variables_of_nnx() -> None:
    nnx = pytest.importorskip('flax.nnx')
    with contract('has names in the metadata of variables', 'to know dimensions of models', library='flax'):
        with nnx.use_eager_sharding(False):  # or flax reads the names as axes of a mesh
            variable = nnx.Param(X, out_sharding=('embed', 'mlp'))
        assert of.is_box(variable) and tuple(of.names_of_box(variable) or ()) == ('embed', 'mlp')
        assert of.is_box(nnx.Param(X)) and not of.names_of_box(nnx.Param(X))


def test_named_arrays_of_haliax() -> None:
    hax: Any = pytest.importorskip('haliax')
    with contract('has *axes* in NamedArrays', 'to know dimensions of models', library='haliax'):
        array = hax.named(X, (hax.Axis('embed', 4), hax.Axis('mlp', 8)))
        assert of.is_box(array) and of.names_of_box(array) == ['embed', 'mlp']


@pytest.mark.parametrize('node', [X, {'w': X}, P('names'), 1.0])
def test_other_nodes_are_not_boxes(node: Any) -> None:
    assert not of.is_box(node)


def test_modules_of_nnx() -> None:
    nnx = pytest.importorskip('flax.nnx')
    with contract('has modules that are Pytree or Object', 'to see what changes in them', library='flax'):
        module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        assert isinstance(module, of.module_class(nnx))
        assert not isinstance(X, of.module_class(nnx))


def test_modules_whose_structure_changes_in_a_compiled_function() -> None:
    nnx: Any = pytest.importorskip('flax.nnx')
    with contract('has split_context and merge_context', 'to change modules in place', library='flax'):
        module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        kernel = module.kernel
        graph, state = nnx.split({0: module})
        with nnx.update_context('inside'):  # not the outer one, as in a cached trace
            with nnx.merge_context('inside', inner=True) as context:
                copy = context.merge(graph, state)[0]
            copy.tied, copy.mode, copy.added = copy.kernel, 'changed', nnx.Param(X)
            del copy.bias
            with nnx.split_context('inside') as context:
                graph, state = context.split({0: copy})
        with nnx.update_context('outside'):
            with nnx.split_context('outside') as context:
                context.split({0: module})
            with nnx.merge_context('outside', inner=False) as context:
                assert context.merge(graph, state)[0] is module
        assert module.kernel is module.tied is kernel and module.mode == 'changed'
        assert module.added.shape == X.shape and not hasattr(module, 'bias')
