"""The rule for optimizer states, which gives every leaf the spec of the parameter that it belongs to.

Optimizers map over the parameters, so the path of a statistic ends with its parameter's path
(``0/mu/layers/0/w``); its shape shows which dimensions of the parameter it has. The rule looks at nothing
else, and depends on no optimizer library.
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

    A leaf belongs to the parameter whose entire path is the end of the leaf's path. If several match, as
    ``w`` and ``mu/w`` do for the leaf ``0/mu/w``, the rule takes the parameter with the most other
    parameters beside it; among equals the one of the leaf's shape, then the longest. The spec depends on the
    shape of the leaf:

    ==========================================  ====================================================
    leaf                                        spec
    ==========================================  ====================================================
    the parameter's shape (moments, averages,   the parameter's spec
     the parameters themselves)
    dimensions dropped or of size 1             the entries of the remaining dimensions. ``v_row``
     (factored statistics)                      and ``v_col`` drop the largest and the second
                                                largest, as in optax. If several dimensions have
                                                that size and their entries differ: replicated
    extra leading dimensions (histories)        these unsharded, then the parameter's spec
    at most one element (counters)              replicated
    beside the parameters, or below one         no answer. If no rule follows: an error for matrices
     (``w/q``, ``w/scale``)                     (and higher ranks) of over 32 floats, and for any
                                                array of 2**20 elements or more; else replicated
    any other shape at a parameter's path       an error that names the leaf
    ==========================================  ====================================================

    If *param_rule* has no answer for a parameter, the default of that rule applies, so that a copy of a
    parameter always has its sharding. In ``a & b``, a rule with a choice chooses for each copy again, among
    the dimensions that *a* left free. The tree may contain the params, so this one rule can shard an entire
    train state.

    Args:
        param_rule: the sharding of the parameters: a rule, a PartitionSpec, or a pytree prefix of these.
        params: the parameters that the optimizer was initialised with; ``jax.ShapeDtypeStruct`` leaves
            are enough. The rule stores only paths, shapes and dtypes.

    Raises:
        RuleError: `param_rule` is not a rule, or `params` has no leaves, or leaves that are not arrays.
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

    param_groups: tuple[ParamGroup, ...]

    def __init__(self, param_rule: RuleLike, params: Any) -> None:
        object.__setattr__(self, 'param_groups', tuple(_param_groups(param_rule, params)))

    def __repr__(self) -> str:
        # The shapes, of which a large model has thousands, are left out; equality compares them.
        rules = [group.rule for group in self.param_groups]
        shapes = [shape for group in self.param_groups for shape in group.shapes]
        text = repr(rules[0]) if len(rules) == 1 else f'<{len(rules)} rules>'
        count = plural(len(shapes), 'parameter')
        return f'{type(self).__name__}({text}, <{count}, {sum(map(math.prod, shapes))} elements>)'

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        return tuple(group.rule for group in self.param_groups)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        # The parameter of a leaf depends on the leaves beside it, so the root of the state is needed.
        state, indices = tree.root()
        occupied = dict(zip(indices, tree.occupied, strict=True))
        matches = _match_params(state, self._params)
        # The rule of a parameter cannot use the dimensions and axes that an outer rule occupies in a copy.
        queries: dict[int, _Query] = {}
        for i, match in enumerate(matches):
            if match is not None:
                is_copy = state.shapes[i] == self._params.shapes[match.param]
                queries[i] = match.param, occupied.get(i, FREE) if is_copy else FREE
        results = self._params.decide(dict.fromkeys(queries.values()), axis_sizes)
        param_results = {i: results[query] for i, query in queries.items()}
        derive = functools.cache(_derive)
        return [self._answer(state, i, matches[i], param_results.get(i), derive) for i in indices]

    def _answer(
        self,
        state: NamedTree,
        index: int,
        match: _ParamMatch | None,
        param_result: Decision | Problem | None,
        derive: Callable[..., Decision | None],
    ) -> Answer:
        """Returns the answer about a leaf of the state, given its parameter and the result for that."""
        shape = state.shapes[index]
        if match is None or param_result is None:
            return _SMALL if _is_small(shape) else self._no_answer(state, index, None)
        name, param_shape = self._params.paths[match.param], self._params.shapes[match.param]
        if isinstance(param_result, Problem):
            detail = f'its parameter {name!r}: {param_result.detail}'
            return dataclasses.replace(param_result, leaf=state.describe(index), detail=detail)
        decision = derive(param_result, param_shape, shape, match.prefix.rpartition('/')[2])
        if decision is not None:
            return decision
        if not name or name.isdigit():  # a weak match, because chained states have such keys too
            return self._no_answer(state, index, match)
        return self._mismatch(state, index, match)

    def _no_answer(self, state: NamedTree, index: int, match: _ParamMatch | None) -> NoAnswer:
        """Returns a NoAnswer whose default replicates the leaf, unless the leaf looks like a parameter."""
        shape, leaf = state.shapes[index], state.leaves[index]
        elements = math.prod(shape)
        is_float = hasattr(leaf, 'dtype') and jax.dtypes.issubdtype(leaf.dtype, np.inexact)
        if elements >= _LARGE_SIZE or (is_float and len(shape) > 1 and elements > _MAX_TABLE_SIZE):
            return NoAnswer(functools.partial(self._mismatch, state, index, match))
        return _NO_PARAMETER

    def _mismatch(self, state: NamedTree, index: int, match: _ParamMatch | None) -> Problem:
        """Returns the problem of a leaf that should belong to a parameter and does not."""
        detail = 'its path does not end with the path of a parameter'
        if match is not None:
            name, param_shape = self._params.paths[match.param], list(self._params.shapes[match.param])
            detail = (
                f'the parameter {name or "itself"!r} has shape {param_shape}; this is neither a copy, nor a '
                'stack of copies, nor a subset of its dimensions'
            )
        return Problem('params-mismatch', state.describe(index), detail, rule=_NAME, hint=_HINT)

    @functools.cached_property
    def _params(self) -> _Params:
        return _Params(self.param_groups)


_MAX_TABLE_SIZE = 32  # elements of a table of coefficients, such as muon's
_LARGE_SIZE = 2**20  # elements; smaller leaves may be tables, keys or scales
_NO_PARAMETER = NoAnswer(Decision(REPLICATED, _NAME, 'does not belong to a parameter'))
_SMALL = Decision(REPLICATED, _NAME, 'at most one element')


# --- The parameters ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """The paths, shapes and dtypes of the parameters that one rule decides about."""

    rule: ShardingRule
    prefix: str | None
    treedef: Any
    # Not hashed, because hashing the paths and shapes of a large model would slow down every look-up.
    paths: tuple[str, ...] = dataclasses.field(hash=False)
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(hash=False)
    dtypes: tuple[Any, ...] = dataclasses.field(hash=False)

    def tree(self) -> NamedTree:
        """Returns the parameters as the rule sees them."""
        structs = list(map(jax.ShapeDtypeStruct, self.shapes, self.dtypes))
        bare = jax.tree_util.treedef_is_leaf(self.treedef)
        free = [FREE] * len(structs)
        return NamedTree(self.paths, structs, self.shapes, self.treedef, free, self.prefix, is_bare_leaf=bare)


def _param_groups(param_rule: RuleLike, params: Any) -> Iterator[ParamGroup]:
    """Groups the parameters by rule.

    Raises:
        RuleError: something is not a rule, or not an array.
        StructureError: the rules are not a prefix of the parameters.
    """
    subtrees = match_subtrees(param_rule, params, f'the params of {_NAME}', RuleError)
    trees = [NamedTree.of(subtree.tree, subtree.path) for subtree in subtrees]
    if not any(map(len, trees)):
        raise RuleError(f'{_NAME}: params has no leaves, so that no state can belong to it')
    for subtree, tree in zip(subtrees, trees, strict=True):
        for i, leaf in enumerate(tree.leaves):
            if leaf_shape(leaf) is None or has_foreign_dtype(leaf):
                raise RuleError(
                    f'{_NAME}: params contains {tree.describe(i)}, which is not an array; pass the '
                    f'parameters that the optimizer was initialised with.{module_advice([leaf])}'
                )
        dtypes = [getattr(leaf, 'dtype', None) or jax.dtypes.result_type(leaf) for leaf in tree.leaves]
        columns = tuple(tree.paths), tuple(map(tuple, tree.shapes)), tuple(dtypes)
        yield ParamGroup(as_rule(subtree.rule), subtree.path, tree.treedef, *columns)


_KEY_START = re.compile('^|/')

_Query = tuple[int, PartitionSpec]
"""The index of a parameter, and what an outer rule occupies in a copy of it."""


class _ParamMatch(NamedTuple):
    """The parameter that a leaf of the state belongs to.

    Attributes:
        prefix: the path of the leaf without the path of the parameter.
        param: the index of the parameter.
    """

    prefix: str
    param: int


class _Params:
    """The parameters of a rule, looked up by path."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        trees = [(group, group.tree()) for group in groups]
        self._leaves = [(group, tree, i) for group, tree in trees for i in range(len(tree))]
        self.shapes = [tree.shapes[i] for _, tree, i in self._leaves]
        self.paths = [tree.path_below(group.prefix, i) for group, tree, i in self._leaves]
        self._index: Mapping[str, int] = {path: i for i, path in enumerate(self.paths)}

    def decide(
        self, queries: Iterable[_Query], axis_sizes: AxisSizes | None
    ) -> dict[_Query, Decision | Problem]:
        """Returns the decisions about parameters, each with its query."""
        queries_by_tree: dict[int, list[_Query]] = {}
        for query in queries:
            queries_by_tree.setdefault(id(self._leaves[query[0]][1]), []).append(query)
        results: dict[_Query, Decision | Problem] = {}
        for tree_queries in queries_by_tree.values():
            group, tree, _ = self._leaves[tree_queries[0][0]]
            selected = tree.select([self._leaves[param][2] for param, _ in tree_queries])
            selected = selected.with_occupied([occupied for _, occupied in tree_queries])
            results.update(zip(tree_queries, decide(group.rule, selected, axis_sizes), strict=True))
        return results

    def matches(self, path: str) -> Iterator[_ParamMatch]:
        """Yields the parameters whose path is the end of *path*, those with the shortest path first."""
        if '' in self._index:
            yield _ParamMatch(path, self._index[''])
        for start in reversed([key.end() for key in _KEY_START.finditer(path)]):
            if path[start:] and path[start:] in self._index:
                yield _ParamMatch(path[: max(start - 1, 0)], self._index[path[start:]])


