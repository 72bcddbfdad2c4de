"""Lowering and compilation of a step for a mesh."""
