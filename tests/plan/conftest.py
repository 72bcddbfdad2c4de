"""Plans are of programs that the compiler has just made, as users have it make them."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope='module', autouse=True)
def no_cache_of_compilations() -> Iterator[None]:
    """Of a program from a cache the compiler writes nothing down, and plans compile it again."""
    before = {
        'jax_compilation_cache_dir': jax.config.jax_compilation_cache_dir,
        'jax_disable_most_optimizations': jax.config.read('jax_disable_most_optimizations'),
    }
    jax.config.update('jax_compilation_cache_dir', None)
    jax.config.update('jax_disable_most_optimizations', False)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
