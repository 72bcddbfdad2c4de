"""Rules for the tests of compositions."""

from __future__ import annotations

import dataclasses

import jax

from scalax.sharding import FSDPShardingRule, ShardingRule, TreePathShardingRule
from scalax.sharding import PartitionSpec as P

FSDP = FSDPShardingRule('fsdp', min_fsdp_size=64)
STRICT_MISS = TreePathShardingRule(('elsewhere', P('tp')))


def specs(helper, rule, tree):
    return jax.tree.map(lambda sharding: sharding.spec, helper.match_sharding_rule(rule, tree))


def last_on_tp(path, leaf):
    return P(*[None] * (len(leaf.shape) - 1), 'tp')


@dataclasses.dataclass(frozen=True)
class FirstOnTp(ShardingRule):
    """A user's rule that has an answer for every leaf."""

    def apply(self, pytree):
        return jax.tree.map(lambda leaf: P('tp'), pytree)
