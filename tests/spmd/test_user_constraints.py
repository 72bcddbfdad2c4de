"""Shardings inside a function: constraints, annotations, `device_put`, and shardings of `jit` or `shard_map`.

Along the batch axes they are conversions between placements, which the report lists.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

from scalax.sharding import (
    BatchPartitioning,
    FSDPShardingRule,
    MeshShardingHelper,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P

pytestmark = pytest.mark.medium

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'], partitioning=BatchPartitioning())
SHARDINGS = {'in_shardings': (FSDPShardingRule(min_fsdp_size=1), P('fsdp')), 'batch_argnums': 1}
ROWS, COLUMNS = P('fsdp'), P(None, 'fsdp')
W = np.random.default_rng(0).normal(size=(16, 16)).astype('float32') / 4
X = np.random.default_rng(1).normal(size=(32, 16)).astype('float32')


def sharding(spec):
    return NamedSharding(HELPER.mesh, spec)


def doubled(x):
    return x * 2


# Each function constrains a value. The last two constrain values inside a call or a loop.
PLACED = {
    'constraint': lambda x, spec: with_sharding_constraint(x, spec),
    'constraint of JAX': lambda x, spec: lax.with_sharding_constraint(x, sharding(spec)),
    'device_put': lambda x, spec: jax.device_put(x, sharding(spec)),
    'results of a jit': lambda x, spec: jax.jit(doubled, out_shardings=sharding(spec))(x),
    'shard_map': lambda x, spec: HELPER.shard_map(jnp.tanh, in_specs=spec, out_specs=spec)(x),
    'arguments of a jit': lambda x, spec: jax.jit(doubled, in_shardings=sharding(spec))(x),
    'in a loop': lambda x, spec: lax.scan(
        lambda c, _: (jax.device_put(c * 2, sharding(spec)), None), x, None, length=2
    )[0],
}
INSIDE = ('arguments of a jit', 'in a loop')
# The collectives and their counts. A loop of two iterations ends with the sharding it starts with.
MOVES = {ROWS: {}, P(): {'all_gather': 2}, P('tp'): {'all_gather': 2}, COLUMNS: {'all_to_all': 4}}


def placing(name, spec):
    """A step that constrains the result of a matmul, and uses the constrained value."""

    def fun(w, x):
        value = PLACED[name](x @ w, spec)
        return value, jnp.tanh(value) @ w

    return fun


def moved(step, *args):
    """Counts the collectives that move examples, by kind and reason."""
    rows = {}
    for row in step.explain_propagation(*args).gathered_examples:
        rows[row.kind, row.primitive] = rows.get((row.kind, row.primitive), 0) + row.count
    return rows


def assert_close(results, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), results, expected)


def test_values_have_the_shardings_that_users_specify():
    cases = [(name, spec) for name in PLACED for spec in MOVES]

    def run_all(w, x):
        return [placing(*case)(w, x) for case in cases]

    with jax.default_matmul_precision('highest'):
        results, expected = HELPER.sjit(run_all, **SHARDINGS)(W, X), jax.jit(run_all)(W, X)
    assert_close(results, expected)
    for (name, spec), (value, _) in zip(cases, results, strict=True):
        assert name in INSIDE or value.sharding.is_equivalent_to(sharding(spec), 2), (name, spec)


@pytest.mark.parametrize('spec', MOVES, ids=str)
def test_moved_examples_are_reported(spec):
    """Nothing is compiled."""
    kinds = {
        name: {kind: 0 for kind, _ in moved(HELPER.sjit(placing(name, spec), **SHARDINGS), W, X)}
        for name in PLACED
    }
    assert kinds == {name: dict.fromkeys(MOVES[spec], 0) for name in PLACED}
    in_loop = moved(HELPER.sjit(placing('in a loop', spec), **SHARDINGS), W, X)
    assert {kind: count for (kind, _), count in in_loop.items()} == MOVES[spec]


def mixed(x):
    """A replicated value computed from all examples."""
    return jnp.fft.fft(x, axis=0).real


AGAIN = {
    name: (lambda x, constrain=constrain: constrain(mixed(x), ROWS)) for name, constrain in PLACED.items()
}
AGAIN['annotation'] = lambda x: with_sharding_annotation(mixed(x), 'rows')
BEHIND = {
    'products': lambda w, x: jnp.tanh(x @ w) @ w,
    'a loop': lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0],
    'a call': lambda w, x: jax.jit(lambda x: jnp.tanh(x @ w))(x),
    'a gradient': lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x),
}


def is_on_examples(step, *args):
    """Returns whether a weight is gathered for examples, instead of examples for its shards."""
    return any(row.what == 'weight' for row in step.explain_propagation(*args).collectives)


def test_a_constraint_makes_a_value_a_batch_again():
    """Nothing is compiled. FFTs of all examples gather them."""
    for name, again in AGAIN.items():
        names = {'annotation_shardings': {'rows': ROWS}} if name == 'annotation' else {}

        def run_all(w, x, again=again):
            return [behind(w, again(x)) for behind in BEHIND.values()]

        step = HELPER.sjit(run_all, **SHARDINGS, **names)
        assert is_on_examples(step, W, X), name
        assert {primitive for _, primitive in moved(step, W, X)} == {'fft'}, name
    step = HELPER.sjit(lambda w, x: BEHIND['products'](w, mixed(x)), **SHARDINGS)
    assert not is_on_examples(step, W, X)


def test_an_iteration_constrains_its_carry():
    def fun(w, x):
        def step(c, _):
            return jnp.tanh(with_sharding_annotation(c, 'rows') @ w), None

        return lax.scan(step, mixed(x), None, length=3)[0] @ w

    step = HELPER.sjit(fun, **SHARDINGS, annotation_shardings={'rows': ROWS})
    assert is_on_examples(step, W, X)


def test_constrained_weights_are_not_examples():
    def fun(w, x):
        weights = with_sharding_constraint(w, ROWS), PLACED['shard_map'](w, ROWS)
        return [jnp.tanh(weight @ weight) for weight in weights], x

    step = HELPER.sjit(fun, **SHARDINGS)
    assert not moved(step, W, X)
    step = HELPER.sjit(lambda w, x: x @ with_sharding_constraint(w, P(None, 'tp')), **SHARDINGS)
    assert not moved(step, W, X)


def test_a_single_function_is_distributed_to_one_device():
    def fun(w, x):
        placed = jax.jit(jnp.matmul, out_shardings=sharding(P()))(x, w)
        return placed, jax.jit(jnp.matmul)(x, w), jax.device_put(x) @ w

    placed, *others = HELPER.sjit(fun, **SHARDINGS)(W, X)
    assert placed.sharding.is_fully_replicated
    assert {other.sharding.spec for other in others} == {ROWS}
