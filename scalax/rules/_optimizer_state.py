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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from scalax._tree import specs
from scalax._tree.paths import NamedTree, has_foreign_dtype, leaf_shape
from scalax.errors import Problem, RuleError, near_names, plural
from scalax.rules._base import BuiltinRule, RuleLike, ShardingRule, answers_of, as_rule
from scalax.rules._decisions import REPLICATED, Answer, AxisSizes, Decision
from scalax.rules._prefix import split

_NAME = 'OptimizerStateShardingRule'
_HINT = (
    'give the params that the state was made for, with the same paths (abstract ones are enough); for '
    'leaves of another kind put a rule in front: TreePathShardingRule((regex, spec)) | '
    'OptimizerStateShardingRule(...).'
)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class OptimizerStateShardingRule(BuiltinRule):
    """Gives the leaves of an optimizer's state the specs of the parameters that they belong to.

    A leaf belongs to the parameter whose whole path its own path ends with. Where several match, as
    ``w`` and ``mu/w`` for the leaf ``0/mu/w``, it is the one beside which most other parameters are found;
    among equals one of the leaf's shape, else the longest. What it gets depends on its shape:

    ==========================================  ====================================================
    a leaf                                      gets
    ==========================================  ====================================================
    of its parameter's shape (moments,          the parameter's spec
    averages, the parameters themselves)
    with dimensions left out or of size 1       the specs of the dimensions it keeps. ``v_row`` and
    (factored statistics)                       ``v_col`` leave out the largest and the second
                                                largest, as in optax. Where several dimensions have
                                                that size and their specs differ: replicated
    with dimensions in front (histories)        those unsharded, then the parameter's spec
    with at most one element (counters)         replicated
    below a parameter (``w/q``, ``w/scale``,    the same; and where the rank is the parameter's, the
    ``w/lora_a``)                               specs of the dimensions whose sizes agree
    any other below or beside the parameters    no answer; alone: an error for floats (for anything,
                                                below a parameter) in a matrix, or more, of over 32
                                                elements or a vector of 2**20 or more; else replicated
    of any other shape at a parameter's path    an error that names the leaf
    ==========================================  ====================================================

    If no parameter has a leaf in the state, though it holds arrays of floats, that is an error too.

    A parameter that *param_rule* does not answer counts with the default of that rule, so that what
    mirrors a parameter always has its sharding. In ``a & b``, a rule with a choice chooses for each copy
    again, among the dimensions that *a* left free. The params may be part of the tree: a whole train state
    takes this one rule.

    Args:
        param_rule: what the parameters are sharded by: a rule, a PartitionSpec, or a pytree prefix of
            these.
        params: the parameters that the optimizer was initialised with; ``jax.ShapeDtypeStruct`` leaves
            are enough, and only paths, shapes and dtypes are kept.

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
        params = _ParamAnswers(self._known, axis_sizes)
        places = _places(whole, self._known)
        # The rule of a parameter cannot use what an outer rule has already given to a copy of it.
        asked: dict[int, tuple[int, PartitionSpec]] = {}
        for i, spec in zip(indices, tree.occupied, strict=True):
            place = places[i]
            if place and any(specs.entries(spec)) and whole.shapes[i] == self._known.shapes[place.param]:
                asked[i] = place.param, spec
        params.ask_again(asked.values())
        answers = [params.answer(whole, i, place, asked.get(i)) for i, place in enumerate(places)]
        if not any(answer and place for answer, place in zip(answers, places, strict=True)):
            for i, answer in enumerate(answers):
                if answer is None and _is_float(whole, i):
                    answers[i] = _mismatch(whole, i, self._known, places[i])
        return [answers[i] for i in indices]

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Decision | Problem:
        """What belongs to no parameter is replicated; an error if it looks as if it should belong to one."""
        shape = tree.shapes[index]
        if len(shape) < 2 and math.prod(shape) < _MANY:
            return _NO_PARAMETER
        known = self._known
        places = list(_ending(tree.paths[index], known))
        place = places[-1] if places else _parameter_above(tree.paths[index], known)
        # Integers beside the parameters are keys and tables; below one, its quantized values.
        if not _is_float(tree, index) and not (place is not None and place.inside):
            return _NO_PARAMETER
        return _FEW_ELEMENTS if math.prod(shape) <= _FEW else _mismatch(tree, index, known, place)

    @functools.cached_property
    def _known(self) -> _ParamIndex:
        return _ParamIndex(self.sections)


_FEW = 32  # elements: tables of coefficients, as muon has
_MANY = 2**20  # elements of a vector: below that it is a table or scales
_NO_PARAMETER = Decision(REPLICATED, _NAME, 'belongs to no parameter')
_FEW_ELEMENTS = dataclasses.replace(
    _NO_PARAMETER, reason=f'{_NO_PARAMETER.reason}; with more than {_FEW} elements it would be an error'
)
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
        return NamedTree(self.paths, structs, self.shapes, self.treedef, self.at, bare=bare)


def _sections(param_rule: RuleLike, params: Any) -> Iterator[Section]:
    """Pairs rules with parameters; keeps shapes in place of the arrays.

    Raises:
        RuleError: something is not a rule, or not an array.
        StructureError: the rules are not a prefix of the parameters.
    """
    parts = split(param_rule, params, f'the params of {_NAME}', RuleError)
    trees = [NamedTree.of(part.tree, part.path) for part in parts]
    if not any(map(len, trees)):
        raise RuleError(f'{_NAME}: params has no leaves, so that no state can belong to it')
    for part, tree in zip(parts, trees, strict=True):
        for i, leaf in enumerate(tree.leaves):
            if leaf_shape(leaf) is None or has_foreign_dtype(leaf):
                raise RuleError(
                    f'{_NAME}: params holds {tree.describe(i)}, which is not an '
                    'array; give what the optimizer was initialised with'
                )
        dtypes = [getattr(leaf, 'dtype', None) or jax.dtypes.result_type(leaf) for leaf in tree.leaves]
        columns = tuple(tree.paths), tuple(map(tuple, tree.shapes)), tuple(dtypes)
        yield Section(as_rule(part.rule), part.path, tree.treedef, *columns)


class _Place(NamedTuple):
    """Where a leaf is: behind *before*, at the parameter number *param* or, if *inside*, below it."""

    before: str
    param: int
    inside: bool = False


class _ParamIndex:
    """The parameters of a rule, looked up by path."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self.trees = [(section, section.tree()) for section in sections]
        self.rows = [(section, tree, i) for section, tree in self.trees for i in range(len(tree))]
        self.shapes = [tree.shapes[i] for _, tree, i in self.rows]
        self.paths = [tree.path_below(section.at, i) for section, tree, i in self.rows]
        self.index: Mapping[str, int] = {path: i for i, path in enumerate(self.paths)}
        self.lengths = set(map(len, self.paths))

    def is_weak(self, param: int) -> bool:
        """Whether the path identifies little: it is empty or a lone number, as in chains of states."""
        return not self.paths[param] or self.paths[param].isdigit()

    def near(self, path: str) -> str:
        """The parameter that shares most of the last keys of *path*, one perhaps misspelled; or ''."""
        found = self._longest(path)
        if not found:
            above, _, name = path.rpartition('/')
            last = [one for one in self._endings if len(one) > 1 and '/' not in one]  # 'nu' means no 'n'
            found = next((self._longest(f'{above}/{one}') for one in near_names(name, last)), '')
        return found

    def _longest(self, path: str) -> str:
        while path not in self._endings and path:
            path = path.partition('/')[2]
        return self._endings[path] if path else ''

    @functools.cached_property
    def _endings(self) -> Mapping[str, str]:
        endings: dict[str, str] = {}
        for path in self.paths:
            keys = path.split('/')
            for start in range(len(keys)):
                endings.setdefault('/'.join(keys[start:]), path)
        return endings


