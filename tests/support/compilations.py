"""A context without JAX's persistent compilation cache."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Compiles every program again, and caches none on disk."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update('jax_compilation_cache_dir', None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update('jax_compilation_cache_dir', before)
        compilation_cache.reset_cache()
