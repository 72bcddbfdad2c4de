"""Benchmarks of scalax against hand-written JAX: ``make bench``."""
