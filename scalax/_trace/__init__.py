"""What is in force while JAX traces: the active helper and its bindings, the mapping of named axes,
constraints on values.
"""
