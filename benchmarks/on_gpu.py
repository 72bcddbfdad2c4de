"""``--only gpu``: training steps on the local GPU, compared with their plans.

Each step runs in a separate process, so that the allocator's peak is the peak of the step. It is planned and
compiled before its arguments are on the GPU, because autotuning uses the GPU's memory too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.published.decoder import AXES, Decoder, Recomputed
from benchmarks.published.decoder import training_step as decoder_step
from benchmarks.unchanged import bert, experts, measure, resnet, vision
from benchmarks.unchanged.model import Strategy
from examples import plan_llama
from scalax.sharding import MeshShardingHelper

Step = tuple[Any, tuple[Any, ...]]
Make = Callable[[str], tuple[MeshShardingHelper, Step]]

_SECONDS = 600  # the time limit of one step, including compilation
_ROUNDS, _CALLS = 5, 5
_FILES = (bert, experts, resnet, vision)
_MOMENTS = re.compile(r'\.(mu|nu|count)\b')


def _helper(names: list[str], topology: str) -> MeshShardingHelper:
    """Returns the helper of a mesh of one GPU, local or absent."""
    sizes = [1] * len(names)
    if topology:
        return MeshShardingHelper.from_topology(topology, sizes, names)
    return MeshShardingHelper(sizes, names, devices=jax.devices()[:1])


def _decoder(model: Decoder, rows: int, recomputed: Recomputed) -> Make:
    """Returns a decoder with float32 weights and cuDNN attention, for sequences of 2,048 tokens."""

    def make(topology: str) -> tuple[MeshShardingHelper, Step]:
        helper = _helper(AXES, topology)
        return helper, decoder_step(model, helper, rows, 2048, 1, recomputed)

    return make


def _llama(rows: int, **sizes: Any) -> Make:
    """Returns the decoder of examples/llama in bfloat16: plain JAX attention, rematerialized layers."""
    model = dataclasses.replace(plan_llama.LLAMA_1B, **sizes)

    def make(topology: str) -> tuple[MeshShardingHelper, Step]:
        helper = _helper(['fsdp', 'tp'], topology)
        step, (state, tokens) = plan_llama.make_step(helper, model)
        return helper, (step, (state, jax.ShapeDtypeStruct((rows, tokens.shape[1]), tokens.dtype)))

    return make


def _unchanged(name: str, rows: int) -> Make:
    """Returns a full-size model of `benchmarks.unchanged` in bfloat16."""

    def make(topology: str) -> tuple[MeshShardingHelper, Step]:
        models = [model for file in _FILES for model in file.models('large')]
        [model] = [candidate for candidate in models if candidate.name == name]
        helper = _helper(['fsdp'], topology)
        strategy = Strategy('one GPU', {'fsdp': 1}, ('fsdp',))
        return helper, measure.make_step(model, strategy, helper, 'partitioned', rows)

    return make


STEPS: dict[str, Make] = {
    'decoder, 125M': _decoder(Decoder(12, 768, 12, 12, 2048, 32_000, head=64), 16, 'nothing'),
    'decoder, 350M': _decoder(Decoder(24, 1024, 16, 16, 2816, 32_000, head=64), 8, 'nothing'),
    'decoder, 1.3B': _decoder(Decoder(24, 2048, 16, 16, 5632, 32_000), 8, 'elementwise'),
    'decoder, 3.2B': _decoder(Decoder(28, 3072, 24, 8, 8192, 128_256, tied=True), 4, 'layers'),
    'LLaMA, 125M, plain attention': _llama(
        8, width=768, layers=12, heads=12, kv_heads=4, units=2048, vocabulary=32_000, sequence=2048
    ),
    'LLaMA, 1.5B, plain attention': _llama(2),
    'ViT-H': _unchanged('vision transformer', 64),
    'BERT-large': _unchanged('BERT', 32),
    'experts, one-hot dispatch': _unchanged('experts, one-hot dispatch', 8),
    'experts, sorted tokens': _unchanged('experts, sorted tokens', 8),
    'ResNet': _unchanged('ResNet with BatchNorm', 128),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a step, and its plan.

    Attributes:
        planned_bytes: its GPU memory, by the plan.
        peak_bytes: the peak of JAX's allocator.
        bound: fully overlapped seconds, by the plan.
        scheduled: seconds along the compiler's schedule, if it has one.
        seconds: the median time of consecutive calls.
    """

    planned_bytes: int
    peak_bytes: int
    bound: float
    scheduled: float | None
    seconds: float


