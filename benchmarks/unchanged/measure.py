"""The table: communication, memory and time of a step of each model, plain, partitioned and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from benchmarks.unchanged.model import Loss, Model, Strategy
from scalax.plan import Collective, Plan, make_plan
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

VARIANTS = ('plain', 'partitioned', 'hand')


def arguments(
    model: Model, rows: int, optimizer: optax.GradientTransformation | None = None
) -> tuple[Any, ...]:
    """Returns the arguments of a training step: (params, optimizer state), batch, key."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    state = params, jax.eval_shape((optimizer or model.optimizer).init, params)
    return state, model.batch(rows), jax.ShapeDtypeStruct((), jax.random.key(0).dtype)


def training_step(
    model: Model, loss: Loss, optimizer: optax.GradientTransformation | None = None
) -> Callable[..., Any]:
    """Returns a step for one device."""
    chosen = optimizer or model.optimizer

    def step(state: Any, batch: Any, key: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss, has_aux=model.has_aux)(params, batch, key)
        updates, opt_state = chosen.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def make_step(
    model: Model, strategy: Strategy, helper: MeshShardingHelper, variant: str, rows: int
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a training step on a mesh, and its arguments."""
    rule, batch = strategy.rule(model), strategy.batch(model)
    by_hand = model.hand_loss if variant == 'hand' else None

    def loss(params: Any, batch: Any, key: Any) -> Any:
        if by_hand is not None:
            return by_hand(params, batch, key, strategy.batch_axes)
        return model.loss(params, batch, key)

    optimizer = model.optimizer
    if variant == 'hand' and model.hand_optimizer is not None:
        optimizer = model.hand_optimizer(helper.mesh.shape)
    named = {name: strategy.bound(spec) for name, spec in model.hand.items()} if variant == 'hand' else {}
    fun = helper.sjit(
        training_step(model, loss, optimizer),
        in_shardings=(rule, batch, P()),
        out_shardings=(rule, P()),
        annotation_shardings=named,
        donate_argnums=0,
        batch_argnums=1 if variant == 'partitioned' else (),
    )
    return fun, arguments(model, rows, optimizer)


def plan(model: Model, strategy: Strategy, topology: str, variant: str) -> Plan:
    """Returns the quick plan of one cell of the table."""
    helper = strategy.helper(topology)
    step, args = make_step(model, strategy, helper, variant, model.rows * helper.mesh.size)
    return make_plan(helper, step, args, {}, quick=True)


def figures(step_plan: Plan) -> dict[str, float]:
    """Returns GiB sent by a device, GiB at its peak, and serial and overlapped roofline seconds."""
    seconds = step_plan.roofline().step_seconds
    return {
        'moved': sum(map(sent, step_plan.collectives)) / 2**30,
        'peak': step_plan.memory.peak / 2**30,
        'estimate': seconds.serial,
        'bound': seconds.overlapped,
    }


def sent(row: Collective) -> float:
    """Returns the bytes that a device sends around a ring.

    A ring of permutes sends as much as an all-gather; an all-reduce as much as a reduce-scatter and a gather.
    """
    total_bytes, devices = row.bytes * row.count, row.group
    if row.kind == 'collective-permute':
        return total_bytes / devices
    others = total_bytes * (devices - 1) / devices
    if row.kind in ('all-to-all', 'ragged-all-to-all'):
        return others / devices
    return 2 * others if row.kind == 'all-reduce' else others
