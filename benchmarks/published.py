"""``--only published``: training steps on GPUs that others published, beside plans of steps with the same sizes.

Each is compiled for its GPUs, none of which is here: a decoder with the sizes, the layout, the microbatches and
the recomputation that were published, weights and moments of AdamW in float32, products in bfloat16. Nothing of
a plan is fitted to what was published.

Attention is that of cuDNN where ``nvidia-cudnn-cu12`` is installed. Elsewhere q * k + v, which reads and writes
the same arrays, stands for the kernel. The compiler does not say what kernels compute, so a half of all pairs is
added to the products.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import scalax
from scalax.plan import HARDWARE, Hardware, Plan
from scalax.sharding import (
    MeshShardingHelper,
    TreePathShardingRule,
)
from scalax.sharding import PartitionSpec as P

Weights = dict[str, Any]
Recomputed = Literal['nothing', 'elementwise', 'layers']
ROWS = ('data', 'fsdp')
HEAD = 128


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder; all its matrices are without biases.

    Attributes:
        layers: how many there are.
        width: of the residual.
        heads: of queries.
        groups: heads of keys and values.
        hidden: units of the feed-forward block.
        vocabulary: words.
        gated: whether the feed-forward block has a third matrix (SwiGLU).
        tied: whether the table of embeddings also makes the logits.
        head: the size of a head.
    """

    layers: int
    width: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    head: int = HEAD

    @property
    def weights(self) -> Weights:
        """Their shapes; those of the layers are stacked."""
        inner = self.heads * self.head
        shapes = {
            'query': (self.width, inner),
            'key': (self.width, self.groups * self.head),
            'value': (self.width, self.groups * self.head),
            'output': (inner, self.width),
            **({'gate': (self.width, self.hidden)} if self.gated else {}),
            'up': (self.width, self.hidden),
            'down': (self.hidden, self.width),
        }
        stacked = {name: (self.layers, *shape) for name, shape in shapes.items()}
        found: Weights = {'layers': stacked, 'embed': (self.vocabulary, self.width)}
        if not self.tied:
            found['last'] = (self.vocabulary, self.width)
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            found,
            is_leaf=lambda node: isinstance(node, tuple),
        )

    @property
    def parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.weights))

    def attention_flops(self, tokens: int, length: int, recomputed: bool) -> int:
        """Those of a half of all pairs; the backward pass takes twice the forward pass."""
        return (8 if recomputed else 6) * self.layers * self.heads * self.head * length * tokens


