"""The models of the table "unchanged code": the expert's programs compute what one device computes."""

from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.unchanged.catalogue import all_models
from benchmarks.unchanged.model import Model, Strategy
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

ROWS = 8
STRATEGIES = (
    Strategy('FSDP', {'fsdp': 8}, ('fsdp',)),
    Strategy('FSDP x TP', {'fsdp': 4, 'tp': 2}, ('fsdp',)),
)
# Half the time of compiling.
QUICKLY = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


def weights(model: Model) -> Any:
    """Parameters in float32, not compiled."""
    rng = np.random.default_rng(0)

    def values(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        scale = 1 / np.sqrt(np.prod(leaf.shape[-2:-1] or (100,)))
        return (scale * rng.normal(size=leaf.shape) + (leaf.ndim < 2)).astype('float32')

    return jax.tree.map(values, jax.eval_shape(model.init, jax.random.key(0)))


def example(model: Model) -> Any:
    """A batch with values."""
    rows = ROWS * model.rows
    if model.example is not None:
        return model.example(rows)
    rng = np.random.default_rng(1)

    def values(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        whole = np.issubdtype(leaf.dtype, np.integer)
        drawn = rng.integers(0, 8, leaf.shape) if whole else rng.normal(size=leaf.shape)
        return drawn.astype(leaf.dtype)

    return jax.tree.map(values, model.batch(rows))


@pytest.mark.parametrize('model', all_models('small'), ids=lambda model: model.name)
def test_hand_is_one_device(model: Model) -> None:
    params, batch, key = weights(model), example(model), jax.random.key(2)
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype), model.batch(ROWS * model.rows))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), batch) == kinds
    plain = jax.value_and_grad(model.loss, has_aux=model.has_aux)
    wanted = jax.jit(plain, compiler_options=QUICKLY)(params, batch, key)
    wanted = jax.tree.map(np.asarray, wanted)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(wanted))
    assert max(np.max(np.abs(x)) for x in jax.tree.leaves(wanted[1])) > 1e-3

    for strategy in STRATEGIES:
        helper = MeshShardingHelper(list(strategy.mesh.values()), list(strategy.mesh))
        fsdp = model.fsdp_rule or FSDPShardingRule('fsdp', min_fsdp_size=1)
        rule = model.columns_and_rows if 'tp' in strategy.mesh else fsdp

        def loss(params: Any, batch: Any, key: Any, axes: tuple[str, ...] = strategy.batch_axes) -> Any:
            if model.hand_loss is not None:
                return model.hand_loss(params, batch, key, axes)
            return model.loss(params, batch, key)

        step = helper.sjit(
            jax.value_and_grad(loss, has_aux=model.has_aux),
            in_shardings=(rule, strategy.batch(model), P()),
            out_shardings=(P(), rule),
            annotation_shardings={name: strategy.bound(spec) for name, spec in model.hand.items()},
            compiler_options=QUICKLY,
        )
        for one, other in zip(
            jax.tree.leaves(step(params, batch, key)), jax.tree.leaves(wanted), strict=True
        ):
            scale = max(0.1, np.max(np.abs(other)))
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * scale, err_msg=strategy.name)
