"""The rule for dimensions with names: each name maps to mesh axes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import canonical_entry, entries, entry_axes, spec_axes
from scalax._core.pytree.paths import NamedTree
from scalax._core.pytree.spec_validation import Fault
from scalax.errors import (
    Problem,
    RuleError,
    checked_flag,
    did_you_mean,
    near_names,
    plural,
)
from scalax.interop import DimensionNames
from scalax.interop._boxes import names_by_leaf
from scalax.rules._answer import ONE_ELEMENT, REPLICATED, Answer, AxisSizes, Decision, NoAnswer
from scalax.rules._einops_pattern import Dimension, Part, Pattern, names_in, parse, pattern_error
from scalax.rules._indivisible import OnIndivisible, checked_policy
from scalax.rules._rule import BuiltinRule
from scalax.rules._tree_path import checked_regex, regex_text

MeshAxisEntry = str | tuple[str, ...] | None
AxisMapping = Mapping[str, str | Sequence[str] | None] | Sequence[tuple[str, str | Sequence[str] | None]]


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
                                                    axes of its names, in their order
    =====================  =======================  ==================================================

    Of several pairs for one name, the first wins of which the mesh has an axis and none is in use, or
    whose value is None; if there is no such pair, the first of which some axis is left, without the
    others. (In flax, the pairs choose in their order instead of the dimensions.)

    Where `on_indivisible` leaves out axes by which a dimension does not divide, they are free for the
    dimensions after it. No other pair is tried for a name whose axes were left out.

    A fused dimension is split into equal blocks: whether it divides is a matter of the
    product, and blocks end between heads only if the number of heads divides.

    Arrays of one element are replicated whatever their names.

    Args:
        axis_mapping: name -> a mesh axis, a tuple of them, or None for "not sharded"; a dict, or pairs in
            which a name may occur several times.
        axis_names: pairs of a regex, sought (``re.search``) in the leaf path, and the names of the
            dimensions as einops writes them: ``'embed (heads head_dim)'``, ``'... embed'``. ``_`` is a
            dimension without a name, a number one of that size. The first regex that is found counts,
            for leaves that do not name their dimensions themselves. For those that name more or fewer than
            they have, it counts if it names every dimension, without ``...``.
        strict: a leaf whose dimensions have no names, and a name that is not in the mapping, are errors.
            With False the rule has no answer for such a leaf, and such a dimension is not sharded.
        on_indivisible: what to do where a dimension does not divide: ``'error'``, ``'replicate'``
            (drop axes from the right until it divides) or ``'warn'`` (the same, with a warning).

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
    axis_names: tuple[tuple[str | re.Pattern[str], str | Pattern], ...] = ()
    strict: bool = True
    on_indivisible: OnIndivisible = 'error'

    def __init__(
        self,
        axis_mapping: AxisMapping,
        axis_names: Sequence[tuple[str | re.Pattern[str], str]] | None = None,
        strict: bool = True,
        on_indivisible: OnIndivisible = 'error',
    ) -> None:
        strict = checked_flag('strict', strict, RuleError)
        pairs = _pairs(axis_mapping, 'axis_mapping', 'a dict or pairs of a name and its mesh axes')
        mapping = tuple(_checked_entry(*pair) for pair in pairs)
        known = [name for name, _ in mapping] if strict else None
        named = _pairs(axis_names or (), 'axis_names', "pairs of a regex and names such as 'embed mlp'")
        vars(self).update(
            axis_mapping=mapping,
            axis_names=tuple(_checked_names(number, pair, known) for number, pair in enumerate(named)),
            strict=strict,
            on_indivisible=checked_policy(on_indivisible),
        )

    def __repr__(self) -> str:
        mapping = dict(self.axis_mapping)
        parts = [repr(mapping if len(mapping) == len(self.axis_mapping) else list(self.axis_mapping))]
        if self.axis_names:
            pairs = [f'({regex_text(regex)}, {str(names)!r})' for regex, names in self.axis_names]
            parts.append(f'[{", ".join(pairs)}]')
        parts += self._options('strict', 'on_indivisible')
        return f'LogicalAxisShardingRule({", ".join(parts)})'

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        # Boxes with names can be found in the whole tree only.
        whole, indices = tree.root()
        own_names = names_by_leaf(whole.tree)
        decided: dict[Any, Decision | Fault] = {}
        answers: list[Answer] = []
        for i, shape in enumerate(tree.shapes):
            if math.prod(shape) == 1:
                answers.append(_ONE)
                continue
            stacked = tree.num_stacked_dims(i)
            named = self._named(tree.paths[i], own_names[indices[i]], len(shape), stacked)
            if named is None:
                answers.append(
                    NoAnswer(functools.partial(self._unnamed, tree, i)) if self.strict else _UNNAMED
                )
                continue
            key = (named, shape, stacked, tree.occupied[i])
            if key not in decided:
                decided[key] = NamedLeaf(self, *key, axis_sizes).decide()
            found = decided[key]
            if isinstance(found, Fault):
                source, hint = named.source, found.hint
                answers.append(Problem(found.kind, tree.describe(i), found.detail, rule=source, hint=hint))
            else:
                answers.append(found)
        return answers

    def _unnamed(self, tree: NamedTree, index: int) -> Problem:
        """The problem of a leaf whose dimensions have no names."""
        return Problem(
            'unmatched',
            tree.describe(index),
            'the leaf does not name its dimensions, and no regex of axis_names matches the path '
            f'{tree.path_text(index)}',
            rule=f'LogicalAxisShardingRule with {plural(len(self.axis_names), "regex", "regexes")}',
            hint='add a pair for these leaves to axis_names, put a rule for them after this one '
            '(rule | FSDPShardingRule()), or pass strict=False to replicate them.',
        )

    def _named(self, path: str, own: DimensionNames | None, rank: int, stacked: int) -> Named | None:
        """The names of the dimensions of a leaf, and where they come from; None where there are none."""
        if own is None or len(own) != rank + stacked:
            # flax reshapes boxed kernels (those of attention) and keeps their names, which are then too few.
            pair = self._pair(path)
            if own is None or (pair is not None and len(pair.pattern.dimensions) == rank):
                return pair
        else:
            own = own[stacked:]  # a leaf may name its stack of layers too
        pattern = Pattern(tuple(entry if isinstance(entry, tuple) else (entry,) for entry in own))
        return Named(pattern, f"the leaf's own names {str(pattern)!r}")

    def _pair(self, path: str) -> Named | None:
        for number, (regex, names) in enumerate(self.axis_names):
            if re.search(regex, path):
                pattern = parse(names) if isinstance(names, str) else names
                return Named(pattern, f'regex {regex_text(regex)}: {str(names)!r}', number)
        return None


_ONE = Decision(REPLICATED, 'LogicalAxisShardingRule', ONE_ELEMENT)
_UNNAMED = NoAnswer(Decision(REPLICATED, 'LogicalAxisShardingRule', 'no names, strict=False'))


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
    return name, canonical_entry(axes)


def _checked_names(
    number: int, pair: tuple[Any, Any], known: Sequence[str] | None
) -> tuple[str | re.Pattern[str], str | Pattern]:
    regex, text = pair
    where = f'LogicalAxisShardingRule, pair {number} of axis_names'
    checked_regex(where, regex)
    if isinstance(text, Pattern):  # of `scalax.axes.shard`, checked with the leaf
        return regex, text
    if not isinstance(text, str):
        raise RuleError(f"{where}: the names are a string such as 'embed mlp', got {text!r}")
    parse(text)
    for name, at in names_in(text):
        if known is not None and name not in known:
            raise pattern_error(text, at, f'axis_mapping has no name {name!r} ({did_you_mean(name, known)})')
    return regex, text


_KNOW = (
    'add the name to axis_mapping (None leaves its dimensions unsharded), or pass strict=False to leave '
    'dimensions of unknown names unsharded.'
)
_ONCE = "give each dimension of an array a name of its own, or none ('_' in a pattern, None in metadata)."
_SIZE = "correct the number in the pattern, or write '_' for a dimension of any size."
_RANK = (
    "name every dimension ('_' for one without a name, '...' for any number of them), or put a rule for "
    'such leaves before this one.'
)
_BOXED = (
    "name every dimension of such leaves in axis_names, without '...', as in "
    "axis_names=[('query/kernel', 'embed heads _')], which counts where a leaf's own names do not fit; or "
    'put a rule for such leaves before this one.'
)


@dataclasses.dataclass(frozen=True)
class Named:
    """The names of the dimensions of a leaf.

    Attributes:
        pattern: the names.
        source: where they come from, as messages show it.
        number: the number of the pair of `axis_names`; None for names that the leaf holds itself.
    """

    pattern: Pattern
    source: str = ''
    number: int | None = None


@dataclasses.dataclass(frozen=True)
class NamedLeaf:
    """Everything that the decision about one leaf depends on; of a shape, sizes may be unknown (None)."""

    rule: LogicalAxisShardingRule
    named: Named
    shape: tuple[int | None, ...]
    stacked: int
    occupied: PartitionSpec
    axis_sizes: AxisSizes | None

    def decide(self) -> Decision | Fault:
        """The decision, or what is wrong."""
        dimensions = self.named.pattern.of_rank(len(self.shape))
        if dimensions is None:
            fault: Fault | None = self._rank_fault()
        else:
            fault = self._name_fault(dimensions) or self._size_fault(dimensions)
        if fault is not None:
            return fault
        assert dimensions is not None
        used, occupied = list(spec_axes(self.occupied)), entries(self.occupied)
        chosen: list[tuple[str, ...]] = []
        dropped: list[str] = []
        reasons: list[str] = []
        notes: list[str] = []
        for dim, parts in enumerate(dimensions):
            axes: tuple[str, ...] = ()
            if dim < len(occupied) and occupied[dim] is not None:
                # `&` takes them out, and notes that it did.
                chosen.append(tuple(axis for part in parts for axis in self._choose(part, used)[0]))
                continue
            for part in parts:
                more, why, busy = self._choose(part, [*used, *axes])
                if not more and set(busy).intersection(spec_axes(self.occupied)):
                    why = ''  # another rule uses them, as the note says
                    asked = ', '.join(dict.fromkeys(busy))
                    notes.append(f'{self.named.source} asked for {asked} on dimension {dim}: in use')
                axes += more
                reasons.extend([why] if why else [])
            kept = self._dividing(axes, self.shape[dim])
            if kept != axes:
                text = f'dimension {dim} of size {self.shape[dim]} does not divide by {"x".join(axes)}'
                dropped.append(f'{text}; {"x".join(kept) or "no axis"} is used')
            used.extend(kept)
            chosen.append(kept)
        number = self.named.number
        return Decision(
            PartitionSpec(*map(canonical_entry, chosen)),
            self.named.source,
            '; '.join([*reasons, *dropped])
            or ('' if notes or any(chosen) else 'no name has a mesh axis here'),
            (self.rule.on_indivisible,),
            clauses=() if number is None else ((self.rule, number),),
            notes=tuple(dict.fromkeys(notes)),
            passed=tuple(dropped) if self.rule.on_indivisible == 'warn' else (),
        )

    def _choose(self, name: Part, used: list[str]) -> tuple[tuple[str, ...], str, list[str]]:
        """The mesh axes of a name, why, and those in use; the docstring of the rule has the precedence."""
        first: tuple[str, ...] = ()
        busy: list[str] = []
        absent: list[str] = []
        present: list[str] = []
        for other, entry in self.rule.axis_mapping:
            if other != name:
                continue
            if entry is None:
                return (), '', busy
            here = [a for a in entry_axes(entry) if self.axis_sizes is None or a in self.axis_sizes]
            free = tuple(axis for axis in here if axis not in used)
            present.extend(here)
            absent.extend(axis for axis in entry_axes(entry) if axis not in here)
            if here and len(free) == len(here):
                return free, f'{name} -> {", ".join(free)}{self._missing(absent, present)}', busy
            first = first or free
            busy.extend(axis for axis in here if axis in used)
        in_use = f'{", ".join(dict.fromkeys(busy))} in use'
        missing = self._missing(absent, present)
        if first:
            return first, f'{name} -> {", ".join(first)} ({in_use}){missing}', busy
        if busy:
            return (), f'{name}: {in_use}{missing}', busy
        return (), f'{name}{missing}' if missing else '', []

    def _missing(self, absent: Sequence[str], present: Sequence[str]) -> str:
        """Which mesh axes of a name the mesh lacks: all of them if it has none, else one that looks misspelt.

        One mapping serves many meshes, so that axes that a mesh lacks are skipped.
        """
        if self.axis_sizes is None or not absent:
            return ''
        others = [axis for axis in self.axis_sizes if axis not in present]
        misspelt = next((axis for axis in absent if near_names(axis, others)), None)
        hint = '' if misspelt is None else f' ({did_you_mean(misspelt, others)})'
        if not present:
            return f': the mesh has no {", ".join(map(repr, dict.fromkeys(absent)))}{hint}'
        return '' if misspelt is None else f'; the mesh has no {misspelt!r}{hint}'

    def _dividing(self, axes: tuple[str, ...], size: int | None) -> tuple[str, ...]:
        """The axes that divide a dimension; others are dropped from the right."""
        # With the policy "error" that is checked with the rest of the spec, in `resolve`.
        if size is not None and self.axis_sizes is not None and self.rule.on_indivisible != 'error':
            while size % math.prod(self.axis_sizes[axis] for axis in axes):
                axes = axes[:-1]
        return axes

    def _rank_fault(self) -> Fault:
        pattern, rank = self.named.pattern, len(self.shape)
        return Fault(
            'names-rank',
            f'{str(pattern)!r} names {"" if pattern.ellipsis is None else "at least "}'
            f'{plural(len(pattern.dimensions), "dimension")}, the array has {rank}'
            + (' without its stack of layers' if self.stacked else ''),
            _BOXED if self.named.number is None else _RANK,
        )

    def _name_fault(self, dimensions: tuple[Dimension, ...]) -> Fault | None:
        """The first fault of names that a leaf holds itself; those of regexes were checked before."""
        places: dict[str, list[int]] = {}
        for dim, parts in enumerate(dimensions):
            for part in parts:
                if isinstance(part, str):
                    places.setdefault(part, []).append(dim)
        known = [name for name, _ in self.rule.axis_mapping]
        unknown = [name for name in places if name not in known] if self.rule.strict else []
        if unknown:
            texts = [
                f'{name!r} of dimension {places[name][0]} ({did_you_mean(name, known)})' for name in unknown
            ]
            return Fault('unknown-name', f'axis_mapping has no name {", ".join(texts)}', _KNOW)
        for name, dims in places.items():
            if len(dims) > 1:
                listed = ', '.join(map(str, dims))
                return Fault('name-reuse', f'{name!r} is used more than once (dimensions {listed})', _ONCE)
        return None

    def _size_fault(self, dimensions: tuple[Dimension, ...]) -> Fault | None:
        """The first dimension whose size is not that of the numbers in the pattern."""
        for dim, (parts, size) in enumerate(zip(dimensions, self.shape, strict=True)):
            if size is None:
                continue
            numbers = [part for part in parts if isinstance(part, int)]
            product = math.prod(numbers)
            if len(numbers) == len(parts) and size != product:
                return Fault('dimension-size', f'dimension {dim} has size {size}, not {product}', _SIZE)
            if size % product:
                return Fault(
                    'dimension-size',
                    f'dimension {dim} of size {size} is not {Pattern((parts,))}: it is not divisible by '
                    f'{product}',
                    _SIZE,
                )
        return None
