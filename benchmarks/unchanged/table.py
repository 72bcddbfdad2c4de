"""``--only unchanged``: what a step of each model moves, needs and takes: partitioned and plain, beside hand.

The steps are planned for TPUs or GPUs that are not here, and not run. A cell takes some seconds of a core.
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

# The figures of the table, their names and units: the bytes that are moved, those held at the peak, and the
# seconds: by the compiler's schedule, or the roofline's if nothing overlaps where there is none. By hand
# first, then the others as multiples of it.
FIGURES = (('moved', 'bytes', 'GiB'), ('peak', 'peak', 'GiB'), ('seconds', 'seconds', 's'))
RATIOS = ('partitioned', 'plain')
# What the compiler refuses has no figures: a Pallas kernel that nothing divides.
REFUSED = '-'


def measure(model: Model, strategy: Strategy, topology: str, variant: str) -> Figures:
    """The figures of one cell, by a quick plan."""
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
    """The table in Markdown, line by line, each as soon as it is known."""
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
    """The figures of one cell; none of a program that is refused."""
    try:
        return measure(model, strategy, topology, variant)
    except (NotImplementedError, PlanError) as error:  # as JAX and the compiler refuse programs
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
    """A line of a table in Markdown."""
    return '| ' + ' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + ' |'


def show(topology: str, model: str, strategy: str) -> None:
    """Prints the table.

    Raises:
        SystemExit: something is not installed, or nothing has such a name.
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
    """Ends the program with what a user can mend: something is not installed, or the topology is unknown."""
    try:
        yield
    except (MissingDependencyError, ModuleNotFoundError) as error:
        raise SystemExit(
            f'{error}\n`make bench ARGS="--only {table}"` installs all that the table needs'
        ) from None
    except MeshError as error:  # of a topology that the compiler does not know
        raise SystemExit(str(error)) from None
