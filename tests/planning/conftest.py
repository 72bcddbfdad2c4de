"""Plans are of programs that the compiler has just made, as users have it make them."""

from collections.abc import Iterator

import jax
import pytest

from tests.support import compilations


@pytest.fixture(scope='module', autouse=True)
def compiled_as_users_do() -> Iterator[None]:
    """Of a program from a cache the compiler writes nothing down, and plans compile it again."""
    before = jax.config.read('jax_disable_most_optimizations')
    jax.config.update('jax_disable_most_optimizations', False)
    with compilations.anew():
        yield
    jax.config.update('jax_disable_most_optimizations', before)
