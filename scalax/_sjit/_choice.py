"""Which program does a call need, when there are several? A few cheap looks at the arguments.

The full signature of a call costs microseconds a leaf. To tell the known signatures apart it is nearly
always enough to look at a static value, the shape of one leaf or the structure of one argument. A guess
may be wrong for a signature that is not known yet: the program itself notices (see `_program`).
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from scalax._sjit._convention import Layout
from scalax._sjit._program import Program
from scalax._sjit._signature import Signature

Look = Callable[[Sequence[Any]], Hashable]
Case = tuple[Layout, Signature, Program]

_MOST_CASES = 32  # beyond that every look would be needed, and the full signature is as good


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """A look at the row of a call, and what it sees for each known signature."""

    look: Look
    seen: tuple[Hashable, ...]


class Chooser:
    """Calls the program that a call most probably needs.

    Args:
        cases: the known signatures with their programs, of which there are at least two.
        exact: the full look, by which all signatures differ.
    """

    def __init__(self, cases: Sequence[Case], exact: Look) -> None:
        probes = _enough(_candidates(cases), cases)
        if probes is None:
            probes = [Probe(exact, tuple(signature for _, signature, _ in cases))]
        self._looks = [probe.look for probe in probes]
        keys = zip(*(probe.seen for probe in probes), strict=True)
        self._table: Mapping[tuple[Hashable, ...], Program] = {
            key: case[2] for key, case in zip(keys, cases, strict=True)
        }
        self._default = cases[-1][2]

    def program(self, row: Sequence[Any]) -> Program:
        """The program for a call; some program for a call of another kind."""
        try:
            return self._table[tuple([look(row) for look in self._looks])]
        except Exception:  # a look may fail in any way at arguments of another structure
            return self._default

    def __call__(self, *row: Any) -> Any:
        """Runs the program on the row."""
        return self.program(row).call(*row)  # type: ignore[misc]  # known programs are compiled


def _enough(candidates: Sequence[Probe], cases: Sequence[Case]) -> list[Probe] | None:
    """The fewest probes, greedily, by which signatures of different programs differ."""
    programs = [program for _, _, program in cases]
    left = {(i, j) for i, j in itertools.combinations(range(len(cases)), 2) if programs[i] is not programs[j]}
    if len(cases) > _MOST_CASES:
        return None
    chosen = []
    while left:
        told = [sum(probe.seen[i] != probe.seen[j] for i, j in left) for probe in candidates]
        best = max(range(len(candidates)), key=lambda k: told[k], default=None)
        if best is None or not told[best]:
            return None
        probe = candidates[best]
        chosen.append(probe)
        left = {(i, j) for i, j in left if probe.seen[i] == probe.seen[j]}
    return chosen


def _candidates(cases: Sequence[Case]) -> list[Probe]:
    """Every cheap look by which some cases differ, the cheapest first."""
    layouts = [layout for layout, _, _ in cases]
    if any(layout != layouts[0] for layout in layouts):
        return [Probe(len, tuple(len(layout.slots) for layout in layouts))]
    layout = layouts[0]
    signatures = [signature for _, signature, _ in cases]
    probes = []
    for position, slot in enumerate(layout.static):
        probes.append(
            Probe(
                lambda row, slot=slot: (type(row[slot]), row[slot]),  # type: ignore[misc]
                tuple(signature.static[position] for signature in signatures),
            )
        )
    probes += _leaf_probes(layout, signatures)
    for position, slot in enumerate(layout.dynamic):
        probes.append(
            Probe(
                lambda row, slot=slot: jax.tree.structure(row[slot]),  # type: ignore[misc]
                tuple(signature.treedef.children()[position] for signature in signatures),
            )
        )
    return [probe for probe in probes if any(seen != probe.seen[0] for seen in probe.seen)]


def _leaf_probes(layout: Layout, signatures: Sequence[Signature]) -> list[Probe]:
    """Looks at the shape and dtype of one leaf, for leaves that all signatures have."""
    tables = [_types_by_path(signature) for signature in signatures]
    probes = []
    for path in tables[0]:
        if not all(path in table for table in tables):
            continue
        getter = _getter(layout, path)
        if getter is None:
            continue
        for number, attribute in ((0, 'shape'), (1, 'dtype')):
            seen = tuple(table[path][number] for table in tables)
            if any(value != seen[0] for value in seen):
                read = operator.attrgetter(attribute)
                probes.append(
                    Probe(lambda row, g=getter, r=read: r(g(row)), seen)  # type: ignore[misc]
                )
    return probes


def _types_by_path(signature: Signature) -> dict[tuple[Any, ...], Any]:
    try:
        tree = signature.treedef.unflatten(range(len(signature.types)))
    except Exception:  # a user's node may refuse to hold numbers
        return {}
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(path): kind for (path, _), kind in zip(flat, signature.types, strict=True)}


def _getter(layout: Layout, path: tuple[Any, ...]) -> Look | None:
    """A function from a row to the leaf at *path*, whose first key counts the dynamic slots."""
    slot = layout.dynamic[path[0].idx]
    steps: list[Callable[[Any], Any]] = [operator.itemgetter(slot)]
    for key in path[1:]:
        if isinstance(key, DictKey):
            steps.append(operator.itemgetter(key.key))
        elif isinstance(key, SequenceKey):
            steps.append(operator.itemgetter(key.idx))
        elif isinstance(key, GetAttrKey):
            steps.append(operator.attrgetter(key.name))
        else:
            return None

    def get(row: Any) -> Any:
        for step in steps:
            row = step(row)
        return row

    return get
