"""Which spec does a leaf get by the names of its dimensions? Names map to mesh axes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from scalax._tree.paths import NamedTree
from scalax._tree.specs import Fault, OnIndivisible, checked_policy, entry_axes
from scalax.errors import IndivisibleWarning, Problem, RuleError, checked_flag, did_you_mean, shown, warn
from scalax.interop import DimensionNames
from scalax.interop._boxes import names_by_leaf
from scalax.rules._answers import ONE_ELEMENT, REPLICATED, Answer, AxisSizes, Said
from scalax.rules._base import BuiltinRule
from scalax.rules._named_leaf import Named, NamedLeaf
from scalax.rules._pattern import Pattern, as_text, names_in, parse, pattern_error
from scalax.rules._tree_path import checked_regex, regex_text

MeshAxisEntry = str | tuple[str, ...] | None
AxisMapping = Mapping[str, MeshAxisEntry] | Sequence[tuple[str, MeshAxisEntry]]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class LogicalAxisShardingRule(BuiltinRule):
    """Chooses by the names of dimensions: each name maps to the mesh axes that shard such dimensions.

    A leaf may name its dimensions itself (flax linen boxes, flax nnx variables, haliax arrays); other
    leaves are named in `axis_names`, and so may be those that name fewer dimensions than they have. Mesh
    axes that the mesh lacks are skipped, so one mapping serves every mesh. Dimensions choose from the first
    to the last, and a mesh axis is used once in a leaf.
    With ``[('batch', ('data', 'fsdp')), ('embed', 'fsdp'), ('mlp', 'tp'), ('embed', 'tp')]``:

    =====================  =======================  ==================================================
    names of the leaf      mesh axes                spec
    =====================  =======================  ==================================================
    ``embed mlp``          data, fsdp, tp           ``P('fsdp', 'tp')``
    ``embed mlp``          fsdp                     ``P('fsdp', None)``: the mesh has no tp
    ``batch embed``        data, fsdp, tp           ``P(('data', 'fsdp'), 'tp')``: fsdp is in use, and
                                                    the next pair for embed is free
    ``batch embed mlp``    data, fsdp, tp           ``P(('data', 'fsdp'), 'tp', None)``: embed chose first
    ``mlp embed``          data, tp                 ``P('tp', None)``: both are in use or missing
    ``(mlp embed)``        fsdp, tp                 ``P(('tp', 'fsdp'))``: a fused dimension takes the
                                                    axes of its parts, in their order
    =====================  =======================  ==================================================

    Of several pairs for one name, the first wins of which the mesh has an axis and none is in use, or
    whose value is None; if there is no such pair, the first of which some axis is left, without the
    others. (In flax, the pairs choose in their order instead of the dimensions.)

    Where `on_indivisible` leaves out axes by which a dimension does not divide, they are free for the
    dimensions behind it. No other pair is tried for a name whose axes were left out.

    A fused dimension is split into equal blocks of the whole: whether it divides is a matter of the
    product, and blocks end between heads only if the number of heads divides. Name it in `sizes`, and
    that is checked too.

    Arrays of one element are replicated whatever their names.

    Args:
        axis_mapping: name -> a mesh axis, a tuple of them, or None for "not sharded"; a dict, or pairs in
            which a name may occur several times.
        axis_names: pairs of a regex, sought (``re.search``) in the leaf path, and the names of the
            dimensions as einops writes them: ``'embed (heads head_dim)'``, ``'... embed'``. ``_`` is a
            dimension without a name, a number one of that size. The first regex that is found counts,
            for leaves that do not name their dimensions themselves. For those that name more or fewer than
            they have, it counts if it names every dimension, without ``...``.
        strict: a leaf whose dimensions nobody names, and a name that is not in the mapping, are errors.
            With False the rule has no answer for such a leaf, and such a dimension is not sharded.
        on_indivisible: what to do where a dimension does not divide: ``'error'``, ``'replicate'``
            (drop axes from the right until it divides) or ``'warn'`` (the same, with a warning).
        sizes: name -> size, for names that have the same size wherever they occur. Dimensions have to
            agree, and each such part of a fused dimension has to divide by its own mesh axes.

    Raises:
        RuleError: an invalid regex or pattern, or a mapping of another form.

    Example:
        >>> import numpy as np
        >>> rule = LogicalAxisShardingRule(
        ...     {'embed': 'fsdp', 'mlp': 'tp', 'heads': 'tp', 'head_dim': None},
        ...     [('query/kernel', 'embed (heads head_dim)'), ('up/kernel', 'embed mlp')],
        ... )
        >>> rule.apply({'query': {'kernel': np.zeros((8, 8))}, 'up': {'kernel': np.zeros((8, 32))}})
        {'query': {'kernel': P('fsdp', 'tp')}, 'up': {'kernel': P('fsdp', 'tp')}}
    """

    axis_mapping: tuple[tuple[str, MeshAxisEntry], ...]
    axis_names: tuple[tuple[str | re.Pattern[str], str], ...] = ()
    strict: bool = True
    on_indivisible: OnIndivisible = 'error'
    sizes: tuple[tuple[str, int], ...] = ()

    def __init__(
        self,
        axis_mapping: AxisMapping,
        axis_names: Sequence[tuple[str | re.Pattern[str], str]] | None = None,
        strict: bool = True,
        on_indivisible: OnIndivisible = 'error',
        *,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        strict = checked_flag('strict', strict, RuleError)
        pairs = _pairs(axis_mapping, 'axis_mapping', 'a dict or pairs of a name and its mesh axes')
        mapping = tuple(_checked_entry(*pair) for pair in pairs)
        known = [name for name, _ in mapping] if strict else None
        named = _pairs(axis_names or (), 'axis_names', "pairs of a regex and names such as 'embed mlp'")
        sized = _pairs(sizes or (), 'sizes', 'a dict of names and sizes')
        for name, value in (
            ('axis_mapping', mapping),
            ('axis_names', tuple(_checked_names(n, pair, known) for n, pair in enumerate(named))),
            ('strict', strict),
            ('on_indivisible', checked_policy(on_indivisible)),
            ('sizes', tuple(sorted(_checked_size(*pair, known) for pair in sized))),
        ):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        mapping = dict(self.axis_mapping)
        parts = [repr(mapping if len(mapping) == len(self.axis_mapping) else list(self.axis_mapping))]
        if self.axis_names:
            pairs = [f'({regex_text(regex)}, {names!r})' for regex, names in self.axis_names]
            parts.append(f'[{", ".join(pairs)}]')
        if not self.strict:
            parts.append('strict=False')
        if self.on_indivisible != 'error':
            parts.append(f'on_indivisible={self.on_indivisible!r}')
        if self.sizes:
            parts.append(f'sizes={dict(self.sizes)!r}')
        return f'LogicalAxisShardingRule({", ".join(parts)})'

    @property
    def is_pure(self) -> bool:
        """See `ShardingRule.is_pure`. Names that leaves hold themselves are part of a tree's structure."""
        return self.on_indivisible != 'warn'

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""
        own = _own_names(tree)
        decided: dict[Any, tuple[Answer | Fault, list[str]]] = {}
        passed: list[str] = []
        answers: list[Said] = []
        for i, shape in enumerate(tree.shapes):
            if math.prod(shape) == 1:
                answers.append(_ONE)
                continue
            stacked = tree.stacked(i)
            named = self._named(tree.paths[i], own[i], len(shape), stacked)
            if named is None:
                answers.append(None)
                continue
            taken = tree.taken[i] if tree.taken else REPLICATED
            key = (named, shape, stacked, taken)
            if key not in decided:
                decided[key] = NamedLeaf(self, named, shape, stacked, taken, axis_sizes).decide()
            said, dropped = decided[key]
            passed.extend(f'{tree.describe(i)}, {named.source}: {text}' for text in dropped)
            if isinstance(said, Fault):
                answers.append(
                    Problem(said.kind, tree.describe(i), said.detail, rule=named.source, hint=said.hint)
                )
            else:
                answers.append(said)
        if passed and self.on_indivisible == 'warn':
            warn(f'dimensions that do not divide:\n{shown(passed)}', IndivisibleWarning)
        return answers

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """A leaf whose dimensions nobody names is an error, or replicated with ``strict=False``."""
        if not self.strict:
            return _UNNAMED
        count = len(self.axis_names)
        return Problem(
            'unmatched',
            tree.describe(index),
            'the leaf does not name its dimensions, and no regex of axis_names matches the path '
            f'{tree.path_seen(index)}',
            rule=f'LogicalAxisShardingRule with {count} regex{"" if count == 1 else "es"}',
            hint='add a pair for these leaves to axis_names, put a rule for them behind this one '
            '(rule | FSDPShardingRule()), or pass strict=False to replicate them.',
        )

    def _named(self, path: str, own: DimensionNames | None, rank: int, stacked: int) -> Named | None:
        """Who names the dimensions of a leaf, and how; None if nobody does."""
        if own is None or len(own) != rank + stacked:
            # flax reshapes boxed kernels (those of attention) and keeps their names, which are then too few.
            pair = self._pair(path)
            if own is None or (pair is not None and len(pair.pattern.dimensions) == rank):
                return pair
        else:
            own = own[stacked:]  # a leaf may name its stack of layers too
        dimensions = tuple(entry if isinstance(entry, tuple) else (entry,) for entry in own)
        return Named(Pattern(dimensions), as_text(dimensions))

    def _pair(self, path: str) -> Named | None:
        for number, (regex, text) in enumerate(self.axis_names):
            if re.search(regex, path):
                return Named(parse(text), text, number, regex)
        return None


