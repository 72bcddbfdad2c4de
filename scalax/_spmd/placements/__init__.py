"""Placements of values, the rules of primitives that take and give them, and conversions between them."""