def _match_params(state: NamedTree, params: _Params) -> list[_ParamMatch | None]:
    """Returns the parameter of every leaf of the state; None for leaves that belong to no parameter."""
    candidates = [list(params.matches(path)) for path in state.paths]
    siblings = collections.Counter(match.prefix for matches in candidates for match in matches)

    def rank(match: _ParamMatch, shape: tuple[int, ...]) -> tuple[int, bool, int]:
        return siblings[match.prefix], params.shapes[match.param] == shape, len(params.paths[match.param])

    return [
        max(matches, key=lambda match: rank(match, shape), default=None)
        for matches, shape in zip(candidates, state.shapes, strict=True)
    ]


def _derive(
    decision: Decision, param_shape: tuple[int, ...], shape: tuple[int, ...], name: str
) -> Decision | None:
    """Derives the decision about a leaf from its parameter's; returns None if the shapes do not fit.

    Args:
        decision: the decision about the parameter.
        param_shape: the shape of the parameter.
        shape: the shape of the leaf.
        name: the key before the parameter's path, as for `parameter_dims`.
    """
    origin = f'{_NAME} -> {decision.origin}'
    if shape == param_shape:
        reason = ': '.join(part for part in ('as its parameter', decision.reason) if part)
        return dataclasses.replace(decision, origin=origin, reason=reason)
    if _is_small(shape):
        return _SMALL
    choices = parameter_dims(param_shape, shape, name)
    if not choices:
        return None
    if decision.spec is None:
        return dataclasses.replace(decision, origin=origin, reason='left to the compiler as its parameter')
    entries = (*partition_specs.entries(decision.spec), *[None] * len(param_shape))
    # If it is ambiguous which dimension stacks the layers, none of the candidates may be sharded.
    stack_dims = {i for dims in choices for i, dim in enumerate(dims) if dim in decision.stack_dims}
    distinct_specs = dict.fromkeys(
        partition_specs.with_entries(decision.spec, [None if dim is None else entries[dim] for dim in dims])
        for dims in choices
    )
    if len(distinct_specs) > 1:  # any of them would be a guess
        dims_text = ' or '.join(map(_dims_text, choices))
        spec, reason = REPLICATED, f'keeps {dims_text} of its parameter: ambiguous'
    else:
        (spec,) = distinct_specs
        is_stack = len(shape) > len(param_shape)
        reason = f'{"a stack of copies" if is_stack else f"keeps {_dims_text(choices[0])}"} of its parameter'
    return dataclasses.replace(
        decision, spec=spec, origin=origin, reason=reason, stack_dims=tuple(sorted(stack_dims))
    )


