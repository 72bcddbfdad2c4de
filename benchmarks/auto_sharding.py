"""``--only auto_sharding``: rules that `scalax.plan.autoshard` chooses, compared with expert rules.

The expert rules are those of benchmarks/unchanged/tables.md and of `updates`, hand-written and partitioned,
with several sizes of tp. The best rule has the smallest mean of the overlapped and serial roofline times.
No step is run: all are planned for absent TPUs or GPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks import updates
from benchmarks.unchanged.measure import arguments, figures, plan, training_step
from benchmarks.unchanged.model import STRATEGIES, Model, Strategy
from benchmarks.unchanged.table import user_errors
from scalax.errors import ScalaxError
from scalax.plan import AutoShardingResult, Plan, autoshard

FSDP, _, HSDP = STRATEGIES
SIZES_OF_TP = (2, 4, 8)
# The fraction of device memory that expert rules and the search leave free.
HEADROOM = 0.1
# One model per architecture, in the order of the table.
NAMES = (
    *('LLaMA-3 8B', 'decoder, many heads', 'experts, one-hot dispatch', 'experts, over the batch axis'),
    *('encoder-decoder', 'vision transformer', 'UNet with attention', 'recommender', 'dual encoder'),
    *('low-rank adapters', 'BERT', 'diffusion transformer', 'state-space model', 'recurrent cell'),
    *('flax.nnx modules', 'LLaMA-3 70B', 'wide and deep', 'Gemma-like 2.6B, float32'),
)
TITLES = (
    *('model', 'best known', 'its seconds', 'bound', 'estimate', 'scheduled', 'peak'),
    *('found mesh', 'seconds', 'bound', 'estimate', 'scheduled', 'peak', 'tried', 'search'),
)
FIGURES = ('seconds', 'bound', 'estimate', 'scheduled')
WIDTHS = (28, 50, 11, 9, 9, 9, 9, 24, 8, 8, 8, 9, 9, 5, 6)


@dataclasses.dataclass(frozen=True)
class Result:
    """The cost of a rule: overlapped and serial seconds, GiB at the peak, and whether it fits.

    On GPUs also the seconds by the compiler's schedule; None on other devices.
    """

    name: str
    bound: float
    estimate: float
    scheduled: float | None
    peak: float
    fits: bool

    @property
    def seconds(self) -> float:
        """The objective of the search."""
        return (self.bound + self.estimate) / 2

    @classmethod
    def of(cls, name: str, plan: Plan) -> Result:
        """Returns the result of a plan."""
        its, limit = figures(plan), plan.memory.limit
        fits = limit is None or plan.memory.total <= limit * (1 - HEADROOM)
        scheduled = None if plan.schedule is None else plan.schedule.seconds
        return cls(name, its['bound'], its['estimate'], scheduled, its['peak'], fits)


@dataclasses.dataclass(frozen=True)
class Task:
    """The input of both sides: a topology for the step, and the time limit of the search."""

    topology: str
    slices: int = 1
    budget: float = 90.0

    @property
    def strategies(self) -> list[Strategy]:
        """Returns the strategies without tp and with several sizes of tp, with a data axis between slices."""
        plain = FSDP
        if self.slices > 1:
            name, mesh = f'HSDP, {self.slices} slices', {**HSDP.mesh, 'data': self.slices}
            plain = Strategy(name, mesh, HSDP.batch_axes, self.slices)
        devices_per_slice = plain.helper(self.topology).mesh.size // self.slices
        with_tp = [
            dataclasses.replace(plain, name=f'{plain.name} x TP {size}', mesh={**plain.mesh, 'tp': size})
            for size in SIZES_OF_TP
            if devices_per_slice % size == 0
        ]
        return [plain, *with_tp]


StrategyResults = Callable[[Sequence[Model], Task], Sequence[Result]]
Search = Callable[[Model, Task], AutoShardingResult]


def strategy_results(models: Sequence[Model], task: Task) -> list[Result]:
    """Returns the results of all expert rules of a model; *models* has the model with each of its tables."""

    def result_of(cell: tuple[Model, Strategy, str]) -> Result | None:
        model, strategy, variant = cell
        variant_name = model.name.removeprefix(models[0].name).removeprefix(', ')
        name = ', '.join(filter(None, [strategy.name, variant_name, variant]))
        try:
            return Result.of(name, plan(model, strategy, task.topology, variant))
        except (NotImplementedError, ScalaxError) as error:  # raised for rejected programs
            print(f'{models[0].name}, {name}: {error}', file=sys.stderr)
            return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cells = itertools.product(models, task.strategies, ('hand', 'partitioned'))
        return [result for result in pool.map(result_of, cells) if result is not None]


def search(model: Model, task: Task) -> AutoShardingResult:
    """Returns the result of auto-sharding for a model."""
    devices = task.strategies[0].helper(task.topology).mesh.size
    return autoshard(
        training_step(model, model.loss),
        arguments(model, model.rows * devices),
        task.topology,
        batch_argnums=1,
        donate_argnums=0,
        batch_dim=model.batch_dim,
        num_slices=task.slices,
        headroom=HEADROOM,
        budget_s=task.budget,
    )


def lines(
    models: Sequence[Sequence[Model]],
    task: Task,
    strategy_results: StrategyResults = strategy_results,
    search: Search = search,
) -> Iterator[str]:
    """Yields the lines of the Markdown table, each as soon as it is computed.

    Args:
        models: for each row, a model with each of its tables.
        task: the topology and the time limit.
        strategy_results: evaluates the expert rules.
        search: runs auto-sharding.
    """
    yield _line(TITLES)
    yield '|' + '|'.join('-' * (width + 2) for width in WIDTHS) + '|'
    for variants in models:
        fitting = [result for result in strategy_results(variants, task) if result.fits]
        best = min(fitting, key=lambda result: result.seconds, default=None)
        yield _line([variants[0].name, *_cells(best, search(variants[0], task))])


def _cells(best: Result | None, autosharded: AutoShardingResult) -> Iterator[str]:
    mesh = ' x '.join(f'{name} {size}' for name, size in autosharded.mesh.items())
    result = Result.of(mesh, autosharded.plan)
    if best is None:
        yield from ['none fits', '', '', '', '', '']
    else:
        yield best.name
        yield from (
            '-' if (value := getattr(best, figure_name)) is None else f'{value:.4g}'
            for figure_name in FIGURES
        )
        yield f'{best.peak:.3g} GiB'
    yield result.name if result.fits else f'{result.name}: too large'
    for figure in FIGURES:
        value, reference = getattr(result, figure), getattr(best, figure, None)
        if value is None:
            yield '-'
        else:
            yield f'{value:.3g} s' if reference is None else f'{value / reference:.3f}'
    yield f'{result.peak:.3g} GiB'
    yield str(autosharded.num_trials)
    yield f'{autosharded.search_seconds:.0f} s'


def _line(cells: Sequence[str]) -> str:
    return '| ' + ' | '.join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)) + ' |'


def show(topology: str, model: str, slices: int, budget: float) -> None:
    """Prints the table.

    Raises:
        SystemExit: a package is not installed, or no model has the name.
    """
    with user_errors('auto_sharding'):
        models = chosen(model)
        if not models:
            raise SystemExit(f'no model holds {model!r} in its name: {"; ".join(NAMES)}')
        for line in lines(models, Task(topology, slices, budget)):
            print(line, flush=True)


def chosen(name: str) -> list[list[Model]]:
    """Returns the models of the table whose names contain *name*, each with all its tables."""
    from benchmarks.unchanged.catalogue import all_models  # imports the libraries of some models

    models = [*all_models('large'), *updates.models()]
    return [
        [model for model in models if model.name == model_name or model.name.startswith(f'{model_name}, by ')]
        for model_name in NAMES
        if name in model_name
    ]
