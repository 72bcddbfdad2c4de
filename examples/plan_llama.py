"""Plans of a LLaMA-3 training step on TPUs that are not attached: whether it fits, and its bottleneck.

    python -m examples.plan_llama                      # a table: 8B and 70B on small and large slices
    python -m examples.plan_llama --only 8b-v5p        # only lines whose names start with this
    python -m examples.plan_llama --only 8b-v5p --full # with all optimizations of the compiler
    python -m examples.plan_llama --names              # activations sharded by name, not by propagation

or one of them in full detail, with the command line of scalax:

    python -m scalax plan examples/plan_llama.py:make_8b --topology v5p:4x4x4 --mesh fsdp=-1,tp=4

The model is the decoder of examples/llama at full size, in bfloat16 with AdamW, with one sequence of 4,096
tokens per device. No array is ever allocated. Sizes: arXiv:2407.21783, table 3.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.llama.model import ModelConfig, Params
from examples.llama.strategies import FSDP_TP, in_stages
from examples.llama.training import make_init, make_train_step
from scalax.plan import Plan, make_plan
from scalax.rules import catalogue
from scalax.sharding import MeshShardingHelper, PartitionSpec, Pipeline

P = PartitionSpec
SEQUENCE = 4096


@dataclasses.dataclass(frozen=True)
class Llama3(ModelConfig):
    """The sizes of LLaMA-3 8B, whose feed-forward block is wider than 8/3 of the width."""

    width: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128_256
    rotary_base: float = 500_000.0
    units: int = 14_336
    sequence: int = SEQUENCE

    @property
    def hidden(self) -> int:
        return self.units


LLAMA_1B = Llama3(width=2048, layers=16, units=8192)
LLAMA_8B = Llama3()
LLAMA_70B = Llama3(width=8192, layers=80, heads=64, units=28_672)


@dataclasses.dataclass(frozen=True)
class Case:
    """A line of the table."""

    name: str
    model: Llama3
    topology: str
    mesh: dict[str, int]
    slices: int = 1


CASES = (
    Case('1b-v5e', LLAMA_1B, 'v5e:2x4', {'fsdp': -1, 'tp': 2}),
    Case('8b-v5e', LLAMA_8B, 'v5e:2x4', {'fsdp': -1, 'tp': 2}),
    Case('8b-v6e', LLAMA_8B, 'v6e:16x16', {'fsdp': -1, 'tp': 8}),
    Case('8b-v5p', LLAMA_8B, 'v5p:4x4x4', {'fsdp': -1, 'tp': 4}),
    Case('70b-v5p', LLAMA_70B, 'v5p:4x4x4', {'fsdp': -1, 'tp': 4}),
    Case('70b-v5p-pod', LLAMA_70B, 'v5p:16x16x16', {'data': 2, 'fsdp': -1, 'tp': 8}),
    Case('70b-v5p-slices', LLAMA_70B, 'v5p:8x8x8', {'data': 4, 'fsdp': -1, 'tp': 8}, slices=4),
)


def make_8b(helper: MeshShardingHelper, pipeline: Pipeline | None = None) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step and its arguments, for ``python -m scalax plan``."""
    return make_step(helper, LLAMA_8B, pipeline=pipeline)


def make_70b(helper: MeshShardingHelper, pipeline: Pipeline | None = None) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step and its arguments, for ``python -m scalax plan``."""
    return make_step(helper, LLAMA_70B, pipeline=pipeline)


def make_step(
    helper: MeshShardingHelper,
    model: Llama3,
    layout: catalogue.ActivationSpecs | None = None,
    pipeline: Pipeline | None = None,
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step of examples/llama and its arguments.

    The mesh has axes fsdp and tp, and may have stage and data. The step is partitioned along its batch, or
    all activations are sharded by a layout. A pipeline has as many microbatches as possible by default.
    """
    strategy = FSDP_TP
    sizes = helper.mesh.shape
    if sizes.get('stage', 1) > 1:
        strategy = in_stages(FSDP_TP, sizes['stage'], helper.mesh.size // sizes['fsdp'])
    optimizer = optax.adamw(1e-4, b2=0.95)
    state = jax.eval_shape(make_init(model, optimizer), jax.random.key(0))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), state.params)
    state = state._replace(params=params, opt_state=jax.eval_shape(optimizer.init, params))
    tokens = jax.ShapeDtypeStruct((helper.mesh.size, model.sequence + 1), 'int32')
    batch_axes = tuple(name for name in ('stage', 'data', 'fsdp') if name in helper.axis_names)
    step = helper.sjit(
        make_train_step(model, optimizer),
        in_shardings=(strategy.state, P(batch_axes)),
        out_shardings=(strategy.state, P()),
        annotation_shardings=None if layout is None else catalogue.activations(layout, batch=batch_axes),
        batch_argnums=1 if layout is None else (),
        donate_argnums=0,
        pipeline=pipeline or strategy.pipeline,
    )
    return step, (state, tokens)


