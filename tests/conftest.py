"""Fixtures shared by the tests. The simulated devices are set up in the conftest.py above."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import jax
import numpy as np
import pytest

# Without deadlines, because tracing and compiling are slow; fixed examples make failures repeatable.
UNTIMED = {'deadline': None, 'suppress_health_check': [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile('scalax', max_examples=100, derandomize=True, **UNTIMED)
# For `make test` and `make check`: the first of the same examples.
hypothesis.settings.register_profile('fewer', max_examples=25, derandomize=True, **UNTIMED)
# For `make fuzz`, with --hypothesis-profile and --hypothesis-seed: examples that differ from the suite's.
hypothesis.settings.register_profile(
    'fuzz',
    max_examples=int(os.environ.get('FUZZ_EXAMPLES', '250')),
    derandomize=False,
    database=None,
    print_blob=True,
    **UNTIMED,
)
hypothesis.settings.load_profile('scalax')


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run (pytest-randomly seeds the global generators)."""
    return np.random.default_rng(0)


@pytest.fixture(scope='module', autouse=True)
def earlier_objects_frozen() -> None:
    """Makes garbage collection fast: it skips objects that are older than the module, such as those of JAX.

    Garbage of earlier modules is freed first. Garbage of this module's tests is freed as usual.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_mesh_left_behind() -> Iterator[None]:
    """Fails a test that leaves an ambient mesh set, because later tests would run on it."""
    yield
    mesh = jax.sharding.get_abstract_mesh()
    assert mesh.empty, f'the test left an ambient mesh behind: {mesh}'


@pytest.fixture(autouse=True)
def no_failed_effects_left_behind() -> Iterator[None]:
    """Fails a test with an unhandled failed callback, because later tests would get its error."""
    yield
    jax.effects_barrier()


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    """A browser that opens pages (`tests.support.browser.Browser`)."""
    from tests.support.browser import browser_or_skip  # imports selenium

    with browser_or_skip(tmp_path_factory.mktemp('profile')) as browser:
        yield browser


@pytest.fixture(scope='module')
def browser_without_scripts(tmp_path_factory):
    """A browser that runs no scripts."""
    from tests.support.browser import browser_or_skip

    with browser_or_skip(tmp_path_factory.mktemp('profile'), scripts=False) as browser:
        yield browser
