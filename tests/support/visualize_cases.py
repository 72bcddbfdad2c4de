"""Leaves with shardings, and their pictures, for the tests of `visualize`."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from scalax.sharding import MeshShardingHelper
from scalax.visualize import visualize

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
POD = AbstractMesh((64, 8, 8), ('data', 'fsdp', 'tp'))
NUMBERS = 'Numbers are ids of CPU devices, in the mesh (fsdp=4, tp=2).'


def leaf(shape, spec, mesh=HELPER.mesh, dtype=jnp.float32, memory_kind=None):
    sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def text(tree, width=80):
    """Returns the picture without the line about device numbers, which all pictures have."""
    drawn = visualize(tree).to_text(width)
    assert max(map(len, drawn.splitlines())) <= width
    picture, _, numbering = drawn.rpartition('\n\n')
    assert numbering == NUMBERS
    return picture
