"""Ablations of a step with differences: the step compiled with one change each, and compared again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from scalax._compile.sjit.function import SjitFunction, partitioned_step, pipelines_of
from scalax._core.pytree.partition_specs import only_axes
from scalax._core.util.progress import UpdateProgress
from scalax._verification.compare import Comparison
from scalax._verification.report import Ablation, first_line


def run_ablations(
    comparison: Comparison, seed: int, steps: int, update_progress: UpdateProgress
) -> Iterator[Ablation]:
    """Compares a step with differences again, with each change, for the arguments that showed them."""
    for change, options in _variants(comparison):
        update_progress(change)
        try:
            function = comparison.step.variant(**options, donate_argnums=None, donate_argnames=None)
            repeated = Comparison(comparison.step, comparison.reference, function)
            repeated.run(seed, steps, lambda _: None)
        except Exception as error:  # noqa: BLE001 - a program that XLA refuses is not a verdict
            yield Ablation(change, None, first_line(error))
        else:
            yield Ablation(change, bool(repeated.differences))


def _variants(comparison: Comparison) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the changes that apply to a step, and the options of `sjit` that make them."""
    step = comparison.step
    if not isinstance(step.function, SjitFunction):
        return
    args, kwargs = step.abstract_arguments()
    pipelines = pipelines_of(step.function, args, kwargs)
    unpartitioned = {'batch_argnums': (), 'batch_argnames': None}
    if pipelines is not None:  # they need the batch, and layers sharded over their axis
        yield 'without pipelining', {'pipeline': None}
        yield 'without pipelining and partitioning along the batch', {**unpartitioned, 'pipeline': None}
    elif partitioned_step(step.function, args, kwargs) is not None:
        yield 'without partitioning along the batch', unpartitioned
    if kwargs:
        return
    pipeline_axes = {loop.axis for loop, _ in pipelines.loops} if pipelines is not None else set()
    for axis, size in step.helper.mesh.shape.items():
        if size > 1 and axis not in pipeline_axes:
            in_shardings = step.function.shardings_for(*args)[0][: len(args)]  # without those of keywords
            others = set(step.helper.mesh.axis_names) - {axis}
            unsharded = jax.tree.map(
                lambda sharding, others=others: NamedSharding(
                    sharding.mesh, only_axes(sharding.spec, others)
                ),
                in_shardings,
            )
            if unsharded != in_shardings:
                yield f'with no argument sharded along {axis}', {'in_shardings': unsharded}
