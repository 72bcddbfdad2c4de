"""The exceptions and warnings of scalax.

Every exception derives from `ScalaxError` and from the built-in exception that Python programs
already catch for the same kind of mistake:

    ScalaxError
    ├── MeshError             (ValueError)   the mesh cannot be built from these devices
    ├── RuleError             (ValueError)   a rule is wrong in itself, whatever the tree
    ├── ShardingError         (ValueError)   rules met a tree and do not fit; lists every offending leaf
    ├── StructureError        (ValueError)   a tree of rules has another structure than the tree it is for
    ├── ArgumentError         (TypeError)    an argument that a compiled function cannot take
    ├── PlacementError        (ValueError)   an argument has another sharding than the one asked for
    ├── StagesError           (ValueError)   a step cannot run as a pipeline
    ├── PlanError             (ValueError)   a compiled program cannot be read, or planned with these numbers
    ├── DataError             (ValueError)   a batch that does not fit the mesh, a file that is no report
    ├── CheckpointError       (ValueError)   a checkpoint cannot be written, is damaged, or is of another tree
    ├── TransferError         (RuntimeError) the other job is gone, silent, or has failed
    └── MissingDependencyError (ImportError) an optional package is needed; holds the install command

    ScalaxWarning             (UserWarning)
    ├── IndivisibleWarning                   a dimension does not divide, and the policy lets it pass
    ├── CheckpointWarning                    a damaged checkpoint was passed over
    ├── UnusedAnnotationWarning              a bound annotation name that the function never used
    ├── LostUpdateWarning                    a change of a module that a compiled function was given
    ├── PartitioningWarning                  a step is not partitioned along its batch
    ├── StagesWarning                        a large part of a pipeline's time is idle
    └── UnshardedWarning                     nothing is sharded that should be, or a regex matches nothing

This module imports nothing of JAX, and of scalax only what folds numbered names: all packages can raise them.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
import warnings
from collections.abc import Iterable, Sequence

from scalax._core.util.folding import MOST_RUNS, Fold, count_prefix, fold

_SHOWN = 10
_LONGEST = 120  # characters of a rule in a message


class ScalaxError(Exception):
    """The base of every exception that scalax raises."""


class MeshError(ScalaxError, ValueError):
    """A mesh cannot be built from the given dimensions, names and devices."""


class RuleError(ScalaxError, ValueError):
    """A rule is wrong in itself: an invalid regex, a value of the wrong kind, an unknown policy."""


class StructureError(ScalaxError, ValueError):
    """A tree of rules does not have the structure of the tree (or of the arguments) it is for."""


class ArgumentError(ScalaxError, TypeError):
    """A function was called with an argument that it cannot take."""


class PlacementError(ScalaxError, ValueError):
    """Arguments are committed to devices with another sharding than the one asked for."""


class StagesError(ScalaxError, ValueError):
    """A step cannot run as a pipeline; the message says what to change."""


class PlanError(ScalaxError, ValueError):
    """A compiled program cannot be read, or a plan cannot be made of these numbers."""


class DataError(ScalaxError, ValueError):
    """Data from outside does not fit: a host batch the mesh, or a file what it is read as."""


class CheckpointError(ScalaxError, ValueError):
    """A checkpoint could not be written, is damaged, or does not hold the tree that is asked for."""


class TransferError(ScalaxError, RuntimeError):
    """Arrays did not get from one job to the other, because one is gone or silent, or has failed."""


class MissingDependencyError(ScalaxError, ImportError):
    """An optional package is needed and not installed; the message holds the install command."""


class ScalaxWarning(UserWarning):
    """The base of every warning that scalax gives."""


class IndivisibleWarning(ScalaxWarning):
    """A dimension does not divide by its mesh axes; the policy in force lets it pass."""


class CheckpointWarning(ScalaxWarning):
    """A damaged checkpoint was passed over for an earlier one."""


class UnusedAnnotationWarning(ScalaxWarning):
    """A sharding was bound to an annotation name that the function never used."""


class LostUpdateWarning(ScalaxWarning):
    """A compiled function changes a module of flax.nnx that it was given: it works on a copy."""


class PartitioningWarning(ScalaxWarning):
    """A step is not partitioned along its batch: an operation cannot be, or nothing is known to be the batch.

    The function runs as written, with the same results; the compiler alone chooses the shardings inside.
    """


class StagesWarning(ScalaxWarning):
    """A pipeline runs, and a large part of its time is idle."""


class UnshardedWarning(ScalaxWarning):
    """Arrays are sharded by nothing.

    `scalax.axes.shard` found no mapping, no mesh, or no array that names its dimensions; the outputs of a
    compiled function depend on no argument, and no `out_shardings` give them a sharding: they are on one
    device; or, in `sjit` and `shard`, an FSDPShardingRule finds all arrays too small, or a regex matches
    no path.
    """


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one leaf.

    Attributes:
        kind: a short stable word, such as ``'indivisible'`` or ``'unknown-axis'``.
        leaf: the leaf path with its dtype and shape, as shown to people.
        detail: what is wrong, in one sentence.
        spec: the spec that was asked for, as text; empty when there is none.
        rule: the rule that chose the spec, as text; empty when there is none.
        hint: what to do about problems of this kind.
    """

    kind: str
    leaf: str
    detail: str
    spec: str = ''
    rule: str = ''
    hint: str = ''


