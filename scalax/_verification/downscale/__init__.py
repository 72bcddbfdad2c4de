"""A step for a large mesh as a small step that stands for it."""
