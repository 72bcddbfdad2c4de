"""The exceptions and warnings of scalax.

Every exception derives from `ScalaxError` and from the built-in exception that Python programs catch for the
same kind of mistake:

    ScalaxError
    ├── MeshError             (ValueError)   the mesh cannot be built from these devices
    ├── RuleError             (ValueError)   a rule is wrong in itself, whatever the tree
    ├── ShardingError         (ValueError)   rules met a tree and do not fit; lists every offending leaf
    ├── StructureError        (ValueError)   the structure of a tree of rules does not match the tree
    ├── ArgumentError         (TypeError)    an argument that a compiled function cannot take
    ├── PlacementError        (ValueError)   an argument has a different sharding than specified
    ├── PipelineError           (ValueError)   a step cannot run as a pipeline
    ├── PlanError             (ValueError)   a compiled program cannot be read, or planned with these values
    ├── DataError             (ValueError)   a batch does not fit the mesh, or a file has the wrong format
    ├── CheckpointError       (ValueError)   a checkpoint cannot be written, is damaged, or holds another tree
    ├── TransferError         (RuntimeError) the other job is gone, silent, or has failed
    └── MissingDependencyError (ImportError) an optional package is needed; holds the install command

    ScalaxWarning             (UserWarning)
    ├── IndivisibleWarning                   a dimension is not divisible, and the policy allows it
    ├── CheckpointWarning                    a damaged checkpoint was skipped
    ├── UnusedAnnotationWarning              the function never used a bound annotation name
    ├── LostUpdateWarning                    a compiled function changes a module that it does not return
    ├── PartitioningWarning                  a step is not partitioned along its batch
    ├── PipelineWarning                        a large part of a pipeline's time is idle
    └── UnshardedWarning                     arrays that should be sharded are not, or a regex matches nothing

All packages can import this module: it imports neither JAX nor, except for the folding of names, scalax.
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

_MAX_SHOWN = 10  # lines of a list
_MAX_RULE_LENGTH = 120  # characters of a rule in a message


class ScalaxError(Exception):
    """The base of every exception that scalax raises."""


class MeshError(ScalaxError, ValueError):
    """A mesh cannot be built from the given dimensions, names and devices."""


class RuleError(ScalaxError, ValueError):
    """A rule is invalid for any tree: an invalid regex, a value of the wrong type, an unknown policy."""


class StructureError(ScalaxError, ValueError):
    """The structure of a tree of rules does not match the tree, or the arguments of the function."""


class ArgumentError(ScalaxError, TypeError):
    """A function was called with an invalid argument."""


class PlacementError(ScalaxError, ValueError):
    """Arguments are committed to devices with a different sharding than specified."""


class PipelineError(ScalaxError, ValueError):
    """A step cannot run as a pipeline; the message says what to change."""


class PlanError(ScalaxError, ValueError):
    """A compiled program cannot be read, or a plan cannot be made from these values."""


class DataError(ScalaxError, ValueError):
    """A host batch does not fit the mesh, or a file does not have the expected contents."""


class CheckpointError(ScalaxError, ValueError):
    """A checkpoint could not be written, is damaged, or does not hold the requested tree."""


class TransferError(ScalaxError, RuntimeError):
    """A transfer between two jobs failed, because one of them has ended, does not respond, or has failed."""


class MissingDependencyError(ScalaxError, ImportError):
    """An optional package is not installed. The message contains the install command."""


class ScalaxWarning(UserWarning):
    """The base of every warning that scalax emits."""


class IndivisibleWarning(ScalaxWarning):
    """A dimension is not divisible by its mesh axes, and the active policy allows it."""


class CheckpointWarning(ScalaxWarning):
    """A damaged checkpoint was skipped, and an earlier one used."""


class UnusedAnnotationWarning(ScalaxWarning):
    """A sharding was bound to an annotation name that the function never used."""


class LostUpdateWarning(ScalaxWarning):
    """A compiled function changes a copy of a flax.nnx module that it does not return."""


class PartitioningWarning(ScalaxWarning):
    """A step is not partitioned along its batch: an operation prevents it, or no argument is the batch.

    The function runs as written, with the same results. The compiler alone chooses the shardings inside.
    """


class PipelineWarning(ScalaxWarning):
    """A pipeline is idle for a large part of its time."""


class UnshardedWarning(ScalaxWarning):
    """Arrays that should be sharded are not.

    There are four reasons. `scalax.axes.shard` found no mapping, no mesh, or no array that names its
    dimensions. The outputs of a compiled function depend on no argument, and no `out_shardings` specify their
    sharding, so they are on one device. All arrays are too small for an FSDPShardingRule of `sjit` or
    `shard`. Or a regex matches no path.
    """


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem of one leaf.

    Attributes:
        kind: a short stable word, such as ``'indivisible'`` or ``'unknown-axis'``.
        leaf: the leaf path with its dtype and shape, as text.
        detail: the problem, in one sentence.
        spec: the requested spec, as text; empty if there is none.
        rule: the rule that chose the spec, as text; empty if there is none.
        hint: the advice about problems of this kind.
    """

    kind: str
    leaf: str
    detail: str
    spec: str = ''
    rule: str = ''
    hint: str = ''


