"""The decoder of the published steps: its training step, sharded by hand.

Weights and AdamW moments are float32, matmuls bfloat16. Attention uses cuDNN if ``nvidia-cudnn-cu12`` is
installed and the loader finds it. Otherwise tanh(q * k * v) replaces the kernel: it reads and writes the
same arrays in both passes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import scalax
from scalax.sharding import MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P

Weights = dict[str, Any]
Recomputed = Literal['nothing', 'elementwise', 'layers']
# The axes that shard rows, and the axes that shard weights. Experts are sharded over axes of the rows.
ROWS = ('data', 'fsdp', 'expert')
SPLIT = ('fsdp', 'expert')
AXES = [*ROWS, 'tp']


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder; its matrices have no biases.

    Attributes:
        layers: the number of layers.
        width: the width of the residual stream.
        heads: the number of query heads.
        groups: the number of key and value heads.
        hidden: the units of the feed-forward block.
        vocabulary: the size of the vocabulary.
        gated: whether the feed-forward block has a third matrix (SwiGLU).
        tied: whether the embedding table also computes the logits.
        head: the size of a head.
        experts: the number of experts of the feed-forward block; 0: it is dense. Each has *expert_hidden*
            units. *chosen* experts process a token, and a shared block of *hidden* units processes all.
    """

    layers: int
    width: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    head: int = 128
    experts: int = 0
    chosen: int = 0
    expert_hidden: int = 0

    @property
    def weights(self) -> Weights:
        """Returns the shapes of the weights; those of layers are stacked."""
        inner = self.heads * self.head
        shapes: dict[str, tuple[int, ...]] = {
            'query': (self.width, inner),
            'key': (self.width, self.groups * self.head),
            'value': (self.width, self.groups * self.head),
            'output': (inner, self.width),
            **({'gate': (self.width, self.hidden)} if self.gated else {}),
            'up': (self.width, self.hidden),
            'down': (self.hidden, self.width),
        }
        if self.experts:
            into = (self.experts, self.width, self.expert_hidden)
            outof = (self.experts, self.expert_hidden, self.width)
            shapes |= {'router': (self.width, self.experts)}
            shapes |= {'expert_gate': into, 'expert_up': into, 'expert_down': outof}
        stacked = {name: (self.layers, *shape) for name, shape in shapes.items()}
        weight_shapes: Weights = {'layers': stacked, 'embed': (self.vocabulary, self.width)}
        if not self.tied:
            weight_shapes['last'] = (self.vocabulary, self.width)
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            weight_shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )

    @property
    def parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.weights))

    def attention_flops(self, tokens: int, length: int, recomputed: bool) -> int:
        """Counts half of all pairs: two matmuls forward, five backward, which recomputes the scores."""
        return (9 if recomputed else 7) * self.layers * self.heads * self.head * length * tokens


WEIGHTS = TreePathShardingRule(
    ('expert_', P(None, 'expert', 'fsdp')),
    ('router', P()),
    ('query|key|value|gate|up', P(None, SPLIT, 'tp')),
    ('output|down', P(None, 'tp', SPLIT)),
    ('embed|last', P('tp', SPLIT)),
)


