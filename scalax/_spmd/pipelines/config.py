"""What users say of a pipeline."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Literal

from scalax.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Stages:
    """Runs loops over layers as pipelines over a mesh axis: ``helper.sjit(step, stages=Stages('stage', 8))``.

    A rule shards the scanned dimension of the layers' parameters over the axis. Each stage then computes with
    the layers that it holds, and the batch passes from stage to stage in microbatches. For S stages, M
    microbatches and r rounds there are ``r M + S - 1`` ticks, in ``S - 1`` of which a stage is idle: the
    bubble is ``(S - 1) / (r M + S - 1)`` (GPipe, arXiv:1811.06965; circular, arXiv:2104.04473, section 2.2).

    Args:
        axis: the mesh axis over which the layers are sharded.
        microbatches: the number of microbatches. With a multiple of the stages, the batch is sharded over the
            axis outside of the pipeline; otherwise all stages compute the same there.
        rounds: how many groups of layers a stage runs, through which microbatches pass in as many rounds.
            More than one moves weights and gradients between stages, once a step each.
        gather: when weights are gathered that are sharded over the mesh axes of the batch: in each
            ``'tick'``, layer by layer, or once a ``'step'``, for which a device needs room for all layers of
            its stage and their gradients.

    Raises:
        ArgumentError: no name of an axis, no positive numbers, or no such time.

    Example:
        >>> Stages('stage', microbatches=8)
        Stages(axis='stage', microbatches=8, rounds=1, gather='tick')
    """

    axis: str
    microbatches: int
    rounds: int = 1
    gather: Literal['tick', 'step'] = 'tick'

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str):
            raise ArgumentError(
                f"Stages('stage', microbatches=8) takes the name of a mesh axis first, got {self.axis!r}"
            )
        for name in ('microbatches', 'rounds'):
            value = getattr(self, name)
            if not _is_count(value):
                raise ArgumentError(f'Stages({self.axis!r}, ...): {name} is a positive number, got {value!r}')
            object.__setattr__(self, name, operator.index(value))
        if self.gather not in ('tick', 'step'):
            raise ArgumentError(
                f"Stages({self.axis!r}, ...): gather is 'tick' or 'step', got {self.gather!r}"
            )


def options_text(stages: Stages) -> str:
    """What is said of a pipeline beside its axis, as in Python.

    Example:
        >>> options_text(Stages('stage', 8)), options_text(Stages('stage', 8, rounds=2, gather='step'))
        ('microbatches=8', "microbatches=8, rounds=2, gather='step'")
    """
    options = [(field, getattr(stages, field.name)) for field in dataclasses.fields(stages)[1:]]
    return ', '.join([f'{field.name}={value!r}' for field, value in options if value != field.default])


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, '__index__') and operator.index(value) > 0
