"""Compilations that are not taken from the folder in which a run of tests keeps its own."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """A context manager in which every program is compiled, and none is written down."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update('jax_compilation_cache_dir', None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update('jax_compilation_cache_dir', before)
        compilation_cache.reset_cache()
