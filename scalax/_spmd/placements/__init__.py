"""Placements of values, sharding rules of primitives, and collectives between placements."""
