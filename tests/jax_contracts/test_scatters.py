"""Scatters of unevenly sharded updates, which `scalax/_compile/xla_workarounds/scatter_padding` corrects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._compile.xla_workarounds.rewrite import apply_workarounds
from scalax._jax import rewriting
from tests.support.contracts import contract


@pytest.mark.medium
def test_xla_counts_padding_of_updates_as_updates() -> None:
    """If this fails, XLA has fixed the bug, and `scatter_padding` can be removed."""
    mesh = jax.make_mesh((4, 2), ('x', 'y'), axis_types=(AxisType.Auto,) * 2)
    groups = jnp.arange(16) % 8
    split = jax.device_put(groups, NamedSharding(mesh, P('x')))

    def counts(groups: jax.Array) -> jax.Array:
        return jnp.bincount(groups[:-1], length=8)

    def corrected(groups: jax.Array) -> jax.Array:
        jaxpr = apply_workarounds(jax.make_jaxpr(counts)(groups), mesh, [], name='f')
        [result] = rewriting.eval_jaxpr(jaxpr, [groups])
        return result

    expected = counts(groups)
    with contract('counts what is in the padding', 'to work around it', library='jaxlib'):
        assert jax.jit(counts)(split).sum() > 15
    with contract('splits them evenly behind a pad', 'to work around it', library='jaxlib'):
        np.testing.assert_array_equal(jax.jit(corrected)(split), expected)


def test_xla_computes_nonzero_wrong_along_a_padded_dimension() -> None:
    mesh = jax.make_mesh((2, 4), ('x', 'y'), axis_types=(AxisType.Auto,) * 2)
    mask = np.arange(9) % 2 == 0

    def nonzero_positions(mask: jax.Array) -> jax.Array:
        split = jax.lax.with_sharding_constraint(mask, NamedSharding(mesh, P('y')))
        return jnp.nonzero(split, size=5)[0]

    with contract('finds other places', 'no policy pads, and a warning says so', library='jaxlib'):
        assert jax.jit(nonzero_positions)(mask).tolist() != [0, 2, 4, 6, 8]
