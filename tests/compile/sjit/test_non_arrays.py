"""Arguments of jax.jit that are not arrays: tokens, references and their views, and user-defined types."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental import hijax
from jax.sharding import AxisType

from scalax.errors import PartitioningWarning, PlacementError, ShardingError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import compilations

AUTO = MeshShardingHelper([4, 2], ['x', 'y'])
EXPLICIT = MeshShardingHelper([4, 2], ['x', 'y'], axis_types=AxisType.Explicit)
HELPERS = [pytest.param(AUTO, id='auto'), pytest.param(EXPLICIT, id='explicit')]
X = np.arange(16, dtype=np.float32).reshape(8, 2)


@pytest.fixture
def never_written_down():
    """JAX 0.10.0 crashes when it prints a program with token arguments."""
    with compilations.anew():
        yield


@pytest.mark.medium
@pytest.mark.usefixtures('never_written_down')
@pytest.mark.parametrize('helper', HELPERS)
@pytest.mark.parametrize('rules', [None, (None, P('x'))])
def test_tokens(helper, rules):
    through = helper.sjit(lambda token, x: (token, 2 * x), rules, out_shardings=rules)
    token = jax.lax.create_token()
    for x in (X, helper.shard(X, P('x')), X):
        token, out = through(token, x)
        np.testing.assert_array_equal(out, 2 * X)
    token, out = helper.sjit(lambda x: (jax.lax.create_token(x), x))(X)
    assert isinstance(token, type(jax.lax.create_token()))
    assert through.eval_shape(token, X)[1].shape == X.shape
    assert through.lower(token, X).compile() is not None


@pytest.mark.parametrize('helper', HELPERS)
def test_a_rule_for_a_token_is_an_error(helper, snapshot):
    with snapshot.raises(ShardingError):
        helper.sjit(lambda tree: tree, P())({'t': jax.lax.create_token(), 'x': X})
    with pytest.raises(ShardingError, match=r"of the outputs of '<lambda>' \(out_shardings\)"):
        helper.sjit(lambda x: (x, jax.lax.create_token(x)), out_shardings=P())(X)


def count(ref, x):
    ref[...] = ref[...] + x.sum()
    return x


@pytest.mark.medium
@pytest.mark.parametrize('helper', HELPERS)
@pytest.mark.parametrize('rules', [None, (None, P('x'))])
def test_references(helper, rules):
    ref = jax.new_ref(helper.shard(np.zeros(8, np.float32), P('x')))
    counting = helper.sjit(count, rules)
    counting(ref, X)
    counting(ref, helper.shard(X, P('x')))
    np.testing.assert_array_equal(jax.freeze(ref), np.full(8, 2 * X.sum()))


@pytest.mark.parametrize('helper', HELPERS)
def test_references_are_not_moved(helper):
    ref = jax.new_ref(helper.shard(np.zeros(8, np.float32), P('x')))
    with pytest.raises(PlacementError, match=r"ref: float32\[8\] is sharded as P\('x',\) on"):
        helper.sjit(count, (P('y'), None))(ref, X)
    alone = jax.new_ref(np.zeros(8, np.float32))
    with pytest.raises(ValueError, match='incompatible devices'):  # of JAX
        helper.sjit(count, (None, P('x')))(alone, X)


def test_views_of_references():
    ref = jax.new_ref(np.zeros((4, 2), np.float32))
    try:
        views = [ref.at[1], ref.at[2], ref.at[1]]
    except NotImplementedError:
        pytest.skip('this JAX has no views outside of kernels')
    counting = AUTO.sjit(count)
    for view in views:
        counting(view, X)
    np.testing.assert_array_equal(jax.freeze(ref)[:, 0], X.sum() * np.array([0, 2, 1, 0]))
    with pytest.raises(ShardingError, match='TransformedRef is not an array type'):
        AUTO.sjit(count, P())(jax.new_ref(X).at[1], X)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A value with a scale, like a quantized weight."""

    value: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class ScaledType(hijax.HiType):
    shape_: tuple[int, ...]

    def lo_ty(self):
        return [
            hijax.ShapedArray(self.shape_, np.dtype('float32')),
            hijax.ShapedArray((), np.dtype('float32')),
        ]

    def lower_val(self, scaled):
        return [scaled.value, scaled.scale]

    def raise_val(self, value, scale):
        return Scaled(value, scale)


hijax.register_hitype(Scaled, lambda scaled: ScaledType(tuple(scaled.value.shape)))


@pytest.mark.parametrize('helper', HELPERS)
@pytest.mark.parametrize('rules', [None, (None, P('x'))])
def test_user_defined_types(helper, rules):
    scaled = Scaled(jax.numpy.ones(3), jax.numpy.ones(()))
    through = helper.sjit(lambda scaled, x: (scaled, 2 * x), rules)
    for _ in range(2):
        same, out = through(scaled, X)
        np.testing.assert_array_equal(out, 2 * X)
        np.testing.assert_array_equal(same.value, scaled.value)
    with pytest.raises(ShardingError, match='ScaledType is not an array type'):
        helper.sjit(lambda scaled: scaled, P())(scaled)


@pytest.mark.usefixtures('never_written_down')
def test_a_step_with_a_token_and_a_batch_is_not_partitioned():
    helper = MeshShardingHelper([-1], ['x'])
    step = helper.sjit(lambda token, x: (token, 2 * x), batch_argnums=1, in_shardings=(None, P('x')))
    with pytest.warns(
        PartitioningWarning, match=r'(?s)values that are not arrays \(\w+\).*keep them outside'
    ) as warned:
        _, out = step(jax.lax.create_token(), X)
    assert len(warned) == 1
    np.testing.assert_array_equal(out, 2 * X)
