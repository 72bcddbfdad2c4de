"""A decoder written layer by layer: the cost of its first step, and the number of compilations."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.timing import Row, compare
from scalax.sharding import MeshShardingHelper, TreePathShardingRule, with_sharding_annotation

Constrain = Callable[[jax.Array, str], jax.Array]
Tree = Any

_HEADS, _HEAD_SIZE, _WIDTH, _HIDDEN, _VOCABULARY = 4, 16, 64, 128, 256
_DATA = PartitionSpec('fsdp')
_COLUMNS, _ROWS = PartitionSpec('fsdp', 'tp'), PartitionSpec('tp', 'fsdp')
_SPECS = dict.fromkeys(('embed', 'query', 'key', 'value', 'gate', 'up'), _COLUMNS)
_SPECS |= {'output': _ROWS, 'down': _ROWS}
RULE = TreePathShardingRule(*((name, spec) for name, spec in _SPECS.items()))
ANNOTATIONS = {
    'residual': _DATA,
    'heads': PartitionSpec('fsdp', None, 'tp'),
    'hidden': PartitionSpec('fsdp', None, 'tp'),
}


def mesh_helper() -> MeshShardingHelper:
    return MeshShardingHelper([-1, 2], ['fsdp', 'tp'])


def init(key: jax.Array, layers: int) -> Tree:
    """Initializes a small decoder with separate parameters for each layer."""
    shapes = dict.fromkeys(('query', 'key', 'value', 'output'), (_WIDTH, _WIDTH))
    shapes |= {'gate': (_WIDTH, _HIDDEN), 'up': (_WIDTH, _HIDDEN), 'down': (_HIDDEN, _WIDTH)}

    def layer(key: jax.Array) -> Tree:
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(key, shape) / shape[0] ** 0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    first, *rest = jax.random.split(key, layers + 1)
    embed = jax.random.normal(first, (_VOCABULARY, _WIDTH))
    return {'embed': embed, 'layers': {f'{i:02}': layer(key) for i, key in enumerate(rest)}}


def tokens(rows: int = 8, length: int = 32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, _VOCABULARY, (rows, length), np.int32)


def loss(constrain: Constrain, params: Tree, batch: jax.Array) -> jax.Array:
    """Returns the mean next-token loss; *constrain* shards the activations."""
    x = constrain(params['embed'][batch], 'residual')
    for layer in params['layers'].values():
        x = constrain(x + _attention(constrain, layer, _normed(x)), 'residual')
        normed = _normed(x)
        hidden = jax.nn.silu(normed @ layer['gate']) * (normed @ layer['up'])
        x = constrain(x + constrain(hidden, 'hidden') @ layer['down'], 'residual')
    logits = jax.nn.log_softmax(_normed(x) @ params['embed'].T)
    return -jnp.mean(jnp.take_along_axis(logits[:, :-1], batch[:, 1:, None], -1))


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _attention(constrain: Constrain, layer: Tree, x: jax.Array) -> jax.Array:
    rows, length, _ = x.shape
    query, key, value = (
        constrain((x @ layer[name]).reshape(rows, length, _HEADS, _HEAD_SIZE), 'heads')
        for name in ('query', 'key', 'value')
    )
    scores = jnp.einsum('bqhk,bthk->bhqt', query, key) / _HEAD_SIZE**0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum('bhqt,bthk->bqhk', jax.nn.softmax(scores), value)
    return mixed.reshape(rows, length, _WIDTH) @ layer['output']


def new_step(constrain: Constrain) -> Callable[[Tree, jax.Array], tuple[Tree, jax.Array]]:
    """Returns a train step as a new function object, which JAX has not cached."""

    def step(params: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(functools.partial(loss, constrain))(params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    return step


class ByHand:
    """The code without a library: a NamedSharding for each array."""

    def __init__(self, helper: MeshShardingHelper, params: Tree) -> None:
        sharding_of = functools.partial(NamedSharding, helper.mesh)
        # The last key of a path is the name of the parameter.
        self.params = jax.tree_util.tree_map_with_path(
            lambda path, _: sharding_of(_SPECS[path[-1].key]), params
        )
        self.batch = sharding_of(_DATA)
        self.replicated = sharding_of(PartitionSpec())
        self._activations = {name: sharding_of(spec) for name, spec in ANNOTATIONS.items()}

    def constrain(self, x: jax.Array, name: str) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, self._activations[name])

    def jit(self, step: Callable[..., Any]) -> Any:
        return jax.jit(
            step,
            in_shardings=(self.params, self.batch),
            out_shardings=(self.params, self.replicated),
            donate_argnums=0,
        )


def with_rules(helper: MeshShardingHelper, step: Callable[..., Any]) -> Any:
    """Returns the same step with scalax."""
    return helper.sjit(
        step,
        in_shardings=(RULE, _DATA),
        out_shardings=(RULE, PartitionSpec()),
        annotation_shardings=ANNOTATIONS,
        donate_argnums=0,
    )


def compare_cold(
    name: str,
    ours: Callable[[], object],
    reference: Callable[[], object],
    rounds: int,
    prepare: Callable[[], object],
    aim: float | None = None,
) -> Row:
    """Times steps that compile for seconds, by the CPU time of this process.

    With so few rounds, other load on the machine would dominate the wall time.
    """
    return compare(name, ours, reference, rounds, aim, warmup=0, before=prepare, clock=time.process_time)


def forget() -> None:
    """Clears all caches of traces and compilations, including those of `jax.numpy` functions."""
    jax.clear_caches()
    gc.collect()


def first_step(rounds: int, layers: int = 24) -> list[Row]:
    """Returns the time until the result of the first call, and the part of it outside XLA."""
    helper = mesh_helper()
    host = jax.device_get(init(jax.random.key(0), layers))
    hand = ByHand(helper, host)
    batch = jax.device_put(tokens(), hand.batch)
    params: list[Tree] = []

    def prepare() -> None:
        forget()
        params[:] = [jax.block_until_ready(jax.device_put(host, hand.params))]

    def ours() -> Any:
        return with_rules(helper, new_step(with_sharding_annotation))

    def reference() -> Any:
        return hand.jit(new_step(hand.constrain))

    def called(make: Callable[[], Any]) -> Callable[[], object]:
        return lambda: jax.block_until_ready(make()(*params, batch))

    def lowered(make: Callable[[], Any]) -> Callable[[], object]:
        return lambda: make().lower(*params, batch)

    name = f'decoder of {layers} layers'
    return [
        compare_cold(
            f'first step, {name} (CPU time)',
            called(ours),
            called(reference),
            max(rounds // 500, 1),
            prepare,
            1.03,
        ),
        compare_cold(
            f'of which trace and lower, {name} (CPU time)',
            lowered(ours),
            lowered(reference),
            max(rounds // 400, 1),
            prepare,
        ),
    ]


def three_steps() -> list[Row]:
    """Counts the programs compiled in three train steps, with a compiled init."""
    helper = mesh_helper()
    start = functools.partial(init, layers=1)
    key = jax.random.key(0)
    hand = ByHand(helper, jax.eval_shape(start, key))
    ours = _compilations(
        helper.sjit(start, out_shardings=RULE)(key),
        with_rules(helper, new_step(with_sharding_annotation)),
    )
    reference = _compilations(
        jax.jit(start, out_shardings=hand.params)(key), hand.jit(new_step(hand.constrain))
    )
    return [Row('programs compiled in three train steps', ours, reference, 1, counted=True)]


def _compilations(params: Tree, step: Callable[..., Any]) -> int:
    compiled = 0

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        nonlocal compiled
        compiled += event == '/jax/core/compile/backend_compile_duration'

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(3):
            params, value = step(params, tokens())
            value.block_until_ready()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return compiled
