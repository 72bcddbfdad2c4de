"""Decoding with a KV cache whose heads are not divisible by the mesh axis of the heads."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.sharding import MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P
from tests.support import tpu_compiler

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, LENGTH, VOCABULARY, EXAMPLES = 3, 32, 8, 2, 8, 32, 64, 4
SHAPES = {
    'embed': (VOCABULARY, WIDTH),
    'q': (LAYERS, WIDTH, HEADS, HEAD),
    'kv': (LAYERS, WIDTH, 2, KV_HEADS, HEAD),
    'out': (LAYERS, HEADS, HEAD, WIDTH),
}
CACHE = (LAYERS, 2, EXAMPLES, LENGTH, KV_HEADS, HEAD)
BY_HEAD = TreePathShardingRule(
    ('embed', P('tp')),
    ('^q', P(None, None, 'tp')),
    ('^kv', P(None, None, None, 'tp')),
    ('^out', P(None, 'tp')),
    on_indivisible='replicate',
)
KV = TreePathShardingRule(('.*', P(None, None, 'fsdp', None, 'tp')), on_indivisible='replicate')


def sliced(cache: jax.Array, new: jax.Array, start: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(cache, new, start, axis=2)


def scattered(cache: jax.Array, new: jax.Array, start: Any) -> jax.Array:
    return cache.at[:, :, start + jnp.arange(new.shape[2])].set(new)


def selected(cache: jax.Array, new: jax.Array, start: Any) -> jax.Array:
    return jnp.where((jnp.arange(LENGTH) == start)[:, None, None], new, cache)


def decoder(update: Callable[..., jax.Array], *, inner_jit: bool = False) -> Callable[..., Any]:
    def decode(params: Any, cache: jax.Array, tokens: jax.Array, start: Any) -> Any:
        def block(x: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
            q, kv, out, cache = layer
            cache = update(cache, jnp.einsum('btd,dchk->cbthk', x, kv), start)
            seen = jnp.arange(LENGTH) <= start + jnp.arange(tokens.shape[1])[:, None]
            heads = jax.nn.dot_product_attention(jnp.einsum('btd,dhk->bthk', x, q), *cache, mask=seen)
            return x + jnp.einsum('bthk,hkd->btd', heads, out), cache

        x, cache = jax.lax.scan(
            block, params['embed'][tokens], (params['q'], params['kv'], params['out'], cache)
        )
        return (x[:, -1:] @ params['embed'].T).argmax(-1), cache

    return jax.jit(decode) if inner_jit else decode


def step_of(helper: MeshShardingHelper, decode: Callable[..., Any]) -> Any:
    return helper.sjit(
        lambda params, cache, tokens, start: decode(params, cache, tokens, start),
        in_shardings=(BY_HEAD, KV, P('fsdp'), None),
        out_shardings=(P('fsdp'), KV),
        donate_argnames='cache',
        batch_argnames='tokens',
    )


def structs() -> tuple[Any, ...]:
    params = {name: jax.ShapeDtypeStruct(shape, 'float32') for name, shape in SHAPES.items()}
    token = jax.ShapeDtypeStruct((EXAMPLES, 1), 'int32')
    return params, jax.ShapeDtypeStruct(CACHE, 'float32'), token, jax.ShapeDtypeStruct((), 'int32')


def largest_gather(plan: Any) -> float:
    """Returns the bytes that a device receives in the largest all-gather."""
    sizes = [kinds.get('all-gather', 0) for kinds in plan.totals.values()]
    return max(sizes, default=0)


@pytest.mark.medium
@pytest.mark.parametrize(
    ('update', 'inner_jit'), [(sliced, False), (sliced, True), (scattered, False), (selected, False)]
)
def test_a_cache_with_equal_shardings_at_both_ends_is_not_gathered(update: Any, inner_jit: bool) -> None:
    helper = MeshShardingHelper([2, 4], ['fsdp', 'tp'])
    decode = decoder(update, inner_jit=inner_jit)
    step = step_of(helper, decode)
    one_layer = 4 * np.prod(CACHE[1:]) // 2  # bytes on a device
    assert largest_gather(helper.plan(step, *structs())) < one_layer / 4
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype('float32') / 4 for name, shape in SHAPES.items()}
    cache, token = np.zeros(CACHE, 'float32'), np.ones((EXAMPLES, 1), 'int32')
    expected_cache, expected = cache, token
    for position in range(3):
        token, cache = step(params, cache, token, position)
        expected, expected_cache = jax.jit(decode)(params, expected_cache, expected, position)
        np.testing.assert_array_equal(token, expected)
        np.testing.assert_allclose(cache, expected_cache, rtol=1e-5, atol=1e-5)
        assert cache.sharding.is_equivalent_to(helper.match_sharding_rule(KV, cache), cache.ndim)


@pytest.mark.medium
@tpu_compiler.needed
def test_nor_is_it_on_a_tpu() -> None:
    helper = MeshShardingHelper.from_topology('v5e:4x2', [2, 4], ['fsdp', 'tp'])
    plan = helper.plan(step_of(helper, decoder(sliced)), *structs())
    assert largest_gather(plan) < 4 * np.prod(CACHE[1:]) / 8
