"""Utilities that know nothing of sharding.

An LRU cache, the folding of numbered names, renamed keywords, notices about slow work, and which frames of a
stack are the user's.
"""
