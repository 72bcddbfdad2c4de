"""`Pipeline`: the options of pipeline parallelism."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Literal

from scalax.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Runs loops over layers as pipelines: ``helper.sjit(step, pipeline=Pipeline('stage', 8))``.

    A rule shards the scanned dimension of the layers' parameters over the axis. Each stage then computes with
    the layers that it holds, and the batch passes from stage to stage in microbatches. For S stages, M
    microbatches and r repeats there are ``r M + S - 1`` ticks, in ``S - 1`` of which a stage is idle: the
    bubble is ``(S - 1) / (r M + S - 1)`` (GPipe, arXiv:1811.06965; circular, arXiv:2104.04473, section 2.2).

    Args:
        axis: the mesh axis over which the layers are sharded.
        num_microbatches: the number of microbatches. If it is a multiple of the number of stages, the batch
            is sharded over the axis outside of the pipeline; otherwise all stages compute the same there.
        num_repeats: how often each microbatch passes through all stages. Each stage then holds as many groups
            of layers. With more than one, weights and gradients move between stages, once a step each.
        fsdp_gather: when weights that are sharded over the batch axes are gathered: in each ``'tick'``, layer
            by layer, or once a ``'step'``, for which a device needs memory for all layers of its stage and
            their gradients.

    Raises:
        ArgumentError: *axis* is not a name, a number is not positive, or *fsdp_gather* is something else.

    Example:
        >>> Pipeline('stage', num_microbatches=8)
        Pipeline(axis='stage', num_microbatches=8, num_repeats=1, fsdp_gather='tick')
    """

    axis: str
    num_microbatches: int
    num_repeats: int = 1
    fsdp_gather: Literal['tick', 'step'] = 'tick'

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str):
            raise ArgumentError(
                "Pipeline('stage', num_microbatches=8) takes the name of a mesh axis first, "
                f'got {self.axis!r}'
            )
        for name in ('num_microbatches', 'num_repeats'):
            value = getattr(self, name)
            if not _is_positive_int(value):
                raise ArgumentError(
                    f'Pipeline({self.axis!r}, ...): {name} is a positive number, got {value!r}'
                )
            object.__setattr__(self, name, operator.index(value))
        if self.fsdp_gather not in ('tick', 'step'):
            raise ArgumentError(
                f"Pipeline({self.axis!r}, ...): fsdp_gather is 'tick' or 'step', got {self.fsdp_gather!r}"
            )


def options_text(pipeline: Pipeline) -> str:
    """Formats the options of a pipeline, except for its axis, as keyword arguments in Python.

    Example:
        >>> options_text(Pipeline('stage', 8))
        'num_microbatches=8'
        >>> options_text(Pipeline('stage', 8, num_repeats=2, fsdp_gather='step'))
        "num_microbatches=8, num_repeats=2, fsdp_gather='step'"
    """
    options = [(field, getattr(pipeline, field.name)) for field in dataclasses.fields(pipeline)[1:]]
    return ', '.join([f'{field.name}={value!r}' for field, value in options if value != field.default])


def _is_positive_int(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, '__index__') and operator.index(value) > 0
