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
def adam_with_gradients_of_rounding_errors(helper: MeshShardingHelper) -> Step:
    """A bias before a softmax has a gradient of zero, but Adam turns its rounding errors into full steps."""

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
def squared_gradients_of_rounding_errors(helper: MeshShardingHelper) -> Step:
    """A bias before a norm over the batch: its gradient is the rounding error of long sums."""

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
def argmax_of_nearly_equal_logits(helper: MeshShardingHelper) -> Step:
    """The weight has pairs of columns that differ by less than a rounding error."""

    def step(w: Any, x: Any) -> Any:
        logits = x @ jnp.concatenate([w['w'], w['w'] * (1 + 1e-7)], 1)
        return {'chosen': jnp.argmax(logits, -1), 'order': jnp.argsort(logits, -1)}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def softmax_of_fully_masked_rows(helper: MeshShardingHelper) -> Step:
    """Exact zeros, and fully masked rows, which are NaN on the mesh and on one device."""

    def step(w: Any, x: Any) -> Any:
        scores = x @ w['w']
        allowed = jnp.arange(8) < (jnp.arange(len(x)) % 9)[:, None]
        weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf))
        return {'weights': weights, 'out': weights @ w['w'].T, 'any': jnp.isnan(weights).any()}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def nan_infinity_and_signed_zero(helper: MeshShardingHelper) -> Step:
    """Logarithms of negative numbers, infinities, and zeros with a sign."""

    def step(w: Any, x: Any) -> Any:
        return {'log': jnp.log(x[:, :4]), 'inverse': 1 / jnp.round(x @ w['w']), 'minus': -jnp.zeros_like(x)}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def counts_after_sums(helper: MeshShardingHelper) -> Step:
    """Integers and booleans computed from sums: the number of correct labels, whether a loss is finite."""

    def step(w: Any, x: Any, labels: Any) -> Any:
        logits = x @ w['w']
        loss = jnp.mean(logits**2)
        right = jnp.sum(jnp.argmax(logits, -1) == labels)
        millions = (loss * 1e6).astype(jnp.int32)
        return {'right': right, 'millions': millions, 'is_finite': jnp.isfinite(loss), 'rows': len(x)}

    return _batch(helper, step, MATRIX, TOKENS, integers(8, 64))


@sound()
def sums_in_bfloat16(helper: MeshShardingHelper) -> Step:
    """A bfloat16 mean over all rows and its gradient: few digits are significant."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.tanh(x.astype(jnp.bfloat16) @ w['w']) ** 2, dtype=jnp.bfloat16)

        value, gradient = jax.value_and_grad(loss)(w)
        return {'loss': value, 'gradient': gradient}

    return _batch(helper, step, {'w': MATRIX['w'].astype(jnp.bfloat16)}, TOKENS)


@sound()
def chaotic_map_of_200_iterations(helper: MeshShardingHelper) -> Step:
    """A logistic map that starts from a mean: the last digit of the mean determines the result."""

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
    """Muon's iteration amplifies small singular values, including those that are only rounding errors."""

    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x[:, :2] @ w[:2]) ** 2))(w['w'])
        y = gradient / (jnp.linalg.norm(gradient) + 1e-7)
        for _ in range(5):
            a = y @ y.T
            y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
        return {'w': w['w'] - 0.1 * y}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def variance_far_from_zero(helper: MeshShardingHelper) -> Step:
    """The mean of squares minus the squared mean, for values near 1,000: no digit is significant."""

    def step(w: Any, x: Any) -> Any:
        y = x @ w['w'] + 1000
        return {'variance': jnp.mean(y * y, 0) - jnp.mean(y, 0) ** 2}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def clipping_at_a_bound_equal_to_the_norm(helper: MeshShardingHelper) -> Step:
    """Clipping at a bound that equals the norm, and a loop that ends when its state has converged."""

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
def quantization_to_8_bits(helper: MeshShardingHelper) -> Step:
    """A matmul rounded to integers: some differ by one."""

    def step(w: Any, x: Any) -> Any:
        y = (x.T @ x) @ w['w'] @ (x.T @ x)
        scale = jnp.max(jnp.abs(y)) / 127
        return {'int8': jnp.round(y / scale).astype(jnp.int8), 'scale': scale}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def dropout_with_one_key(helper: MeshShardingHelper) -> Step:
    """Random numbers from one key. The next key is exactly equal on the mesh and on one device."""

    def step(w: Any, x: Any) -> Any:
        key, used = jax.random.split(jax.random.key(7))
        kept = jax.random.bernoulli(used, 0.5, x.shape)
        order = jax.random.permutation(used, len(x))
        return {'out': jnp.where(kept, 2 * x, 0) @ w['w'], 'kept': kept, 'order': order, 'key': key}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def correct_sums_over_devices(helper: MeshShardingHelper) -> Step:
    """`jax.shard_map` with all the reductions that it needs, and with check_vma=True."""

    def step(params: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda params: lax.pmean(loss_of_rows(params, x), 'fsdp'))(params)
        return {'loss': loss, 'gradient': gradient}

    specs = P(), P('fsdp')
    fun = mapped(helper, step, specs, P(), check_vma=True)
    return helper.sjit(fun, in_shardings=specs), (PARAMS, normal(16, 8))


@sound()
def convolution_gradient_with_the_workaround(helper: MeshShardingHelper) -> Step:
    """The gradient of a depthwise convolution with sjit's workaround."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@sound(mesh=SEQUENCE)
def next_token_loss_with_the_workaround(helper: MeshShardingHelper) -> Step:
    """The gradient of a lookup of all tokens but the last, with sjit's workaround."""
    return helper.sjit(next_token_gradient, in_shardings=(P(), P('fsdp', 'sp'))), NEXT_TOKEN


@sound()
def counts_with_the_workaround(helper: MeshShardingHelper) -> Step:
    """Counts of all groups but the last, with sjit's workaround."""
    return helper.sjit(counts_but_the_last, in_shardings=(P('fsdp'),)), (integers(8, 16),)


@sound()
def maxima_with_the_workaround(helper: MeshShardingHelper) -> Step:
    """The maximum of each group, with sjit's workaround."""
    return helper.sjit(largest_but_the_first, in_shardings=(P('tp'), P('tp'))), GROUPS


@sound()
def donated_state(helper: MeshShardingHelper) -> Step:
    """A state that is donated, and returned after an update."""

    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(lambda w: jnp.mean((x @ w['w']) ** 2))(w))

    rule = TreePathShardingRule(('.*', P('fsdp', 'tp')))
    shardings = {'in_shardings': (rule, P('fsdp')), 'out_shardings': rule}
    return helper.sjit(step, **shardings, donate_argnums=0), (MATRIX, TOKENS)


@sound()
def overflow_in_float16(helper: MeshShardingHelper) -> Step:
    """A float16 sum near the largest number: whether it overflows depends on the order of the terms."""

    def step(w: Any, x: Any) -> Any:
        total = jnp.sum(jnp.abs(x @ w['w']).astype(jnp.float16) * 56)
        return {'total': total, 'is_finite': jnp.isfinite(total)}

    return _batch(helper, step, MATRIX, TOKENS)
