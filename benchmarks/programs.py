"""The cost of plans compared with compiling, and of microbatches compared with hand-written accumulation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import decoder
from benchmarks.timing import Row, compare
from scalax import microbatch
from scalax.sharding import with_sharding_annotation


def plans(rounds: int, layers: int = 24) -> list[Row]:
    """Times a plan, which compiles the program and reads it, against the compilation alone."""
    helper = decoder.mesh_helper()
    params = jax.eval_shape(functools.partial(decoder.init, layers=layers), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((8, 32), np.int32)
    hand = decoder.ByHand(helper, params)

    def ours() -> object:
        step = decoder.with_rules(helper, decoder.new_step(with_sharding_annotation))
        return helper.plan(step, params, batch)

    def reference() -> object:
        step = hand.jit(decoder.new_step(hand.constrain))
        return step.lower(params, batch).compile()

    name = f'plan of a decoder of {layers} layers, against lower and compile (CPU time)'
    return [decoder.compare_cold(name, ours, reference, max(rounds // 600, 1), decoder.forget)]


def microbatches(rounds: int, layers: int = 4, parts: int = 4) -> list[Row]:
    """Times gradients accumulated over microbatches, against a hand-written loop."""
    helper = decoder.mesh_helper()
    params = decoder.init(jax.random.key(0), layers)
    hand = decoder.ByHand(helper, params)
    params = jax.device_put(params, hand.params)
    batch = jax.device_put(decoder.tokens(64), hand.batch)

    compiled = helper.sjit(
        microbatch(jax.value_and_grad(functools.partial(decoder.loss, with_sharding_annotation)), parts),
        in_shardings=(decoder.RULE, decoder.ANNOTATIONS['residual']),
        out_shardings=(None, decoder.RULE),
        annotation_shardings=decoder.ANNOTATIONS,
    )
    grads_of = jax.value_and_grad(functools.partial(decoder.loss, hand.constrain))

    def accumulated(params: decoder.Tree, batch: jax.Array) -> decoder.Tree:
        # Takes every `parts`-th row, so that each device keeps its own rows.
        stacked = jnp.moveaxis(batch.reshape(-1, parts, batch.shape[1]), 1, 0)

        def add(sums: decoder.Tree, part: jax.Array) -> tuple[decoder.Tree, None]:
            return jax.tree.map(jnp.add, sums, grads_of(params, part)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(add, zeros, stacked)
        return jax.tree.map(lambda leaf: leaf / parts, sums)

    by_hand = jax.jit(accumulated, in_shardings=(hand.params, hand.batch), out_shardings=(None, hand.params))
    return [
        compare(
            f'microbatch in {parts} parts, decoder of {layers} layers',
            lambda: jax.block_until_ready(compiled(params, batch)),
            lambda: jax.block_until_ready(by_hand(params, batch)),
            max(rounds // 20, 5),
        )
    ]