class _ParamAnswers:
    """The parameters in one resolve, with the answers of their rules."""

    def __init__(self, known: _ParamIndex, axis_sizes: AxisSizes | None) -> None:
        self.known, self._axis_sizes = known, axis_sizes
        each = [answer for part, tree in known.trees for answer in answers_of(part.rule, tree, axis_sizes)]
        self._answers: dict[tuple[int, PartitionSpec | None], Answer] = {
            (param, None): answer for param, answer in enumerate(each)
        }
        self._memo: dict[Any, Decision | None] = {}

    def ask_again(self, wanted: Iterable[tuple[int, PartitionSpec]]) -> None:
        """Asks about some parameters again, each with the spec that an outer rule gave to a copy of it."""
        groups: dict[int, list[tuple[int, PartitionSpec]]] = {}
        for param, occupied in dict.fromkeys(wanted):
            groups.setdefault(id(self.known.rows[param][1]), []).append((param, occupied))
        for group in groups.values():
            section, tree, _ = self.known.rows[group[0][0]]
            part = tree.select([self.known.rows[param][2] for param, _ in group])
            part = part.with_occupied([occupied for _, occupied in group])
            self._answers.update(zip(group, answers_of(section.rule, part, self._axis_sizes), strict=True))

    def answer(
        self, state: NamedTree, index: int, place: _Place | None, asked: tuple[int, PartitionSpec] | None
    ) -> Answer:
        """The answer about a leaf of the state; *asked*: its parameter and what is occupied of its copy."""
        shape = state.shapes[index]
        if place is None:
            return _SMALL if _is_small(shape) else None
        answer = self._of_parameter(asked or (place.param, None))
        if isinstance(answer, Problem):
            detail = f'its parameter {self.known.paths[place.param]!r}: {answer.detail}'
            return dataclasses.replace(answer, leaf=state.describe(index), detail=detail)
        own = self.known.shapes[place.param]
        last = place.before.rpartition('/')[2]
        role = last if last in ('v_row', 'v_col') else ''
        key = (id(answer), own, shape, role, place.inside)
        if key not in self._memo:
            self._memo[key] = _derived(answer, own, shape, role, place.inside)
        derived = self._memo[key]
        if derived is not None or place.inside or self.known.is_weak(place.param):
            return derived
        return Problem(
            'params-mismatch',
            state.describe(index),
            f'the parameter {self.known.paths[place.param]!r} has shape {list(own)}: this is no copy, no '
            'stack of copies, and not some of its dimensions',
            rule=_NAME,
            hint=_HINT,
        )

    def _of_parameter(self, asked: tuple[int, PartitionSpec | None]) -> Decision | Problem:
        answer = self._answers[asked]
        if answer is None:
            section, tree, i = self.known.rows[asked[0]]
            if asked[1] is not None:
                tree, i = tree.select([i]).with_occupied([asked[1]]), 0
            answer = self._answers[asked] = section.rule.fallback(tree, i, self._axis_sizes)
        return answer


