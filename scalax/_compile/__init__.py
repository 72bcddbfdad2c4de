"""Transformations of a user's function: `sjit`, `shard_map`, `microbatch`.

`call` holds what they share: the signature of a call, the shardings of its arguments, their placement.

`shard_map` is `jax.shard_map` plus rules, moves, and names in errors. The manual axes (`axis_names`) of a
leaf's sharding become the spec for JAX; the other axes become the sharding of the global array, before and
after. Along manual axes of type Auto, JAX reshards arguments itself; along Explicit axes they are resharded
first. The specs of outputs are needed before the outputs exist, so the function is traced once, as one
jitted function, to learn them; the second trace by JAX finds the first. Rules for outputs see ranks only.

The functions that `shard_map` and `microbatch` return run in the trace of their caller. Outside of compiled
functions they are compiled (`deferred_jit`), and arguments of `shard_map` are placed on the mesh first: with
host data alone, JAX would silently compute on one device.
"""
