"""The dependences of scalax on undocumented behavior of JAX, Pallas, flax and Orbax.

Each dependence is one function, whose docstring says what it relies on. `tests/jax_contracts` has a test of
each, which fails with a sentence if a release changes it. No other package reads the parameters of equations,
imports `jax.extend`, tells errors apart by their texts, or provokes an error of JAX to learn something.
"""
