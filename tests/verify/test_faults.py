"""The catalogue of faults is what it says: each shows on a mesh, and what changes no value does not."""

import warnings

import jax
import numpy as np
import pytest

from scalax.errors import FollowingWarning
from tests.verify.faults import FAULTS, SOUND, Fault

HARMLESS = [name for name, each in SOUND.items() if each.is_seeded]


def results(step, args):
    """The leaves of what a step returns, by path; keys as their data."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(step(*args))
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {
        jax.tree_util.keystr(path): jax.random.key_data(leaf) if is_key(leaf) else leaf
        for path, leaf in leaves
        if isinstance(leaf, jax.Array)
    }


def largest_error(fault: Fault) -> float:
    """Of all leaves, on all devices, in units of the largest value of a leaf on one device."""
    with fault.seeded():
        found = results(*fault.make(fault.helper()))
    expected = results(*fault.make(fault.one_device()))
    assert found.keys() == expected.keys()
    errors = [0.0]
    for path, whole in expected.items():
        right = np.asarray(whole).astype(np.float64)
        for shard in found[path].addressable_shards:
            errors.append(np.abs(np.asarray(shard.data).astype(np.float64) - right[shard.index]).max())
            errors[-1] /= np.abs(right).max() or 1
    return max(errors)


@pytest.mark.parametrize('name', FAULTS)
def test_faults_show_on_a_mesh(name):
    fault = FAULTS[name]
    if fault.raises:
        with pytest.raises(RuntimeError, match=fault.raises):
            largest_error(fault)
        return
    with warnings.catch_warnings():
        warnings.simplefilter('error', FollowingWarning)  # then the fault would not be there
        error = largest_error(fault)
    assert error > 0.02 if fault.shows else error < 1e-4


@pytest.mark.parametrize('name', HARMLESS)
def test_mistakes_about_where_values_are_change_no_value(name):
    with warnings.catch_warnings():
        warnings.simplefilter('error', FollowingWarning)
        assert largest_error(SOUND[name]) < 1e-4


def test_ten_primitives_have_a_wrong_trail_that_changes_values():
    assert len([name for name in FAULTS if name.startswith('wrong_trail_of_')]) >= 10


def test_at_least_five_faults_are_those_of_the_partitioner_here():
    assert len([each for each in FAULTS.values() if each.kind == 'partitioner' and each.shows]) >= 5
