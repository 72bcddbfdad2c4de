"""``--only published``: steps on GPUs that others published, beside plans of steps with the same sizes.

Each is compiled for its GPUs, none of which is here: a decoder with the sizes, the layout, the microbatches
and the recomputation that were published, weights and moments of AdamW in float32, products in bfloat16.
Nothing of a plan is fitted to what was published.

Attention is that of cuDNN where ``nvidia-cudnn-cu12`` is installed and the loader finds it. Elsewhere
q * k + v, which reads and writes the same arrays, stands for the kernel. The compiler does not say what
kernels compute, so a half of all pairs is added to the products.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
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
# The axes of rows, and those over which weights are split: experts lie on devices that share the rows out.
ROWS = ('data', 'fsdp', 'expert')
SPLIT = ('fsdp', 'expert')
AXES = [*ROWS, 'tp']


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
        experts: how many the feed-forward block has; 0: it is dense. Each has *expert_hidden* units, *chosen*
            of them take a token, and a block of *hidden* units takes all.
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
        """Their shapes; those of the layers are stacked."""
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
    ('expert_', P(None, 'expert', 'fsdp')),
    ('router', P()),
    ('query|key|value|gate|up', P(None, SPLIT, 'tp')),
    ('output|down', P(None, 'tp', SPLIT)),
    ('embed|last', P('tp', SPLIT)),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step whose time was published.

    Attributes:
        source: where.
        model: the sizes.
        topology: the GPUs.
        mesh: the sizes of data, fsdp, expert and tp; those that are left out are 1.
        sequences: in one microbatch, on the devices of tp together.
        length: the tokens of one.
        microbatches: of a step.
        recomputed: what the backward pass computes again: no product, or all of each layer.
        seconds: of a step, as published or from the published tokens a second.
        hardware: changes to the numbers of the GPU, where others were published.
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
    hardware: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def tokens(self) -> int:
        """Of one step, on all devices."""
        rows = math.prod(size for name, size in self.mesh.items() if name in ROWS)
        return rows * self.sequences * self.length * self.microbatches

    @property
    def attention(self) -> int:
        """The operations of the attention of one device."""
        of_all = self.model.attention_flops(self.tokens, self.length, self.recomputed == 'layers')
        return of_all // self.devices

    def plan(self) -> Plan:
        """The plan of the step, compiled for its GPUs, with the operations of its attention."""
        sizes = [self.mesh.get(name, 1) for name in AXES]
        helper = MeshShardingHelper.from_topology(self.topology, sizes, AXES)
        step, arguments = training_step(self, helper)
        plan: Plan = helper.plan(step, *arguments)
        work = dataclasses.replace(plan.work, flops=plan.work.flops + self.attention)
        return dataclasses.replace(plan, work=work)

    def scheduled(self, plan: Plan) -> float | None:
        """Its seconds by the compiler's schedule, with the least that the operations of attention take."""
        if plan.schedule is None:
            return None
        known = sum(row.seconds for row in plan.schedule.kernels if '__cudnn' in row.name)
        attention = self.attention * self.devices / plan.roofline(self.numbers).peak
        return plan.schedule.seconds + max(0.0, attention - known)

    @property
    def numbers(self) -> Hardware:
        return dataclasses.replace(HARDWARE[self.topology.partition(':')[0]], **self.hardware)


def mfu_seconds(model: Decoder, tokens: int, length: int, mfu: float) -> float:
    """The seconds of a step by its MFU of 989e12 operations a second, as torchtitan counts: all pairs.

    https://github.com/pytorch/torchtitan/blob/0011fb9/torchtitan/utils.py
    """
    multiplied = model.parameters - model.vocabulary * model.width
    return tokens * (6 * multiplied + 12 * model.layers * model.width * length) / (989e12 * mfu)


def training_step(step: Step, helper: MeshShardingHelper) -> tuple[Any, tuple[Any, ...]]:
    """A compiled function of weights, moments and tokens, and its arguments."""
    model, optimizer = step.model, optax.adamw(1e-4)
    constrain = helper.with_sharding_constraint
    rows = math.prod(helper.mesh.shape[name] for name in ROWS) * step.sequences * step.microbatches

    def loss(weights: Weights, tokens: jax.Array) -> jax.Array:
        x = weights['embed'].astype(jnp.bfloat16)[tokens[:, :-1]]
        x = constrain(x, P(ROWS, 'tp'))
        body: Callable[..., jax.Array] = functools.partial(layer, model, helper)
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
    compiled = helper.sjit(train, in_shardings=(*state, P(ROWS)), out_shardings=state, donate_argnums=(0, 1))
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
    x = x + constrain(hidden @ w['down'], P(ROWS, 'tp'))
    return x + routed(model, helper, normed, w) if model.experts else x


