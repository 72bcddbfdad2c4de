"""Does a checkpoint hold the tree that is asked for? Everything that does not fit, leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from scalax._report.pages import visible
from scalax._tree.paths import canonical_dtype
from scalax._util.folding import MOST_RUNS, Fold, fold, times
from scalax.checkpoint._describe import LeafDescription
from scalax.errors import CheckpointError, near_names

_SHOWN = 10
_HINTS = {
    'missing': 'give rename=[(regex, replacement)] where leaves have other paths in the checkpoint, or '
    'only=regex to restore those that are there',
    'extra': 'give only=regex to restore a part of a checkpoint',
    'shape': 'make like as it was when the checkpoint was saved; describe(step) lists its leaves',
    'dtype': 'give cast=True to convert, or ask for the dtype that was saved',
}


def require_fit(
    wanted: Mapping[str, Any], saved: Mapping[str, LeafDescription], cast: bool, partial: bool, where: str
) -> None:
    """Raises CheckpointError, which names every leaf that is missing, extra, or unlike.

    Args:
        wanted: by path, structs, or the types of Python numbers.
        saved: by path as `wanted` has them, the leaves of the checkpoint.
        cast: whether dtypes may differ.
        partial: whether the checkpoint may hold more.
        where: the checkpoint, for the message.
    """
    found = list(_problems(wanted, saved, cast, partial))
    if found:
        count = 'one leaf differs' if len(found) == 1 else f'{len(found)} leaves differ'
        kinds = dict.fromkeys(one.kind for one in found)
        if 'missing' in kinds:
            kinds.pop('extra', None)  # the hint about what is missing serves for both
        hints = ''.join(f'\nWhat to do: {_HINTS[kind]}.' for kind in kinds)
        # What is wrong with a leaf in each of many layers is said once.
        folds = fold((one.path, (one.kind, one.array, one.more)) for one in found)
        extra = [path for path in saved if path not in wanted]
        lines = [_line(item, found[item.first], saved, extra) for item in folds[:_SHOWN]]
        rest = sum(item.count for item in folds[_SHOWN:])
        lines += [f'... and {rest} more'] if rest else []
        listed = ''.join(f'\n  {visible(line)}' for line in lines)
        raise CheckpointError(f'{where} does not hold what is asked for; {count}:{listed}{hints}')


class _Problem(NamedTuple):
    """What is wrong with one leaf: what kind of thing, what the leaf is, and what else there is to say."""

    kind: str
    path: str
    array: str
    more: str = ''


def _problems(
    wanted: Mapping[str, Any], saved: Mapping[str, LeafDescription], cast: bool, partial: bool
) -> Iterator[_Problem]:
    for path, target in wanted.items():
        array = _array(target)
        if path not in saved:
            yield _Problem('missing', path, array)
        elif _shape(target) != saved[path].shape:
            yield _Problem('shape', path, array, f' is asked for, and {saved[path].array} was saved')
        elif not cast and _dtype(target) != saved[path].dtype:
            yield _Problem('dtype', path, array, f' is asked for, and {saved[path].array} was saved')
    for path in () if partial else [path for path in saved if path not in wanted]:
        yield _Problem('extra', path, saved[path].array, ' is in the checkpoint only')


def _line(item: Fold, problem: _Problem, saved: Mapping[str, LeafDescription], extra: Sequence[str]) -> str:
    """One line of the message, which may stand for several leaves."""
    near = near_names(problem.path, extra) if problem.kind == 'missing' else []
    has = f' (the checkpoint has {" and ".join(str(saved[name]) for name in near)})' if near else ''
    name = item.short_name(MOST_RUNS) or '(the leaf itself)'
    return f'{problem.kind}: {name}: {times(item.count)}{problem.array}{problem.more}{has}'


def with_keys(wanted: Mapping[str, Any], saved: Mapping[str, LeafDescription]) -> dict[str, LeafDescription]:
    """The leaves of a checkpoint that Orbax wrote without scalax: what it calls words may be typed keys."""
    leaves = dict(saved)
    for path, target in wanted.items():
        leaf = saved.get(path)
        if leaf is not None and leaf.dtype == 'uint32' and _is_key(target) and leaf.shape:
            leaves[path] = dataclasses.replace(leaf, shape=leaf.shape[:-1], dtype=str(target.dtype))
    return leaves


def _is_key(target: Any) -> bool:
    return hasattr(target, 'dtype') and jax.dtypes.issubdtype(target.dtype, jax.dtypes.prng_key)


def _shape(target: Any) -> tuple[int, ...]:
    return () if isinstance(target, type) else tuple(target.shape)


def _dtype(target: Any) -> str:
    return str(canonical_dtype(target)) if isinstance(target, type) else str(target.dtype)


def _array(target: Any) -> str:
    return f'Python {target.__name__}' if isinstance(target, type) else f'{target.dtype}{list(target.shape)}'
