"""The meshes of these programs, and how they show the sharding of an array."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding

from examples.devices import choose_devices
from scalax.sharding import MeshShardingHelper


def helper_of(rows: int, columns: int, names: tuple[str, str]) -> MeshShardingHelper:
    """A mesh of the first devices."""
    devices = choose_devices()[: rows * columns]
    return MeshShardingHelper([rows, columns], list(names), devices=devices)


def spec_of(x: jax.Array) -> str:
    """The sharding of an array."""
    assert isinstance(x.sharding, NamedSharding)
    return str(x.sharding.spec)