def model_flops(model: ModelConfig, params: Params, sequences: int) -> float:
    """Returns 6 x parameters x tokens, plus causal attention, which computes half of all pairs."""
    weights = sum(leaf.size for leaf in jax.tree.leaves(params)) - params['embed'].size
    attention = 6 * model.layers * SEQUENCE * model.width  # per token: 12 x layers x width x sequence / 2
    return sequences * SEQUENCE * (6.0 * weights + attention)


def plan_case(case: Case, quick: bool, layout: catalogue.ActivationSpecs | None = None) -> Plan:
    """Returns the plan of a case."""
    helper = MeshShardingHelper.from_topology(
        case.topology,
        list(case.mesh.values()),
        list(case.mesh),
        mesh_axis_splitting=True,  # in large slices, tp is shorter than a torus axis
        num_slices=case.slices,
        dcn_axis_dims=[case.slices if name == 'data' else 1 for name in case.mesh]
        if case.slices > 1
        else None,
    )
    step, arguments = make_step(helper, case.model, layout)
    plan = make_plan(helper, step, arguments, {}, quick=quick)
    return plan.with_model_flops(model_flops(case.model, arguments[0].params, helper.mesh.size))


def line(case: Case, plan: Plan, seconds: float) -> str:
    """Formats a plan as a line of the table."""
    roofline = plan.roofline()
    mesh = ' '.join(f'{name}={size}' for name, size in plan.mesh.items())
    cells = [
        case.name,
        case.topology + (f' x {case.slices}' if case.slices > 1 else ''),
        mesh,
        f'{plan.memory.peak / 2**30:.1f}',
        f'{(plan.memory.limit or 0) / 2**30:.1f}',
        'yes' if plan.fits else 'no',
        f'{plan.flops:.3g}',
        f'{1e3 * roofline.step_seconds.overlapped:,.0f}',
        roofline.bottleneck,
        f'{roofline.mfu or 0:.0%}',
        f'{seconds:.0f}',
    ]
    return f'| {" | ".join(cells)} |'


def main() -> None:
    """Prints the table line by line."""
    parser = argparse.ArgumentParser(description='Plans LLaMA-3 on TPUs that are not attached.')
    parser.add_argument('--only', default='', metavar='NAME', help='only lines whose names start with NAME')
    parser.add_argument(
        '--full', action='store_true', help='compile with all optimizations; takes minutes per line'
    )
    parser.add_argument(
        '--names', action='store_true', help='shard activations by name instead of by propagation'
    )
    args = parser.parse_args()
    cases = [case for case in CASES if case.name.startswith(args.only)]
    if not cases:
        parser.error(f'no name starts with {args.only!r}: {", ".join(case.name for case in CASES)}')
    jax.config.update('jax_platforms', 'cpu')
    layout = catalogue.TENSOR_PARALLEL if args.names else None
    print('| step | slice | mesh | peak GiB | of | fits | flops | at least ms | bound | MFU | planned in s |')
    print('|---|---|---|---|---|---|---|---|---|---|---|')
    for case in cases:
        start = time.perf_counter()
        plan = plan_case(case, not args.full, layout)
        print(line(case, plan, time.perf_counter() - start), flush=True)


if __name__ == '__main__':
    main()