def _places(state: NamedTree, params: _ParamIndex) -> list[_Place | None]:
    """The place of every leaf of the state; None for what belongs to no parameter."""
    found = [list(_ending(path, params)) for path in state.paths]
    if any(len(places) > 1 for places in found):
        votes = collections.Counter(place.before for places in found for place in places)

    def choose(i: int, places: list[_Place]) -> _Place | None:
        if len(places) > 1:
            return max(
                places,
                key=lambda place: (
                    votes[place.before],
                    params.shapes[place.param] == state.shapes[i],
                    len(params.paths[place.param]),
                ),
            )
        return places[0] if places else _parameter_above(state.paths[i], params)

    return [choose(i, places) for i, places in enumerate(found)]


def _ending(path: str, params: _ParamIndex) -> Iterator[_Place]:
    """The parameters whose path *path* ends with, on whole keys; the shortest first."""
    index, lengths = params.index, params.lengths
    if '' in index:
        yield _Place(path, index[''])
    end = len(path)
    start, longest = end + 1, max(lengths)
    while start > 0 and end - start < longest:
        start = path.rfind('/', 0, start - 1) + 1
        # Asking for the length first saves most of the slices.
        if end - start in lengths and end > start:
            param = index.get(path[start:])
            if param is not None:
                yield _Place(path[: max(start - 1, 0)], param)


def _parameter_above(path: str, params: _ParamIndex) -> _Place | None:
    """The parameter that a leaf is below: the deepest one, of those the longest."""
    end = path.rfind('/')
    while end > 0:
        places = [p for p in _ending(path[:end], params) if not params.is_weak(p.param)]
        if places:
            return places[-1]._replace(inside=True)
        end = path.rfind('/', 0, end)
    return None