def _dims_text(dims: Dimensions) -> str:
    numbers = [str(dim) for dim in dims if dim is not None]
    return f'dimension{"" if len(numbers) == 1 else "s"} {" and ".join(numbers)}'


def _is_small(shape: tuple[int, ...]) -> bool:
    return math.prod(shape) <= 1  # counters, and placeholders, which may have size zero


Dimensions = tuple[int | None, ...]
"""For each dimension of a statistic, the matching dimension of its parameter, or None without one."""


def parameter_dims(parameter: tuple[int, ...], shape: tuple[int, ...], name: str = '') -> list[Dimensions]:
    """Returns all ways to match the dimensions of a statistic with those of its parameter.

    Args:
        parameter: the parameter's shape.
        shape: the statistic's shape.
        name: ``'v_row'`` or ``'v_col'`` for Adafactor's factors, under optax's names: these drop the
            largest and the second largest dimension.

    Example:
        >>> parameter_dims((4, 6), (6,))
        [(1,)]
        >>> parameter_dims((4, 4), (4,))
        [(0,), (1,)]
        >>> parameter_dims((4, 4), (4,), 'v_row')
        [(0,)]
        >>> parameter_dims((4, 6), (1, 6)), parameter_dims((4, 6), (3, 4, 6))
        ([(None, 1)], [(None, 0, 1)])
        >>> parameter_dims((4, 6), (4, 2))
        []
    """
    extra = len(shape) - len(parameter)
    if extra > 0:
        return [(*[None] * extra, *range(len(parameter)))] if shape[extra:] == parameter else []
    if name in ('v_row', 'v_col') and extra == -1 and len(parameter) > 1:
        # Sorts as optax's _factored_dims does, because numpy determines the order of equal sizes.
        second, largest = map(int, np.argsort(parameter)[-2:])
        dropped = largest if name == 'v_row' else second
        dims = tuple(dim for dim in range(len(parameter)) if dim != dropped)
        if shape == tuple(parameter[dim] for dim in dims):
            return [dims]
    return [
        tuple(dim if size == parameter[dim] else None for size, dim in zip(shape, dims, strict=True))
        for dims in itertools.combinations(range(len(parameter)), len(shape))
        if all(size in (1, parameter[dim]) for size, dim in zip(shape, dims, strict=True))
    ]
