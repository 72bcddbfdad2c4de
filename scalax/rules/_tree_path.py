"""Rules that choose by leaf path: pairs of a regex and a spec, of which the first match wins."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any, ClassVar

from scalax._core.pytree.paths import NamedTree
from scalax.errors import Problem, RuleError, ScalaxError, checked_flag, near_names, plural
from scalax.rules._answer import (
    ONE_ELEMENT,
    REPLICATED,
    Answer,
    AxisSizes,
    Decision,
    NoAnswer,
    changed,
    short,
)
from scalax.rules._indivisible import OnIndivisible, checked_policy
from scalax.rules._rule import BuiltinRule, Rule, ShardingRule, answers_of_each, is_rule


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class TreePathShardingRule(BuiltinRule):
    """Chooses by leaf path: the first pair whose regex is found (``re.search``) in the path wins.

    Scalars and arrays of one element are replicated whatever their path, and whether or not a regex matches.

    Args:
        *rules: pairs of a regex and a value. A value is a PartitionSpec; another rule, which then
            decides about the leaves of that pair; or None, which leaves them to the compiler.
        strict: any other leaf that no regex matches is an error; with False it is replicated.
        on_indivisible: what to do where a dimension does not divide: ``'error'``, ``'replicate'``
            (drop axes from the right until it divides) or ``'warn'`` (the same, with a warning).

    Raises:
        RuleError: an invalid regex, or a value of another kind.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec
        >>> rule = TreePathShardingRule(
        ...     ('attention/.*/kernel', PartitionSpec('fsdp', 'tp')),
        ...     ('.*', PartitionSpec()),
        ... )
        >>> rule.apply({'attention': {'q': {'kernel': np.zeros((8, 8))}}, 'norm': np.zeros(8)})
        {'attention': {'q': {'kernel': P('fsdp', 'tp')}}, 'norm': P()}
    """

    rules: tuple[tuple[str | re.Pattern[str], Rule], ...]
    strict: bool = True
    on_indivisible: OnIndivisible = 'error'
    by_path: ClassVar[bool] = True
    _unmatched_hint: ClassVar[str] = (
        "add a pair for these leaves, end with ('.*', PartitionSpec()), or pass strict=False to replicate "
        'what nothing matches.'
    )

    def __init__(
        self,
        *rules: tuple[str | re.Pattern[str], Rule],
        strict: bool = True,
        on_indivisible: OnIndivisible = 'error',
    ) -> None:
        pairs = tuple(
            checked_pair(f'TreePathShardingRule, pair {number}', rule) for number, rule in enumerate(rules)
        )
        strict = checked_flag('strict', strict, RuleError)
        vars(self).update(rules=pairs, strict=strict, on_indivisible=checked_policy(on_indivisible))

    def __repr__(self) -> str:
        pairs = [f'({regex_text(pattern)}, {value!r})' for pattern, value in self.rules]
        return f'{type(self).__name__}({", ".join([*pairs, *self._options("strict", "on_indivisible")])})'

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        return tuple(value for _, value in self.rules if isinstance(value, ShardingRule))

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        scalar = Decision(REPLICATED, 'TreePathShardingRule', ONE_ELEMENT)
        single = {shape for shape in set(tree.shapes) if all(size == 1 for size in shape)}
        answers: list[Any] = [scalar if shape in single else None for shape in tree.shapes]
        # Clause by clause over the leaves that are left, rather than leaf by leaf over the clauses:
        # the inner loops then run in C.
        left = [i for i, answer in enumerate(answers) if answer is None]
        paths = [tree.paths[i] for i in left]
        nested: dict[int, tuple[int, ShardingRule]] = {}
        for number, (pattern, value) in enumerate(self.rules):
            found = list(map(re.compile(pattern).search, paths))
            mine = list(itertools.compress(left, found))
            if not mine:
                continue
            missed = [not hit for hit in found]
            left, paths = list(itertools.compress(left, missed)), list(itertools.compress(paths, missed))
            if isinstance(value, ShardingRule):
                nested.update(dict.fromkeys(mine, (number, value)))
            else:
                origin = f'regex {regex_text(pattern)}'
                fixed = Decision.of(value, origin, '', self.on_indivisible, ((self, number),))
                for i in mine:
                    answers[i] = fixed
        for i in left:
            answers[i] = NoAnswer(functools.partial(self._unmatched, tree, i)) if self.strict else _MISS
        inner = answers_of_each({i: nested[i][1] for i in sorted(nested)}, tree, axis_sizes)
        clauses = [nested[i][0] for i in inner]  # several may have the same rule
        told = map(functools.cache(self._by_clause), clauses, inner.values())
        for i, answer in zip(inner, told, strict=True):
            answers[i] = answer
        return answers

    def _unmatched(self, tree: NamedTree, index: int) -> Problem:
        """The problem of a leaf that no regex matches."""
        near = self._near_pattern(tree.paths[index])
        return Problem(
            'unmatched',
            tree.describe(index),
            f'no regex of the rule matches the path {tree.path_text(index)}'
            + (f'; {near!r} comes near' if near else ''),
            rule=f'TreePathShardingRule with {plural(len(self.rules), "regex", "regexes")}',
            hint=self._unmatched_hint,
        )

    def _near_pattern(self, path: str) -> str:
        """A regex that looks like a misspelling of the path or of one of its keys, or ''."""
        literal = {re.sub(r'[^\w/]', '', _text(pattern)): _text(pattern) for pattern, _ in self.rules}
        for word in (path, *reversed(path.split('/'))):
            for name in near_names(word, literal):
                return literal[name]
        return ''

    def _by_clause(self, number: int, answer: Answer) -> Answer:
        origin = f'regex {regex_text(self.rules[number][0])}'
        return changed(
            answer,
            lambda found: dataclasses.replace(
                found, origin=f'{origin} -> {found.origin}', clauses=((self, number), *found.clauses)
            ),
        )


_MISS = Decision(REPLICATED, 'TreePathShardingRule', 'no regex matches, strict=False')


def _text(pattern: str | re.Pattern[str]) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def regex_text(pattern: str | re.Pattern[str]) -> str:
    """A regex as code. The repr of a compiled one is cut off after 200 characters."""
    if isinstance(pattern, str):
        return repr(pattern)
    flags = re.RegexFlag(pattern.flags & ~re.UNICODE)  # which every regex of text has
    return f're.compile({pattern.pattern!r}{f", {flags!r}" if flags else ""})'


def checked_pair(where: str, rule: Any) -> tuple[str | re.Pattern[str], Rule]:
    """Returns *rule* if it is a pair of a regex and a value, else raises RuleError about *where*."""
    if not isinstance(rule, tuple | list) or len(rule) != 2 or isinstance(rule[0], tuple | list):
        raise RuleError(
            f'{where}: expected a pair (regex, PartitionSpec), got {short(rule)}; several pairs are given '
            'with a star: *pairs'
        )
    pattern, value = rule
    checked_regex(where, pattern)
    if not is_rule(value):
        raise RuleError(
            f'{where} ({_text(pattern)!r}): the value is a PartitionSpec, a rule or None, got {value!r}'
        )
    return pattern, value


def checked_regex(where: str, pattern: Any, kind: type[ScalaxError] = RuleError) -> None:
    """Raises RuleError, or an error of another *kind*, if *pattern* is no regex; it begins with *where*."""
    if not isinstance(getattr(pattern, 'pattern', pattern), str):
        raise kind(f'{where}: the regex is a string, got {pattern!r}')
    try:
        re.compile(pattern)
    except re.error as error:
        raise kind(f'{where}: invalid regex {pattern!r}: {error.msg} (position {error.pos})') from None
