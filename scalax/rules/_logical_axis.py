"""The rule for named dimensions: each logical axis name maps to mesh axes."""

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

    A leaf may name its dimensions itself (flax linen boxes, flax nnx variables, haliax arrays). `axis_names`
    names those of other leaves, including leaves that name fewer dimensions than they have. Mesh axes that
    the mesh lacks are skipped, so one mapping serves every mesh. Dimensions choose from the first to the
    last, and each mesh axis is used at most once in a leaf.
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

    If a name has several pairs, the first one applies whose value is None, or whose axes are all free and at
    least one of them is in the mesh. If there is no such pair, the first pair with a free axis applies,
    without its other axes. (In flax, the pairs choose in their order instead of the dimensions.)

    If `on_indivisible` drops axes by which a dimension is not divisible, later dimensions can use them. The
    rule tries no other pair for a name whose axes were dropped.

    A fused dimension is split into equal blocks: its total size has to be divisible, and the blocks align
    with heads only if the number of heads is divisible.

    Arrays of one element are always replicated.

    Args:
        axis_mapping: name -> a mesh axis, a tuple of axes, or None for "not sharded"; a dict, or pairs in
            which a name may occur several times.
        axis_names: pairs of a regex, which is searched (``re.search``) in the leaf path, and the names of the
            dimensions in einops notation: ``'embed (heads head_dim)'``, ``'... embed'``. ``_`` is a
            dimension without a name, a number one of that size. The first regex that matches names the
            dimensions of leaves that do not name them themselves. It also applies to leaves that name more
            or fewer dimensions than they have, if it names every dimension, without ``...``.
        strict: whether a leaf without names, or a name that is not in the mapping, is an error. With False
            the rule has no answer for such a leaf, and such a dimension is not sharded.
        on_indivisible: what to do if a dimension is not divisible: ``'error'``, ``'replicate'``
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
        known_names = [name for name, _ in mapping] if strict else None
        name_pairs = _pairs(axis_names or (), 'axis_names', "pairs of a regex and names such as 'embed mlp'")
        vars(self).update(
            axis_mapping=mapping,
            axis_names=tuple(_checked_names(i, pair, known_names) for i, pair in enumerate(name_pairs)),
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
        # Boxes with names are nodes, so only the root of the tree contains them.
        root, indices = tree.root()
        own_names = names_by_leaf(root.tree)
        results: dict[Any, Decision | Fault] = {}
        answers: list[Answer] = []
        for i, shape in enumerate(tree.shapes):
            if math.prod(shape) == 1:
                answers.append(_SCALAR)
                continue
            stacked = tree.num_stacked_dims(i)
            named = self._named(tree.paths[i], own_names[indices[i]], len(shape), stacked)
            if named is None:
                answers.append(
                    NoAnswer(functools.partial(self._unnamed, tree, i)) if self.strict else _UNNAMED
                )
                continue
            key = (named, shape, stacked, tree.occupied[i])
            if key not in results:
                results[key] = AxisAssignment(self, *key, axis_sizes).decide()
            result = results[key]
            if isinstance(result, Fault):
                source, hint = named.source, result.hint
                answers.append(Problem(result.kind, tree.describe(i), result.detail, rule=source, hint=hint))
            else:
                answers.append(result)
        return answers

    def _unnamed(self, tree: NamedTree, index: int) -> Problem:
        """Returns the problem of a leaf whose dimensions have no names."""
        return Problem(
            'unmatched',
            tree.describe(index),
            'the leaf does not name its dimensions, and no regex of axis_names matches the path '
            f'{tree.path_text(index)}',
            rule=f'LogicalAxisShardingRule with {plural(len(self.axis_names), "regex", "regexes")}',
            hint='add a pair for these leaves to axis_names, put a rule for them after this one '
            '(rule | FSDPShardingRule()), or pass strict=False to replicate them.',
        )

    def _named(
        self, path: str, own_names: DimensionNames | None, rank: int, stacked: int
    ) -> NamedDimensions | None:
        """Returns the names of the dimensions of a leaf, or None if they have no names."""
        if own_names is None or len(own_names) != rank + stacked:
            # flax reshapes the boxed kernels of attention without adding names, so they have too few.
            by_regex = self._named_by_regex(path)
            if own_names is None or (by_regex is not None and len(by_regex.pattern.dimensions) == rank):
                return by_regex
        else:
            own_names = own_names[stacked:]  # a leaf may name its stack of layers too
        pattern = Pattern(tuple(entry if isinstance(entry, tuple) else (entry,) for entry in own_names))
        return NamedDimensions(pattern, f"the leaf's own names {str(pattern)!r}")

    def _named_by_regex(self, path: str) -> NamedDimensions | None:
        for clause, (regex, names) in enumerate(self.axis_names):
            if re.search(regex, path):
                pattern = parse(names) if isinstance(names, str) else names
                return NamedDimensions(pattern, f'regex {regex_text(regex)}: {str(names)!r}', clause)
        return None


_SCALAR = Decision(REPLICATED, 'LogicalAxisShardingRule', ONE_ELEMENT)
_UNNAMED = NoAnswer(Decision(REPLICATED, 'LogicalAxisShardingRule', 'no names, strict=False'))


# --- Construction ---------------------------------------------------------------------------------


def _pairs(value: Any, argument: str, form: str) -> list[tuple[Any, Any]]:
    """Returns the pairs of a dict or of a sequence."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
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
    clause: int, pair: tuple[Any, Any], known_names: Sequence[str] | None
) -> tuple[str | re.Pattern[str], str | Pattern]:
    regex, text = pair
    where = f'LogicalAxisShardingRule, pair {clause} of axis_names'
    checked_regex(where, regex)
    if isinstance(text, Pattern):  # from `scalax.axes.shard`; `_name_fault` checks its names
        return regex, text
    if not isinstance(text, str):
        raise RuleError(f"{where}: the names are a string such as 'embed mlp', got {text!r}")
    parse(text)
    for name, position in names_in(text):
        if known_names is not None and name not in known_names:
            reason = f'axis_mapping has no name {name!r} ({did_you_mean(name, known_names)})'
            raise pattern_error(text, position, reason)
    return regex, text


_UNKNOWN_NAME_HINT = (
    'add the name to axis_mapping (None leaves its dimensions unsharded), or pass strict=False to leave '
    'dimensions of unknown names unsharded.'
)
_NAME_REUSE_HINT = (
    "give each dimension of an array a name of its own, or none ('_' in a pattern, None in metadata)."
)
_SIZE_HINT = "correct the number in the pattern, or write '_' for a dimension of any size."
_RANK_HINT = (
    "name every dimension ('_' for one without a name, '...' for any number of them), or put a rule for "
    'such leaves before this one.'
)
_OWN_NAMES_RANK_HINT = (
    "name every dimension of such leaves in axis_names, without '...', as in "
    "axis_names=[('query/kernel', 'embed heads _')], which applies if a leaf's own names do not fit; or "
    'put a rule for such leaves before this one.'
)


@dataclasses.dataclass(frozen=True)
class NamedDimensions:
    """The names of the dimensions of a leaf.

    Attributes:
        pattern: the names.
        source: the origin of the names, as messages show it.
        clause: the index of the pair of `axis_names`; None for names that the leaf has itself.
    """

    pattern: Pattern
    source: str = ''
    clause: int | None = None


@dataclasses.dataclass(frozen=True)
class AxisAssignment:
    """The assignment of mesh axes to the dimensions of one leaf.

    Attributes:
        rule: the rule.
        named: the names of the dimensions.
        shape: the shape; None for an unknown size.
        stacked: the number of leading dimensions, of stacked layers, that the shape leaves out.
        occupied: the dimensions and mesh axes that earlier rules occupy.
        axis_sizes: mesh axis name -> size; None without a mesh.
    """

    rule: LogicalAxisShardingRule
    named: NamedDimensions
    shape: tuple[int | None, ...]
    stacked: int
    occupied: PartitionSpec
    axis_sizes: AxisSizes | None

    def decide(self) -> Decision | Fault:
        """Returns the decision, or the fault of the names."""
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
                # `&` removes these axes, and adds the note.
                chosen.append(tuple(axis for part in parts for axis in self._choose_axes(part, used)[0]))
                continue
            for part in parts:
                part_axes, reason, in_use = self._choose_axes(part, [*used, *axes])
                if not part_axes and set(in_use).intersection(spec_axes(self.occupied)):
                    reason = ''  # the note has it
                    requested = ', '.join(dict.fromkeys(in_use))
                    notes.append(f'{self.named.source} asked for {requested} on dimension {dim}: in use')
                axes += part_axes
                reasons.extend([reason] if reason else [])
            divisible_axes = self._divisible_axes(axes, self.shape[dim])
            if divisible_axes != axes:
                text = f'dimension {dim} of size {self.shape[dim]} is not divisible by {"x".join(axes)}'
                dropped.append(f'{text}; {"x".join(divisible_axes) or "no axis"} is used')
            used.extend(divisible_axes)
            chosen.append(divisible_axes)
        clause = self.named.clause
        return Decision(
            PartitionSpec(*map(canonical_entry, chosen)),
            self.named.source,
            '; '.join([*reasons, *dropped])
            or ('' if notes or any(chosen) else 'no name maps to a mesh axis'),
            (self.rule.on_indivisible,),
            clauses=() if clause is None else ((self.rule, clause),),
            notes=tuple(dict.fromkeys(notes)),
            warnings=tuple(dropped) if self.rule.on_indivisible == 'warn' else (),
        )

    def _choose_axes(self, name: Part, used: list[str]) -> tuple[tuple[str, ...], str, list[str]]:
        """Returns the mesh axes of a name, the reason, and the axes of the name that are in use.

        `LogicalAxisShardingRule` documents the precedence.
        """
        first_choice: tuple[str, ...] = ()
        in_use: list[str] = []
        absent: list[str] = []
        present: list[str] = []
        for pair_name, entry in self.rule.axis_mapping:
            if pair_name != name:
                continue
            if entry is None:
                return (), '', in_use
            candidates = [
                axis for axis in entry_axes(entry) if self.axis_sizes is None or axis in self.axis_sizes
            ]
            free = tuple(axis for axis in candidates if axis not in used)
            present.extend(candidates)
            absent.extend(axis for axis in entry_axes(entry) if axis not in candidates)
            if candidates and len(free) == len(candidates):
                return free, f'{name} -> {", ".join(free)}{self._missing_text(absent, present)}', in_use
            first_choice = first_choice or free
            in_use.extend(axis for axis in candidates if axis in used)
        in_use_text = f'{", ".join(dict.fromkeys(in_use))} in use'
        missing_text = self._missing_text(absent, present)
        if first_choice:
            return first_choice, f'{name} -> {", ".join(first_choice)} ({in_use_text}){missing_text}', in_use
        if in_use:
            return (), f'{name}: {in_use_text}{missing_text}', in_use
        return (), f'{name}{missing_text}' if missing_text else '', []

    def _missing_text(self, absent: Sequence[str], present: Sequence[str]) -> str:
        """Returns which mesh axes of a name the mesh lacks.

        If the mesh has some axes of the name, only an axis that looks misspelt is reported, because one
        mapping serves many meshes.
        """
        if self.axis_sizes is None or not absent:
            return ''
        others = [axis for axis in self.axis_sizes if axis not in present]
        misspelt = next((axis for axis in absent if near_names(axis, others)), None)
        hint = '' if misspelt is None else f' ({did_you_mean(misspelt, others)})'
        if not present:
            return f': the mesh has no {", ".join(map(repr, dict.fromkeys(absent)))}{hint}'
        return '' if misspelt is None else f'; the mesh has no {misspelt!r}{hint}'

    def _divisible_axes(self, axes: tuple[str, ...], size: int | None) -> tuple[str, ...]:
        """Drops axes from the right until the dimension is divisible by the rest."""
        # With the policy 'error', `resolve` checks divisibility with the rest of the spec.
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
            _OWN_NAMES_RANK_HINT if self.named.clause is None else _RANK_HINT,
        )

    def _name_fault(self, dimensions: tuple[Dimension, ...]) -> Fault | None:
        """Returns the first fault of names that the leaf has itself. The rule has checked other names."""
        dims_by_name: dict[str, list[int]] = {}
        for dim, parts in enumerate(dimensions):
            for part in parts:
                if isinstance(part, str):
                    dims_by_name.setdefault(part, []).append(dim)
        known_names = [name for name, _ in self.rule.axis_mapping]
        unknown = [name for name in dims_by_name if name not in known_names] if self.rule.strict else []
        if unknown:
            texts = [
                f'{name!r} of dimension {dims_by_name[name][0]} ({did_you_mean(name, known_names)})'
                for name in unknown
            ]
            return Fault('unknown-name', f'axis_mapping has no name {", ".join(texts)}', _UNKNOWN_NAME_HINT)
        for name, dims in dims_by_name.items():
            if len(dims) > 1:
                detail = f'{name!r} is used more than once (dimensions {", ".join(map(str, dims))})'
                return Fault('name-reuse', detail, _NAME_REUSE_HINT)
        return None

    def _size_fault(self, dimensions: tuple[Dimension, ...]) -> Fault | None:
        """Returns the fault of the first dimension whose size contradicts the numbers in the pattern."""
        for dim, (parts, size) in enumerate(zip(dimensions, self.shape, strict=True)):
            if size is None:
                continue
            numbers = [part for part in parts if isinstance(part, int)]
            product = math.prod(numbers)
            if len(numbers) == len(parts) and size != product:
                return Fault('dimension-size', f'dimension {dim} has size {size}, not {product}', _SIZE_HINT)
            if size % product:
                return Fault(
                    'dimension-size',
                    f'dimension {dim} of size {size} is not {Pattern((parts,))}: it is not divisible by '
                    f'{product}',
                    _SIZE_HINT,
                )
        return None
