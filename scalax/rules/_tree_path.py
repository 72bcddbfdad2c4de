"""The rule that chooses by leaf path: pairs of a regex and a spec, of which the first match wins."""

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
    map_decision,
    short_repr,
)
from scalax.rules._indivisible import OnIndivisible, checked_policy
from scalax.rules._rule import BuiltinRule, Rule, ShardingRule, answers_by_leaf, is_rule


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class TreePathShardingRule(BuiltinRule):
    """Chooses by leaf path: the first pair whose regex is found (``re.search``) in the path wins.

    Scalars and arrays of one element are always replicated, whether or not a regex matches.

    Args:
        *rules: pairs of a regex and a value. The value is a PartitionSpec; another rule, which then
            decides about the leaves of that pair; or None, which leaves them to the compiler.
        strict: whether a larger array that no regex matches is an error; with False it is replicated.
        on_indivisible: what to do if a dimension is not divisible: ``'error'``, ``'replicate'``
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
        'unmatched leaves.'
    )

    def __init__(
        self,
        *rules: tuple[str | re.Pattern[str], Rule],
        strict: bool = True,
        on_indivisible: OnIndivisible = 'error',
    ) -> None:
        pairs = tuple(checked_pair(f'TreePathShardingRule, pair {i}', pair) for i, pair in enumerate(rules))
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
        scalar_shapes = {shape for shape in set(tree.shapes) if all(size == 1 for size in shape)}
        answers: list[Any] = [scalar if shape in scalar_shapes else None for shape in tree.shapes]
        # The outer loop is over the clauses rather than the leaves, so that the inner loops run in C.
        unmatched = [i for i, answer in enumerate(answers) if answer is None]
        paths = [tree.paths[i] for i in unmatched]
        nested: dict[int, tuple[int, ShardingRule]] = {}
        for clause, (pattern, value) in enumerate(self.rules):
            matches = list(map(re.compile(pattern).search, paths))
            matched = list(itertools.compress(unmatched, matches))
            if not matched:
                continue
            misses = [not match for match in matches]
            unmatched = list(itertools.compress(unmatched, misses))
            paths = list(itertools.compress(paths, misses))
            if isinstance(value, ShardingRule):
                nested.update(dict.fromkeys(matched, (clause, value)))
            else:
                origin = f'regex {regex_text(pattern)}'
                decision = Decision.of(value, origin, '', self.on_indivisible, ((self, clause),))
                for i in matched:
                    answers[i] = decision
        for i in unmatched:
            answers[i] = NoAnswer(functools.partial(self._unmatched, tree, i)) if self.strict else _UNMATCHED
        inner_answers = answers_by_leaf({i: nested[i][1] for i in sorted(nested)}, tree, axis_sizes)
        clauses = [nested[i][0] for i in inner_answers]  # several clauses may have the same rule
        outer_answers = map(functools.cache(self._with_clause), clauses, inner_answers.values())
        for i, answer in zip(inner_answers, outer_answers, strict=True):
            answers[i] = answer
        return answers

    def _unmatched(self, tree: NamedTree, index: int) -> Problem:
        """Returns the problem of a leaf that no regex matches."""
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
        """Returns a regex that looks like a misspelling of the path or of one of its keys, or ''."""
        patterns = {re.sub(r'[^\w/]', '', _text(pattern)): _text(pattern) for pattern, _ in self.rules}
        for word in (path, *reversed(path.split('/'))):
            for literal in near_names(word, patterns):
                return patterns[literal]
        return ''

    def _with_clause(self, clause: int, answer: Answer) -> Answer:
        """Adds a clause of this rule to the answer of the rule nested in it."""
        regex = f'regex {regex_text(self.rules[clause][0])}'
        return map_decision(
            answer,
            lambda decision: dataclasses.replace(
                decision,
                origin=f'{regex} -> {decision.origin}',
                clauses=((self, clause), *decision.clauses),
            ),
        )


_UNMATCHED = Decision(REPLICATED, 'TreePathShardingRule', 'no regex matches, strict=False')


def _text(pattern: str | re.Pattern[str]) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def regex_text(pattern: str | re.Pattern[str]) -> str:
    """Returns a regex as code, unlike the repr of a compiled one, which ends after 200 characters."""
    if isinstance(pattern, str):
        return repr(pattern)
    flags = re.RegexFlag(pattern.flags & ~re.UNICODE)  # every str regex has UNICODE
    return f're.compile({pattern.pattern!r}{f", {flags!r}" if flags else ""})'


def checked_pair(where: str, pair: Any) -> tuple[str | re.Pattern[str], Rule]:
    """Returns *pair* if it is a pair of a regex and a value, and raises RuleError about *where* otherwise."""
    if not isinstance(pair, tuple | list) or len(pair) != 2 or isinstance(pair[0], tuple | list):
        raise RuleError(
            f'{where}: expected a pair (regex, PartitionSpec), got {short_repr(pair)}; unpack a list of '
            'pairs: *pairs'
        )
    pattern, value = pair
    checked_regex(where, pattern)
    if not is_rule(value):
        raise RuleError(
            f'{where} ({_text(pattern)!r}): the value is a PartitionSpec, a rule or None, got {value!r}'
        )
    return pattern, value


def checked_regex(where: str, pattern: Any, error_type: type[ScalaxError] = RuleError) -> None:
    """Raises RuleError, or another type of error, if *pattern* is not a regex.

    Args:
        where: the beginning of the message.
        pattern: the regex to check.
        error_type: the type of the error.
    """
    if not isinstance(getattr(pattern, 'pattern', pattern), str):
        raise error_type(f'{where}: the regex is a string, got {pattern!r}')
    try:
        re.compile(pattern)
    except re.error as error:
        raise error_type(f'{where}: invalid regex {pattern!r}: {error.msg} (position {error.pos})') from None
