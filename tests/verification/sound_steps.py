"""Sound steps that look wrong: their results may consist of rounding errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from scalax.sharding import MeshShardingHelper, TreePathShardingRule
from tests.verification.fault import (
    Step,
    integers,
    normal,
    sound,
)
from tests.verification.partitioner_faults import (
    GROUPS,
    NEXT_TOKEN,
    SEQUENCE,
    conv_gradient,
    counts_but_the_last,
    depthwise_gradient,
    largest_but_the_first,
    next_token_gradient,
)
from tests.verification.user_faults import PARAMS, loss_of_rows, mapped


def _batch(helper: MeshShardingHelper, fun: Any, *args: Any) -> Step:
    """Weights that are sharded over both axes, and a batch."""
    rule = TreePathShardingRule(('.*', P('fsdp', 'tp')))
    return helper.sjit(fun, in_shardings=(rule, *[P('fsdp')] * (len(args) - 1))), args


TOKENS = normal(64, 8)
MATRIX = {'w': normal(8, 8, seed=3)}


@sound()
def adam_of_gradients_that_are_zero_but_for_rounding(helper: MeshShardingHelper) -> Step:
    """A bias in front of a softmax changes nothing, but Adam makes whole steps of what rounding leaves."""

    def step(state: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return -jnp.mean(jax.nn.log_softmax(x @ w['w'] + w['shift'].sum())[:, 0])

        w, mean, square = state['w'], state['mean'], state['square']
        gradient = jax.grad(loss)(w)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, gradient)
        w = jax.tree.map(lambda w, m, v: w - 0.1 * m / (jnp.sqrt(v) + 1e-12), w, mean, square)
        return {'w': w, 'mean': mean, 'square': square}

    w = {**MATRIX, 'shift': normal(8, 2)}
    zeros = jax.tree.map(np.zeros_like, w)
    return _batch(helper, step, {'w': w, 'mean': zeros, 'square': zeros}, TOKENS)


@sound()
def squares_of_gradients_that_are_zero_but_for_rounding(helper: MeshShardingHelper) -> Step:
    """A bias in front of a norm over the batch: its gradient is what adding up many terms leaves."""

    def step(state: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = x @ w['w'] + w['shift'].sum(1)
            h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)
            return -jnp.mean(jax.nn.log_softmax(jax.nn.relu(h) @ w['w'])[:, 0])

        gradient = jax.grad(loss)(state['w'])
        square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state['square'], gradient)
        return {'w': state['w'], 'square': square}

    w = {**MATRIX, 'shift': np.zeros((8, 2), np.float32)}
    return _batch(helper, step, {'w': w, 'square': jax.tree.map(np.zeros_like, w)}, normal(1024, 8))


@sound()
def routing_by_top_k_in_bfloat16(helper: MeshShardingHelper) -> Step:
    """Logits that are equal in bfloat16: rounding decides which expert comes first."""

    def step(w: Any, x: Any) -> Any:
        logits = (x @ w['w']).astype(jnp.bfloat16) / 64
        gates, experts = lax.top_k(jax.nn.softmax(logits), 2)
        return {'experts': experts, 'gates': gates, 'load': jnp.bincount(experts.reshape(-1), length=8)}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def largest_of_nearly_equal_logits(helper: MeshShardingHelper) -> Step:
    """Columns of the weight come in pairs that differ by less than rounding does."""

    def step(w: Any, x: Any) -> Any:
        logits = x @ jnp.concatenate([w['w'], w['w'] * (1 + 1e-7)], 1)
        return {'chosen': jnp.argmax(logits, -1), 'order': jnp.argsort(logits, -1)}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def softmax_of_rows_that_are_masked(helper: MeshShardingHelper) -> Step:
    """Exact zeros, and rows that are masked entirely, which are NaN on the mesh and on one device."""

    def step(w: Any, x: Any) -> Any:
        scores = x @ w['w']
        allowed = jnp.arange(8) < (jnp.arange(len(x)) % 9)[:, None]
        weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf))
        return {'weights': weights, 'out': weights @ w['w'].T, 'any': jnp.isnan(weights).any()}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def not_numbers_at_the_same_places(helper: MeshShardingHelper) -> Step:
    """Logarithms of negative numbers, infinities, and zeros with a sign."""

    def step(w: Any, x: Any) -> Any:
        return {'log': jnp.log(x[:, :4]), 'inverse': 1 / jnp.round(x @ w['w']), 'minus': -jnp.zeros_like(x)}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def counts_behind_sums(helper: MeshShardingHelper) -> Step:
    """Integers and booleans that follow sums: how many are right, whether a loss is below a bound."""

    def step(w: Any, x: Any, labels: Any) -> Any:
        logits = x @ w['w']
        loss = jnp.mean(logits**2)
        right = jnp.sum(jnp.argmax(logits, -1) == labels)
        millions = (loss * 1e6).astype(jnp.int32)
        return {'right': right, 'millions': millions, 'is_finite': jnp.isfinite(loss), 'rows': len(x)}

    return _batch(helper, step, MATRIX, TOKENS, integers(8, 64))


@sound()
def sums_in_bfloat16(helper: MeshShardingHelper) -> Step:
    """A mean and a gradient of bfloat16 over all rows: few digits are left."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.tanh(x.astype(jnp.bfloat16) @ w['w']) ** 2, dtype=jnp.bfloat16)

        value, gradient = jax.value_and_grad(loss)(w)
        return {'loss': value, 'gradient': gradient}

    return _batch(helper, step, {'w': MATRIX['w'].astype(jnp.bfloat16)}, TOKENS)


