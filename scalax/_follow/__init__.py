"""Following the batch: which values of a jaxpr hold its rows, and constraints that keep these where they are.

`follow` edits the jaxpr of a function.
"""
