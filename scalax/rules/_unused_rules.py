"""Idle rules: regexes that decide about no leaf, and rules for sharding that replicate everything.

Reports list the first. Warnings list both, where a function is compiled and where a tree is placed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
        size: the number of its elements.
        rank: the number of its dimensions.
        rule_path: its path as the rules saw it.
        decision: what was decided.
        is_whole: whether each device holds all of it; not where the compiler decides.
        text: makes what messages call it.
    """

    size: int
    rank: int
    rule_path: str
    decision: Decision
    is_whole: bool
    text: Callable[[], str]


def warn_unsharded(what: str, resolutions: Sequence[Resolution], mesh: Mapping[str, int]) -> None:
    """Warns about rules that shard nothing of a call though they should, and about misspelt regexes.

    All trees of a call count together: parameters, the state of an optimizer, outputs. Nobody is warned on
    one device, nor about arrays that a regex of theirs, or the entire rule, replicates.

    Args:
        what: what was called, for the message.
        resolutions: what rules made of the trees of one call.
        mesh: mesh axis name -> size.
    """
    rules = {id(rule): rule for each in resolutions for rule in each.rules}.values()
    if math.prod(mesh.values()) == 1 or not any(isinstance(rule, ShardingRule) for rule in rules):
        return
    uses = _uses(resolutions)
    for rule, arrays in uses.values():
        if isinstance(rule, FSDPShardingRule) and (message := _all_replicated(rule, arrays, mesh)):
            warn(f'{what}: {message}', UnshardedWarning)
    seen = [path for each in resolutions for path in each.rule_paths]
    unused, _ = find_unused_clauses(rules, seen, [one for each in resolutions for one in each.decisions])
    named = [(clause, uses.get(_key(clause[0]))) for clause in unused]
    lines = [line for clause, use in named if use and (line := _misspelt(clause, use[1], seen))]
    if lines:
        warn(
            f'{what}: regexes that match no path:\n' + '\n'.join(lines) + '\n'
            'What to do: correct or remove them; helper.explain(tree, rules) shows what decides about each '
            'leaf. To replicate such arrays on purpose, give them a regex of their own with PartitionSpec().',
            UnshardedWarning,
        )


def shardings_with_warnings(found: Resolution, mesh: Mesh | AbstractMesh) -> list[NamedSharding | None]:
    """The shardings of a tree that is placed, after `warn_unsharded`."""
    if found.any_replicated:
        warn_unsharded('shard', [found], mesh.shape)
    return found.shardings


def _uses(resolutions: Iterable[Resolution]) -> dict[Any, tuple[ShardingRule, list[_Array]]]:
    """Every rule, also inside of others, with the arrays of the trees that it is for."""
    uses: dict[Any, tuple[ShardingRule, list[_Array]]] = {}
    for found in resolutions:
        tree, by_rule = found.tree, dict[int, tuple[Rule, list[_Array]]]()
        columns = zip(found.rules, found.rule_paths, found.decisions, found.shardings, strict=True)
        for index, (rule, seen, decision, sharding) in enumerate(columns):
            size, rank = math.prod(tree.shapes[index]), len(tree.shapes[index])
            if size > 1:
                is_whole = sharding is not None and sharding.spec == REPLICATED
                array = _Array(size, rank, seen, decision, is_whole, functools.partial(tree.describe, index))
                by_rule.setdefault(id(rule), (rule, []))[1].append(array)
        for rule, arrays in by_rule.values():
            for key, inner in {_key(inner): inner for inner, _ in _nested([rule])}.items():
                uses.setdefault(key, (inner, []))[1].extend(arrays)
    return uses


def _all_replicated(rule: FSDPShardingRule, arrays: Sequence[_Array], mesh: Mapping[str, int]) -> str:
    """The warning about a rule for large arrays that replicates all of its arrays; '' if that is right."""
    axes = partition_specs.entry_axes(rule.fsdp_axis_name)
    devices = math.prod(mesh[axis] for axis in axes)
    # Vectors are rightly replicated: the factored statistics of an optimizer, norms.
    if devices == 1 or not all(array.is_whole for array in arrays):
        return ''
    asked = [array for array in arrays if (rule, 0) in array.decision.clauses]
    matrices = [array for array in asked if array.rank > 1]
    if not matrices:
        return ''
    largest = max(matrices, key=lambda array: array.size)
    if largest.size < rule.min_fsdp_size:
        why = f'{largest.size:,} elements, and min_fsdp_size is {rule.min_fsdp_size:,}'
        cure = f'pass min_fsdp_size={largest.size}, or less to shard more of them'
    else:
        why = f'no dimension that is free and divides by {devices}'
        cure = 'choose sizes that divide, or a mesh axis of another size'
    count = len({(array.rule_path, array.size) for array in asked})  # arguments come back as outputs
    return (
        f'{rule!r} shards nothing: {plural(count, "array")} replicated over the '
        f'{devices} devices along {", ".join(axes)}. The largest, {largest.text()}, has {why}.\n'
        f'What to do: {cure}. To replicate them on purpose, give PartitionSpec() in place of the rule.'
    )


