"""Which program does a call need, when there are several? A few cheap looks at the arguments.

The full signature of a call costs microseconds a leaf. To tell the known signatures apart it is nearly
always enough to look at a static value, the shape of one leaf or the structure of one argument. A guess
may be wrong for a signature that is not known yet: the program itself notices (see `_program`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from scalax._transforms.calls.call_key import CallKey
from scalax._transforms.calls.call_signature import CallLayout
from scalax._transforms.sjit.program import Program
from scalax._tree.paths import dtype_on_devices

Look = Callable[[Sequence[Any]], Hashable]
Case = tuple[CallLayout, CallKey, Program]

_MOST_CASES = 256  # beyond these limits finding good looks costs more than they save
_MOST_CANDIDATES = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """A look at the row of a call, and what it sees for each known signature."""

    look: Look
    seen: tuple[Hashable, ...]


class Chooser:
    """Calls the program that a call most probably needs; raises Missed if there is none.

    Args:
        cases: the known signatures with their programs, of which there are at least two.
        exact: the full look, by which all signatures differ.
        missed: makes the exception to raise.
    """

    def __init__(self, cases: Sequence[Case], exact: Look, missed: Callable[[], Exception]) -> None:
        self._missed = missed
        # Calls of another length have other slots: looks are for those of one layout.
        by_length: dict[int, list[Case]] = {}
        for case in cases:
            by_length.setdefault(len(case[0].slots), []).append(case)
        self._tables = {length: _Table.of(alike, exact) for length, alike in by_length.items()}

    def program(self, flat_args: Sequence[Any]) -> Program | None:
        """The program for a call; None for a call of a kind that is not known."""
        try:
            table = self._tables[len(flat_args)]
            return table.programs.get(tuple([look(flat_args) for look in table.looks]))
        except Exception:  # a look may fail in any way at arguments of another structure
            return None

    def __call__(self, *flat_args: Any) -> Any:
        """Runs the program on the row."""
        program = self.program(flat_args)
        if program is None or program.call is None:
            raise self._missed()
        return program.call(*flat_args)


@dataclasses.dataclass(frozen=True, eq=False)
class _Table:
    """The looks at the calls of one layout, and the program for what they see."""

    looks: Sequence[Look]
    programs: Mapping[tuple[Hashable, ...], Program]

    @classmethod
    def of(cls, cases: Sequence[Case], exact: Look) -> _Table:
        probes = _enough(_candidates(cases), cases)
        if probes is None:
            probes = [Probe(exact, tuple(key for _, key, _ in cases))]
        return cls(
            [probe.look for probe in probes],
            {tuple(probe.seen[i] for probe in probes): case[2] for i, case in enumerate(cases)},
        )


def _enough(candidates: Sequence[Probe], cases: Sequence[Case]) -> list[Probe] | None:
    """The fewest probes, greedily, by which signatures of different programs differ; None if too many.

    Cases that the chosen probes see alike form a group; a group is settled if all its cases have one
    program.
    """
    if len(cases) > _MOST_CASES:
        return None
    chosen: list[Probe] = []
    groups = [list(range(len(cases)))]
    while groups := [group for group in groups if len({id(cases[i][2]) for i in group}) > 1]:
        best = min(
            candidates,
            key=lambda probe: _unsettled(_divided(groups, probe), cases),
            default=None,
        )
        divided = groups if best is None else _divided(groups, best)
        if best is None or len(divided) == len(groups):
            return None
        chosen.append(best)
        groups = divided
    return chosen


def _divided(groups: Sequence[list[int]], probe: Probe) -> list[list[int]]:
    """The groups, divided by what a probe sees."""
    parts: list[list[int]] = []
    for group in groups:
        by_seen: dict[Hashable, list[int]] = {}
        for i in group:
            by_seen.setdefault(probe.seen[i], []).append(i)
        parts.extend(by_seen.values())
    return parts


def _unsettled(groups: Sequence[list[int]], cases: Sequence[Case]) -> int:
    """How many cases are in groups of more than one program."""
    return sum(len(group) for group in groups if len({id(cases[i][2]) for i in group}) > 1)


def _candidates(cases: Sequence[Case]) -> list[Probe]:
    """Every cheap look by which some cases of one layout differ, the cheapest first."""
    layout = cases[0][0]
    signatures = [key for _, key, _ in cases]
    probes = []
    for position, slot in enumerate(layout.static):
        probes.append(
            Probe(
                functools.partial(_static_value, slot),
                tuple(key.static[position] for key in signatures),
            )
        )
    probes += _leaf_probes(layout, signatures)[:_MOST_CANDIDATES]
    for position, slot in enumerate(layout.dynamic):
        probes.append(
            Probe(
                functools.partial(_structure, slot),
                tuple(key.treedef.children()[position] for key in signatures),
            )
        )
    return [probe for probe in probes if any(seen != probe.seen[0] for seen in probe.seen)]


def _static_value(slot: int, flat_args: Sequence[Any]) -> Hashable:
    return type(flat_args[slot]), flat_args[slot]


def _structure(slot: int, flat_args: Sequence[Any]) -> Hashable:
    return jax.tree.structure(flat_args[slot])


def _then(first: Look, second: Callable[[Any], Hashable]) -> Look:
    return lambda flat_args: second(first(flat_args))


def _leaf_probes(layout: CallLayout, signatures: Sequence[CallKey]) -> list[Probe]:
    """Looks at the shape and dtype of one leaf, for leaves that all signatures have."""
    tables = [_types_by_path(key) for key in signatures]
    probes = []
    for path in tables[0]:
        if not all(path in table for table in tables):
            continue
        getter = _getter(layout, path)
        if getter is None:
            continue
        for number, of in ((0, np.shape), (1, dtype_on_devices)):
            seen = tuple(table[path][number] for table in tables)
            if any(value != seen[0] for value in seen):
                probes.append(Probe(_then(getter, of), seen))
    return probes


def _types_by_path(key: CallKey) -> dict[tuple[Any, ...], Any]:
    try:
        tree = key.treedef.unflatten(range(len(key.types)))
    except Exception:  # a user's node may refuse to hold numbers
        return {}
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(path): kind for (path, _), kind in zip(flat, key.types, strict=True)}


def _getter(layout: CallLayout, path: tuple[Any, ...]) -> Look | None:
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

    def get(flat_args: Any) -> Any:
        for step in steps:
            flat_args = step(flat_args)
        return flat_args

    return get
