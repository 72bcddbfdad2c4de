"""The rule for optimizer states: every leaf gets the spec of the parameter that it belongs to.

Optimizers map over the parameters, so the path of a statistic ends with its parameter's path
(``0/mu/layers/0/w``); its shape says which dimensions of the parameter it keeps. The rule looks at nothing
else, and knows no optimizer library.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from scalax._core.pytree import partition_specs
from scalax._core.pytree.paths import FREE, NamedTree, has_foreign_dtype, leaf_shape
from scalax.errors import Problem, RuleError, module_advice, plural
from scalax.rules._answer import REPLICATED, Answer, AxisSizes, Decision, NoAnswer
from scalax.rules._rule import BuiltinRule, ShardingRule, as_rule, decide
from scalax.rules._rule_tree import RuleLike, match_subtrees

_NAME = 'OptimizerStateShardingRule'
_HINT = (
    'give the params that the state was made for, with the same paths (abstract ones are enough); for '
    'leaves of another kind put a rule in front: TreePathShardingRule((regex, spec)) | '
    'OptimizerStateShardingRule(...).'
)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class OptimizerStateShardingRule(BuiltinRule):
    """Gives the leaves of an optimizer's state the specs of the parameters that they belong to.

    A leaf belongs to the parameter whose entire path its own path ends with. Where several match, as
    ``w`` and ``mu/w`` for the leaf ``0/mu/w``, it is the one beside which most other parameters are found;
    among equals one of the leaf's shape, else the longest. What it gets depends on its shape:

    ==========================================  ====================================================
    a leaf                                      gets
    ==========================================  ====================================================
    of its parameter's shape (moments,          the parameter's spec
     averages, the parameters themselves)
    with dimensions left out or of size 1       the specs of the dimensions it keeps. ``v_row`` and
     (factored statistics)                      ``v_col`` leave out the largest and the second
                                                largest, as in optax. Where several dimensions have
                                                that size and their specs differ: replicated
    with dimensions in front (histories)        those unsharded, then the parameter's spec
    with at most one element (counters)         replicated
    beside the parameters, or below one         no answer; alone: an error for matrices (and more) of
     (``w/q``, ``w/scale``)                     over 32 floats, and for anything of 2**20 elements or
                                                more; else replicated
    of any other shape at a parameter's path    an error that names the leaf
    ==========================================  ====================================================

    A parameter that *param_rule* does not answer counts with the default of that rule, so that what
    mirrors a parameter always has its sharding. In ``a & b``, a rule with a choice chooses for each copy
    again, among the dimensions that *a* left free. The params may be part of the tree: an entire train
    state takes this one rule.

    Args:
        param_rule: what the parameters are sharded by: a rule, a PartitionSpec, or a pytree prefix of
            these.
        params: the parameters that the optimizer was initialised with; ``jax.ShapeDtypeStruct`` leaves
            are enough, and only paths, shapes and dtypes are stored.

    Raises:
        RuleError: `param_rule` is not a rule, or `params` holds no arrays, or other leaves.
        StructureError: the tree of rules is not a prefix of `params`.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> params = {'w': np.zeros((8, 16)), 'b': np.zeros(16)}
        >>> rule = OptimizerStateShardingRule({'w': P('fsdp', 'tp'), 'b': P()}, params)
        >>> factored = {'v_row': {'w': np.zeros(8)}, 'v_col': {'w': np.zeros(16)}}
        >>> rule.apply({'count': 0, 'mu': params, **factored})
        {'count': P(), 'mu': {'b': P(), 'w': P('fsdp', 'tp')},
         'v_col': {'w': P('tp',)}, 'v_row': {'w': P('fsdp',)}}

        ZeRO-1, parameters replicated and the state sharded, is
        ``OptimizerStateShardingRule(P(), params) & FSDPShardingRule('data')``.

    Source: Shazeer and Stern, "Adafactor", ICML 2018 (arXiv:1804.04235), for factored statistics;
    Rajbhandari et al., "ZeRO", SC 2020 (arXiv:1910.02054), for sharding the state further.
    """

    sections: tuple[Section, ...]

    def __init__(self, param_rule: RuleLike, params: Any) -> None:
        object.__setattr__(self, 'sections', tuple(_sections(param_rule, params)))

    def __repr__(self) -> str:
        # Without the shapes, of which a large model has thousands; equality compares them.
        rules = [section.rule for section in self.sections]
        shapes = [shape for section in self.sections for shape in section.shapes]
        text = repr(rules[0]) if len(rules) == 1 else f'<{len(rules)} rules>'
        count = plural(len(shapes), 'parameter')
        return f'{type(self).__name__}({text}, <{count}, {sum(map(math.prod, shapes))} elements>)'

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        return tuple(section.rule for section in self.sections)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        # Only the whole state shows where the parameters are.
        whole, indices = tree.root()
        occupied = dict(zip(indices, tree.occupied, strict=True))
        places = _places(whole, self._params)
        # The rule of a parameter cannot use what an outer rule has already given to a copy of it.
        asked: dict[int, tuple[int, PartitionSpec]] = {}
        for i, place in enumerate(places):
            if place is not None:
                is_copy = whole.shapes[i] == self._params.shapes[place.param]
                asked[i] = place.param, occupied.get(i, FREE) if is_copy else FREE
        decided = self._params.decide(dict.fromkeys(asked.values()), axis_sizes)
        given = {i: decided[key] for i, key in asked.items()}
        derive = functools.cache(_derived)
        return [self._answer(whole, i, places[i], given.get(i), derive) for i in indices]

    def _answer(
        self,
        state: NamedTree,
        index: int,
        place: _Place | None,
        decided: Decision | Problem | None,
        derive: Callable[..., Decision | None],
    ) -> Answer:
        """The answer about a leaf of the state; *decided* is what its parameter gets, if it has one."""
        shape = state.shapes[index]
        if place is None or decided is None:
            return _SMALL if _is_small(shape) else self._unplaced(state, index, None)
        name, own = self._params.paths[place.param], self._params.shapes[place.param]
        if isinstance(decided, Problem):
            detail = f'its parameter {name!r}: {decided.detail}'
            return dataclasses.replace(decided, leaf=state.describe(index), detail=detail)
        derived = derive(decided, own, shape, place.before.rpartition('/')[2])
        if derived is not None:
            return derived
        if not name or name.isdigit():  # identifies little: chains of states have such keys, too
            return self._unplaced(state, index, place)
        return self._mismatch(state, index, place)

    def _unplaced(self, state: NamedTree, index: int, place: _Place | None) -> NoAnswer:
        """No answer; alone, the leaf is replicated, or an error if it looks as if it should have one."""
        shape, leaf = state.shapes[index], state.leaves[index]
        elements = math.prod(shape)
        is_float = hasattr(leaf, 'dtype') and jax.dtypes.issubdtype(leaf.dtype, np.inexact)
        if elements >= _MANY or (is_float and len(shape) > 1 and elements > _FEW):
            return NoAnswer(functools.partial(self._mismatch, state, index, place))
        return _NO_PARAMETER

    def _mismatch(self, state: NamedTree, index: int, place: _Place | None) -> Problem:
        """The problem of a leaf that should belong to a parameter and does not."""
        detail = 'its path ends with no parameter path'
        if place is not None:
            name, own = self._params.paths[place.param], list(self._params.shapes[place.param])
            detail = (
                f'the parameter {name or "itself"!r} has shape {own}: this is no copy, no stack of copies, '
                'and not some of its dimensions'
            )
        return Problem('params-mismatch', state.describe(index), detail, rule=_NAME, hint=_HINT)

    @functools.cached_property
    def _params(self) -> _Params:
        return _Params(self.sections)


_FEW = 32  # elements: tables of coefficients, as muon has
_MANY = 2**20  # elements: below that it is a table, a key, or scales
_NO_PARAMETER = NoAnswer(Decision(REPLICATED, _NAME, 'belongs to no parameter'))
_SMALL = Decision(REPLICATED, _NAME, 'at most one element')


# --- The parameters ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Section:
    """The parameters that one rule decides about, as paths, shapes and dtypes."""

    rule: ShardingRule
    at: str | None
    treedef: Any
    # Not hashed: hashing the paths and shapes of a large model would cost at every look-up.
    paths: tuple[str, ...] = dataclasses.field(hash=False)
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(hash=False)
    dtypes: tuple[Any, ...] = dataclasses.field(hash=False)

    def tree(self) -> NamedTree:
        """The parameters, as the rule sees them."""
        structs = list(map(jax.ShapeDtypeStruct, self.shapes, self.dtypes))
        bare = jax.tree_util.treedef_is_leaf(self.treedef)
        free = [FREE] * len(structs)
        return NamedTree(self.paths, structs, self.shapes, self.treedef, free, self.at, is_bare_leaf=bare)


def _sections(param_rule: RuleLike, params: Any) -> Iterator[Section]:
    """Pairs rules with parameters; keeps shapes in place of the arrays.

    Raises:
        RuleError: something is not a rule, or not an array.
        StructureError: the rules are not a prefix of the parameters.
    """
    parts = match_subtrees(param_rule, params, f'the params of {_NAME}', RuleError)
    trees = [NamedTree.of(part.tree, part.path) for part in parts]
    if not any(map(len, trees)):
        raise RuleError(f'{_NAME}: params has no leaves, so that no state can belong to it')
    for part, tree in zip(parts, trees, strict=True):
        for i, leaf in enumerate(tree.leaves):
            if leaf_shape(leaf) is None or has_foreign_dtype(leaf):
                raise RuleError(
                    f'{_NAME}: params holds {tree.describe(i)}, which is not an '
                    f'array; give what the optimizer was initialised with.{module_advice([leaf])}'
                )
        dtypes = [getattr(leaf, 'dtype', None) or jax.dtypes.result_type(leaf) for leaf in tree.leaves]
        columns = tuple(tree.paths), tuple(map(tuple, tree.shapes)), tuple(dtypes)
        yield Section(as_rule(part.rule), part.path, tree.treedef, *columns)


_BEFORE_A_KEY = re.compile('^|/')


class _Place(NamedTuple):
    """Where a leaf is: after *before*, at the parameter number *param*."""

    before: str
    param: int


class _Params:
    """The parameters of a rule, looked up by path."""

    def __init__(self, sections: Sequence[Section]) -> None:
        trees = [(section, section.tree()) for section in sections]
        self._rows = [(section, tree, i) for section, tree in trees for i in range(len(tree))]
        self.shapes = [tree.shapes[i] for _, tree, i in self._rows]
        self.paths = [tree.path_below(section.at, i) for section, tree, i in self._rows]
        self._index: Mapping[str, int] = {path: i for i, path in enumerate(self.paths)}

    def decide(
        self, asked: Iterable[tuple[int, PartitionSpec]], axis_sizes: AxisSizes | None
    ) -> dict[tuple[int, PartitionSpec], Decision | Problem]:
        """What parameters get by their rules, each with what an outer rule gave to a copy of it."""
        groups: dict[int, list[tuple[int, PartitionSpec]]] = {}
        for each in asked:
            groups.setdefault(id(self._rows[each[0]][1]), []).append(each)
        decided: dict[tuple[int, PartitionSpec], Decision | Problem] = {}
        for group in groups.values():
            section, tree, _ = self._rows[group[0][0]]
            part = tree.select([self._rows[param][2] for param, _ in group])
            part = part.with_occupied([occupied for _, occupied in group])
            decided.update(zip(group, decide(section.rule, part, axis_sizes), strict=True))
        return decided

    def ending(self, path: str) -> Iterator[_Place]:
        """The parameters whose path *path* ends with, on whole keys; the shortest first."""
        if '' in self._index:
            yield _Place(path, self._index[''])
        for start in reversed([match.end() for match in _BEFORE_A_KEY.finditer(path)]):
            if path[start:] and path[start:] in self._index:
                yield _Place(path[: max(start - 1, 0)], self._index[path[start:]])


def _places(state: NamedTree, params: _Params) -> list[_Place | None]:
    """The place of every leaf of the state; None for what belongs to no parameter."""
    found = [list(params.ending(path)) for path in state.paths]
    beside = collections.Counter(place.before for places in found for place in places)

    def rank(place: _Place, shape: tuple[int, ...]) -> tuple[int, bool, int]:
        return beside[place.before], params.shapes[place.param] == shape, len(params.paths[place.param])

    return [
        max(places, key=lambda place: rank(place, shape), default=None)
        for places, shape in zip(found, state.shapes, strict=True)
    ]


def _derived(answer: Decision, own: tuple[int, ...], shape: tuple[int, ...], role: str) -> Decision | None:
    """The answer for a leaf of *shape*, given its parameter's; None where the shapes do not fit."""
    origin = f'{_NAME} -> {answer.origin}'
    if shape == own:
        reason = ': '.join(part for part in ('as its parameter', answer.reason) if part)
        return dataclasses.replace(answer, origin=origin, reason=reason)
    if _is_small(shape):
        return _SMALL
    choices = kept_dimensions(own, shape, role)
    if not choices:
        return None
    if answer.spec is None:
        return dataclasses.replace(answer, origin=origin, reason='left to the compiler as its parameter')
    entries = (*partition_specs.entries(answer.spec), *[None] * len(own))
    # Where several dimensions may be the stack of layers, all of them count as it.
    stack = tuple(sorted({i for dims in choices for i, dim in enumerate(dims) if dim in answer.stack}))
    distinct = dict.fromkeys(
        partition_specs.with_entries(answer.spec, [None if dim is None else entries[dim] for dim in dims])
        for dims in choices
    )
    if len(distinct) > 1:  # any of them would be a guess
        spec, reason = (
            REPLICATED,
            f'keeps {" or ".join(map(_dimensions, choices))} of its parameter: ambiguous',
        )
    else:
        kept = 'a stack of copies' if len(shape) > len(own) else f'keeps {_dimensions(choices[0])}'
        (spec,), reason = distinct, f'{kept} of its parameter'
    return dataclasses.replace(answer, spec=spec, origin=origin, reason=reason, stack=stack)