def _derived(
    answer: Decision, own: tuple[int, ...], shape: tuple[int, ...], role: str, inside: bool
) -> Decision | None:
    """The answer for a leaf of *shape*, given its parameter's; None where the shapes do not fit."""
    origin = f'{_NAME} -> {answer.origin}'
    if shape == own:
        reason = ': '.join(part for part in ('as its parameter', answer.reason) if part)
        return dataclasses.replace(answer, origin=origin, reason=reason)
    if _is_small(shape):
        return _SMALL
    answer = dataclasses.replace(answer, passed=tuple(f'its parameter: {text}' for text in answer.passed))
    choices = kept_dimensions(own, shape, role, inside)
    if not choices:
        return None
    if answer.spec is None:
        return dataclasses.replace(answer, origin=origin, reason='left to the compiler as its parameter')
    entries = (*specs.entries(answer.spec), *[None] * len(own))
    # Where several dimensions may be the stack of layers, all of them count as it.
    stack = tuple(sorted({i for dims in choices for i, dim in enumerate(dims) if dim in answer.stack}))
    distinct = dict.fromkeys(
        specs.replaced(answer.spec, [None if dim is None else entries[dim] for dim in dims])
        for dims in choices
    )
    if len(distinct) > 1:  # any of them would be a guess
        several = ' or '.join(map(_dimensions, choices))
        return dataclasses.replace(
            answer,
            spec=REPLICATED,
            origin=origin,
            stack=stack,
            reason=f'keeps {several} of its parameter: ambiguous',
        )
    kept = 'a stack of copies' if len(shape) > len(own) else f'keeps {_dimensions(choices[0])}'
    reason = f'{kept} of its parameter'
    return dataclasses.replace(answer, spec=next(iter(distinct)), origin=origin, reason=reason, stack=stack)


def _dimensions(dims: Dimensions) -> str:
    kept = [str(dim) for dim in dims if dim is not None]
    return f'dimension{"" if len(kept) == 1 else "s"} {" and ".join(kept)}'


def _is_small(shape: tuple[int, ...]) -> bool:
    return math.prod(shape) <= 1  # counters; placeholders, also those of size zero


def _is_float(state: NamedTree, index: int) -> bool:
    """Whether a leaf holds floats. Integers may be keys and counters, which belong to no parameter."""
    dtype = getattr(state.leaves[index], 'dtype', None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact)


def _mismatch(state: NamedTree, index: int, params: _ParamIndex, place: _Place | None) -> Problem:
    """The problem of a leaf that should belong to a parameter and does not."""
    if place is None:
        near = params.near(state.paths[index])
        detail = 'its path ends with no parameter path' + (f'; there is {near!r}' if near else '')
    else:
        name, shape = params.paths[place.param] or 'itself', list(params.shapes[place.param])
        detail = f'it has no shape that belongs to the parameter {name!r}: {shape}'
    return Problem('params-mismatch', state.describe(index), detail, rule=_NAME, hint=_HINT)


Dimensions = tuple[int | None, ...]
"""For each dimension of a statistic the parameter's dimension that it is; None for one of its own."""


def kept_dimensions(
    parameter: tuple[int, ...], shape: tuple[int, ...], name: str = '', loose: bool = False
) -> list[Dimensions]:
    """All ways to read the shape of a statistic as dimensions of its parameter; empty if there is none.

    Args:
        parameter: the parameter's shape.
        shape: the statistic's shape.
        name: ``'v_row'`` or ``'v_col'`` for the factors of Adafactor as optax calls them: these leave out
            the largest and the second largest dimension.
        loose: at the same rank some sizes may differ, as those of a low-rank factor or of block scales.

    Example:
        >>> kept_dimensions((4, 6), (6,))
        [(1,)]
        >>> kept_dimensions((4, 4), (4,))
        [(0,), (1,)]
        >>> kept_dimensions((4, 4), (4,), 'v_row')
        [(0,)]
        >>> kept_dimensions((4, 6), (1, 6)), kept_dimensions((4, 6), (3, 4, 6))
        ([(None, 1)], [(None, 0, 1)])
        >>> kept_dimensions((4, 6), (4, 2)), kept_dimensions((4, 6), (4, 2), loose=True)
        ([], [(0, None)])
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
    found: list[Dimensions] = []
    for dims in itertools.combinations(range(len(parameter)), len(shape)):
        pairs = list(zip(shape, dims, strict=True))
        if all(size in (1, parameter[dim]) for size, dim in pairs):
            found.append(tuple(dim if size == parameter[dim] else None for size, dim in pairs))
    if not found and loose and extra == 0:
        pairs = list(zip(shape, range(len(shape)), strict=True))
        if any(size == parameter[dim] > 1 for size, dim in pairs):
            found.append(tuple(dim if size == parameter[dim] else None for size, dim in pairs))
    return found
