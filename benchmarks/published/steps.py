"""Published step times, and pairs of layouts of which one was reported to be faster.

Each step is compiled for its (absent) GPUs with the published sizes, layout, microbatches and recomputation.
No parameter of a plan is fitted to the published times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from benchmarks.published.decoder import AXES, ROWS, Decoder, Recomputed, has_cudnn, training_step
from scalax._planning.time.schedule import CUDNN_FACTORS
from scalax.plan import HARDWARE, Hardware, Plan
from scalax.sharding import MeshShardingHelper


@dataclasses.dataclass(frozen=True)
class Step:
    """A step with a published time.

    Attributes:
        source: the publication.
        model: the sizes.
        topology: the GPUs.
        mesh: the sizes of data, fsdp, expert and tp; 1 if omitted.
        sequences: the number per microbatch, for the devices of tp together.
        length: the number of tokens of a sequence.
        microbatches: the number per step.
        recomputed: what the backward pass recomputes: nothing, all but matmuls, or entire layers.
        seconds: the step time, as published or from the published tokens per second.
        hardware: changes to the hardware specs of the GPU, if other specs were published.
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
    def rows(self) -> int:
        """The number of sequences of a step."""
        shares = math.prod(size for name, size in self.mesh.items() if name in ROWS)
        return shares * self.sequences * self.microbatches

    @property
    def tokens(self) -> int:
        """The number of tokens of a step."""
        return self.rows * self.length

    @property
    def missing(self) -> int:
        """The FLOPs of attention on one device, if another function replaces the kernel."""
        if has_cudnn():
            return 0
        of_all = self.model.attention_flops(self.tokens, self.length, self.recomputed == 'layers')
        return of_all // self.devices

    def plan(self) -> Plan:
        """Returns the plan of the step, compiled for its GPUs, with the FLOPs of its attention."""
        sizes = [self.mesh.get(name, 1) for name in AXES]
        helper = MeshShardingHelper.from_topology(self.topology, sizes, AXES)
        step, arguments = training_step(
            self.model, helper, self.rows, self.length, self.microbatches, self.recomputed
        )
        plan: Plan = helper.plan(step, *arguments)
        work = dataclasses.replace(plan.device_cost, flops=plan.device_cost.flops + self.missing)
        return dataclasses.replace(plan, device_cost=work)

    def scheduled(self, plan: Plan) -> float | None:
        """Returns the seconds by the compiler's schedule, including attention."""
        if plan.schedule is None:
            return None
        least = self.missing * self.devices / plan.roofline(self.numbers).peak
        return plan.schedule.seconds + CUDNN_FACTORS['__cudnn$fmha'] * least

    @property
    def numbers(self) -> Hardware:
        return dataclasses.replace(HARDWARE[self.topology.partition(':')[0]], **self.hardware)


def mfu_seconds(model: Decoder, tokens: int, length: int, mfu: float) -> float:
    """Returns the step time from an MFU of 989e12 FLOPs per second, counted as torchtitan does: all pairs.

    https://github.com/pytorch/torchtitan/blob/0011fb9/torchtitan/utils.py
    """
    multiplied = model.parameters - model.vocabulary * model.width
    return tokens * (6 * multiplied + 12 * model.layers * model.width * length) / (989e12 * mfu)


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
# The vocabulary of 50,257 is padded to a multiple of tp.
LLAMA_1B = Decoder(24, 2048, 32, 32, 4096, 50_264, tied=True, head=64)
# In most layers of the original, attention has a window. Here it covers all positions in all layers.
GRUG_129B = Decoder(48, 5120, 40, 10, 5120, 128_256, experts=64, chosen=4, expert_hidden=2560)
GRUG_360B = Decoder(48, 6144, 48, 12, 6144, 128_256, experts=128, chosen=4, expert_hidden=3072)

NGC = 'https://catalog.ngc.nvidia.com/orgs/nvidia/teams/dgxc-benchmarking/resources/'
LLAMA2_RECIPE, LLAMA3_RECIPE = (
    f'{NGC}maxtext-llama2-70b-dgxc-benchmarking-c',
    f'{NGC}maxtext-llama3-70b-dgxc-benchmarking-d',
)
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
NANOTRON = 'https://huggingface.co/nanotron/old_bench'  # sizes: github.com/huggingface/bench_cluster
GB200 = 'https://github.com/daddyofadoggy/blog/blob/db07f84/posts/torchtitan/3d.md'
MARIN = 'https://github.com/marin-community/marin/pull/7981'  # sizes: issue 7201
MARIN_RACKS = 'https://github.com/marin-community/marin/issues/7201'
# "96GB HBM2e with 2.4 TB/sec"; its lower power limit only makes steps longer.
HBM2E: dict[str, Any] = {'hbm_bytes_per_second': 2.4e12}

PUBLISHED = {
    # The saved residuals were not published: no matmul is recomputed here.
    'MaxText, Llama 2 70B, 64 H100, FSDP': Step(
        LLAMA2_RECIPE, LLAMA2_70B, 'h100:8x8', {'fsdp': 64}, 2, 4096, 1, 'elementwise', 7.908
    ),
    'MaxText, Llama 3 70B, 128 H100, FSDP': Step(
        LLAMA3_RECIPE, LLAMA3_70B, 'h100:16x8', {'fsdp': 128}, 2, 8192, 1, 'elementwise', 15.570
    ),
    # "Selective" recomputes some matmuls; here none.
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
    # ZeRO-1, but here every device updates all parameters; the gradients of each microbatch are reduced.
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
    # "FSDP + intra-rack sharding" of eight racks; the recomputation was not published.
    'marin, Grug 129B, 512 GB200, HSDP': Step(
        MARIN_RACKS,
        GRUG_129B,
        'gb200:8x16x4',
        {'data': 8, 'fsdp': 64},
        16,
        4096,
        1,
        'elementwise',
        8192 * 4096 / 2.77e6,
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
    # Published as MFU of 989e12 FLOPs per second: 26.9 % and 22.4 %.
    'torchtitan, Llama 3 8B, 8 H100, FSDP (1 sequence)': Step(
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
    'torchtitan, Llama 3 8B, 8 H100, FSDP x TP 4 (4 sequences)': Step(
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
        'torchtitan, Llama 3 8B, 8 H100, FSDP (1 sequence)',
        'torchtitan, Llama 3 8B, 8 H100, FSDP x TP 4 (4 sequences)',
    ),
    ('nanotron, Llama 1B, 8 H100, DP x TP 2', 'nanotron, Llama 1B, 8 H100, DP x TP 4'),
    ('nanotron, Llama 1B, 8 H100, DP x TP 4', 'nanotron, Llama 1B, 8 H100, TP 8'),
    ('torchtitan, Llama 3.1 8B, 8 GB200, FSDP', 'torchtitan, Llama 3.1 8B, 8 GB200, FSDP x TP 2'),
    ('torchtitan, Llama 3.1 8B, 8 GB200, FSDP', 'torchtitan, Llama 3.1 8B, 8 GB200, HSDP'),
    ('marin, Grug 360B, 64 GB200, experts', 'marin, Grug 360B, 64 GB200, FSDP'),
)
"""Pairs of layouts on the same GPUs, the faster one first: tokens a second, as published."""
