"""Compiles programs as users do: without a cache."""

from collections.abc import Iterator

import jax
import pytest

from tests.support import compilations


@pytest.fixture(scope='module', autouse=True)
def compiled_as_users_do() -> Iterator[None]:
    """The compiler writes no dump for a cached program, so plans would compile it again."""
    before = jax.config.read('jax_disable_most_optimizations')
    jax.config.update('jax_disable_most_optimizations', False)
    with compilations.anew():
        yield
    jax.config.update('jax_disable_most_optimizations', before)
