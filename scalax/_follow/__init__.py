"""Activation sharding propagation: where the batch is in a jaxpr, and constraints that keep it there.

`follow` edits the jaxpr of a function.
"""
