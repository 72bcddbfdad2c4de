"""What is in force while JAX traces, and what changes the sharding of a value there.

Offers the active helper with its bindings, the mapping of named axes, constraints, resharding, and the
state of a thread for another thread to enter.
"""
