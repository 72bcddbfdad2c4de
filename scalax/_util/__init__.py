"""Utilities that know nothing of sharding.

Offers an LRU cache, strict JSON, the folding of numbered names, renamed keywords, what is said while
something takes long, and which frames of a stack are the user's.
"""