class ShardingError(ScalaxError, ValueError):
    """Rules do not fit a tree. ``problems`` lists every offending leaf, not only the first.

    Args:
        problems: all of them; ten are shown and the rest are counted.
        mesh: the mesh axis sizes as text, for the first line.
        where: which tree this is about, such as ``"argument 'state'"``.
        message: the entire message, if the problems are not about single leaves.
    """

    def __init__(
        self, problems: Sequence[Problem], mesh: str = '', where: str = '', message: str = ''
    ) -> None:
        self.problems = tuple(problems)
        self.mesh = mesh
        self.where = where
        super().__init__(message or _render(self.problems, mesh, where))

    def __reduce__(self) -> tuple[type[ShardingError], tuple[tuple[Problem, ...], str, str, str]]:
        return type(self), (self.problems, self.mesh, self.where, str(self))


def _render(problems: Sequence[Problem], mesh: str, where: str) -> str:
    of_leaf: dict[str, list[Problem]] = {}
    for problem in problems:
        of_leaf.setdefault(problem.leaf, []).append(problem)
    count = 'One leaf' if len(of_leaf) == 1 else f'{len(of_leaf)} leaves'
    head = f'{count}{f" of {where}" if where else ""} cannot be sharded as asked'
    leaves = ('\n    '.join([leaf, *_details(of_leaf[leaf])]) for leaf in of_leaf)
    lines = [f'{head} (mesh: {mesh}):' if mesh else f'{head}:', shown_leaves(leaves)]
    hints = list(dict.fromkeys(problem.hint for problem in problems if problem.hint))
    # A hint that another one begins with is left out.
    told = [hint for hint in hints if not any(one != hint and one.startswith(hint) for one in hints)]
    lines.extend(f'What to do: {hint}' for hint in told)
    return '\n'.join(lines)


def _details(problems: Sequence[Problem]) -> list[str]:
    """The problems of one leaf and the spec asked for, one a line."""
    lines: list[str] = []
    for origin in dict.fromkeys(map(_origin, problems)):
        details = [problem.detail for problem in problems if _origin(problem) == origin]
        lines.extend(line for line in dict.fromkeys([*details, origin]) if line)
    return lines


def _origin(problem: Problem) -> str:
    rule = problem.rule
    if len(rule) > _LONGEST:
        # A regex of the catalogue takes three lines, at every leaf. The attribute has all of it.
        rule = f'{rule[: _LONGEST // 2]} ... {rule[-_LONGEST // 3 :]}'
    if problem.spec:
        return f'asked for: {problem.spec}' + (f' from {rule}' if rule else '')
    return f'rule: {rule}' if rule else ''


