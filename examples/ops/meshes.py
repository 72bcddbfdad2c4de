"""The meshes of these programs, and the text of an array's sharding."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding

from examples.devices import choose_devices
from scalax.sharding import MeshShardingHelper


def helper_of(rows: int, columns: int, names: tuple[str, str]) -> MeshShardingHelper:
    """Returns a helper for a mesh of the first devices."""
    devices = choose_devices()[: rows * columns]
    return MeshShardingHelper([rows, columns], list(names), devices=devices)


def spec_of(x: jax.Array) -> str:
    """Returns the spec of an array as text."""
    assert isinstance(x.sharding, NamedSharding)
    return str(x.sharding.spec)