def _misspelt(clause: Clause, arrays: Sequence[_Array], seen: Sequence[str]) -> str:
    """The warning about a regex that matches no path; '' where it may be one for other trees.

    It should have matched something where an array that no regex names has a path of similar words.
    """
    rule, number = clause
    if not isinstance(rule, TreePathShardingRule) or not _shards(rule.rules[number][1]):
        return ''
    unnamed = [array for array in arrays if not any(map(_names, array.decision.clauses))]
    words = {word: array for array in unnamed for word in re.findall(r'\w+', array.rule_path)}
    text = clause_text(clause)
    for word in re.findall(r'[^\W\d]\w\w+', re.sub(r'\\.', ' ', text)):  # without \d and the like
        near = near_names(word, words)
        if near and not any(word in path for path in seen):
            like = f'{near[0]!r}, as in {words[near[0]].text()}'
            return f'  {text!r}: {word!r} is in no path, did you mean {like}?'
    return ''


def _shards(value: Rule) -> bool:
    """Whether what a regex stands for shards anything."""
    spec = value.spec if isinstance(value, NamedSharding) else value
    return any(partition_specs.entries(spec)) if isinstance(spec, PartitionSpec) else spec is not None


def _names(clause: Clause) -> bool:
    """Whether a regex is for some paths: others, such as '.*', are for what is left."""
    patterns = _patterns(clause[0])
    return bool(patterns) and not re.search(patterns[clause[1]], '')


def clause_text(clause: Clause) -> str:
    """The regex of a clause."""
    pattern = _patterns(clause[0])[clause[1]]
    return str(getattr(pattern, 'pattern', pattern))


def _patterns(rule: ShardingRule) -> list[Any]:
    """The regexes of a rule with a table of them; none of another."""
    if isinstance(rule, LogicalAxisShardingRule):
        return [pattern for pattern, _ in rule.axis_names]
    return [pattern for pattern, _ in rule.rules] if isinstance(rule, TreePathShardingRule) else []


def find_unused_clauses(
    rules: Iterable[Rule], seen: Sequence[str], decisions: Sequence[Decision]
) -> tuple[list[Clause], list[Clause]]:
    """The regexes that decide about no leaf: those that match none, and those always shadowed.

    Args:
        rules: all rules that were asked.
        seen: the leaf paths as the rules saw them.
        decisions: what was decided about each.
    """
    from scalax.rules import catalogue  # here, because few programs use its tables

    distinct = {id(answer): answer for answer in decisions}.values()
    used = {(_key(rule), number) for answer in distinct for rule, number in answer.clauses}
    unused: list[Clause] = []
    shadowed: list[Clause] = []
    asked: dict[Any, tuple[ShardingRule, list[list[str] | None]]] = {}
    for rule, parameters in _nested(rules):
        asked.setdefault(_key(rule), (rule, []))[1].append(parameters)
    for key, (rule, uses) in asked.items():
        patterns = _patterns(rule)
        params = [path for use in uses for path in use or ()]
        outside = None in uses
        rows = [
            (path, answer)
            for path, answer in zip(seen, decisions, strict=True)
            # A rule used for both params and optimizer state does not see the paths of the state.
            if outside and not (params and OptimizerStateShardingRule.__name__ in answer.origin)
        ]
        for number, pattern in enumerate(patterns):
            # The tables of the catalogue are for many models: most of their rows are idle in each.
            if (key, number) in used or clause_text((rule, number)) in catalogue.REGEXES:
                continue
            # The paths of a state do not show which parameter a leaf belongs to, and may lack parameters.
            mine = [path for path in params if re.search(pattern, path)]
            if any(not any(re.search(earlier, path) for earlier in patterns[:number]) for path in mine):
                continue
            hits = [answer for path, answer in rows if re.search(pattern, path)]
            if not hits and not mine:
                unused.append((rule, number))
                continue
            nested = isinstance(rule, TreePathShardingRule) and isinstance(
                rule.rules[number][1], ShardingRule
            )
            # No rule decides about arrays of one element. A nested rule may have had no answer.
            others = [
                answer
                for answer in hits
                if answer.reason != ONE_ELEMENT
                and (not nested or any(owner == rule and clause < number for owner, clause in answer.clauses))
            ]
            if others or mine:
                shadowed.append((rule, number))
    return unused, shadowed


def _key(rule: ShardingRule) -> Any:
    """The rule as a key of a dict; one that holds a user's rule may have no hash, and is told by its id."""
    try:
        hash(rule)
    except TypeError:
        return id(rule)
    return rule


def _nested(
    rules: Iterable[Rule], params: list[str] | None = None
) -> Iterator[tuple[ShardingRule, list[str] | None]]:
    """Every rule and the rules inside, with the paths of parameters; None outside of optimizer states."""
    for rule in rules:
        if isinstance(rule, OptimizerStateShardingRule):
            for section in rule.sections:
                # No rule decides about arrays of one element.
                leaves = zip(section.paths, section.shapes, strict=True)
                yield from _nested([section.rule], [path for path, shape in leaves if math.prod(shape) != 1])
        elif isinstance(rule, ShardingRule):
            yield rule, params
            yield from _nested(rule.parts, params)
