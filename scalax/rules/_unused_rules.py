"""Unused rules: regexes that decide about no leaf, and FSDP rules that replicate everything.

Reports list the regexes. Warnings, when a function is compiled or a tree is placed, list both.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._core.pytree import partition_specs
from scalax.errors import UnshardedWarning, near_names, plural, warn
from scalax.rules._answer import ONE_ELEMENT, REPLICATED, Clause, Decision
from scalax.rules._fsdp import FSDPShardingRule
from scalax.rules._logical_axis import LogicalAxisShardingRule
from scalax.rules._optimizer_state import OptimizerStateShardingRule
from scalax.rules._resolve import Resolution
from scalax.rules._rule import Rule, ShardingRule
from scalax.rules._tree_path import TreePathShardingRule


class _Array(NamedTuple):
    """A leaf of more than one element.

    Attributes:
        size: the number of elements.
        rank: the number of dimensions.
        rule_path: the path that the rules saw.
        decision: the decision about it.
        is_replicated: whether it is replicated; False if the compiler decides.
        describe: returns its description in messages.
    """

    size: int
    rank: int
    rule_path: str
    decision: Decision
    is_replicated: bool
    describe: Callable[[], str]


def warn_unsharded(function: str, resolutions: Sequence[Resolution], mesh: Mapping[str, int]) -> None:
    """Warns about FSDP rules that shard nothing in a call, and about misspelt regexes.

    All trees of a call are considered together: parameters, optimizer state, outputs. There are no warnings
    on one device, or about arrays that are replicated by a regex for them or by the entire rule.

    Args:
        function: the name of the called function, for the message.
        resolutions: the resolutions of the trees of one call.
        mesh: mesh axis name -> size.
    """
    rules = {id(rule): rule for resolution in resolutions for rule in resolution.rules}.values()
    if math.prod(mesh.values()) == 1 or not any(isinstance(rule, ShardingRule) for rule in rules):
        return
    arrays_by_rule = _arrays_by_rule(resolutions)
    for rule, arrays in arrays_by_rule.values():
        if isinstance(rule, FSDPShardingRule) and (message := _fsdp_warning(rule, arrays, mesh)):
            warn(f'{function}: {message}', UnshardedWarning)
    paths = [path for resolution in resolutions for path in resolution.rule_paths]
    decisions = [decision for resolution in resolutions for decision in resolution.decisions]
    lines = []
    for clause in find_unused_clauses(rules, paths, decisions)[0]:
        rule_and_arrays = arrays_by_rule.get(_key(clause[0]))
        if rule_and_arrays and (line := _misspelling(clause, rule_and_arrays[1], paths)):
            lines.append(line)
    if lines:
        warn(
            f'{function}: regexes that match no path:\n' + '\n'.join(lines) + '\n'
            'What to do: correct or remove them; helper.explain(tree, rules) shows which rule decides about '
            'each leaf. To replicate such arrays on purpose, give them a regex of their own with '
            'PartitionSpec().',
            UnshardedWarning,
        )


def shardings_with_warnings(resolution: Resolution, mesh: Mesh | AbstractMesh) -> list[NamedSharding | None]:
    """Returns the shardings of a tree to place, after `warn_unsharded`."""
    if resolution.any_replicated:
        warn_unsharded('shard', [resolution], mesh.shape)
    return resolution.shardings


def _arrays_by_rule(resolutions: Iterable[Resolution]) -> dict[Any, tuple[ShardingRule, list[_Array]]]:
    """Returns every rule, nested ones included, with the arrays of the trees that it applies to."""
    result: dict[Any, tuple[ShardingRule, list[_Array]]] = {}
    for resolution in resolutions:
        tree, outer_rules = resolution.tree, dict[int, tuple[Rule, list[_Array]]]()
        leaves = zip(
            resolution.rules, resolution.rule_paths, resolution.decisions, resolution.shardings, strict=True
        )
        for index, (rule, path, decision, sharding) in enumerate(leaves):
            size, rank = math.prod(tree.shapes[index]), len(tree.shapes[index])
            if size > 1:
                is_replicated = sharding is not None and sharding.spec == REPLICATED
                describe = functools.partial(tree.describe, index)
                array = _Array(size, rank, path, decision, is_replicated, describe)
                outer_rules.setdefault(id(rule), (rule, []))[1].append(array)
        for rule, arrays in outer_rules.values():
            for key, inner in {_key(inner): inner for inner, _ in _all_rules([rule])}.items():
                result.setdefault(key, (inner, []))[1].extend(arrays)
    return result


def _fsdp_warning(rule: FSDPShardingRule, arrays: Sequence[_Array], mesh: Mapping[str, int]) -> str:
    """Returns the warning if an FSDP rule replicates all of its matrices, and '' otherwise."""
    axes = partition_specs.entry_axes(rule.fsdp_axis_name)
    devices = math.prod(mesh[axis] for axis in axes)
    if devices == 1 or not all(array.is_replicated for array in arrays):
        return ''
    decided = [array for array in arrays if (rule, 0) in array.decision.clauses]
    # Vectors, such as norms and factored optimizer statistics, are rightly replicated.
    matrices = [array for array in decided if array.rank > 1]
    if not matrices:
        return ''
    largest = max(matrices, key=lambda array: array.size)
    if largest.size < rule.min_fsdp_size:
        reason = f'{largest.size:,} elements, and min_fsdp_size is {rule.min_fsdp_size:,}'
        remedy = f'pass min_fsdp_size={largest.size}, or less to shard more of them'
    else:
        reason = f'no free dimension that is divisible by {devices}'
        remedy = 'choose sizes that are divisible, or a mesh axis of another size'
    count = len({(array.rule_path, array.size) for array in decided})  # outputs repeat arguments
    return (
        f'{rule!r} shards nothing: {plural(count, "array")} replicated over the '
        f'{devices} devices along {", ".join(axes)}. The largest, {largest.describe()}, has {reason}.\n'
        f'What to do: {remedy}. To replicate them on purpose, give PartitionSpec() in place of the rule.'
    )


def _misspelling(clause: Clause, arrays: Sequence[_Array], paths: Sequence[str]) -> str:
    """Returns the warning about a regex that matches no path, or '' if it may be meant for other trees.

    A regex is probably misspelt if an array that only a catch-all regex matches has a similar word in its
    path.
    """
    rule, index = clause
    if not isinstance(rule, TreePathShardingRule) or not _shards(rule.rules[index][1]):
        return ''
    unnamed = [array for array in arrays if not any(map(_is_specific, array.decision.clauses))]
    arrays_by_word = {word: array for array in unnamed for word in re.findall(r'\w+', array.rule_path)}
    text = clause_text(clause)
    for word in re.findall(r'[^\W\d]\w\w+', re.sub(r'\\.', ' ', text)):  # without escapes such as \d
        near = near_names(word, arrays_by_word)
        if near and not any(word in path for path in paths):
            suggestion = f'{near[0]!r}, as in {arrays_by_word[near[0]].describe()}'
            return f'  {text!r}: {word!r} is in no path, did you mean {suggestion}?'
    return ''


def _shards(rule: Rule) -> bool:
    """Whether a rule may shard anything."""
    spec = rule.spec if isinstance(rule, NamedSharding) else rule
    return any(partition_specs.entries(spec)) if isinstance(spec, PartitionSpec) else spec is not None


def _is_specific(clause: Clause) -> bool:
    """Whether a regex is for certain paths, unlike a catch-all regex such as '.*'."""
    patterns = _patterns(clause[0])
    return bool(patterns) and not re.search(patterns[clause[1]], '')


def clause_text(clause: Clause) -> str:
    """Returns the regex of a clause."""
    pattern = _patterns(clause[0])[clause[1]]
    return str(getattr(pattern, 'pattern', pattern))


def _patterns(rule: ShardingRule) -> list[Any]:
    """Returns the regexes of a rule; empty for rules of other types."""
    if isinstance(rule, LogicalAxisShardingRule):
        return [pattern for pattern, _ in rule.axis_names]
    return [pattern for pattern, _ in rule.rules] if isinstance(rule, TreePathShardingRule) else []


def find_unused_clauses(
    rules: Iterable[Rule], paths: Sequence[str], decisions: Sequence[Decision]
) -> tuple[list[Clause], list[Clause]]:
    """Returns the regexes that match no leaf, and the regexes that are always shadowed by earlier ones.

    Args:
        rules: all rules that were applied.
        paths: the leaf paths that the rules saw.
        decisions: the decision about each leaf.
    """
    from scalax.rules import catalogue  # imported late, because few programs use its tables

    distinct_decisions = {id(decision): decision for decision in decisions}.values()
    used = {(_key(rule), index) for decision in distinct_decisions for rule, index in decision.clauses}
    unused: list[Clause] = []
    shadowed: list[Clause] = []
    uses_by_rule: dict[Any, tuple[ShardingRule, list[list[str] | None]]] = {}
    for rule, param_paths in _all_rules(rules):
        uses_by_rule.setdefault(_key(rule), (rule, []))[1].append(param_paths)
    for key, (rule, uses) in uses_by_rule.items():
        patterns = _patterns(rule)
        params = [path for use in uses for path in use or ()]
        is_used_directly = None in uses
        leaves = [
            (path, decision)
            for path, decision in zip(paths, decisions, strict=True)
            # A rule used for both params and optimizer state does not see the paths of the state.
            if is_used_directly and not (params and OptimizerStateShardingRule.__name__ in decision.origin)
        ]
        for index in range(len(patterns)):
            # The tables of the catalogue are for many models, so most of their regexes are unused in each.
            if (key, index) in used or clause_text((rule, index)) in catalogue.REGEXES:
                continue
            status = _status((rule, index), patterns, leaves, params)
            if status == 'unused':
                unused.append((rule, index))
            elif status == 'shadowed':
                shadowed.append((rule, index))
    return unused, shadowed


def _status(
    clause: Clause, patterns: Sequence[Any], leaves: Sequence[tuple[str, Decision]], params: Sequence[str]
) -> Literal['used', 'unused', 'shadowed']:
    """Returns whether a clause that decided about no leaf is unused or shadowed.

    Args:
        clause: the clause.
        patterns: the regexes of its rule.
        leaves: the paths and decisions of the leaves that the rule saw directly.
        params: the paths of the parameters that the rule decides about in optimizer states. The paths of a
            state do not show which parameter a leaf belongs to, and the state may lack parameters.
    """
    rule, index = clause
    matching_params = [path for path in params if re.search(patterns[index], path)]
    if any(not any(re.search(pattern, path) for pattern in patterns[:index]) for path in matching_params):
        return 'used'
    matching_decisions = [decision for path, decision in leaves if re.search(patterns[index], path)]
    if not matching_decisions and not matching_params:
        return 'unused'
    is_nested = isinstance(rule, TreePathShardingRule) and isinstance(rule.rules[index][1], ShardingRule)
    # Arrays of one element do not count, because no rule decides about them. If the clause has a rule, only
    # an earlier clause shadows it: otherwise that rule may have had no answer.
    shadowing = [
        decision
        for decision in matching_decisions
        if decision.reason != ONE_ELEMENT
        and (not is_nested or any(owner == rule and i < index for owner, i in decision.clauses))
    ]
    return 'shadowed' if shadowing or matching_params else 'used'


def _key(rule: ShardingRule) -> Any:
    """Returns a dict key for a rule: its id if it has no hash, because it contains a user's rule."""
    try:
        hash(rule)
    except TypeError:
        return id(rule)
    return rule


def _all_rules(
    rules: Iterable[Rule], params: list[str] | None = None
) -> Iterator[tuple[ShardingRule, list[str] | None]]:
    """Yields every rule, nested ones included, with the paths of the parameters that it decides about.

    The paths are None for a rule outside an `OptimizerStateShardingRule`.
    """
    for rule in rules:
        if isinstance(rule, OptimizerStateShardingRule):
            for group in rule.param_groups:
                # No rule decides about arrays of one element.
                leaves = zip(group.paths, group.shapes, strict=True)
                paths = [path for path, shape in leaves if math.prod(shape) != 1]
                yield from _all_rules([group.rule], paths)
        elif isinstance(rule, ShardingRule):
            yield rule, params
            yield from _all_rules(rule.parts, params)
