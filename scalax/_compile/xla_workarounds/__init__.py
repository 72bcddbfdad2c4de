"""Workarounds for operations that XLA's partitioner computes incorrectly.

`rewrite` applies them to a jaxpr. `grouped_convolutions` replaces convolutions with groups, and
`scatter_padding` replaces scatters whose updates may be sharded unevenly. A contract test for each reports
when XLA no longer needs it.
"""