def _dimensions(dims: Dimensions) -> str:
    kept = [str(dim) for dim in dims if dim is not None]
    return f'dimension{"" if len(kept) == 1 else "s"} {" and ".join(kept)}'


def _is_small(shape: tuple[int, ...]) -> bool:
    return math.prod(shape) <= 1  # counters; placeholders, also those of size zero


Dimensions = tuple[int | None, ...]
"""For each dimension of a statistic the parameter's dimension that it is; None for one of its own."""


def kept_dimensions(parameter: tuple[int, ...], shape: tuple[int, ...], name: str = '') -> list[Dimensions]:
    """All ways to read the shape of a statistic as dimensions of its parameter; empty if there is none.

    Args:
        parameter: the parameter's shape.
        shape: the statistic's shape.
        name: ``'v_row'`` or ``'v_col'`` for the factors of Adafactor as optax calls them: these leave out
            the largest and the second largest dimension.

    Example:
        >>> kept_dimensions((4, 6), (6,))
        [(1,)]
        >>> kept_dimensions((4, 4), (4,))
        [(0,), (1,)]
        >>> kept_dimensions((4, 4), (4,), 'v_row')
        [(0,)]
        >>> kept_dimensions((4, 6), (1, 6)), kept_dimensions((4, 6), (3, 4, 6))
        ([(None, 1)], [(None, 0, 1)])
        >>> kept_dimensions((4, 6), (4, 2))
        []
    """
    extra = len(shape) - len(parameter)
    if extra > 0:
        return [(*[None] * extra, *range(len(parameter)))] if shape[extra:] == parameter else []
    if name in ('v_row', 'v_col') and extra == -1 and len(parameter) > 1:
        # The sort of optax's _factored_dims: which of two equal sizes comes last is up to numpy.
        second, largest = map(int, np.argsort(parameter)[-2:])
        gone = largest if name == 'v_row' else second
        dims = tuple(dim for dim in range(len(parameter)) if dim != gone)
        if shape == tuple(parameter[dim] for dim in dims):
            return [dims]
    return [
        tuple(dim if size == parameter[dim] else None for size, dim in zip(shape, dims, strict=True))
        for dims in itertools.combinations(range(len(parameter)), len(shape))
        if all(size in (1, parameter[dim]) for size, dim in zip(shape, dims, strict=True))
    ]
