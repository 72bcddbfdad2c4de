"""Plans compared with published figures: worked problems of the scaling book, and step times of MaxText.

The book is https://jax-ml.github.io/scaling-book (sources: https://github.com/jax-ml/scaling-book).
test_roofline has its problems about one collective or one kind of parallelism.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from scalax.plan import HARDWARE, Hardware, Plan, Roofline, count_model_flops
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.torus_seconds import seconds

V5P, V6E = HARDWARE['v5p'], HARDWARE['v6e']
BF16 = 2
HELPER = MeshShardingHelper([8], ['fsdp'])
# Eight simulated devices represent a slice whose axes are rings: the time of a gather depends on the full
# array and on the number of rings, not on their lengths.
RINGS = {hardware.name: dataclasses.replace(hardware, ring_multiple=2) for hardware in (V5P, V6E)}


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# --- A decoder ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes of a LLaMA model, with MaxText's names of its matmuls."""

    layers: int
    width: int
    hidden: int
    vocabulary: int
    groups: int  # key and value heads; the head size is 128

    @property
    def weights(self) -> dict[str, Any]:
        width, few = self.width, self.groups * 128
        shapes = {
            'query_proj': (width, width),
            'key_proj': (width, few),
            'value_proj': (width, few),
            'out_proj': (width, width),
            'gate': (width, self.hidden),
            'up': (width, self.hidden),
            'down': (self.hidden, width),
        }
        stacked = {name: array(self.layers, *shape) for name, shape in shapes.items()}
        return {
            'layers': stacked,
            'embed': array(self.vocabulary, width),
            'last': array(width, self.vocabulary),
        }

    @property
    def parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.weights))

    def attention_flops(self, tokens: int, sequence: int) -> int:
        """Returns the minimum FLOPs of causal attention, forward and backward: half of all pairs."""
        return 6 * self.layers * self.width * sequence * tokens

    def step(self, saved: tuple[str, ...]) -> Any:
        """A training step that saves the results of some matmuls, and recomputes the others.

        The attention kernel reads queries, keys and values; q * k + v represents it, without FLOPs.
        """

        def rows(x: jax.Array) -> jax.Array:
            return HELPER.with_sharding_constraint(x, P('fsdp'))

        def loss(weights: dict[str, Any], tokens: jax.Array) -> jax.Array:
            def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
                def product(name: str, x: jax.Array) -> jax.Array:
                    return checkpoint_name(rows(x @ w[name]), name)

                q, k, v = (product(name, x) for name in ('query_proj', 'key_proj', 'value_proj'))
                k, v = (jnp.tile(few, self.width // few.shape[-1]) for few in (k, v))
                x = x + product('out_proj', q * k + v)
                return x + product('down', jax.nn.silu(product('gate', x)) * product('up', x)), None

            policy = jax.checkpoint_policies.save_only_these_names(*saved)
            x, _ = jax.lax.scan(
                jax.checkpoint(layer, policy=policy), rows(weights['embed'][tokens]), weights['layers']
            )
            return jnp.square(rows(x @ weights['last']).astype('float32')).mean()

        def step(weights: dict[str, Any], tokens: jax.Array) -> dict[str, Any]:
            return jax.tree.map(jnp.subtract, weights, jax.grad(loss)(weights, tokens))

        return step


ALL = ('query_proj', 'key_proj', 'value_proj', 'out_proj', 'gate', 'up', 'down')


def plan_fsdp(model: Decoder, tokens: int, saved: tuple[str, ...] = ALL) -> Plan:
    """Returns the plan of a step under FSDP with this number of tokens on each device."""
    weights = FSDPShardingRule('fsdp', min_fsdp_size=1)
    rule = {'layers': weights.stacked(), 'embed': weights, 'last': weights}
    step = HELPER.sjit(
        model.step(saved), in_shardings=(rule, P('fsdp')), out_shardings=rule, donate_argnums=0
    )
    return HELPER.plan(step, model.weights, array(HELPER.mesh.size * tokens, dtype='int32'))


# --- Problems of "How to Parallelize a Transformer for Training" (training.md) ---------------------

LLAMA2_13B = Decoder(layers=40, width=5120, hidden=13_824, vocabulary=32_000, groups=40)
CHIPS = 4096


def test_parameters_of_llama_2_13b() -> None:
    """Question 1: 13.1e9. The model needs 6 FLOPs for each parameter outside the embedding table."""
    assert LLAMA2_13B.parameters == pytest.approx(13.1e9, rel=0.01)
    multiplied = LLAMA2_13B.parameters - 32_000 * 5120
    step = jax.make_jaxpr(LLAMA2_13B.step(ALL))(LLAMA2_13B.weights, array(1000, dtype='int32'))
    assert count_model_flops(step) == 6 * multiplied * 1000


@pytest.mark.slow
@pytest.mark.parametrize(('tokens', 'compute_bound'), [(3e6, False), (1e6, False), (10e6, True)])
def test_fsdp_of_llama_2_13b(tokens: float, compute_bound: bool) -> None:
    """Question 3.2: 3M tokens on 16x16x16 are bound by communication: at least 850 x 4096 = 3.48M are needed.

    Question 4 asks for 1M and 10M.
    """
    # Eight devices represent 4,096. At 1M tokens, the activations of eight devices have fewer bytes than a
    # weight, so sjit would move them; those of 4,096 devices have more. At 3M tokens, gathering weights takes
    # as long.
    planned = max(tokens, 3e6)
    roofline = plan_fsdp(LLAMA2_13B, int(planned / CHIPS)).roofline(RINGS['v5p'], torus={'fsdp': (2, 2, 2)})
    compute = roofline.compute * tokens / planned
    assert (compute > roofline.parts['ici:fsdp']) == compute_bound
    # The number of tokens at which both take the same time.
    least = planned * roofline.parts['ici:fsdp'] / roofline.compute
    assert least == pytest.approx(850 * CHIPS, rel=0.02)


def test_the_time_of_a_step_of_llama_2_13b() -> None:
    """Question 3.3: 6 x 3e6 x 13e9 FLOPs at 40 % of 4,096 chips take 300 ms."""
    peak = CHIPS * V5P.flops_per_second
    roofline = Roofline(V5P, CHIPS, peak, 0.3, 0.0, (), model_flops=int(6 * 3e6 * 13e9))
    assert roofline.mfu == pytest.approx(0.4, rel=0.05)


@pytest.mark.medium
@pytest.mark.parametrize(
    ('tokens', 'shape', 'fsdp', 'tp', 'compute_bound'),
    [
        # "We'll do roughly 1024 way DP and 4 way TP", on two axes and one.
        (3e6, (32, 32, 4), 'XY', 'Z', True),
        # "We can't do a full axis worth of model parallelism" (the first edition), where that has 16 chips.
        (3e6, (16, 16, 16), 'XY', 'Z', False),
        # "Our per-chip batch size needs to be above 2550^2 / 2F = 235"
        (200 * CHIPS, (32, 32, 4), 'XY', 'Z', False),
    ],
)
def test_fsdp_and_tensor_parallelism_of_llama_2_13b(
    tokens: float, shape: tuple[int, ...], fsdp: str, tp: str, compute_bound: bool
) -> None:
    """Question 3.3, with the two matmuls of a block, as the chapter counts."""
    model, (x, y) = LLAMA2_13B, (shape[0] * shape[1], shape[2])
    assert math.sqrt(3e6 / model.hidden * 2 * CHIPS) == pytest.approx(1333, rel=0.01)
    weights = seconds('all-gather', BF16 * model.width * model.hidden / y, V5P, shape, fsdp)
    rows = BF16 * tokens * model.width / x
    activations = sum(seconds(kind, rows, V5P, shape, tp) for kind in ('all-gather', 'reduce-scatter'))
    computing = 4 * tokens * model.width * model.hidden / (CHIPS * V5P.flops_per_second)
    assert (computing > max(2 * weights, activations)) == compute_bound


# --- Problems of "Sharded Matrices and How to Multiply Them" (sharding.md) -------------------------


def plan_blocks(block: Any, specs: tuple[P, ...], out: P, *args: Any) -> Plan:
    return HELPER.plan(jax.jit(HELPER.shard_map(block, specs, out, check_vma=False)), *args)


def gathered(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ jax.lax.all_gather(w, 'fsdp', axis=0, tiled=True)


def summed(x: jax.Array, w: jax.Array) -> jax.Array:
    start = w.shape[0] * jax.lax.axis_index('fsdp')
    return jax.lax.psum(jax.lax.dynamic_slice_in_dim(x, start, w.shape[0], 1) @ w, 'fsdp')


@pytest.mark.medium
@pytest.mark.parametrize(('width', 'sums_win'), [(4096, False), (8192, True)])
def test_two_ways_to_multiply(width: int, sums_win: bool) -> None:
    """Question 4 [matmul strategies]: A[B, D] B[D_X, F]: partial sums are faster if D > 2 x 2550."""
    rows, hidden, hardware = 2048, 32_768, RINGS['v5p']
    hardware = dataclasses.replace(hardware, ring_needs_all=False)
    plans = [
        plan_blocks(block, (P(), P('fsdp')), P(), array(rows, width), array(width, hidden))
        for block in (gathered, summed)
    ]
    gathers, sums = (plan.roofline(hardware, torus={'fsdp': 8}) for plan in plans)
    flops = 2 * rows * width * hidden
    assert [plan.device_cost.flops for plan in plans] == [flops, flops / 8]
    assert gathers.parts['ici:fsdp'] == pytest.approx(2 * width * hidden / 1.8e11)
    assert sums.parts['ici:fsdp'] == pytest.approx(4 * rows * hidden / 1.8e11)
    assert (sums.parts['ici:fsdp'] < gathers.compute) == sums_win


def test_gathering_first_or_scattering_last() -> None:
    """Question 9: for A[N, M_X] B[M, K], gathering A costs M / K times scattering the result."""
    rows, inner, columns = 4096, 8192, 2048

    def first(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, 'fsdp', axis=1, tiled=True) @ w

    def last(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(x @ w, 'fsdp', scatter_dimension=0, tiled=True)

    args = array(rows, inner), array(inner, columns)
    plans = (
        plan_blocks(first, (P(None, 'fsdp'), P()), P(), *args),
        plan_blocks(last, (P(None, 'fsdp'), P('fsdp')), P('fsdp'), *args),
    )
    gathers, scatters = (plan.roofline(RINGS['v5p'], torus={'fsdp': (2, 2, 2)}) for plan in plans)
    ratio = gathers.parts['ici:fsdp'] / scatters.parts['ici:fsdp']
    assert ratio == pytest.approx(inner / columns)


# --- MaxText --------------------------------------------------------------------------------------

LLAMA2_70B = Decoder(layers=80, width=8192, hidden=28_672, vocabulary=32_000, groups=8)
LLAMA3_8B = Decoder(layers=32, width=4096, hidden=14_336, vocabulary=128_256, groups=8)
LLAMA3_70B = dataclasses.replace(LLAMA2_70B, vocabulary=128_256)
LLAMA3_405B = Decoder(layers=126, width=16_384, hidden=53_248, vocabulary=128_256, groups=8)
QKV = ('query_proj', 'key_proj', 'value_proj')


@dataclasses.dataclass(frozen=True)
class Published:
    """A step under FSDP with a published time.

    Attributes:
        model: the model.
        hardware: the chips, in a slice whose axes are rings.
        sequences: the number per chip.
        length: the number of tokens of a sequence.
        saved: the matmuls that the backward pass does not recompute.
        seconds: the step time.
        mfu: the published MFU.
    """

    model: Decoder
    hardware: Hardware
    sequences: int
    length: int
    saved: tuple[str, ...]
    seconds: float
    mfu: float


# MFU: https://maxtext.readthedocs.io/en/maxtext-v0.2.0/reference/models/tiering.html. Step times and saved
# matmuls: https://github.com/AI-Hypercomputer/tpu-recipes, in training/trillium/NAME/README.md, for
# v6e-256 (16x16). Sequences are total_weights / (chips x length) of the log line there.
PUBLISHED = {
    # Llama2-70B-MaxText: "qkv_proj_offloaded"; 2,097,152 tokens (per_device_batch_size says 3)
    'Llama 2 70B, v6e-256': Published(LLAMA2_70B, V6E, 2, 4096, QKV, 9.052, 0.438),
    # Llama3.1-8B-MaxText/v6e-256
    'Llama 3.1 8B, v6e-256': Published(LLAMA3_8B, V6E, 4, 8192, (*QKV, 'out_proj'), 4.546, 0.4546),
    # Llama3.1-70B-MaxText/v6e-256
    'Llama 3.1 70B, v6e-256': Published(LLAMA3_70B, V6E, 5, 8192, QKV, 42.656, 0.5033),
    # 692 tokens a second on each of 512 chips; benchmarks/maxtext_v5p_model_configs.py, llama2_70b_v5p_128:
    # four sequences, "save_dot_except_mlpwi"
    'Llama 2 70B, v5p-1024': Published(
        LLAMA2_70B, V5P, 4, 4096, (*QKV, 'out_proj', 'down'), 4 * 4096 / 692, 0.654
    ),
    # tpu-recipes, training/v5p/Llama3.1-405B-MaxText/README.md: 314.53e12 FLOPs per second on each of 512
    # chips. The saved values were not published: nothing is recomputed here.
    'Llama 3.1 405B, v5p-1024': Published(LLAMA3_405B, V5P, 2, 8192, ALL, 131.474, 314.53e12 / 4.59e14),
}


@pytest.mark.slow
def test_a_published_step_of_gpus() -> None:
    """Llama 3 70B by MaxText on 128 H100 under FSDP, two sequences of 8,192 tokens on each: 15.570 s, and
    506.597e12 operations a second:
    https://catalog.ngc.nvidia.com/orgs/nvidia/teams/dgxc-benchmarking/resources/maxtext-llama3-70b-dgxc-benchmarking-d.

    Two nodes of four GPUs represent 16 of eight: the cards carry 1 / 2 of a fourth of the array instead of
    15 / 16 of an eighth. The saved values were not published: nothing is recomputed here.
    """
    hardware = dataclasses.replace(HARDWARE['h100'], chips_per_host=4, dcn_bytes_per_second=4 * 5e10)
    tokens, published = 2 * 8192, 15.570
    plan = plan_fsdp(LLAMA3_70B, tokens)
    attention = LLAMA3_70B.attention_flops(tokens, 8192)
    plan = dataclasses.replace(
        plan, device_cost=dataclasses.replace(plan.device_cost, flops=plan.device_cost.flops + attention)
    )
    roofline = plan.roofline(hardware)
    bound, estimate = roofline.step_seconds
    assert bound <= published <= 2 * estimate
    assert plan.model_flops is not None
    counted = plan.model_flops / plan.devices + 2 * attention
    assert counted / published == pytest.approx(506.597e12, rel=0.01)
    assert {*roofline.parts} == {'compute', 'hbm', 'ici:fsdp', 'dcn:fsdp'}


@pytest.mark.slow
@pytest.mark.parametrize('published_step', PUBLISHED.values(), ids=PUBLISHED)
def test_published_steps_are_between_the_bounds(published_step: Published) -> None:
    """At least the fully overlapped time, and at most twice the serial time."""
    tokens = published_step.sequences * published_step.length
    plan = plan_fsdp(published_step.model, tokens, published_step.saved)
    attention = published_step.model.attention_flops(tokens, published_step.length)
    plan = dataclasses.replace(
        plan, device_cost=dataclasses.replace(plan.device_cost, flops=plan.device_cost.flops + attention)
    )
    torus = (2, 2, 2) if published_step.hardware is V5P else (4, 2)
    hardware = RINGS[published_step.hardware.name]
    bound, estimate = plan.roofline(hardware, torus={'fsdp': torus}).step_seconds
    assert bound <= published_step.seconds <= 2 * estimate
    # The published MFU counts all pairs of attention or, since 2025, half of them.
    assert plan.model_flops is not None
    peak = published_step.seconds * plan.devices * hardware.flops_per_second
    half, full = ((plan.model_flops + plan.devices * count * attention) / peak for count in (1, 2))
    assert 0.98 * half < published_step.mfu < 1.02 * full
    assert published_step.mfu < full * published_step.seconds / bound
