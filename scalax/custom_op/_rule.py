"""The rule of a sharded operation: its parser, and its factors for the shapes of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scalax._core.pytree.paths import describe_leaf
from scalax.errors import ArgumentError, RuleError, did_you_mean, plural
from scalax.rules._einops_pattern import Pattern, names_in, parse, pattern_error


@dataclasses.dataclass(frozen=True)
class Rule:
    """A parsed rule, such as ``'b c, -> b'``.

    Attributes:
        text: the text of the rule.
        operands: the dimensions of each operand.
        results: the dimensions of each result.
        reduction_factors: factors whose blocks the function combines.
        need_replication_factors: factors that the function needs unsharded.
    """

    text: str
    operands: tuple[Pattern, ...]
    results: tuple[Pattern, ...]
    reduction_factors: tuple[str, ...] = ()
    need_replication_factors: tuple[str, ...] = ()

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the factors, in the order of the text."""
        return tuple(dict.fromkeys(name for name, _ in names_in(self.text)))


def parse_rule(text: str, reduction_factors: Iterable[str], need_replication_factors: Iterable[str]) -> Rule:
    """Parses a rule.

    Raises:
        RuleError: the text is not a rule; the message points at the position.

    Example:
        >>> rule = parse_rule('b c, -> b', ('c',), ())
        >>> [len(operand.dimensions) for operand in rule.operands], rule.factors
        ([2, 0], ('b', 'c'))
    """
    if not isinstance(text, str):
        raise RuleError(
            f"sharded_op takes a rule first, such as @sharded_op('b c, -> b'), got {type(text).__name__}"
        )
    arrow = text.find('->')
    if arrow < 0:
        raise pattern_error(text, len(text), "no '->' between operands and results")
    rule = Rule(
        text,
        _parse_arrays(text, 0, arrow),
        _parse_arrays(text, arrow + 2, len(text)),
        _checked_factors(text, 'reduction_factors', reduction_factors),
        _checked_factors(text, 'need_replication_factors', need_replication_factors),
    )
    _check_roles(rule, arrow)
    return rule


def _parse_arrays(text: str, start: int, stop: int) -> tuple[Pattern, ...]:
    """Parses the comma-separated patterns between two positions of a rule."""
    patterns = []
    for part in text[start:stop].split(','):
        for sign, reason in (
            ('(', 'a group; a dimension is one factor here'),
            ('...', "'...'; name each dimension"),
        ):
            if sign in part:
                raise pattern_error(text, start + part.index(sign), f'{reason} (reshape outside)')
        patterns.append(parse(part, text, start))
        start += len(part) + 1
    return tuple(patterns)


def _checked_factors(text: str, option: str, names: Iterable[str]) -> tuple[str, ...]:
    rule_factors = list(dict.fromkeys(name for name, _ in names_in(text)))
    names = names if isinstance(names, str) else tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise RuleError(f"{option} is a tuple of factors, such as ('b', 'c'), got {names!r}")
    for name in names:
        if name not in rule_factors:
            raise RuleError(
                f'{option}: the rule {text!r} has no factor {name!r} ({did_you_mean(name, rule_factors)})'
            )
    return names


def _check_roles(rule: Rule, arrow: int) -> None:
    """Raises if a factor is neither reduced, replicated nor in a result, or both reduced and in a result."""
    text, reduced, replicated = rule.text, rule.reduction_factors, rule.need_replication_factors
    result_positions = {name: position for name, position in names_in(text) if position > arrow}
    for name, position in names_in(text):
        if name in reduced and name in result_positions:
            raise pattern_error(
                text,
                result_positions[name],
                f'{name!r} is in reduction_factors, but is also a dimension of a result',
            )
        if name not in result_positions and name not in (*reduced, *replicated):
            raise pattern_error(
                text,
                position,
                f'{name!r} is in no result: reduction_factors=({name!r},) if the function combines its '
                f'blocks (ctx.psum), need_replication_factors=({name!r},) if it needs the entire factor',
            )


Factors = tuple[str | None, ...]
"""The factor of each dimension of one array; None for a dimension that is never sharded."""


