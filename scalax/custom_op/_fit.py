"""Which factor is each dimension of these arrays? A rule, fitted to shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scalax._tree.paths import describe_leaf
from scalax.custom_op._rule import Rule
from scalax.errors import ArgumentError, RuleError
from scalax.rules._pattern import Dimension, Pattern, as_text

Factors = tuple[str | None, ...]
"""The factor of each dimension of one array; None for a dimension without one, which is never sharded."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """The factors of operands and results, one entry an array.

    Attributes:
        operands: the factors of each operand.
        results: the factors of each result.
        sizes: the size of each factor.
        whole: the factors that are never sharded.
        reduced: the factors whose blocks are combined.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str]
    reduced: frozenset[str]

    def batched(self, batched: Sequence[bool], size: int) -> Fit:
        """The fit under ``jax.vmap``: a new first factor, of all results and of some operands."""
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

    def with_more(self, shapes: Sequence[tuple[int, ...]]) -> Fit:
        """The fit with more operands behind the others, which are never sharded."""
        more = [(None,) * len(shape) for shape in shapes]
        return dataclasses.replace(self, operands=(*self.operands, *more))

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
        whole = [names[factor] for factor in self.sizes if factor in self.whole]
        reduced = [names[factor] for factor in self.sizes if factor in self.reduced]
        special = {'reduction_factors': reduced, 'need_replication_factors': [*whole, *nameless]}
        return rule, {kind: tuple(factors) for kind, factors in special.items()}


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of a call, fitted to a rule; made by `fit_operands`."""

    rule: Rule
    name: str
    factors: tuple[Factors, ...]
    sizes: Mapping[str, tuple[int, str]]
    dots: int
    described: tuple[str, ...]

    def with_results(self, results: Sequence[Any]) -> Fit:
        """The fit of a call with these results: the types of what the function returns for whole arrays.

        Raises:
            RuleError: they contradict the rule.
        """
        sizes = dict(self.sizes)
        labels = {f'result {i}': result for i, result in enumerate(results)}
        factors: list[Factors] = []
        wrong = [f'the rule has {len(self.rule.results)}, the function returned {len(results)}']
        if len(results) == len(self.rule.results):
            factors, wrong = _all_factors(self.rule.results, labels, self.dots, sizes)
        if wrong:
            texts = [*self.described, *[describe_leaf(label, result) for label, result in labels.items()]]
            raise RuleError(
                _lines(f'{self.name}: the results contradict the rule {self.rule.text!r}', texts, wrong)
            )
        return Fit(
            self.factors,
            tuple(factors),
            {factor: size for factor, (size, _) in sizes.items()},
            # What no operand has, the function makes: whole, on every device.
            frozenset(self.rule.need_replication_factors) | (set(sizes) - set(self.sizes)),
            frozenset(self.rule.reduction_factors),
        )


def fit_operands(rule: Rule, name: str, operands: Mapping[str, Any]) -> Operands:
    """Fits a rule to the operands of a call.

    Args:
        rule: the rule.
        name: the name of the operation, for errors.
        operands: the types of the operands, by name.

    Raises:
        ArgumentError: they do not fit the rule, or one another.
    """
    dots = next(
        (
            len(operand.shape) - len(pattern.dimensions)
            for pattern, operand in zip(rule.operands, operands.values(), strict=True)
            if pattern.ellipsis is not None
        ),
        0,
    )
    sizes: dict[str, tuple[int, str]] = {}
    described = tuple(
        f'{describe_leaf(label, operand)} for {_text(pattern)!r}'
        for pattern, (label, operand) in zip(rule.operands, operands.items(), strict=True)
    )
    factors, wrong = _all_factors(rule.operands, operands, dots, sizes)
    if wrong:
        raise ArgumentError(
            _lines(f'{name}: the operands do not fit the rule {rule.text!r}', described, wrong)
        )
    return Operands(rule, name, tuple(factors), sizes, dots, described)


def _all_factors(
    patterns: Sequence[Pattern], arrays: Mapping[str, Any], dots: int, sizes: dict[str, tuple[int, str]]
) -> tuple[list[Factors], list[str]]:
    """The factors of some arrays, and what is wrong; fills in *sizes*, each with who said so."""
    found, wrong = [], []
    for pattern, (label, array) in zip(patterns, arrays.items(), strict=True):
        dimensions = _dimensions(pattern, len(array.shape), dots)
        if dimensions is None:
            wrong.append(_wrong_rank(pattern, label, len(array.shape), dots))
            continue
        factors: list[str | None] = []
        for dim, (part, size) in enumerate(zip(dimensions, array.shape, strict=True)):
            factor = part if isinstance(part, str) else None
            factors.append(factor)
            if factor is not None:
                known, who = sizes.setdefault(factor, (size, label))
                if known != size:
                    wrong.append(f'factor {shown_factor(factor)} is {known} in {who} and {size} in {label}')
            elif isinstance(part, int) and part != size:
                wrong.append(f'dimension {dim} of {label} is {size}, and {part} in the rule')
        found.append(tuple(factors))
    return found, wrong


def _dimensions(pattern: Pattern, rank: int, dots: int) -> list[str | int | None] | None:
    """For each dimension its factor, its size, or None if it may have any; None for another rank."""
    at = len(pattern.dimensions) if pattern.ellipsis is None else pattern.ellipsis
    middle = [] if pattern.ellipsis is None else [f'... {i}' for i in range(dots)]
    parts = [*map(_part, pattern.dimensions[:at]), *middle, *map(_part, pattern.dimensions[at:])]
    return parts if len(parts) == rank else None


def _part(dimension: Dimension) -> str | int | None:
    return dimension[0] if dimension else 1


def _wrong_rank(pattern: Pattern, label: str, rank: int, dots: int) -> str:
    least = len(pattern.dimensions)
    if pattern.ellipsis is None:
        said = str(least)
    elif dots < 0:
        said = f'at least {least}'
    else:
        said = f"{least + dots} ('...' stands for {dots} dimensions)"
    return f'{label} has {rank} dimension{"" if rank == 1 else "s"}, and {said} in the rule'


def _text(pattern: Pattern) -> str:
    if pattern.ellipsis is None:
        return as_text(pattern.dimensions)
    parts = pattern.dimensions[: pattern.ellipsis], pattern.dimensions[pattern.ellipsis :]
    return ' '.join(filter(None, [as_text(parts[0]), '...', as_text(parts[1])]))


def shown_factor(factor: str) -> str:
    """A factor as messages show it: the dimensions of an ellipsis have no names."""
    return f"'...'[{factor.split()[1]}]" if factor.startswith('...') else repr(factor)


def _lines(head: str, arrays: Sequence[str], wrong: Sequence[str]) -> str:
    return '\n'.join([f'{head}:', *[f'  {text}' for text in arrays], *wrong])
