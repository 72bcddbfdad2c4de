"""Operations with custom partitioning: a function of local blocks, and a rule that relates their dimensions.

They run inside and outside ``jax.jit`` on any mesh, and can be differentiated. `MeshShardingHelper.verify`
compares the results on a mesh with the results on one device.

Example:
    >>> from scalax.custom_op import sharded_op
    >>> @sharded_op('b c -> b', reduction_factors=('c',))
    ... def sums(ctx, x):
    ...     return ctx.psum(x.sum(axis=-1), 'c')
"""

from scalax.custom_op._layout import FactorContext
from scalax.custom_op._op import ShardedOp, sharded_op

__all__ = ['FactorContext', 'ShardedOp', 'sharded_op']
