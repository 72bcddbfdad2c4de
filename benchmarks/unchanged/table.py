"""``--only unchanged``: communication, memory and time of each model's step: partitioned, plain and by hand.

The steps are planned for absent TPUs or GPUs, and not run. A cell takes a few CPU seconds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.unchanged.measure import VARIANTS, figures, plan
from benchmarks.unchanged.model import Model, Strategy, strategies
from scalax.errors import MeshError, MissingDependencyError, PlanError

Figures = Mapping[str, float]
Measure = Callable[[Model, Strategy, str, str], Figures]

# The figures of the table with names and units: bytes sent, bytes at the peak, and seconds by the compiler's
# schedule, or serial roofline seconds if there is no schedule. The expert program comes first; the others are
# multiples of it.
FIGURES = (('moved', 'bytes', 'GiB'), ('peak', 'peak', 'GiB'), ('seconds', 'seconds', 's'))
RATIOS = ('partitioned', 'plain')
# Programs that the compiler rejects have no figures: a Pallas kernel outside a shard_map.
REFUSED = '-'


def measure(model: Model, strategy: Strategy, topology: str, variant: str) -> Figures:
    """Returns the figures of one cell, from a quick plan."""
    measured_plan = plan(model, strategy, topology, variant)
    its = figures(measured_plan)
    return {
        **its,
        'seconds': its['estimate'] if measured_plan.schedule is None else measured_plan.schedule.seconds,
    }


def lines(
    models: Sequence[Model],
    strategies: Sequence[Strategy],
    topology: str,
    measure: Measure = measure,
) -> Iterator[str]:
    """Yields the lines of the Markdown table, each as soon as it is computed."""
    head = ['model', 'strategy']
    for _, name, _ in FIGURES:
        head += [f'{name} by hand', *RATIOS]
    names = [model.name for model in models], [strategy.name for strategy in strategies]
    first = [max(map(len, (title, *column))) for title, column in zip(head, names, strict=False)]
    widths = [*first, *map(len, head[2:])]
    yield line(head, widths)
    yield '|' + '|'.join('-' * (width + 2) for width in widths) + '|'
    for model in models:
        for strategy in strategies:
            results = {variant: measured(model, strategy, topology, variant, measure) for variant in VARIANTS}
            yield line([model.name, strategy.name, *_cells(results)], widths)


def measured(
    model: Model, strategy: Strategy, topology: str, variant: str, measure: Measure = measure
) -> Figures | None:
    """Returns the figures of one cell; None for a rejected program."""
    try:
        return measure(model, strategy, topology, variant)
    except (NotImplementedError, PlanError) as error:  # raised for rejected programs
        print(f'{model.name}, {strategy.name}, {variant}: {error}', file=sys.stderr)
        return None


def _cells(results: Mapping[str, Figures | None]) -> Iterator[str]:
    hand = results['hand']
    for name, _, unit in FIGURES:
        yield REFUSED if hand is None else f'{hand[name]:.3g} {unit}'
        for variant in RATIOS:
            other = results[variant]
            yield REFUSED if hand is None or other is None else f'{other[name] / hand[name]:.2f}'


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Returns a line of a Markdown table."""
    return '| ' + ' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + ' |'


def show(topology: str, model: str, strategy: str) -> None:
    """Prints the table.

    Raises:
        SystemExit: a package is not installed, or no model has the name.
    """
    with user_errors('unchanged'):
        available = strategies(topology)
        chosen = [item for item in available if strategy in (item.name, '')]
        if not chosen:
            names = '; '.join(item.name for item in available)
            raise SystemExit(f'no strategy is called {strategy!r}: {names}')
        from benchmarks.unchanged.catalogue import all_models  # imports the libraries of some models

        models = [item for item in all_models('large') if model in item.name]
        if not models:
            names = '; '.join(item.name for item in all_models('large'))
            raise SystemExit(f'no model holds {model!r} in its name: {names}')
        for line in lines(models, chosen, topology):
            print(line, flush=True)


@contextlib.contextmanager
def user_errors(table: str) -> Iterator[None]:
    """Ends the program for errors that a user can fix: a missing package, or an unknown topology."""
    try:
        yield
    except (MissingDependencyError, ModuleNotFoundError) as error:
        raise SystemExit(
            f'{error}\n`make bench ARGS="--only {table}"` installs all that the table needs'
        ) from None
    except MeshError as error:  # unknown topology
        raise SystemExit(str(error)) from None
