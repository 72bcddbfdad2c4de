"""What makes differences go away: the step is compiled in other ways, and compared again."""

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


def run_ablations(found: Comparison, seed: int, steps: int, note: UpdateProgress) -> Iterator[Ablation]:
    """Compares a step with differences again, in other ways, with the arguments that showed them."""
    for change, options in _variants(found):
        note(change)
        try:
            function = found.step.variant(**options, donate_argnums=None, donate_argnames=None)
            again = Comparison(found.step, found.one, function)
            again.run(seed, steps, lambda _: None)
        except Exception as error:  # noqa: BLE001 - a program that XLA refuses is no verdict
            yield Ablation(change, None, first_line(error))
        else:
            yield Ablation(change, bool(again.differences))


def _variants(found: Comparison) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is done in another way, and the options of `sjit` that say so."""
    step = found.step
    if not isinstance(step.function, SjitFunction):
        return
    args, kwargs = step.abstract()
    staged, unbatched = (
        pipelines_of(step.function, args, kwargs),
        {'batch_argnums': (), 'batch_argnames': None},
    )
    if staged is not None:  # its pipelines need the batch, and layers along their axis
        yield 'without stages', {'stages': None}
        yield 'without stages and partitioning along the batch', {**unbatched, 'stages': None}
    elif partitioned_step(step.function, args, kwargs) is not None:
        yield 'without partitioning along the batch', unbatched
    for axis, size in step.helper.mesh.shape.items():
        if (
            size > 1
            and not kwargs
            and (staged is None or axis not in [loop.axis for loop, _ in staged.loops])
        ):
            inputs, _ = step.function.shardings_for(*args)
            others = set(step.helper.mesh.axis_names) - {axis}
            inputs = inputs[: len(args)]  # the last may be of keywords, of which there are none
            whole = jax.tree.map(
                lambda each, others=others: NamedSharding(each.mesh, only_axes(each.spec, others)), inputs
            )
            if whole != inputs:
                yield f'with no argument sharded along {axis}', {'in_shardings': whole}
