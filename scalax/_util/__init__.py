"""Utilities that know nothing of sharding.

Offers an LRU cache, strict JSON, the folding of numbered names, and renamed keywords.
"""
