"""A failed comparison of plans or reports shows both tables."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scalax.sharding import MeshShardingHelper

HELPER = MeshShardingHelper([8], ['fsdp'])


def test_reports() -> None:
    sharded, replicated = (HELPER.explain({'w': np.zeros((8, 8))}, spec) for spec in (P('fsdp'), P()))
    with pytest.raises(AssertionError) as caught:
        assert sharded == replicated
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert 'two ShardingReports differ (- left, + right):' in str(caught.value)
    assert ['-', 'w'] in [line[:2] for line in lines] and ['+', 'w'] in [line[:2] for line in lines]


def test_plans() -> None:
    step = HELPER.sjit(lambda x: x.sum(), in_shardings=P('fsdp'))
    plan = HELPER.plan(step, jax.ShapeDtypeStruct((64, 64), np.float32))
    with pytest.raises(AssertionError, match=r'two Plans differ \(- left, \+ right\):'):
        assert plan == dataclasses.replace(plan, collectives=())
