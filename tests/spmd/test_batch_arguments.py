"""Which arguments are the batch, and how users specify them."""

import jax.numpy as jnp
import numpy as np
import pytest

from scalax.errors import ArgumentError, ShardingError
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([2, 4], ['data', 'fsdp'])
RULE = FSDPShardingRule(min_fsdp_size=1)
W, X = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
ROWS = P('fsdp')


def layer(w, x):
    return jnp.tanh(x @ w)


def axes(*args, fun=layer, **options):
    return HELPER.sjit(fun, **options).explain_propagation(*(args or (W, np.ones((64, 16), np.float32)))).axes


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        ({'in_shardings': (RULE, ROWS)}, ('fsdp',)),
        ({'in_shardings': {'w': RULE, 'x': ROWS}}, ('fsdp',)),
        ({'in_shardings': (RULE, P(('data', 'fsdp')))}, ('data', 'fsdp')),
        ({'in_shardings': (RULE, P('fsdp', 'data'))}, ('data', 'fsdp')),
        ({'in_shardings': (RULE, P())}, ()),
        ({'in_shardings': (P(), ROWS)}, ()),  # all by their specs
        ({'in_shardings': (RULE, ROWS), 'donate_argnums': 1}, ('fsdp',)),
        ({'args_sharding_constraint': (RULE, ROWS)}, ('fsdp',)),
        ({'in_shardings': (RULE, ROWS), 'args_sharding_constraint': (RULE, None)}, ('fsdp',)),
        ({'in_shardings': (RULE, ROWS), 'args_sharding_constraint': (RULE, P('data'))}, ('data',)),
        ({'in_shardings': (RULE, ROWS), 'args_sharding_constraint': (RULE, P())}, ()),
        ({'in_shardings': (RULE, ROWS), 'batch_argnums': ()}, ()),
        ({'in_shardings': (P(), ROWS), 'batch_argnums': 1}, ('fsdp',)),
        ({'in_shardings': (P(), ROWS), 'batch_argnums': -1}, ('fsdp',)),
        ({'in_shardings': (P(), ROWS), 'batch_argnames': 'x'}, ('fsdp',)),
    ],
)
def test_batch_arguments(options, expected):
    assert axes(**options) == expected


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            {'batch_argnames': 'y'},
            "batch_argnames='y': layer has no such argument (known: 'w', 'x')",
        ),
        ({'batch_argnums': 2}, 'batch_argnums=2: layer takes 2 positional arguments (w, x)'),
        ({'batch_argnums': -3}, 'batch_argnums=-3: layer takes 2 positional arguments (w, x)'),
        ({'batch_argnums': 1, 'static_argnums': 1}, 'layer: x cannot be both static and a batch'),
        ({'batch_argnames': 'x', 'static_argnums': 1}, 'layer: x cannot be both static and a batch'),
        *(
            (
                {'batch_argnums': 1, **shardings},
                'layer: batch_argnums or batch_argnames includes x, but neither in_shardings nor '
                "args_sharding_constraint shards it: pass a spec such as PartitionSpec('data') for it, or "
                'leave it out of the batch',
            )
            for shardings in (
                {'in_shardings': (RULE, P())},
                {'in_shardings': (RULE, None)},
                {'in_shardings': None},
                {'in_shardings': None, 'args_sharding_constraint': (None, P(P.UNCONSTRAINED))},
                {'in_shardings': FSDPShardingRule()},  # replicates a small array
            )
        ),
    ],
)
def test_arguments_that_cannot_be_a_batch(options, message):
    with pytest.raises(ArgumentError) as error:
        axes(**options)
    assert str(error.value) == message


def example_dims(compiled):
    """Returns the batch dimension of each argument of a step with four arguments."""
    batch = compiled._dispatcher.prepare(compiled._flatten((W, X, X), {'z': X}))[1].batch
    return [batch.example_dim(i) for i in range(4)]


def test_donated_arguments_are_the_batch_if_no_others_are():
    def step(w, x, y, *, z):
        return layer(w, x) + y + z

    rules = {'w': RULE, 'x': ROWS, 'y': ROWS, 'z': ROWS}
    compiled = HELPER.sjit(step, in_shardings=rules, donate_argnums=(0, 1, 2))
    assert compiled.explain_propagation(W, X, X, z=X).axes == ('fsdp',)
    assert example_dims(compiled) == [None, None, None, 0]
    del rules['z']
    compiled = HELPER.sjit(step, in_shardings=rules, donate_argnums=(0, 1, 2))
    assert compiled.explain_propagation(W, X, X, z=X).axes == ('fsdp',)
    assert example_dims(compiled)[1] == 0


def any_number(w, *batches, **more):
    return sum(layer(w, x) for x in [*batches, *more.values()])


def test_optional_batches():
    """A batch argument may be omitted or None, if another one is an array."""

    def fun(w, x=None, y=None):
        return w if x is None else layer(w, x) if y is None else layer(w, x) + layer(w, y)

    step = HELPER.sjit(fun, in_shardings=ROWS, batch_argnums=(1, 2))
    assert [step.explain_propagation(W, *rest).axes for rest in [(), (X,), (X, None), (X, X)]] == [
        *((), ('fsdp',), ('fsdp',), ('fsdp',))
    ]
    step = HELPER.sjit(any_number, in_shardings=ROWS, batch_argnums=(1, 2), batch_argnames='y')
    assert step.explain_propagation(W, X).axes == step.explain_propagation(W, y=X).axes == ('fsdp',)


def test_indivisible_batches():
    """The policy of the helper applies to explicit batches too, such as the last one of an epoch."""
    helper = MeshShardingHelper([8], ['fsdp'], on_indivisible='replicate')
    step = helper.sjit(layer, in_shardings=(P(), ROWS), batch_argnums=1)
    assert [step.explain_propagation(W, X[:rows]).axes for rows in (16, 15)] == [('fsdp',), ()]
    np.testing.assert_allclose(step(W, X[:15]), layer(W, X[:15]), rtol=1e-6)
    with pytest.raises(ShardingError, match='dimension 0 of size 15 is not divisible by 4'):
        HELPER.sjit(layer, in_shardings=(P(), ROWS), batch_argnums=1)(W, X[:15])


def test_keywords_and_trees():
    def fun(w, *, batch, **more):
        return batch['x'] @ w * batch['n'] + more['y']

    batch = {'x': X, 'n': np.float32(2)}
    step = HELPER.sjit(
        fun,
        in_shardings={'w': RULE, 'batch': {'x': ROWS, 'n': P()}, 'y': ROWS},
        batch_argnames=['batch', 'y'],
    )
    assert step.explain_propagation(W, batch=batch, y=X).axes == ('fsdp',)
    np.testing.assert_array_equal(step(W, batch=batch, y=X), fun(W, batch=batch, y=X))


def test_the_code_runs_once():
    runs = []

    def fun(w, x):
        runs.append(1)
        return x @ w

    step = HELPER.sjit(fun, in_shardings=(RULE, ROWS))
    step(W, X)
    step.explain_propagation(W, X)
    step(W, X)
    assert len(runs) == 1