_ONE = Answer(REPLICATED, 'LogicalAxisShardingRule', ONE_ELEMENT)
_UNNAMED = Answer(REPLICATED, 'LogicalAxisShardingRule', 'no names, strict=False')


def _own_names(tree: NamedTree) -> list[DimensionNames | None]:
    """What the leaves themselves call their dimensions. Their boxes are found in the whole tree only."""
    whole, indices = tree.root()
    names = names_by_leaf(whole.tree)
    return [names[i] for i in indices]


# --- Construction ---------------------------------------------------------------------------------


def _pairs(value: Any, argument: str, form: str) -> list[tuple[Any, Any]]:
    """The pairs of a dict or of a sequence."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        return [tuple(pair) for pair in pairs]
    raise RuleError(f'LogicalAxisShardingRule: {argument} is {form}, got {value!r}')


def _checked_entry(name: Any, entry: Any) -> tuple[str, MeshAxisEntry]:
    axes = entry_axes(entry)
    if not isinstance(name, str) or not name:
        raise RuleError(f'LogicalAxisShardingRule, axis_mapping: a name is a string, got {name!r}')
    where = f'LogicalAxisShardingRule, axis_mapping of {name!r}'
    if not all(isinstance(axis, str) and axis for axis in axes):
        raise RuleError(f'{where}: the value is a mesh axis, a tuple of them or None, got {entry!r}')
    if len(set(axes)) < len(axes):
        raise RuleError(f'{where}: a mesh axis is repeated in {entry!r}')
    return name, axes[0] if len(axes) == 1 else axes or None


def _checked_names(
    number: int, pair: tuple[Any, Any], known: Sequence[str] | None
) -> tuple[str | re.Pattern[str], str]:
    regex, text = pair
    where = f'LogicalAxisShardingRule, pair {number} of axis_names'
    checked_regex(where, regex)
    if not isinstance(text, str):
        raise RuleError(f"{where}: the names are a string such as 'embed mlp', got {text!r}")
    parse(text)
    for name, at in names_in(text):
        if known is not None and name not in known:
            raise pattern_error(text, at, f'axis_mapping has no name {name!r} ({did_you_mean(name, known)})')
    return regex, text


def _checked_size(name: Any, size: Any, known: Sequence[str] | None) -> tuple[str, int]:
    where = 'LogicalAxisShardingRule, sizes'
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise RuleError(f'{where}: a size is a positive integer, got {size!r} for {name!r}')
    if known is not None and name not in known:
        raise RuleError(f'{where}: axis_mapping has no name {name!r} ({did_you_mean(str(name), known)})')
    return name, size
