"""Partitioning of calls, branches and loops."""