@dataclasses.dataclass(frozen=True)
class FactorMap:
    """The factors of the operands and results of one call.

    Attributes:
        operands: the factors of each operand.
        results: the factors of each result.
        sizes: the size of each factor.
        replicated: the factors that are never sharded.
        reduced: the factors whose blocks the function combines.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    sizes: Mapping[str, int]
    replicated: frozenset[str]
    reduced: frozenset[str]

    def batched(self, batched: Sequence[bool], size: int) -> FactorMap:
        """Returns the map under ``jax.vmap``: a new leading factor, of all results and of some operands.

        Args:
            batched: whether each operand has the new dimension.
            size: the size of the new dimension.
        """
        name = f'vmap {len(self.sizes)}'  # with a space, so that no factor of a rule has this name
        operands = [
            (name, *factors) if is_batched else factors
            for factors, is_batched in zip(self.operands, batched, strict=True)
        ]
        return dataclasses.replace(
            self,
            operands=tuple(operands),
            results=tuple((name, *factors) for factors in self.results),
            sizes={name: size, **self.sizes},
        )

    def shardy_rule(self) -> tuple[str, dict[str, tuple[str, ...]]]:
        """Returns the rule for JAX's ``custom_partitioning``: its text, and its special factors."""
        names = {factor: f'f{i}' for i, factor in enumerate(self.sizes)}
        nameless: list[str] = []

        def word(factor: str | None) -> str:
            if factor is not None:
                return names[factor]
            nameless.append(f'n{len(nameless)}')
            return nameless[-1]

        def text(arrays: Sequence[Factors]) -> str:
            return ', '.join(' '.join(map(word, factors)) for factors in arrays)

        rule = f'{text(self.operands)} -> {text(self.results)}'
        replicated = [names[factor] for factor in self.sizes if factor in self.replicated]
        reduced = [names[factor] for factor in self.sizes if factor in self.reduced]
        special = {'reduction_factors': reduced, 'need_replication_factors': [*replicated, *nameless]}
        return rule, {kind: tuple(factors) for kind, factors in special.items()}


def match_rule(
    rule: Rule, name: str, operands: Mapping[str, Any], results: Mapping[str, Any] | None = None
) -> FactorMap:
    """Matches a rule with the shapes of a call.

    Args:
        rule: the rule.
        name: the name of the operation, for errors.
        operands: the types of the operands, by name.
        results: the types of the function's results for global arrays; None if they are not known yet.

    Raises:
        ArgumentError: the operands do not fit the rule, or one another.
        RuleError: the results contradict the rule.
    """
    descriptions = [
        f'{describe_leaf(label, operand)} for {str(pattern)!r}'
        for pattern, (label, operand) in zip(rule.operands, operands.items(), strict=True)
    ]
    sizes: dict[str, tuple[int, str]] = {}
    operand_factors, problems = _match_factors(rule.operands, operands, sizes)
    if problems:
        raise ArgumentError(
            error_message(f'{name}: the operands do not fit the rule {rule.text!r}', descriptions, problems)
        )
    operand_factor_names = set(sizes)
    result_factors: list[Factors] = []
    if results is not None:
        num_results = plural(len(rule.results), 'result')
        problems = [f'the rule has {num_results}, the function returned {len(results)}']
        if len(results) == len(rule.results):
            result_factors, problems = _match_factors(rule.results, results, sizes)
        if problems:
            descriptions += [describe_leaf(label, result) for label, result in results.items()]
            raise RuleError(
                error_message(
                    f'{name}: the results contradict the rule {rule.text!r}', descriptions, problems
                )
            )
    return FactorMap(
        tuple(operand_factors),
        tuple(result_factors),
        {factor: size for factor, (size, _) in sizes.items()},
        # Every device computes all of a factor that only results have.
        frozenset(rule.need_replication_factors) | (set(sizes) - operand_factor_names),
        frozenset(rule.reduction_factors),
    )


def _match_factors(
    patterns: Sequence[Pattern], arrays: Mapping[str, Any], sizes: dict[str, tuple[int, str]]
) -> tuple[list[Factors], list[str]]:
    """Returns the factors of arrays, and the problems; adds new factors to *sizes*, with an array's label."""
    array_factors, problems = [], []
    for pattern, (label, array) in zip(patterns, arrays.items(), strict=True):
        rank, rule_rank = len(array.shape), len(pattern.dimensions)
        if rank != rule_rank:
            problems.append(f'{label} has {plural(rank, "dimension")}, but {rule_rank} in the rule')
            continue
        factors: list[str | None] = []
        for dim, (parts, size) in enumerate(zip(pattern.dimensions, array.shape, strict=True)):
            part = parts[0] if parts else 1
            factor = part if isinstance(part, str) else None
            factors.append(factor)
            if factor is not None:
                first_size, first_label = sizes.setdefault(factor, (size, label))
                if first_size != size:
                    problems.append(
                        f'factor {factor!r} has size {first_size} in {first_label}, but {size} in {label}'
                    )
            elif isinstance(part, int) and part != size:
                problems.append(f'dimension {dim} of {label} has size {size}, but {part} in the rule')
        array_factors.append(tuple(factors))
    return array_factors, problems


def error_message(head: str, arrays: Sequence[str], rest: Sequence[str]) -> str:
    """Returns a message with a list of arrays under its first line."""
    return '\n'.join([f'{head}:', *[f'  {text}' for text in arrays], *rest])
