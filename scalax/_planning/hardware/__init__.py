"""Specifications of chips and their networks, and positions in a torus."""