def shown(items: Iterable[str]) -> str:
    """Lists the first ten items, one a line, and counts the rest."""
    lines = list(items)
    text = [f'  {line}' for line in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        text.append(f'  ... and {len(lines) - _SHOWN} more')
    return '\n'.join(text)


def shown_leaves(leaves: Iterable[str], separator: str = '/') -> str:
    """Lists leaves as `shown` lists lines; those that differ in numbers in their paths only share a line.

    Args:
        leaves: ``'<leaf path>: <what is there and what is wrong with it>'``, or paths alone.
        separator: what is between the keys of a path.

    Example:
        >>> print(shown_leaves(f'layers/{i}/{name}: float32[8]' for i in range(80) for name in 'bw'))
          layers/{0..79}/b: 80 x float32[8]
          layers/{0..79}/w: 80 x float32[8]
    """
    split = [leaf.partition(': ') for leaf in leaves]
    texts = [colon + _without_path(text, path, separator) for path, colon, text in split]
    folds = fold(((path, text) for (path, *_), text in zip(split, texts, strict=True)), separator)
    lines = []
    for item in folds[:_SHOWN]:
        colon = split[item.first][1]
        text = _with_path(texts[item.first].removeprefix(colon), item)
        count = f' ({item.count} leaves)' if item.count > 1 and not colon else count_prefix(item.count)
        lines.append(f'  {item.short_name(MOST_RUNS)}{colon}{count}{text}')
    more = sum(item.count for item in folds[_SHOWN:])
    if more:
        lines.append(f'  ... and {plural(more, "more leaf", "more leaves")}')
    return '\n'.join(lines)


_OWN_PATH = re.compile("'\0([0-9]+)'")


def _without_path(text: str, path: str, separator: str) -> str:
    """The text about a leaf, where the end of its path is quoted, with the number of keys in its place."""
    keys = path.split(separator)
    for count in range(len(keys), 0, -1):
        text = text.replace(f"'{separator.join(keys[-count:])}'", f"'\0{count}'")
    return text


def _with_path(text: str, item: Fold) -> str:
    """The result of `_without_path` with the folded path where that of each leaf was."""
    return _OWN_PATH.sub(lambda found: f"'{item.short_name(MOST_RUNS, int(found[1]))}'", text)


_MODULES = (
    'A module of equinox holds functions too: equinox.partition(module, equinox.is_array) gives its arrays '
    'and the rest, and equinox.combine joins them; equinox.filter_shard places all of its arrays alike; '
    'scalax.axes.named_jit takes entire modules.'
)


def module_advice(leaves: Iterable[object]) -> str:
    """What to do with a module of equinox, for the end of a message; empty if no leaf is a function."""
    return f' {_MODULES}' if any(map(callable, leaves)) else ''


def plural(count: int, noun: str, several: str = '') -> str:
    """A number of things in words.

    Example:
        >>> plural(1, 'leaf', 'leaves'), plural(2, 'leaf', 'leaves'), plural(0, 'array')
        ('1 leaf', '2 leaves', '0 arrays')
    """
    return f'{count} {noun if count == 1 else several or f"{noun}s"}'


def checked_flag(option: str, value: object, error: type[ScalaxError] = ArgumentError) -> bool:
    """*value* as True or False, where it is one of them. A text such as ``'no'`` would count as true.

    Example:
        >>> checked_flag('strict', 'no')
        Traceback (most recent call last):
        ...
        scalax.errors.ArgumentError: strict is True or False, got 'no'
    """
    # Also NumPy's, which are equal to these.
    if isinstance(value, str) or value not in (True, False):
        raise error(f'{option} is True or False, got {value!r}')
    return bool(value)


def near_names(word: str, known: Iterable[str]) -> list[str]:
    """At most two of the *known* names that *word* looks like a misspelling of, the nearest first."""
    return difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)


def warn(message: str, category: type[ScalaxWarning]) -> None:
    """Warns, and names the line of the user's code that led here.

    Frames of scalax and of JAX are passed over: there are as many of them between the user and a
    warning as JAX has transformations.
    """
    frame, level = inspect.currentframe(), 0
    while frame is not None and _module(frame) in ('scalax', 'jax', 'contextlib'):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


def _module(frame: types.FrameType) -> str:
    """The top-level module whose code a frame runs."""
    return str(frame.f_globals.get('__name__', '')).partition('.')[0]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggests the *known* names that are like *word*, or lists them all.

    Example:
        >>> did_you_mean('fdsp', ['fsdp', 'tp'])
        "did you mean 'fsdp'?"
        >>> did_you_mean('x', ['fsdp', 'tp'])
        "known: 'fsdp', 'tp'"
    """
    names = [str(name) for name in known]
    near = near_names(word, names)
    if near:
        return f'did you mean {" or ".join(repr(name) for name in near)}?'
    if not names:
        return 'there are none'
    listed = ', '.join(repr(name) for name in names[:_SHOWN])
    return f'known: {listed}' + (', ...' if len(names) > _SHOWN else '')
