"""The active context: the helper with its bindings, named axes, constraints, and the state of a thread.

Auto axes use `jax.lax.with_sharding_constraint`, Explicit axes `jax.sharding.reshard`. On a mesh with both,
a value is first resharded along its Explicit axes and then constrained along its Auto axes. Manual axes are
removed from the spec. Shardings are always full NamedShardings of the helper's mesh; inside `shard_map`, of
the abstract mesh there, the only mesh that JAX accepts.
"""