def routed(model: Decoder, helper: MeshShardingHelper, x: jax.Array, w: Weights) -> jax.Array:
    """The experts: tokens travel along the axis 'expert' to those that they chose, and none is left out.

    All experts get equally many, as a router in balance has it.
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
        found = swap(jnp.einsum('etf,efd->etd', hidden, down), split_axis=1, concat_axis=0)
        found = found.reshape(-1, model.width) * likes.reshape(-1)[order, None]
        return jnp.zeros_like(tokens).at[order // model.chosen].add(found).reshape(x.shape)

    names = ('router', 'expert_gate', 'expert_up', 'expert_down')
    specs = (P(ROWS), P(), *(P('expert'),) * 3)
    on_all = helper.shard_map(on_device, specs, P(ROWS), check_vma=False)
    return on_all(x, *(w[name] for name in names))


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


# --- What was published -------------------------------------------------------------------------------

LLAMA2_7B = Decoder(32, 4096, 32, 32, 11_008, 32_000)
LLAMA2_13B = Decoder(40, 5120, 40, 40, 13_824, 32_000)
LLAMA2_70B = Decoder(80, 8192, 64, 8, 28_672, 32_000)
LLAMA3_8B = Decoder(32, 4096, 32, 8, 14_336, 128_256)
LLAMA3_70B = Decoder(80, 8192, 64, 8, 28_672, 128_256)
LLAMA3_13B = Decoder(40, 5120, 40, 8, 17_920, 128_256)
MPT_7B = Decoder(32, 4096, 32, 32, 16_384, 50_368, gated=False, tied=True)
MPT_13B = Decoder(40, 5120, 40, 40, 20_480, 50_368, gated=False, tied=True)
MPT_30B = Decoder(48, 7168, 56, 56, 28_672, 50_368, gated=False, tied=True)
MPT_70B = Decoder(80, 8192, 64, 64, 32_768, 50_368, gated=False, tied=True)
# Its 50,257 words are as many more as divide over tp.
LLAMA_1B = Decoder(24, 2048, 32, 32, 4096, 50_264, tied=True, head=64)
# Attention of most layers looks back 2,048 of 4,096 positions; here as of all. The shared experts are what is
# left of 11.7e9 parameters outside of the experts.
GRUG_360B = Decoder(48, 6144, 48, 12, 6144, 128_256, experts=128, chosen=4, expert_hidden=3072)

NGC = 'https://catalog.ngc.nvidia.com/orgs/nvidia/teams/dgxc-benchmarking/resources/'
TITAN = 'https://github.com/pytorch/torchtitan/blob/31a17bf/benchmarks/llama3_h100_202412_torchtitan.md'
TITAN_A100 = 'https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md'
DTENSOR = 'https://github.com/pytorch/pytorch/issues/88838 (2024-05-20)'
KEMPNER = 'https://github.com/KempnerInstitute/KempnerForge/blob/9f3f03a/benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md'
KEMPNER_FSDP = 'https://github.com/KempnerInstitute/KempnerForge/blob/5d3e723/benchmarks/config_validation/config_validation_2026-04-06.md'
KEMPNER_160 = (
    'https://github.com/KempnerInstitute/KempnerForge/blob/e9f9189/benchmarks/weak_scaling_160gpu/README.md'
)
FOUNDRY = 'https://github.com/mosaicml/llm-foundry/blob/061f2c7/scripts/train/benchmarking/README.md'
FMS = 'https://github.com/foundation-model-stack/fms-fsdp/blob/0d31998/README.md'
NANOTRON = 'https://huggingface.co/nanotron/old_bench (llama-1B; sizes: huggingface/bench_cluster)'
GB200 = 'https://github.com/daddyofadoggy/blog/blob/db07f84/posts/torchtitan/3d.md'
MARIN = 'https://github.com/marin-community/marin/pull/7981 (sizes: issues 7706 and 8053)'
# "96GB HBM2e with 2.4 TB/sec"; its lower power limit only makes steps longer.
HBM2E: dict[str, Any] = {'hbm_bytes_per_second': 2.4e12}

PUBLISHED = {
    # What is saved was not found: no product is computed again.
    'MaxText, Llama 2 70B, 64 H100, FSDP': Step(
        f'{NGC}maxtext-llama2-70b-dgxc-benchmarking-c',
        LLAMA2_70B,
        'h100:8x8',
        {'fsdp': 64},
        2,
        4096,
        1,
        'elementwise',
        7.908,
    ),
    'MaxText, Llama 3 70B, 128 H100, FSDP': Step(
        f'{NGC}maxtext-llama3-70b-dgxc-benchmarking-d',
        LLAMA3_70B,
        'h100:16x8',
        {'fsdp': 128},
        2,
        8192,
        1,
        'elementwise',
        15.570,
    ),
    # "Selective" recomputes some products: here none.
    'torchtitan, Llama 3.1 8B, 8 H100, FSDP': Step(
        TITAN, LLAMA3_8B, 'h100:8', {'fsdp': 8}, 2, 8192, 1, 'elementwise', 2 * 8192 / 6667, HBM2E
    ),
    'torchtitan, Llama 3.1 8B, 128 H100, FSDP': Step(
        TITAN, LLAMA3_8B, 'h100:16x8', {'fsdp': 128}, 2, 8192, 1, 'elementwise', 2 * 8192 / 6514, HBM2E
    ),
    'torchtitan, Llama 3 8B, 64 A100, FSDP': Step(
        TITAN_A100, LLAMA3_8B, 'a100:8x8', {'fsdp': 64}, 1, 8192, 1, 'elementwise', 8192 / 2973
    ),
    'torchtitan, Llama 3 70B, 64 A100, FSDP': Step(
        TITAN_A100, LLAMA3_70B, 'a100:8x8', {'fsdp': 64}, 1, 8192, 1, 'layers', 8192 / 331
    ),
    'torchtitan, Llama 2 13B, 64 A100, FSDP': Step(
        TITAN_A100, LLAMA2_13B, 'a100:8x8', {'fsdp': 64}, 2, 4096, 1, 'nothing', 2 * 4096 / 2162
    ),
    'KempnerForge, Llama 3 7B, 2 H200, FSDP': Step(
        KEMPNER, LLAMA3_8B, 'h200:2', {'fsdp': 2}, 2, 4096, 4, 'layers', 3.50
    ),
    'KempnerForge, Llama 3 7B, 2 H200, TP 2': Step(
        KEMPNER, LLAMA3_8B, 'h200:2', {'tp': 2}, 4, 4096, 2, 'layers', 2.49
    ),
    'KempnerForge, Llama 3 7B, 4 H200, FSDP': Step(
        KEMPNER, LLAMA3_8B, 'h200:4', {'fsdp': 4}, 4, 4096, 2, 'layers', 3.36
    ),
    'KempnerForge, Llama 3 7B, 4 H200, TP 4': Step(
        KEMPNER, LLAMA3_8B, 'h200:4', {'tp': 4}, 4, 4096, 2, 'layers', 1.30
    ),
    'KempnerForge, Llama 3 7B, 4 H200, FSDP x TP 2': Step(
        KEMPNER, LLAMA3_8B, 'h200:4', {'fsdp': 2, 'tp': 2}, 4, 4096, 2, 'layers', 2.52
    ),
    'KempnerForge, Llama 3 13B, 8 H200, FSDP': Step(
        KEMPNER, LLAMA3_13B, 'h200:2x4', {'fsdp': 8}, 4, 4096, 4, 'layers', 14.81
    ),
    'KempnerForge, Llama 3 13B, 8 H200, FSDP x TP 4': Step(
        KEMPNER, LLAMA3_13B, 'h200:2x4', {'fsdp': 2, 'tp': 4}, 4, 4096, 4, 'layers', 4.79
    ),
    'KempnerForge, Llama 3 7B, 32 H200, FSDP': Step(
        KEMPNER_FSDP, LLAMA3_8B, 'h200:8x4', {'fsdp': 32}, 4, 4096, 4, 'layers', 7.05
    ),
    'KempnerForge, Llama 3 7B, 32 H200, FSDP x TP 4': Step(
        KEMPNER, LLAMA3_8B, 'h200:8x4', {'fsdp': 8, 'tp': 4}, 4, 4096, 2, 'layers', 1.68
    ),
    'KempnerForge, Llama 3 70B, 32 H200, FSDP x TP 4': Step(
        KEMPNER, LLAMA3_70B, 'h200:8x4', {'fsdp': 8, 'tp': 4}, 2, 4096, 4, 'layers', 14.85
    ),
    'KempnerForge, Llama 3 70B, 128 H200, FSDP x TP 4': Step(
        KEMPNER_160, LLAMA3_70B, 'h200:32x4', {'fsdp': 32, 'tp': 4}, 2, 4096, 4, 'layers', 14.98
    ),
    'LLM Foundry, MPT 7B, 8 H100, FSDP': Step(
        FOUNDRY, MPT_7B, 'h100:8', {'fsdp': 8}, 6, 2048, 1, 'nothing', 98_304 / 85_144
    ),
    'LLM Foundry, MPT 13B, 64 H100, FSDP': Step(
        FOUNDRY, MPT_13B, 'h100:8x8', {'fsdp': 64}, 2, 2048, 1, 'nothing', 262_144 / 307_209
    ),
    'LLM Foundry, MPT 30B, 16 H100, FSDP': Step(
        FOUNDRY, MPT_30B, 'h100:2x8', {'fsdp': 16}, 10, 2048, 3, 'layers', 983_040 / 36_209
    ),
    'LLM Foundry, MPT 70B, 64 H100, FSDP': Step(
        FOUNDRY, MPT_70B, 'h100:8x8', {'fsdp': 64}, 8, 2048, 4, 'layers', 4_194_304 / 66_523
    ),
    'LLM Foundry, MPT 7B, 8 A100, FSDP': Step(
        FOUNDRY, MPT_7B, 'a100:8', {'fsdp': 8}, 6, 2048, 2, 'nothing', 196_608 / 37_130
    ),
    'fms-fsdp, Llama 2 7B, 128 A100, HSDP': Step(
        FMS, LLAMA2_7B, 'a100:16x8', {'data': 16, 'fsdp': 8}, 2, 4096, 1, 'nothing', 2 * 4096 / 3760
    ),
    'fms-fsdp, Llama 2 70B, 128 A100, FSDP': Step(
        FMS, LLAMA2_70B, 'a100:16x8', {'fsdp': 128}, 6, 4096, 1, 'layers', 6 * 4096 / 380
    ),
    # ZeRO-1, whose update is that of one device here; the gradients of each microbatch are summed.
    'nanotron, Llama 1B, 8 H100, DP x TP 2': Step(
        NANOTRON, LLAMA_1B, 'h100:8', {'data': 4, 'tp': 2}, 8, 4096, 32, 'nothing', 15.8
    ),
    'nanotron, Llama 1B, 8 H100, DP x TP 4': Step(
        NANOTRON, LLAMA_1B, 'h100:8', {'data': 2, 'tp': 4}, 8, 4096, 64, 'nothing', 18.9
    ),
    'nanotron, Llama 1B, 8 H100, TP 8': Step(
        NANOTRON, LLAMA_1B, 'h100:8', {'tp': 8}, 8, 4096, 128, 'nothing', 26.1
    ),
    'marin, Grug 360B, 64 GB200, FSDP': Step(
        MARIN, GRUG_360B, 'gb200:16x4', {'fsdp': 64}, 16, 4096, 1, 'layers', 1024 * 4096 / 235_125
    ),
    'marin, Grug 360B, 64 GB200, experts': Step(
        MARIN, GRUG_360B, 'gb200:16x4', {'expert': 64}, 16, 4096, 1, 'layers', 1024 * 4096 / 316_473
    ),
    'torchtitan, Llama 3.1 8B, 8 GB200, FSDP': Step(
        GB200, LLAMA3_8B, 'gb200:2x4', {'fsdp': 8}, 16, 2048, 1, 'elementwise', 16 * 2048 / 20_849
    ),
    'torchtitan, Llama 3.1 8B, 8 GB200, HSDP': Step(
        GB200, LLAMA3_8B, 'gb200:2x4', {'data': 2, 'fsdp': 4}, 16, 2048, 1, 'elementwise', 16 * 2048 / 20_529
    ),
    'torchtitan, Llama 3.1 8B, 8 GB200, FSDP x TP 2': Step(
        GB200, LLAMA3_8B, 'gb200:2x4', {'fsdp': 4, 'tp': 2}, 32, 2048, 1, 'elementwise', 16 * 2048 / 18_258
    ),
    # Of these MFU is published, of 989e12: 26.9 % and 22.4 %.
    'torchtitan, Llama 3 8B, 8 H100, FSDP, one sequence': Step(
        DTENSOR,
        LLAMA3_8B,
        'h100:8',
        {'fsdp': 8},
        1,
        8192,
        1,
        'layers',
        mfu_seconds(LLAMA3_8B, 8192, 8192, 0.269),
    ),
    'torchtitan, Llama 3 8B, 8 H100, FSDP x TP 4, four sequences': Step(
        DTENSOR,
        LLAMA3_8B,
        'h100:8',
        {'fsdp': 2, 'tp': 4},
        4,
        8192,
        1,
        'layers',
        mfu_seconds(LLAMA3_8B, 8192, 8192, 0.224),
    ),
}

WINNERS = (
    ('KempnerForge, Llama 3 7B, 2 H200, FSDP', 'KempnerForge, Llama 3 7B, 2 H200, TP 2'),
    ('KempnerForge, Llama 3 7B, 4 H200, FSDP', 'KempnerForge, Llama 3 7B, 4 H200, TP 4'),
    ('KempnerForge, Llama 3 7B, 4 H200, FSDP', 'KempnerForge, Llama 3 7B, 4 H200, FSDP x TP 2'),
    ('KempnerForge, Llama 3 7B, 4 H200, FSDP x TP 2', 'KempnerForge, Llama 3 7B, 4 H200, TP 4'),
    ('KempnerForge, Llama 3 13B, 8 H200, FSDP', 'KempnerForge, Llama 3 13B, 8 H200, FSDP x TP 4'),
    ('KempnerForge, Llama 3 7B, 32 H200, FSDP', 'KempnerForge, Llama 3 7B, 32 H200, FSDP x TP 4'),
    (
        'torchtitan, Llama 3 8B, 8 H100, FSDP, one sequence',
        'torchtitan, Llama 3 8B, 8 H100, FSDP x TP 4, four sequences',
    ),
    ('nanotron, Llama 1B, 8 H100, DP x TP 2', 'nanotron, Llama 1B, 8 H100, DP x TP 4'),
    ('nanotron, Llama 1B, 8 H100, DP x TP 4', 'nanotron, Llama 1B, 8 H100, TP 8'),
    ('torchtitan, Llama 3.1 8B, 8 GB200, FSDP', 'torchtitan, Llama 3.1 8B, 8 GB200, FSDP x TP 2'),
    ('torchtitan, Llama 3.1 8B, 8 GB200, FSDP', 'torchtitan, Llama 3.1 8B, 8 GB200, HSDP'),
    ('marin, Grug 360B, 64 GB200, experts', 'marin, Grug 360B, 64 GB200, FSDP'),
)
"""Pairs of layouts on the same GPUs, the faster one first: tokens a second, as published."""


# --- Tables ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Judged:
    """A step beside its plan.

    Attributes:
        step: the step.
        bound: seconds if everything overlaps.
        estimate: seconds if nothing does.
        scheduled: seconds along the compiler's schedule, if it has one.
    """

    step: Step
    bound: float
    estimate: float
    scheduled: float | None

    @classmethod
    def of(cls, step: Step) -> Judged:
        """That of a step, which is compiled."""
        plan = step.plan()
        return cls(step, *plan.roofline(step.numbers).step_seconds, step.scheduled(plan))

    @property
    def objective(self) -> float:
        """What searches make small."""
        return (self.bound + self.estimate) / 2


def lines(judged: Mapping[str, Judged]) -> Iterator[str]:
    """Both tables in Markdown: steps, and pairs of layouts of which both are judged."""
    yield "| step | at least | by the compiler's schedule | published | if nothing overlaps |"
    yield '|---|---|---|---|---|'
    for name, each in judged.items():
        seconds = (each.bound, each.scheduled, each.step.seconds, each.estimate)
        yield f'| {name} | {" | ".join(map(_number, seconds))} |'
    errors = [abs(each.scheduled / each.step.seconds - 1) for each in judged.values() if each.scheduled]
    if errors:
        yield f'\nmedian error of {len(errors)} schedules: {statistics.median(errors):.0%}'
    yield '\n| faster | slower | published | planned | scheduled |'
    yield '|---|---|---|---|---|'
    for names in WINNERS:
        if all(name in judged for name in names):
            one, other = (judged[name] for name in names)
            tokens = one.step.tokens / other.step.tokens
            ratios = [
                other.step.seconds / one.step.seconds * tokens,
                other.objective / one.objective * tokens,
            ]
            if one.scheduled and other.scheduled:
                ratios.append(other.scheduled / one.scheduled * tokens)
            yield f'| {" | ".join(names)} | {" | ".join(map(_number, ratios))} |'


def _number(value: float | None) -> str:
    return '-' if value is None else f'{value:.3g}'


def show(model: str) -> None:
    """Prints the tables of the steps whose names hold *model*."""
    judged = {}
    for name, step in PUBLISHED.items():
        if model in name:
            judged[name] = Judged.of(step)
            print(f'{name}: {judged[name].bound:.3g} s at least', file=sys.stderr, flush=True)
    print('\n'.join(lines(judged)))
