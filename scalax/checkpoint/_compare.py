"""Does a checkpoint hold the tree that is asked for? Everything that does not fit, leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from scalax._paths import canonical_dtype
from scalax.checkpoint._describe import LeafDescription
from scalax.errors import CheckpointError, near_names, shown

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
        kinds = dict.fromkeys(kind for kind, _ in found)
        hints = ''.join(f'\nWhat to do: {_HINTS[kind]}.' for kind in kinds)
        lines = shown(f'{kind}: {text}' for kind, text in found)
        raise CheckpointError(f'{where} does not hold what is asked for; {count}:\n{lines}{hints}')


def _problems(
    wanted: Mapping[str, Any], saved: Mapping[str, LeafDescription], cast: bool, partial: bool
) -> Iterator[tuple[str, str]]:
    extra = [path for path in saved if path not in wanted]
    for path, target in wanted.items():
        text = _text(path, target)
        if path not in saved:
            near = [str(saved[name]) for name in near_names(path, extra)]
            yield 'missing', text + (f' (the checkpoint has {" and ".join(near)})' if near else '')
            continue
        leaf = saved[path]
        if _shape(target) != leaf.shape:
            yield 'shape', f'{text} is asked for, and {str(leaf).partition(": ")[2]} was saved'
        elif not cast and _dtype(target) != leaf.dtype:
            yield 'dtype', f'{text} is asked for, and {str(leaf).partition(": ")[2]} was saved'
    for path in [] if partial else extra:
        yield 'extra', f'{saved[path]} is in the checkpoint only'


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


def _text(path: str, target: Any) -> str:
    name = path or '(the leaf itself)'
    if isinstance(target, type):
        return f'{name}: Python {target.__name__}'
    return f'{name}: {target.dtype}{list(target.shape)}'