@sound()
def chaos_of_two_hundred_rounds(helper: MeshShardingHelper) -> Step:
    """A logistic map that begins with a mean: its last digit determines the result."""

    def step(w: Any, x: Any) -> Any:
        first = jax.nn.sigmoid(jnp.sum(jnp.tanh(x @ w['w']), 0) / 8)
        last, _ = lax.scan(lambda y, _: (3.9 * y * (1 - y), None), first, None, length=200)
        return {'first': first, 'last': last}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def signs_of_singular_vectors(helper: MeshShardingHelper) -> Step:
    """The singular vectors of equal singular values are not unique."""

    def step(w: Any, x: Any) -> Any:
        moments = x.T @ x / len(x) + jnp.eye(8) * 1e3
        left, values, right = jnp.linalg.svd(moments)
        q, r = jnp.linalg.qr(x.T @ x @ w['w'])
        return {'left': left, 'values': values, 'right': right, 'q': q, 'r': r}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def newton_schulz(helper: MeshShardingHelper) -> Step:
    """Muon's iteration makes small singular values large, also zero ones with rounding errors."""

    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x[:, :2] @ w[:2]) ** 2))(w['w'])
        y = gradient / (jnp.linalg.norm(gradient) + 1e-7)
        for _ in range(5):
            a = y @ y.T
            y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
        return {'w': w['w'] - 0.1 * y}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def variance_of_what_is_far_from_zero(helper: MeshShardingHelper) -> Step:
    """The mean of squares minus the square of the mean, of numbers near a thousand: no digit is right."""

    def step(w: Any, x: Any) -> Any:
        y = x @ w['w'] + 1000
        return {'variance': jnp.mean(y * y, 0) - jnp.mean(y, 0) ** 2}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def branch_by_a_norm_at_its_bound(helper: MeshShardingHelper) -> Step:
    """Clipping at a bound that equals the norm, and a loop that ends when its state converges."""

    def step(w: Any, x: Any) -> Any:
        gradient = jnp.mean(x @ w['w'], 0)
        norm = jnp.linalg.norm(gradient)
        bound = jnp.sqrt(jnp.sum(jnp.sort(gradient) ** 2))
        clipped = lax.cond(norm > bound, lambda g: g * (bound / norm), lambda g: g, gradient)

        def better(state: Any) -> Any:
            root, rounds = state
            return 0.5 * (root + norm / root), rounds + 1

        def is_far(state: Any) -> Any:
            root, rounds = state
            return (jnp.abs(root * root - norm) > 3e-8 * norm) & (rounds < 30)

        root, rounds = lax.while_loop(is_far, better, (norm + 1, 0))
        return {'clipped': clipped, 'root': root, 'rounds': rounds}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def numbers_rounded_to_eight_bits(helper: MeshShardingHelper) -> Step:
    """A product rounded to integers: some differ by one."""

    def step(w: Any, x: Any) -> Any:
        y = (x.T @ x) @ w['w'] @ (x.T @ x)
        scale = jnp.max(jnp.abs(y)) / 127
        return {'int8': jnp.round(y / scale).astype(jnp.int8), 'scale': scale}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def dropout_by_one_key(helper: MeshShardingHelper) -> Step:
    """Random numbers of one key; the next key is exactly equal on the mesh and on one device."""

    def step(w: Any, x: Any) -> Any:
        key, used = jax.random.split(jax.random.key(7))
        kept = jax.random.bernoulli(used, 0.5, x.shape)
        order = jax.random.permutation(used, len(x))
        return {'out': jnp.where(kept, 2 * x, 0) @ w['w'], 'kept': kept, 'order': order, 'key': key}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def sums_over_devices_that_are_right(helper: MeshShardingHelper) -> Step:
    """`jax.shard_map` with all reductions that it needs, and with check_vma=True."""

    def step(params: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda params: lax.pmean(loss_of_rows(params, x), 'fsdp'))(params)
        return {'loss': loss, 'gradient': gradient}

    specs = P(), P('fsdp')
    fun = mapped(helper, step, specs, P(), check_vma=True)
    return helper.sjit(fun, in_shardings=specs), (PARAMS, normal(16, 8))


