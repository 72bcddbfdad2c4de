"""Pytrees and PartitionSpecs, without devices.

Leaf paths, trees with named leaves, differences of tree structures, and the validation of specs.
"""
