"""Tests that `scalax/_jax/weak_types` makes weakly typed arrays."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._jax.weak_types import weakly_typed
from tests.support.contracts import contract


@pytest.mark.parametrize('memory', ['device', 'pinned_host'])
@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ('value', 'spec'),
    [
        (np.int32(3), P()),
        (np.int64(2**40), P()),
        (np.float32(0.1), P()),
        (np.float16(0.5), P()),
        (np.arange(8, dtype=np.float32), P('x')),
    ],
    ids=str,
)
def test_placed_arrays_become_weakly_typed(value, spec, axis_type, memory) -> None:
    mesh = Mesh(np.array(jax.devices()), ('x',), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, spec, memory_kind=memory)
    with jax.enable_x64(True):
        array = jax.device_put(value, sharding)
    with contract('takes an array for a weakly typed argument of a compiled program', 'to keep weak types'):
        weak = weakly_typed(array)
        assert (array.weak_type, weak.weak_type) == (False, True)
        assert weak.sharding == sharding
        assert weak.dtype == value.dtype
        np.testing.assert_array_equal(weak, value)
        assert weakly_typed(weak) is weak


def test_arrays_without_elements_stay_as_they_are() -> None:
    empty = jax.device_put(
        np.zeros((8, 0), np.float32), NamedSharding(Mesh(np.array(jax.devices()), ('x',)), P('x'))
    )
    assert weakly_typed(empty) is empty
