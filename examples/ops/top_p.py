"""Top-p sampling from a sharded vocabulary, without sorting it.

    python -m examples.ops.top_p

Top-p sampling (Holtzman et al., arXiv:1904.09751, section 3.1) keeps the smallest set of tokens whose
probabilities sum to *p*. The set is given by a threshold for each example, which bisection finds: each
iteration reduces one number per example. The token is then drawn by the Gumbel-max trick, for which each
device sends only its best candidate.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import jax
import jax.numpy as jnp
import numpy as np

from examples.ops.meshes import helper_of, spec_of
from scalax.custom_op import FactorContext, sharded_op
from scalax.sharding import PartitionSpec as P

ITERATIONS = 32


@sharded_op('b v, b v, -> b', reduction_factors=('v',))
def sample_top_p(ctx: FactorContext, logits: jax.Array, noise: jax.Array, p: jax.Array) -> jax.Array:
    """Draws one token for each example, from the smallest set of tokens with the total probability *p*.

    Args:
        ctx: the context.
        logits: the logits of the vocabulary.
        noise: standard Gumbel noise of the same shape.
        p: a number between 0 and 1.
    """
    top = ctx.pmax(logits.max(axis=-1), 'v')[:, None]
    odds = jnp.exp(logits - top)
    total = ctx.psum(odds.sum(axis=-1), 'v')[:, None]

    def bisect(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) / 2
        mass = ctx.psum(jnp.where(odds >= middle, odds, 0).sum(axis=-1), 'v')[:, None]
        is_enough = mass >= p * total
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    # The most probable token has odds of 1. The bounds are computed from *total*, so that they vary over
    # devices like the examples.
    threshold, _ = jax.lax.fori_loop(0, ITERATIONS, bisect, (0 * total, 1 + 0 * total))
    score = jnp.where(odds >= threshold, logits + noise, -jnp.inf)
    best = ctx.pmax(score.max(axis=-1), 'v')
    token = score.argmax(axis=-1) + ctx.index('v') * logits.shape[-1]
    last = jnp.iinfo(token.dtype).max
    return ctx.pmin(jnp.where(score.max(axis=-1) == best, token, last), 'v')


def main() -> None:
    """Draws many tokens, and compares their frequencies with their probabilities."""
    helper = helper_of(2, 4, ('data', 'tp'))
    probabilities = np.array([0.4, 0.3, 0.15, 0.1, 0.02, 0.01, 0.01, 0.01], np.float32)
    samples = 20_000
    logits = helper.shard(np.tile(np.log(probabilities), (samples, 1)), P('data', 'tp'))
    noise = jax.random.gumbel(jax.random.key(0), logits.shape)
    tokens = sample_top_p(logits, noise, 0.8)
    print(f'the tokens are sharded as {spec_of(tokens)}')
    frequencies = np.bincount(np.asarray(tokens), minlength=8) / samples
    expected = np.where(np.arange(8) < 3, probabilities, 0)
    print(f'tokens drawn: {np.flatnonzero(frequencies).tolist()}')
    print(f'as often as they should be: {np.allclose(frequencies, expected / expected.sum(), atol=0.01)}')
    step = helper.sjit(sample_top_p, in_shardings=(P('data', 'tp'), P('data', 'tp'), P()))
    report = helper.verify(step, np.asarray(logits)[:8], np.asarray(noise)[:8], 0.8)
    print(f'the same tokens as on one device: {report.ok}')


if __name__ == '__main__':
    main()