class ShardingError(ScalaxError, ValueError):
    """Rules do not fit a tree. ``problems`` lists all offending leaves.

    Args:
        problems: all problems. The message shows ten leaves and counts the rest.
        mesh: the mesh axis sizes as text, for the first line.
        where: the name of the tree, such as ``"argument 'state'"``.
        message: the full message, if the problems are not about single leaves.
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
    by_leaf: dict[str, list[Problem]] = {}
    for problem in problems:
        by_leaf.setdefault(problem.leaf, []).append(problem)
    count = 'One leaf' if len(by_leaf) == 1 else f'{len(by_leaf)} leaves'
    head = f'{count}{f" of {where}" if where else ""} cannot be sharded as asked'
    leaves = ('\n    '.join([leaf, *_details(by_leaf[leaf])]) for leaf in by_leaf)
    lines = [f'{head} (mesh: {mesh}):' if mesh else f'{head}:', shown_leaves(leaves)]
    hints = list(dict.fromkeys(problem.hint for problem in problems if problem.hint))
    for hint in hints:
        if not any(other != hint and other.startswith(hint) for other in hints):
            lines.append(f'What to do: {hint}')
    return '\n'.join(lines)


def _details(problems: Sequence[Problem]) -> list[str]:
    """Returns the lines about one leaf: its problems, each followed by the requested spec."""
    lines: list[str] = []
    for origin in dict.fromkeys(map(_origin, problems)):
        details = [problem.detail for problem in problems if _origin(problem) == origin]
        lines.extend(line for line in dict.fromkeys([*details, origin]) if line)
    return lines


def _origin(problem: Problem) -> str:
    rule = problem.rule
    if len(rule) > _MAX_RULE_LENGTH:
        # A regex of the catalogue would take three lines for every leaf. The attribute has the full text.
        rule = f'{rule[: _MAX_RULE_LENGTH // 2]} ... {rule[-_MAX_RULE_LENGTH // 3 :]}'
    if problem.spec:
        return f'asked for: {problem.spec}' + (f' from {rule}' if rule else '')
    return f'rule: {rule}' if rule else ''


def shown(items: Iterable[str]) -> str:
    """Returns the first ten items, one per line, and counts the rest."""
    lines = list(items)
    text = [f'  {line}' for line in lines[:_MAX_SHOWN]]
    if len(lines) > _MAX_SHOWN:
        text.append(f'  ... and {len(lines) - _MAX_SHOWN} more')
    return '\n'.join(text)


def shown_leaves(leaves: Iterable[str], separator: str = '/') -> str:
    """Returns the first ten leaves, one per line. Leaves whose paths differ only in numbers share a line.

    Args:
        leaves: the texts ``'<leaf path>: <description>'``, or paths alone.
        separator: the separator of keys in a path.

    Example:
        >>> print(shown_leaves(f'layers/{i}/{name}: float32[8]' for i in range(80) for name in 'bw'))
          layers/{0..79}/b: 80 x float32[8]
          layers/{0..79}/w: 80 x float32[8]
    """
    split = [leaf.partition(': ') for leaf in leaves]
    texts = [colon + _without_path(text, path, separator) for path, colon, text in split]
    folds = fold(((path, text) for (path, *_), text in zip(split, texts, strict=True)), separator)
    lines = []
    for item in folds[:_MAX_SHOWN]:
        colon = split[item.first][1]
        text = _with_path(texts[item.first].removeprefix(colon), item)
        count = f' ({item.count} leaves)' if item.count > 1 and not colon else count_prefix(item.count)
        lines.append(f'  {item.short_name(MOST_RUNS)}{colon}{count}{text}')
    more = sum(item.count for item in folds[_MAX_SHOWN:])
    if more:
        lines.append(f'  ... and {plural(more, "more leaf", "more leaves")}')
    return '\n'.join(lines)


_PATH_MARK = re.compile("'\0([0-9]+)'")


def _without_path(text: str, path: str, separator: str) -> str:
    """Replaces a quoted end of the path in the text about a leaf by a mark with the number of keys."""
    keys = path.split(separator)
    for count in range(len(keys), 0, -1):
        text = text.replace(f"'{separator.join(keys[-count:])}'", f"'\0{count}'")
    return text


def _with_path(text: str, item: Fold) -> str:
    """Replaces the marks of `_without_path` by the folded path."""
    return _PATH_MARK.sub(lambda match: f"'{item.short_name(MOST_RUNS, int(match[1]))}'", text)


_EQUINOX_ADVICE = (
    'A module of equinox holds functions too: equinox.partition(module, equinox.is_array) gives its arrays '
    'and the rest, and equinox.combine joins them; equinox.filter_shard places all of its arrays alike; '
    'scalax.axes.named_jit takes entire modules.'
)


def module_advice(leaves: Iterable[object]) -> str:
    """Returns the advice about equinox modules for the end of a message; empty if no leaf is a function."""
    return f' {_EQUINOX_ADVICE}' if any(map(callable, leaves)) else ''


def plural(count: int, noun: str, several: str = '') -> str:
    """Returns a count with its noun.

    Example:
        >>> plural(1, 'leaf', 'leaves'), plural(2, 'leaf', 'leaves'), plural(0, 'array')
        ('1 leaf', '2 leaves', '0 arrays')
    """
    return f'{count} {noun if count == 1 else several or f"{noun}s"}'


def checked_flag(option: str, value: object, error: type[ScalaxError] = ArgumentError) -> bool:
    """Returns *value* as a bool, or raises an error if it is not True or False.

    Example:
        >>> checked_flag('strict', 'no')
        Traceback (most recent call last):
        ...
        scalax.errors.ArgumentError: strict is True or False, got 'no'
    """
    # NumPy's bools are equal to these. A string such as 'no' would be truthy.
    if isinstance(value, str) or value not in (True, False):
        raise error(f'{option} is True or False, got {value!r}')
    return bool(value)


def near_names(word: str, names: Iterable[str]) -> list[str]:
    """Returns at most two names of which *word* may be a misspelling, the closest first."""
    return difflib.get_close_matches(word, list(names), n=2, cutoff=0.6)


def warn(message: str, category: type[ScalaxWarning]) -> None:
    """Emits a warning at the line of the user's code that led here.

    Frames of scalax and of JAX are skipped: each JAX transformation adds some between the user and a warning.
    """
    frame, level = inspect.currentframe(), 0
    while frame is not None and _module(frame) in ('scalax', 'jax', 'contextlib'):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


def _module(frame: types.FrameType) -> str:
    """Returns the top-level module whose code a frame runs."""
    return str(frame.f_globals.get('__name__', '')).partition('.')[0]


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Suggests names that are similar to *word*, or lists all names.

    Example:
        >>> did_you_mean('fdsp', ['fsdp', 'tp'])
        "did you mean 'fsdp'?"
        >>> did_you_mean('x', ['fsdp', 'tp'])
        "known: 'fsdp', 'tp'"
    """
    names = [str(name) for name in names]
    if near := near_names(word, names):
        return f'did you mean {" or ".join(map(repr, near))}?'
    if not names:
        return 'there are none'
    listed = ', '.join(repr(name) for name in names[:_MAX_SHOWN])
    return f'known: {listed}' + (', ...' if len(names) > _MAX_SHOWN else '')