@sound()
def convolution_that_is_mended(helper: MeshShardingHelper) -> Step:
    """The gradient of a depthwise convolution, as `sjit` mends it."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@sound(mesh=SEQUENCE)
def next_token_loss_that_is_mended(helper: MeshShardingHelper) -> Step:
    """The gradient of a lookup of all tokens but the last, as `sjit` mends it."""
    return helper.sjit(next_token_gradient, in_shardings=(P(), P('fsdp', 'sp'))), NEXT_TOKEN


@sound()
def counts_that_are_mended(helper: MeshShardingHelper) -> Step:
    """Counts of all groups but the last, as `sjit` mends them."""
    return helper.sjit(counts_but_the_last, in_shardings=(P('fsdp'),)), (integers(8, 16),)


@sound()
def maxima_that_are_mended(helper: MeshShardingHelper) -> Step:
    """The maximum of each group, as `sjit` mends it."""
    return helper.sjit(largest_but_the_first, in_shardings=(P('tp'), P('tp'))), GROUPS


@sound()
def state_that_is_donated(helper: MeshShardingHelper) -> Step:
    """A state that is donated, and returned updated."""

    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(lambda w: jnp.mean((x @ w['w']) ** 2))(w))

    rule = TreePathShardingRule(('.*', P('fsdp', 'tp')))
    shardings = {'in_shardings': (rule, P('fsdp')), 'out_shardings': rule}
    return helper.sjit(step, **shardings, donate_argnums=0), (MATRIX, TOKENS)


@sound()
def overflow_of_half_precision(helper: MeshShardingHelper) -> Step:
    """A sum in float16 near its largest number: infinite, or just not, by the order of summands."""

    def step(w: Any, x: Any) -> Any:
        total = jnp.sum(jnp.abs(x @ w['w']).astype(jnp.float16) * 56)
        return {'total': total, 'is_finite': jnp.isfinite(total)}

    return _batch(helper, step, MATRIX, TOKENS)