WEIGHTS = TreePathShardingRule(
    ('query|key|value|gate|up', P(None, 'fsdp', 'tp')),
    ('output|down', P(None, 'tp', 'fsdp')),
    ('embed|last', P('tp', 'fsdp')),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step whose time was published.

    Attributes:
        source: where.
        model: the sizes.
        topology: the GPUs.
        mesh: the sizes of data, fsdp and tp; those that are left out are 1.
        sequences: in one microbatch, on the devices of tp together.
        length: the tokens of one.
        microbatches: of a step.
        recomputed: what the backward pass computes again: no product, or all of each layer.
        seconds: of a step, as published or from the published tokens a second.
        hardware: changes to the numbers of the GPU, where others were published.
        framework: which measured it.
    """

    source: str
    model: Decoder
    topology: str
    mesh: Mapping[str, int]
    sequences: int
    length: int
    microbatches: int
    recomputed: Recomputed
    seconds: float
    hardware: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def tokens(self) -> int:
        """Of one step, on all devices."""
        rows = math.prod(size for name, size in self.mesh.items() if name in ROWS)
        return rows * self.sequences * self.length * self.microbatches

    def plan(self) -> Plan:
        """The plan of the step, compiled for its GPUs."""
        sizes = [self.mesh.get(name, 1) for name in (*ROWS, 'tp')]
        helper = MeshShardingHelper.from_topology(self.topology, sizes, [*ROWS, 'tp'])
        step, arguments = training_step(self, helper)
        plan: Plan = helper.plan(step, *arguments)
        attention = self.model.attention_flops(self.tokens, self.length, self.recomputed == 'layers')
        work = dataclasses.replace(plan.work, flops=plan.work.flops + attention // self.devices)
        return dataclasses.replace(plan, work=work)

    def bound(self, plan: Plan) -> float:
        """Its least seconds."""
        return plan.roofline(self.numbers).step_seconds.bound

    @property
    def numbers(self) -> Hardware:
        return dataclasses.replace(HARDWARE[self.topology.partition(':')[0]], **self.hardware)


def training_step(step: Step, helper: MeshShardingHelper) -> tuple[Any, tuple[Any, ...]]:
    """A compiled function of weights, moments and tokens, and its arguments."""
    model, optimizer = step.model, optax.adamw(1e-4)
    constrain = helper.with_sharding_constraint
    rows = math.prod(helper.mesh.shape[name] for name in ROWS) * step.sequences * step.microbatches

    def loss(weights: Weights, tokens: jax.Array) -> jax.Array:
        x = weights['embed'].astype(jnp.bfloat16)[tokens[:, :-1]]
        x = constrain(x, P(ROWS, 'tp'))
        body = functools.partial(layer, model, helper)
        if step.recomputed != 'nothing':
            policy = jax.checkpoint_policies.dots_saveable if step.recomputed == 'elementwise' else None
            body = jax.checkpoint(body, policy=policy)
        x, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, weights['layers'])
        last = weights['embed' if model.tied else 'last'].astype(jnp.bfloat16)
        logits = constrain(constrain(_normed(x), P(ROWS)) @ last.T, P(ROWS, None, 'tp')).astype('float32')
        at_label = jnp.arange(model.vocabulary) == tokens[:, 1:, None]
        label = jnp.sum(jnp.where(at_label, logits, 0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - label)

    def train(weights: Weights, moments: Any, tokens: jax.Array) -> tuple[Weights, Any]:
        gradients = scalax.microbatch(jax.grad(loss), step.microbatches)(weights, tokens)
        updates, moments = optimizer.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments

    state = (WEIGHTS, WEIGHTS)
    compiled = helper.sjit(
        train, in_shardings=(*state, P(ROWS)), out_shardings=state, donate_argnums=(0, 1)
    )
    moments = jax.eval_shape(optimizer.init, model.weights)
    return compiled, (model.weights, moments, jax.ShapeDtypeStruct((rows, step.length + 1), 'int32'))


def layer(model: Decoder, helper: MeshShardingHelper, x: jax.Array, weights: Weights) -> jax.Array:
    """A block of attention and a feed-forward block; between blocks tp shares out the positions."""
    w = {name: leaf.astype(jnp.bfloat16) for name, leaf in weights.items()}
    constrain = helper.with_sharding_constraint

    def heads(name: str) -> jax.Array:
        found = constrain(normed @ w[name], P(ROWS, None, 'tp'))
        return found.reshape(*found.shape[:2], -1, model.head)

    normed = constrain(_normed(x), P(ROWS))
    mixed = attention(helper, heads('query'), heads('key'), heads('value'))
    x = x + constrain(mixed.reshape(*x.shape[:2], -1) @ w['output'], P(ROWS, 'tp'))
    normed = constrain(_normed(x), P(ROWS))
    up = constrain(normed @ w['up'], P(ROWS, None, 'tp'))
    gate = constrain(normed @ w['gate'], P(ROWS, None, 'tp')) if model.gated else up
    hidden = jax.nn.silu(gate) * up if model.gated else jax.nn.gelu(up)
    return x + constrain(hidden @ w['down'], P(ROWS, 'tp'))


def attention(helper: MeshShardingHelper, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """A kernel on the rows and heads of each device."""

    def kernel(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if has_cudnn():
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation='cudnn')
        shared = query.shape[2] // key.shape[2]
        return query * jnp.repeat(key, shared, 2) + jnp.repeat(value, shared, 2)

    spec = P(ROWS, None, 'tp')
    return helper.shard_map(kernel, (spec,) * 3, spec, check_vma=False)(query, key, value)


@functools.cache
def has_cudnn() -> bool:
    """Whether the compiler finds cuDNN."""
    try:
        ctypes.CDLL('libcudnn.so.9')
    except OSError:
        return False
    return True


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
