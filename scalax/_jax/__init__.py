"""What scalax knows of JAX, Pallas, flax and Orbax that no documentation promises.

Each dependence is one function, whose docstring says on what it relies; `tests/jax_contracts` holds a test
for each, which fails with a sentence where a release changes it. No other package reads the parameters of
equations, imports `jax.extend`, tells errors apart by their texts, or asks JAX a question by its error.
"""
