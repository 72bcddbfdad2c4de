"""Calls, loops and branches, and loops over examples and microbatches."""
