"""Utilities that know nothing of sharding: an LRU cache, strict JSON, the folding of numbered names."""
