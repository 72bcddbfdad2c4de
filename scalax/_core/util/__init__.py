"""Utilities that are independent of sharding.

An LRU cache, folding of numbered names, renamed keywords, progress lines, strict JSON, stack space, and the
user's frames of a stack.
"""
