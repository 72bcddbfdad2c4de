"""Tests that `scalax/_jax/custom_partitioning` reads the equations of `custom_partitioning`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._jax.custom_partitioning import as_shard_map
from scalax._jax.equations import all_equations, shard_map_in_specs, shard_map_out_specs
from tests.support.contracts import contract, equation_in

MESH = AbstractMesh((2, 4), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)
X = np.ones((4, 8), np.float32)


def sine(x, y, scale):
    return {'sine': jnp.sin(x) * scale, 'sum': y.sum(1)}


def partition(scale, mesh, operands, results):
    operand = NamedSharding(mesh, P(*operands[0].sharding.spec[:1]))
    shardings = {name: result.sharding for name, result in results.items()}
    return mesh, lambda x, y: sine(x, y, scale), shardings, (operand,) * 2


def called(rule):
    call = custom_partitioning(sine, static_argnums=(2,))
    call.def_partition(partition, sharding_rule=rule)
    return equation_in('custom_partitioning', lambda x, y: call(x, y, 3), X, X)


def test_custom_partitioning_becomes_a_shard_map() -> None:
    with (
        contract('has the parameters of custom_partitioning', 'to run its function on blocks'),
        jax.sharding.use_abstract_mesh(MESH),
    ):
        mapped = as_shard_map(called('b c, b d -> b c, b'), [P('a', 'b'), P('a')], MESH)
        assert (shard_map_in_specs(mapped), shard_map_out_specs(mapped)) == (
            (P('a'),) * 2,
            (P('a', 'b'), P('a')),
        )
        assert next(all_equations(mapped.params['jaxpr'])).primitive.name == 'sin'


def test_a_sharding_rule_with_an_ellipsis_gives_no_shard_map() -> None:
    with contract('has the factors of dimensions in the sharding rule', 'to run its function on blocks'):
        equation = called('..., b d -> ..., b')
        assert as_shard_map(equation, [P('a')] * 2, MESH) is None
