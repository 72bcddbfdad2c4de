"""Equations of constraints: made once for a sharding and a mesh in force, and right under another one."""

import jax
from jax.sharding import PartitionSpec

from scalax._follow.constraint import _template, constraint
from scalax.sharding import MeshShardingHelper

SPEC = PartitionSpec('fsdp', PartitionSpec.UNCONSTRAINED)


def test_what_is_kept_is_for_one_sharding_and_one_mesh_in_force() -> None:
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    [var] = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct((64, 32), 'float32')).jaxpr.invars

    def made(spec: PartitionSpec, ambient: jax.sharding.AbstractMesh) -> dict:
        with jax.sharding.use_abstract_mesh(ambient):
            equation = constraint(var, spec, helper.mesh, None)
            assert equation.outvars[0].aval == var.aval
            return dict(equation.params)

    _template.cache_clear()
    first = made(SPEC, helper.mesh.abstract_mesh)
    assert made(SPEC, helper.mesh.abstract_mesh) == first
    assert _template.cache_info().misses == 1
    closed = made(PartitionSpec('fsdp', None), helper.mesh.abstract_mesh)
    assert [dict(each)['unconstrained_dims'] for each in (first, closed)] == [frozenset({1}), frozenset()]
    made(SPEC, jax.sharding.AbstractMesh((), ()))
    assert _template.cache_info().misses == 3
