"""``--only others``: communication, memory and time of a step of third-party models, partitioned and plain.

Small models first run a step on eight simulated devices, which is compared with one device. Real sizes are
planned for absent TPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax

from benchmarks.unchanged.model import STRATEGIES, Model
from benchmarks.unchanged.table import REFUSED, line, measured, user_errors
from benchmarks.unchanged.values import difference

FSDP = STRATEGIES[0]
TITLES = (
    *('model', 'differs', 'ideal bytes', 'partitioned', 'plain'),
    *('peak partitioned', 'plain', 'seconds partitioned', 'plain'),
)


def ideal(model: Model, topology: str) -> float:
    """Returns the minimum GiB that a device sends.

    Each sharded weight is gathered in both passes, and the gradients of all weights are reduced.
    XLA lowers these reductions to all-reduces, which send an array twice.
    """
    helper = FSDP.helper(topology)
    params = jax.eval_shape(model.init, jax.random.key(0))
    shardings = helper.match_sharding_rule(FSDP.rule(model), params)
    arrays = zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)
    sent = sum(2 * x.size * x.dtype.itemsize * (1 if where.is_fully_replicated else 3) for x, where in arrays)
    return sent * (1 - 1 / helper.mesh.size) / 2**30


def lines(pairs: Sequence[tuple[Model, Model]], topology: str) -> Iterator[str]:
    """Yields the lines of the Markdown table: each model in a small and in its real size."""
    widths = [max(len(large.name) for _, large in pairs), *(max(len(title), 9) for title in TITLES[1:])]
    yield line(TITLES, widths)
    yield '|' + '|'.join('-' * (width + 2) for width in widths) + '|'
    for small, large in pairs:
        yield line([large.name, f'{difference(small):.0e}', *_cells(large, topology)], widths)


def _cells(model: Model, topology: str) -> Iterator[str]:
    least = ideal(model, topology)
    results = [measured(model, FSDP, topology, variant) for variant in ('partitioned', 'plain')]
    yield f'{least:.3g} GiB'
    yield from (REFUSED if result is None else f'{result["moved"] / least:.2f}' for result in results)
    for figure, unit in (('peak', 'GiB'), ('seconds', 's')):
        yield from (REFUSED if result is None else f'{result[figure]:.3g} {unit}' for result in results)


def show(topology: str, name: str) -> None:
    """Prints the table.

    Raises:
        SystemExit: a package is not installed, or no model has the name.
    """
    with user_errors('others'):
        from benchmarks.unchanged.others import models  # imports packages that only this table needs

        both = zip(models('small'), models('large'), strict=True)
        pairs = [(small, large) for small, large in both if name in large.name]
        if not pairs:
            names = '; '.join(model.name for model in models('large'))
            raise SystemExit(f'no model holds {name!r} in its name: {names}')
        for text in lines(pairs, topology):
            print(text, flush=True)