def training_step(
    model: Decoder,
    helper: MeshShardingHelper,
    rows: int,
    length: int,
    microbatches: int,
    recomputed: Recomputed,
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a compiled function of weights, moments and tokens, and its arguments.

    Args:
        model: the sizes.
        helper: the helper of a mesh with the axes `AXES`.
        rows: the number of sequences in all microbatches.
        length: the number of tokens of a sequence.
        microbatches: the number of microbatches.
        recomputed: what the backward pass recomputes: nothing, all but matmuls, or entire layers.
    """
    optimizer = optax.adamw(1e-4)
    constrain = helper.with_sharding_constraint

    def loss(weights: Weights, tokens: jax.Array) -> jax.Array:
        x = weights['embed'].astype(jnp.bfloat16)[tokens[:, :-1]]
        x = constrain(x, P(ROWS, 'tp'))
        body: Callable[..., jax.Array] = functools.partial(layer, model, helper)
        if recomputed != 'nothing':
            body = jax.checkpoint(body, policy=is_product if recomputed == 'elementwise' else None)
        x, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, weights['layers'])
        last = weights['embed' if model.tied else 'last'].astype(jnp.bfloat16)
        logits = constrain(constrain(_normed(x), P(ROWS)) @ last.T, P(ROWS, None, 'tp')).astype('float32')
        at_label = jnp.arange(model.vocabulary) == tokens[:, 1:, None]
        label = jnp.sum(jnp.where(at_label, logits, 0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - label)

    def train(weights: Weights, moments: Any, tokens: jax.Array) -> tuple[Weights, Any]:
        gradients = scalax.microbatch(jax.grad(loss), microbatches)(weights, tokens)
        updates, moments = optimizer.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments

    state = (WEIGHTS, WEIGHTS)
    compiled = helper.sjit(train, in_shardings=(*state, P(ROWS)), out_shardings=state, donate_argnums=(0, 1))
    moments = jax.eval_shape(optimizer.init, model.weights)
    return compiled, (model.weights, moments, jax.ShapeDtypeStruct((rows, length + 1), 'int32'))


def layer(model: Decoder, helper: MeshShardingHelper, x: jax.Array, weights: Weights) -> jax.Array:
    """A block of attention and a feed-forward block; between blocks, positions are sharded over tp."""
    w = {name: leaf.astype(jnp.bfloat16) for name, leaf in weights.items()}
    constrain = helper.with_sharding_constraint

    def heads(name: str) -> jax.Array:
        projected = constrain(normed @ w[name], P(ROWS, None, 'tp'))
        return projected.reshape(*projected.shape[:2], -1, model.head)

    normed = constrain(_normed(x), P(ROWS))
    mixed = attention(helper, heads('query'), heads('key'), heads('value'))
    x = x + constrain(mixed.reshape(*x.shape[:2], -1) @ w['output'], P(ROWS, 'tp'))
    normed = constrain(_normed(x), P(ROWS))
    up = constrain(normed @ w['up'], P(ROWS, None, 'tp'))
    gate = constrain(normed @ w['gate'], P(ROWS, None, 'tp')) if model.gated else up
    hidden = jax.nn.silu(gate) * up if model.gated else jax.nn.gelu(up)
    x = x + constrain(hidden @ w['down'], P(ROWS, 'tp'))
    return x + routed(model, helper, normed, w) if model.experts else x


def is_product(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that saves the results of matmuls and attention."""
    return 'dot' in primitive.name


def routed(model: Decoder, helper: MeshShardingHelper, x: jax.Array, w: Weights) -> jax.Array:
    """The experts: tokens travel along the axis 'expert' to their chosen experts, and none is dropped.

    All experts get the same number of tokens, as with a balanced router.
    """

    def on_device(
        x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
    ) -> jax.Array:
        tokens = x.reshape(-1, model.width)
        likes, chosen = jax.lax.top_k(jax.nn.softmax(tokens @ router), model.chosen)
        order = jnp.argsort(chosen.reshape(-1))
        swap = functools.partial(jax.lax.all_to_all, axis_name='expert', tiled=True)
        sent = tokens[order // model.chosen].reshape(model.experts, -1, model.width)
        here = swap(sent, split_axis=0, concat_axis=1)
        hidden = jax.nn.silu(jnp.einsum('etd,edf->etf', here, gate)) * jnp.einsum('etd,edf->etf', here, up)
        expert_outputs = swap(jnp.einsum('etf,efd->etd', hidden, down), split_axis=1, concat_axis=0)
        expert_outputs = expert_outputs.reshape(-1, model.width) * likes.reshape(-1)[order, None]
        return jnp.zeros_like(tokens).at[order // model.chosen].add(expert_outputs).reshape(x.shape)

    names = ('router', 'expert_gate', 'expert_up', 'expert_down')
    specs = (P(ROWS), P(), *(P('expert'),) * 3)
    on_all = helper.shard_map(on_device, specs, P(ROWS), check_vma=False)
    return on_all(x, *(w[name] for name in names))


def attention(helper: MeshShardingHelper, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Runs the kernel on the rows and heads of each device."""

    def kernel(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if has_cudnn():
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation='cudnn')
        apart = jax.lax.optimization_barrier  # kernels are not fused with other operations
        query, key, value = apart((query, key, value))
        shared = query.shape[2] // key.shape[2]
        return apart(jnp.tanh(query * jnp.repeat(key, shared, 2) * jnp.repeat(value, shared, 2)))

    spec = P(ROWS, None, 'tp')
    return helper.shard_map(kernel, (spec,) * 3, spec, check_vma=False)(query, key, value)


@functools.cache
def has_cudnn() -> bool:
    """Returns whether the compiler finds cuDNN."""
    try:
        ctypes.CDLL('libcudnn.so.9')
    except OSError:
        return False
    return True


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
