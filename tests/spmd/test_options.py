"""Options of partitioning: the collectives that each produces, with dtypes and counts, and results."""

import pickle
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.errors import ArgumentError
from scalax.sharding import BatchPartitioning, FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.partitioned import FSDP, HSDP, assert_equal, partitioned, state_spec

pytestmark = pytest.mark.medium

LAYERS, WIDTH, EXAMPLES = 3, 16, 32
RNG = np.random.default_rng(0)
W = {
    'blocks': np.asarray(RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / 4, 'float32'),
    'head': np.asarray(RNG.normal(size=(WIDTH, 2 * WIDTH)) / 4, 'float32'),
}
X = np.asarray(RNG.normal(size=(EXAMPLES, WIDTH)), 'float32')
SPECS = [state_spec(leaf.shape) for leaf in jax.tree.leaves(W)]


def loss(w, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, w['blocks'])
    return jnp.mean(jnp.tanh(x @ w['head']) ** 2)


def sgd(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value


def partitioned_step(fun=sgd, mesh=FSDP, specs=SPECS, **options):
    specs = [state_spec(leaf.shape, size=mesh['fsdp']) for leaf in jax.tree.leaves(W)]
    return partitioned(fun, W, X, mesh, result_specs=[*specs, P()], options=BatchPartitioning(**options))


def collective_counts(step):
    """Counts the collectives of weights and of gradients by kind and dtype."""
    counts = Counter()
    for row in step.collective_rows:
        counts[row.kind, row.what, row.array.partition('[')[0]] += row.count
    return counts


WEIGHTS = LAYERS + 1  # layer by layer, and the head
# Each in both passes, except the last weight of the forward pass, which is kept for the backward pass.
GATHERS = 2 * WEIGHTS - 1


def test_by_default_weights_are_gathered_twice_in_their_dtype_and_gradients_reduced_once():
    step, run = partitioned_step()
    assert collective_counts(step) == {
        ('all_gather', 'weight', 'float32'): GATHERS,
        ('reduce_scatter', 'gradient', 'float32'): WEIGHTS,
        ('all_reduce', 'sum', 'float32'): 1,
    }
    assert_equal(run(), jax.jit(sgd)(W, X))


def rounded(w):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), w)


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
def test_weights_are_gathered_in_the_dtype_of_parameters(mesh):
    step, run = partitioned_step(mesh=mesh, param_dtype=jnp.bfloat16)
    weights = {key: count for key, count in collective_counts(step).items() if key[1] == 'weight'}
    assert weights == {('all_gather', 'weight', 'bfloat16'): GATHERS}
    assert {key[2] for key in collective_counts(step) if key[1] == 'gradient'} == {'float32'}

    def expected(w, x):
        """Runs both passes with rounded weights, and updates the stored weights."""
        value, gradient = jax.value_and_grad(loss)(rounded(w), x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value

    assert_equal(run(), jax.jit(expected)(W, X))
    with pytest.raises(AssertionError):
        assert_equal(run(), jax.jit(sgd)(W, X), 1e-6)


def test_narrow_weights_are_not_cast():
    def cast(w, x):
        return x.astype(jnp.bfloat16) @ w['head'].astype(jnp.bfloat16)

    for dtype in (None, jnp.bfloat16, jnp.float32):
        step, _ = partitioned(cast, W, X, options=BatchPartitioning(param_dtype=dtype))
        assert collective_counts(step) == {('all_gather', 'weight', 'bfloat16'): 1}


def test_state_that_does_not_meet_examples_is_not_rounded():
    """An optimizer that multiplies a moment by itself gets the unrounded moment."""

    def fun(w, x):
        return w['head'].T @ w['head'], x @ w['head']

    step, run = partitioned(fun, W, X, options=BatchPartitioning(param_dtype=jnp.bfloat16))
    expected = fun(W, X)
    got = run()
    if {key[2] for key in collective_counts(step)} == {'float32'}:  # gathered once for both
        assert_equal(got, expected)
    np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.parametrize('dtype, tolerance', [('bfloat16', 2e-3), ('float32', 1e-5)])
def test_gradients_are_reduced_in_a_dtype(mesh, dtype, tolerance):
    step, run = partitioned_step(mesh=mesh, reduce_dtype=dtype)
    counts = collective_counts(step)
    assert {key[2] for key in counts if key[1] == 'gradient'} == {dtype}
    assert counts['reduce_scatter', 'gradient', dtype] == WEIGHTS
    assert counts['all_reduce', 'gradient', dtype] == (WEIGHTS if mesh is HSDP else 0)
    assert {key[2] for key in counts if key[1] != 'gradient'} == {'float32'}  # a loss is not a gradient
    assert_equal(run(), jax.jit(sgd)(W, X), tolerance)


def test_gradients_of_narrow_products_are_reduced_in_a_wide_dtype():
    def narrow(w, x):
        def loss(w):
            return jnp.mean((x.astype(jnp.bfloat16) @ w['head'].astype(jnp.bfloat16)).astype('float32') ** 2)

        return jax.tree.map(lambda a, g: a - g, w, jax.grad(loss)(w))

    for dtype, expected in ((None, 'bfloat16'), ('float32', 'float32')):
        step, run = partitioned(
            narrow, W, X, result_specs=SPECS, options=BatchPartitioning(reduce_dtype=dtype)
        )
        assert collective_counts(step)['reduce_scatter', 'gradient', expected] == 1
        assert_equal(run(), jax.jit(narrow)(W, X), 1e-2)


def test_weights_are_kept_for_the_backward_pass():
    step, run = partitioned_step(reshard_after_forward=False)
    counts = collective_counts(step)
    assert counts['all_gather', 'weight', 'float32'] == 2  # all layers at once, and the head
    assert counts['reduce_scatter', 'gradient', 'float32'] == WEIGHTS
    assert_equal(run(), jax.jit(sgd)(W, X))


def test_weights_are_kept_with_rematerialization():
    def remat(w, x):
        def loss(w):
            h = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w))(x, w['blocks'][0])
            return jnp.mean(h**2)

        return jax.tree.map(lambda a, g: a - g, w, jax.grad(loss)(w))

    counts = {}
    for reshard in (True, False):
        step, run = partitioned(
            remat, W, X, result_specs=SPECS, options=BatchPartitioning(reshard_after_forward=reshard)
        )
        counts[reshard] = collective_counts(step)['all_gather', 'weight', 'float32']
        assert_equal(run(), jax.jit(remat)(W, X))
    assert counts == {True: 2, False: 1}