def values(structs: Any, shardings: Any) -> Any:
    """Returns small numbers as arguments of a step; the moments of an optimizer are zero, as initially."""

    def value(path: Any, struct: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(struct.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if _MOMENTS.search(jax.tree_util.keystr(path)):
            return jnp.zeros(struct.shape, struct.dtype)
        many = jax.lax.iota('int32', math.prod(struct.shape))
        if jnp.issubdtype(struct.dtype, jnp.integer):
            array = many * 7919 % 1000
        else:
            array = 0.02 * jnp.sin(many.astype('float32'))
        return array.reshape(struct.shape).astype(struct.dtype)

    return jax.jit(lambda: jax.tree.map_with_path(value, structs), out_shardings=shardings)()


def run(name: str) -> Measured:
    """Plans a step, and runs it on the local GPU."""
    helper, (step, structs) = STEPS[name]('')
    plan = helper.plan(step, *structs)
    lowered = step.lower(*structs)
    call = lowered.compile()
    args, _ = values((structs, {}), call.input_shardings)
    carried = sum(all(leaf.donated for leaf in jax.tree.leaves(info)) for info in lowered.args_info[0])
    [device] = helper.mesh.devices.flat

    def calls(count: int) -> float:
        nonlocal args
        start = time.perf_counter()
        for _ in range(count):
            result = call(*args)
            args = (*result[:carried], *args[carried:])
        jax.block_until_ready(args)
        return (time.perf_counter() - start) / count

    calls(2)
    seconds = statistics.median(calls(_CALLS) for _ in range(_ROUNDS))
    return Measured(
        plan.memory.total,
        device.memory_stats()['peak_bytes_in_use'],
        plan.roofline().step_seconds.overlapped,
        plan.schedule.seconds if plan.schedule else None,
        seconds,
    )


def line(name: str, measured: Measured) -> str:
    """Returns a row of the table."""
    gib = [f'{size / 2**30:.2f}' for size in (measured.planned_bytes, measured.peak_bytes)]
    off = f'{measured.planned_bytes / measured.peak_bytes - 1:+.1%}'
    times = (measured.bound, measured.scheduled, measured.seconds)
    ms = ['-' if time is None else f'{1e3 * time:#.3g}' for time in times]
    late = '-' if measured.scheduled is None else f'{measured.scheduled / measured.seconds - 1:+.0%}'
    return f'| {" | ".join([name, *gib, off, *ms, late])} |'


def show(model: str) -> None:
    """Prints the table of the steps whose names contain *model*, each line as soon as it is measured."""
    # This process only checks that there is a GPU. The processes of steps preallocate its memory, as usual.
    os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'
    process_env = {
        **os.environ,
        'XLA_PYTHON_CLIENT_PREALLOCATE': 'true',
        'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.9',
    }
    device = jax.devices()[0]
    if device.platform != 'gpu':
        print(f'no GPU is here, and nothing is measured: JAX has {device.device_kind!r}')
        return
    print(f'JAX {jax.__version__}, {device.device_kind}\n')
    print('| step | planned GiB | peak GiB | off | at least ms | schedule ms | measured ms | off |')
    print('|---|---|---|---|---|---|---|---|')
    for name in STEPS:
        if model in name:
            command = [sys.executable, '-m', 'benchmarks.on_gpu', name]
            ended = subprocess.run(
                command, env=process_env, stdout=subprocess.PIPE, check=True, timeout=_SECONDS
            )
            print(line(name, Measured(**json.loads(ended.stdout.splitlines()[-1]))), flush=True)


if __name__ == '__main__':
    print(json.dumps(dataclasses.asdict(run(sys.argv[1]))))
