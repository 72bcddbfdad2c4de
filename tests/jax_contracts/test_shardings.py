"""Tests that `scalax/_jax/shardings` reads specs in all supported versions of JAX."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scalax._jax import shardings
from tests.support.contracts import contract


def test_entries_of_specs() -> None:
    with contract('has the entries of a spec, also of one with unreduced axes', 'for every rule'):
        for spec in (P('a', None, ('b', 'c')), P('a', None, ('b', 'c'), unreduced={'d'})):
            assert shardings.entries(spec) == ('a', None, ('b', 'c'))
        assert shardings.entries(P()) == ()


def test_kinds_of_sums() -> None:
    with contract('has the kinds of sums as an enum, and "sum" where nothing is said', 'to save reports'):
        assert shardings.unreduced_kind(P(unreduced={'a'})) == 'sum'
        for name, kind in shardings.unreduced_kinds().items():
            assert shardings.unreduced_kind(P(unreduced={'a'}, unreduced_kind=kind)) == name


def test_versions_that_crash_on_deleted_arguments() -> None:
    with contract('has its version as numbers', 'to check for deleted arguments before 0.11.1'):
        assert (jax.__version_info__ < (0, 11, 1)) == shardings.DELETED_ARGUMENTS_CRASH
        assert jax.__version__.startswith(('0.10.', '0.11.0')) == shardings.DELETED_ARGUMENTS_CRASH


@pytest.mark.parametrize('has_devices', [True, False])
def test_programs_compile_for_the_devices_of_a_mesh(has_devices: bool) -> None:
    mesh = Mesh(np.array(jax.devices()), ('x',))
    mesh_to_compile_for = mesh if has_devices else mesh.abstract_mesh

    def program(ask: bool) -> str:
        def fun(x):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                x = jax.lax.with_sharding_constraint(x, P('x'))
                return shardings.compile_for_devices(x, mesh_to_compile_for) if ask else x

        return jax.jit(fun).trace(np.ones(8, np.float32)).lower(lowering_platforms=('cpu',)).as_text()

    with contract('takes the devices of a program from what is in it', 'to run on all of a mesh'):
        assert 'num_partitions = 8' in program(ask=True)
    assert shardings.unconstrained_sharding(np.ones((2, 3)), mesh_to_compile_for).spec == P(
        P.UNCONSTRAINED, P.UNCONSTRAINED
    )


def test_programs_compile_for_the_devices_of_a_shard_map() -> None:
    mesh = Mesh(np.array(jax.devices()), ('x',))

    def fun(x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            x = jax.lax.with_sharding_constraint(x, P('x'))
            return jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P('x'), out_specs=P('x'))(x)

    traced = jax.jit(fun).trace(jax.ShapeDtypeStruct((8,), np.float32))
    with contract('takes the devices of a program from what is in it', 'to run partitioned steps on a mesh'):
        assert 'num_partitions = 8' in traced.lower(lowering_platforms=('cpu',)).as_text()
