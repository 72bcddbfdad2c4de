"""Rules that choose by leaf path: pairs of a regex and a spec, of which the first match wins."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any, ClassVar

from jax.sharding import NamedSharding, PartitionSpec

from scalax._tree.paths import NamedTree
from scalax._tree.specs import OnIndivisible, checked_policy, entries, no_axis, spec_axes
from scalax.errors import Problem, RuleError, ScalaxError, checked_flag, near_names, plural
from scalax.rules._base import BuiltinRule, Rule, ShardingRule, answers_of_each, is_rule
from scalax.rules._decisions import ONE_ELEMENT, REPLICATED, Answer, AxisSizes, Decision, short


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
            checked_pair(f'TreePathShardingRule, pair {number}', rule, _SPREAD)
            for number, rule in enumerate(rules)
        )
        strict = checked_flag('strict', strict, RuleError)
        vars(self).update(rules=pairs, strict=strict, on_indivisible=checked_policy(on_indivisible))

    def __repr__(self) -> str:
        pairs = [f'({regex_text(pattern)}, {value!r})' for pattern, value in self.rules]
        return f'TreePathShardingRule({", ".join([*pairs, *self._options("strict", "on_indivisible")])})'

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        return tuple(value for _, value in self.rules if isinstance(value, ShardingRule))

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        scalar = Decision(REPLICATED, 'TreePathShardingRule', ONE_ELEMENT)
        miss = None if self.strict else _MISS
        single = {shape for shape in set(tree.shapes) if all(size == 1 for size in shape)}
        answers: list[Answer] = [scalar if shape in single else miss for shape in tree.shapes]
        # Clause by clause over the leaves that are left, rather than leaf by leaf over the clauses:
        # the inner loops then run in C.
        left = [i for i, answer in enumerate(answers) if answer is not scalar]
        paths = [tree.paths[i] for i in left]
        nested: dict[int, tuple[int, ShardingRule]] = {}
        for number, (pattern, value) in enumerate(self.rules):
            found = _finds(pattern, paths)
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
        # A rule may be the value of several clauses, and one decision serves many leaves.
        memo: dict[tuple[int, int], Decision] = {}
        for i, answer in answers_of_each({i: nested[i][1] for i in sorted(nested)}, tree, axis_sizes).items():
            if isinstance(answer, Decision):
                key = nested[i][0], id(answer)
                if key not in memo:
                    memo[key] = self._by_clause(nested[i][0], answer)
                answer = memo[key]
            answers[i] = answer
        return answers

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Decision | Problem:
        """A leaf of a nested rule gets that rule's default; an unmatched one is an error."""
        path = tree.paths[index]
        for number, (pattern, value) in enumerate(self.rules):
            if re.search(pattern, path):
                assert isinstance(value, ShardingRule)
                default = value.fallback(tree, index, axis_sizes)
                return default if isinstance(default, Problem) else self._by_clause(number, default)
        near = self._near_pattern(path)
        return Problem(
            'unmatched',
            tree.describe(index),
            f'no regex of the rule matches the path {tree.path_seen(index)}'
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

    def _by_clause(self, number: int, answer: Decision) -> Decision:
        origin = f'regex {regex_text(self.rules[number][0])}'
        return dataclasses.replace(
            answer, origin=f'{origin} -> {answer.origin}', clauses=((self, number), *answer.clauses)
        )


_MISS = Decision(REPLICATED, 'TreePathShardingRule', 'no regex matches, strict=False')
_SPECIAL = frozenset('\\.^$*+?{}[]|()')


def _finds(pattern: str | re.Pattern[str], paths: list[str]) -> list[Any]:
    """Whether ``re.search`` finds the pattern, path by path (as something true or false)."""
    if isinstance(pattern, str) and _SPECIAL.isdisjoint(pattern):
        return [pattern in path for path in paths]  # a regex without operators is a plain substring
    return list(map(re.compile(pattern).search, paths))


def _text(pattern: str | re.Pattern[str]) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def regex_text(pattern: str | re.Pattern[str]) -> str:
    """A regex as code. The repr of a compiled one is cut off after 200 characters."""
    if isinstance(pattern, str):
        return repr(pattern)
    flags = re.RegexFlag(pattern.flags & ~re.UNICODE)  # which every regex of text has
    return f're.compile({pattern.pattern!r}{f", {flags!r}" if flags else ""})'


def _axes(value: Any) -> tuple[Any, ...]:
    """The entries of a string, tuple or list in place of a PartitionSpec; empty for anything else."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, tuple | list) else ()


_SPREAD = 'pairs are arguments of their own: TreePathShardingRule(*pairs)'


def checked_pair(where: str, rule: Any, spread: str) -> tuple[str | re.Pattern[str], Rule]:
    """Returns *rule* if it is a pair of a regex and a value, else raises RuleError.

    Args:
        where: what the message begins with.
        rule: what was given.
        spread: what to say where pairs were given in place of one.
    """
    if not isinstance(rule, tuple | list) or len(rule) != 2 or isinstance(rule[0], tuple | list):
        hint = ''
        if isinstance(rule, tuple | list) and rule and isinstance(rule[0], tuple | list):
            hint = f'; {spread}'
        raise RuleError(f'{where}: expected a pair (regex, PartitionSpec), got {short(rule)}{hint}')
    pattern, value = rule
    checked_regex(where, pattern)
    if not is_rule(value):
        hint = f'; write PartitionSpec({", ".join(map(repr, _axes(value)))})' if _axes(value) else ''
        raise RuleError(
            f'{where} ({_text(pattern)!r}): the value is a PartitionSpec, a rule or None, got {value!r}{hint}'
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


_STACKED = "stacked layers take rule.stacked(1), or catalogue.rule(table, stacked='layers/')"
_NOT_STACKED = (
    'layers that are not stacked take the rule without .stacked(), and a stacked= that does not match'
)


class ExactRankRule(TreePathShardingRule):
    """A `TreePathShardingRule` whose specs are for arrays of exactly as many dimensions as they have entries.

    Arrays of another rank are an error, so that layers that were stacked are not sharded by accident.
    ``PartitionSpec()``, rules and None are for arrays of any rank.

    Args:
        *rules: as in `TreePathShardingRule`.
        strict: as there.
        on_indivisible: as there.

    Example:
        >>> import numpy as np
        >>> exact = ExactRankRule(('kernel', PartitionSpec('fsdp', None)), ('bias', PartitionSpec()))
        >>> exact.apply({'kernel': np.zeros((8, 8)), 'bias': np.zeros(8)})
        {'bias': P(), 'kernel': P('fsdp', None)}
        >>> exact.stacked(1).apply({'kernel': np.zeros((80, 8, 8))})
        {'kernel': P(None, 'fsdp')}
    """

    _unmatched_hint: ClassVar[str] = (
        'put a row for these leaves in front, as in catalogue.rule((row, *table)), or replicate what no row '
        'matches with rule | PartitionSpec().'
    )

    def __repr__(self) -> str:
        return 'ExactRankRule' + super().__repr__().removeprefix('TreePathShardingRule')

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        answers = super().answers(tree, axis_sizes)
        # One decision serves all leaves of a clause; it is checked once for each rank.
        wrong: dict[tuple[int, int, int], Problem | None] = {}
        for index, (answer, shape) in enumerate(zip(answers, tree.shapes, strict=True)):
            key = id(answer), len(shape), tree.stacked(index)
            if key not in wrong:
                wrong[key] = self._wrong(answer, *key[1:], axis_sizes)
            problem = wrong[key]
            if problem is not None:
                answers[index] = dataclasses.replace(problem, leaf=tree.describe(index))
        return answers

    def _wrong(self, answer: Answer, rank: int, stacked: int, axis_sizes: AxisSizes | None) -> Problem | None:
        """What is wrong with an answer of this rule about a leaf of that rank, without its stack."""
        # Decisions about arrays of one element have no clauses; those of other rules are not checked.
        if not isinstance(answer, Decision) or not answer.clauses or answer.clauses[0][0] is not self:
            return None
        value = self.rules[answer.clauses[0][1]][1]
        spec = value.spec if isinstance(value, NamedSharding) else value
        if not isinstance(spec, PartitionSpec):
            return None
        expected = len(entries(spec))
        if expected not in (0, rank):
            return _problem(
                'rank',
                answer,
                f'the spec is for an array of rank {expected}, and this one is of rank {rank}'
                + (' without its stack of layers' if stacked else ''),
                f'{_NOT_STACKED if stacked else _STACKED}; heads that are a dimension take '
                'catalogue.SPLIT_HEADS in front; others a row of your own.',
            )
        absent = [axis for axis in spec_axes(spec) if axis_sizes is not None and axis not in axis_sizes]
        # The hint is about the axes of the catalogue.
        for_tables = [f'{axis}=None' for axis in absent if axis in TABLE_AXES]
        if axis_sizes is None or not for_tables:
            return None
        return _problem(
            'unknown-axis',
            answer,
            '; '.join(no_axis(axis, axis_sizes) for axis in absent),
            f'give {", ".join(for_tables)} to catalogue.rule to leave out what the mesh lacks, or the name '
            'that it has there.',
        )


TABLE_AXES = ('fsdp', 'tp', 'expert')
"""The axes that the tables of the catalogue are over."""


def _problem(kind: str, answer: Decision, detail: str, hint: str) -> Problem:
    """A problem whose leaf is filled in later."""
    return Problem(kind, '', detail, spec=str(answer.spec), rule=answer.origin, hint=hint)
