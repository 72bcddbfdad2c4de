"""Changes of nnx modules inside a compiled function, which JAX loses."""

from __future__ import annotations

import warnings

import numpy as np
import optax
import pytest

from scalax.errors import LostUpdateWarning
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

nnx = pytest.importorskip('flax.nnx')

HELPER = MeshShardingHelper([4, 2], ['x', 'y'])
X = np.ones((8, 4), np.float32)


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(x))


@pytest.mark.medium
def test_lost_changes_warn(snapshot):
    def forward(model, x):
        return model(x)

    compiled = HELPER.sjit(forward, {'x': P('x')})
    model = Model()
    with pytest.warns(LostUpdateWarning) as record:
        compiled(model, X)
    (warning,) = record
    snapshot(warning.message)
    assert warning.filename == __file__
    compiled(model, X)  # one warning, when it is traced


def test_an_optimizer_updated_inside_warns():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: model.norm(x).sum())(model)
        optimizer.update(model, grads)

    with pytest.warns(
        LostUpdateWarning,
        match=r'norm/scale/value: float32\[4\] of Model\n(.*\n)*  step/value: .* of Optimizer',
    ):
        HELPER.sjit(step)(model, optimizer, X)


KEPT = {
    'the module': lambda model, x: (model(x), model),
    'in a tree': lambda model, x: {'out': model(x), 'models': [model]},
    'its state': lambda model, x: (model(x), nnx.state(model)),
    'a split': lambda model, x: (model(x), nnx.split(model)[1]),
    'nothing changed': lambda model, x: model.norm(x, use_running_average=True),
}


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('kept', KEPT)
def test_returned_changes_do_not_warn(kept):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        HELPER.sjit(KEPT[kept])(Model(), X)
        HELPER.sjit(lambda tree: tree.update(y=1))({'x': X})
