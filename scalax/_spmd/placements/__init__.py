"""Placements of values, the rules of primitives that take and give them, and the collectives between them."""
