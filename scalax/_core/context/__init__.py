"""What is in force while JAX traces: the active helper with its bindings, and the mapping of named axes.

Also constraints, resharding, and the state of a thread for another thread to enter.
"""
