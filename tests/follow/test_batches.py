"""Which arguments are batches, and how users say it."""

import jax.numpy as jnp
import numpy as np
import pytest

from scalax.errors import ArgumentError
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([2, 4], ['data', 'fsdp'])
RULE = FSDPShardingRule(min_fsdp_size=1)
W, X = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
ROWS = P('fsdp')


def layer(w, x):
    return jnp.tanh(x @ w)


def axes(*args, fun=layer, **options):
    return HELPER.sjit(fun, **options).followed(*(args or (W, X))).axes


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        ({'in_shardings': (RULE, ROWS)}, ('fsdp',)),
        ({'in_shardings': {'w': RULE, 'x': ROWS}}, ('fsdp',)),
        ({'in_shardings': (RULE, P(('data', 'fsdp')))}, ('data', 'fsdp')),
        ({'in_shardings': (RULE, P('fsdp', 'data'))}, ('data', 'fsdp')),
        ({'in_shardings': (RULE, P())}, ()),
        ({'in_shardings': (P(), ROWS)}, ()),  # all by specs
        ({'in_shardings': (RULE, ROWS), 'donate_argnums': 1}, ()),
        ({'args_sharding_constraint': (RULE, ROWS)}, ('fsdp',)),
        ({'in_shardings': (RULE, ROWS), 'batch_argnums': ()}, ()),
        ({'in_shardings': (P(), ROWS), 'batch_argnums': 1}, ('fsdp',)),
        ({'in_shardings': (P(), ROWS), 'batch_argnums': -1}, ('fsdp',)),
        ({'in_shardings': (P(), ROWS), 'batch_argnames': 'x'}, ('fsdp',)),
    ],
)
def test_what_is_a_batch(options, expected):
    assert axes(**options) == expected


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'batch_argnames': 'y'}, "batch_argnames='y': layer has no such argument"),
        ({'batch_argnums': 2}, 'batch_argnums=2: layer takes 2'),
        ({'batch_argnums': 1, 'static_argnums': 1}, 'cannot be both static and a batch'),
        ({'batch_argnums': 1, 'in_shardings': (RULE, P())}, 'is said to be a batch'),
    ],
)
def test_what_cannot_be_one(options, message):
    with pytest.raises(ArgumentError, match=message):
        axes(**options)


def test_keywords_and_trees():
    def fun(w, *, batch, **more):
        return batch['x'] @ w * batch['n'] + more['y']

    batch = {'x': X, 'n': np.float32(2)}
    step = HELPER.sjit(
        fun,
        in_shardings={'w': RULE, 'batch': {'x': ROWS, 'n': P()}, 'y': ROWS},
        batch_argnames=['batch', 'y'],
    )
    assert step.followed(W, batch=batch, y=X).axes == ('fsdp',)
    np.testing.assert_array_equal(step(W, batch=batch, y=X), fun(W, batch=batch, y=X))


def test_the_code_runs_once():
    runs = []

    def fun(w, x):
        runs.append(1)
        return x @ w

    step = HELPER.sjit(fun, in_shardings=(RULE, ROWS))
    step(W, X)
    step.followed(W, X)
    step(W, X)
    assert len(runs) == 1
