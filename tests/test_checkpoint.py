"""Checkpoints: what is saved is what is restored, whatever the mesh, or an error says why not."""

from pathlib import Path

import jax
import numpy as np
import pytest

from scalax.checkpoint import Checkpointer
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P


@pytest.fixture
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def test_restores_onto_another_mesh(tmp_path: Path, helper: MeshShardingHelper) -> None:
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() is None
        assert checkpointer.save(3, helper.shard({'x': x}, P('fsdp', 'tp')))
        checkpointer.wait()
        assert checkpointer.latest_step() == 3
    other = MeshShardingHelper([8], ['all'])
    restored = Checkpointer(tmp_path).restore(other, P(None, 'all'), lambda: {'x': jax.numpy.zeros((8, 8))})
    assert restored['x'].sharding.spec == P(None, 'all')
    np.testing.assert_array_equal(restored['x'], x)
