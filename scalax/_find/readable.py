from jax.sharding import PartitionSpec
from scalax.rules import TreePathShardingRule


def readable_rule(leaves, front=()):
    return TreePathShardingRule(*[('^' + k + '$', s) for k, (sh, s) in leaves.items()])


def to_code(rule, name='rule'):
    return f'{name} = {rule!r}'
