"""The rule of a sharded operation, read from text and fitted to the shapes of a call."""

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
        text: as it was written.
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
        """The names of the factors, in the order in which they are written."""
        return tuple(dict.fromkeys(name for name, _ in names_in(self.text)))


def parse_rule(text: str, reduction_factors: Iterable[str], need_replication_factors: Iterable[str]) -> Rule:
    """Reads a rule.

    Raises:
        RuleError: it is not one; the message points at the place.

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
        _arrays(text, 0, arrow),
        _arrays(text, arrow + 2, len(text)),
        _names(text, 'reduction_factors', reduction_factors),
        _names(text, 'need_replication_factors', need_replication_factors),
    )
    _check_factors(rule, arrow)
    return rule


def _arrays(text: str, start: int, stop: int) -> tuple[Pattern, ...]:
    """The patterns between two places of a rule, which commas separate."""
    patterns = []
    for part in text[start:stop].split(','):
        for sign, why in (
            ('(', 'a group; a dimension is one factor here'),
            ('...', "'...'; name each dimension"),
        ):
            if sign in part:
                raise pattern_error(text, start + part.index(sign), f'{why} (reshape outside)')
        patterns.append(parse(part, text, start))
        start += len(part) + 1
    return tuple(patterns)


def _names(text: str, option: str, names: Iterable[str]) -> tuple[str, ...]:
    known = list(dict.fromkeys(name for name, _ in names_in(text)))
    names = names if isinstance(names, str) else tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise RuleError(f"{option} is a tuple of factors, such as ('b', 'c'), got {names!r}")
    for name in names:
        if name not in known:
            raise RuleError(
                f'{option}: the rule {text!r} has no factor {name!r} ({did_you_mean(name, known)})'
            )
    return names


def _check_factors(rule: Rule, arrow: int) -> None:
    """Raises about factors that nothing handles, or that are handled twice."""
    text, reduced, whole = rule.text, rule.reduction_factors, rule.need_replication_factors
    kept = {name: at for name, at in names_in(text) if at > arrow}
    for name, at in names_in(text):
        if name in reduced and name in kept:
            raise pattern_error(
                text, kept[name], f'{name!r} is in reduction_factors, but is also a dimension of a result'
            )
        if name not in kept and name not in (*reduced, *whole):
            raise pattern_error(
                text,
                at,
                f'{name!r} is in no result: reduction_factors=({name!r},) if the function combines its '
                f'blocks (ctx.psum), need_replication_factors=({name!r},) if it needs the entire factor',
            )


Factors = tuple[str | None, ...]
"""The factor of each dimension of one array; None for a dimension without one, which is never sharded."""


@dataclasses.dataclass(frozen=True)
class FactorMap:
    """The factors of operands and results, one entry an array.

    Attributes:
        operands: the factors of each operand.
        results: the factors of each result.
        sizes: the size of each factor.
        replicated: the factors that are never sharded.
        reduced: the factors whose blocks are combined.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    sizes: Mapping[str, int]
    replicated: frozenset[str]
    reduced: frozenset[str]

    def batched(self, batched: Sequence[bool], size: int) -> FactorMap:
        """The map under ``jax.vmap``: a new first factor, of all results and of some operands."""
        name = f'vmap {len(self.sizes)}'  # no name of a rule holds a space
        operands = [
            (name, *factors) if more else factors
            for factors, more in zip(self.operands, batched, strict=True)
        ]
        return dataclasses.replace(
            self,
            operands=tuple(operands),
            results=tuple((name, *factors) for factors in self.results),
            sizes={name: size, **self.sizes},
        )

    def shardy_rule(self) -> tuple[str, dict[str, tuple[str, ...]]]:
        """The rule as JAX's ``custom_partitioning`` takes it: its text, and its special factors."""
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
        whole = [names[factor] for factor in self.sizes if factor in self.replicated]
        reduced = [names[factor] for factor in self.sizes if factor in self.reduced]
        special = {'reduction_factors': reduced, 'need_replication_factors': [*whole, *nameless]}
        return rule, {kind: tuple(factors) for kind, factors in special.items()}


def match_rule(
    rule: Rule, name: str, operands: Mapping[str, Any], results: Mapping[str, Any] | None = None
) -> FactorMap:
    """Fits a rule to a call.

    Args:
        rule: the rule.
        name: the name of the operation, for errors.
        operands: the types of the operands, by name.
        results: the types of what the function returns for whole arrays; None where that is not known yet.

    Raises:
        ArgumentError: the operands do not fit the rule, or one another.
        RuleError: the results contradict it.
    """
    described = [
        f'{describe_leaf(label, operand)} for {str(pattern)!r}'
        for pattern, (label, operand) in zip(rule.operands, operands.items(), strict=True)
    ]
    sizes: dict[str, tuple[int, str]] = {}
    operand_factors, wrong = _all_factors(rule.operands, operands, sizes)
    if wrong:
        raise ArgumentError(
            message(f'{name}: the operands do not fit the rule {rule.text!r}', described, wrong)
        )
    of_operands = set(sizes)
    result_factors: list[Factors] = []
    if results is not None:
        wrong = [f'the rule has {plural(len(rule.results), "result")}, the function returned {len(results)}']
        if len(results) == len(rule.results):
            result_factors, wrong = _all_factors(rule.results, results, sizes)
        if wrong:
            described += [describe_leaf(label, result) for label, result in results.items()]
            raise RuleError(
                message(f'{name}: the results contradict the rule {rule.text!r}', described, wrong)
            )
    return FactorMap(
        tuple(operand_factors),
        tuple(result_factors),
        {factor: size for factor, (size, _) in sizes.items()},
        # A factor of results only is made by the function, whole, on every device.
        frozenset(rule.need_replication_factors) | (set(sizes) - of_operands),
        frozenset(rule.reduction_factors),
    )


def _all_factors(
    patterns: Sequence[Pattern], arrays: Mapping[str, Any], sizes: dict[str, tuple[int, str]]
) -> tuple[list[Factors], list[str]]:
    """The factors of some arrays, and what is wrong; adds to *sizes* each size with the array that has it."""
    found, wrong = [], []
    for pattern, (label, array) in zip(patterns, arrays.items(), strict=True):
        rank, wanted = len(array.shape), len(pattern.dimensions)
        if rank != wanted:
            wrong.append(f'{label} has {plural(rank, "dimension")}, but {wanted} in the rule')
            continue
        factors: list[str | None] = []
        for dim, (parts, size) in enumerate(zip(pattern.dimensions, array.shape, strict=True)):
            part = parts[0] if parts else 1
            factor = part if isinstance(part, str) else None
            factors.append(factor)
            if factor is not None:
                known, who = sizes.setdefault(factor, (size, label))
                if known != size:
                    wrong.append(f'factor {factor!r} has size {known} in {who}, but {size} in {label}')
            elif isinstance(part, int) and part != size:
                wrong.append(f'dimension {dim} of {label} has size {size}, but {part} in the rule')
        found.append(tuple(factors))
    return found, wrong


def message(head: str, arrays: Sequence[str], rest: Sequence[str]) -> str:
    """A message with a list of arrays under its first line."""
    return '\n'.join([f'{head}:', *[f'  {text}' for text in arrays], *rest])