def accumulated(w, x):
    """Accumulates gradients of microbatches."""
    parts = x.reshape(-1, 4, WIDTH).swapaxes(0, 1)

    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(w, part)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), parts)
    return jax.tree.map(lambda a, g: a - 0.1 * g / 4, w, total)


@pytest.mark.parametrize('reduce_per_microbatch', [False, True])
def test_gradients_of_microbatches(reduce_per_microbatch):
    options, x = (
        BatchPartitioning(reduce_per_microbatch=reduce_per_microbatch),
        np.tile(X, (16, 1)),
    )  # with few rows, activations would move
    step, run = partitioned(accumulated, W, x, result_specs=SPECS, options=options)
    heads = [(x.kind, x.count) for x in step.collective_rows if x.reason == "gradient of ['head']"]
    assert heads == [('reduce_scatter', 4 if reduce_per_microbatch else 1)]
    assert_equal(run(), jax.jit(accumulated)(W, x))


def test_functions_use_their_own_options_or_those_of_the_helper():
    rule, batch = FSDPShardingRule(min_fsdp_size=1), P('fsdp')
    narrow = BatchPartitioning(reduce_dtype=jnp.bfloat16)
    by_default = MeshShardingHelper([8], ['fsdp'])
    helper = MeshShardingHelper([8], ['fsdp'], partitioning=narrow)
    assert (by_default.partitioning, helper.partitioning) == (None, narrow)
    assert pickle.loads(pickle.dumps(helper)).partitioning == narrow

    def dtypes(helper, **options):
        step = helper.sjit(sgd, in_shardings=(rule, batch), out_shardings=(rule, P()), **options)
        rows = step.explain_propagation(W, X).collectives
        return {row.array.partition('[')[0] for row in rows if row.what == 'gradient'}

    assert dtypes(by_default) == {'float32'}
    assert dtypes(by_default, partitioning=narrow) == {'bfloat16'}
    assert dtypes(helper) == {'bfloat16'}
    assert dtypes(helper, partitioning=BatchPartitioning()) == {'float32'}


def test_invalid_options():
    with pytest.raises(ArgumentError, match=r'BatchPartitioning\(param_dtype=\.\.\.\) is a floating dtype'):
        BatchPartitioning(param_dtype=jnp.int8)
    with pytest.raises(ArgumentError, match=r"reduce_dtype=\.\.\.\) is a floating dtype .* got 'half a'"):
        BatchPartitioning(reduce_dtype='half a')
    with pytest.raises(ArgumentError, match=r'reshard_after_forward=\.\.\.\) is True or False, got 1'):
        BatchPartitioning(reshard_after_forward=1)
    helper = MeshShardingHelper([8], ['fsdp'])
    with pytest.raises(ArgumentError, match='partitioning is a BatchPartitioning'):
        helper.sjit(sgd, partitioning={'reduce_dtype': 'float32'})
    with pytest.raises(ArgumentError, match='partitioning is a BatchPartitioning'):
        MeshShardingHelper([8], ['fsdp'], partitioning=jnp.float32)
