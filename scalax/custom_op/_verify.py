"""Checks that a function follows its rule, before anything is compiled.

The function is traced twice, without computing: on whole arrays, and on blocks of every factor that may be
sharded. JAX then tracks which values differ between devices, so that a forgotten sum is found whatever the
mesh will be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from scalax._core.pytree.paths import describe_leaf
from scalax._jax.tracing import varying_axes
from scalax.custom_op._layout import FactorLayout
from scalax.custom_op._rule import FactorMap, Rule, match_rule, message
from scalax.custom_op._run import Operation
from scalax.errors import RuleError

_NO_MESH = AbstractMesh((), ())


def verified(operation: Operation, operands: Sequence[Any]) -> Operation:
    """The operation with the factors of its results, once its function has been tried on blocks.

    Raises:
        RuleError: the results contradict the rule, whole or in blocks, or a factor is forgotten.
    """
    blank = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, weak_type=each.weak_type)
        for each in map(jax.typeof, operands)
    ]
    name, rule, named = operation.name, operation.rule, dict(zip(operation.labels, blank, strict=True))
    # The trial is independent of the caller's mesh.
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        whole = jax.eval_shape(operation.plain, *blank)
        if not all(hasattr(result, 'shape') for result in whole):
            kinds = ', '.join(type(result).__name__ for result in whole)
            raise RuleError(f'{name}: the function returns one array, or a tuple of arrays, got {kinds}')
        fitted = match_rule(rule, name, named, {f'result {i}': result for i, result in enumerate(whole)})
        operation = dataclasses.replace(operation, factor_map=fitted)
        _try_on_blocks(operation, blank, whole)
    return operation


def _try_on_blocks(operation: Operation, operands: Sequence[Any], whole: Sequence[Any]) -> None:
    name, rule, fitted, check_vma = operation.name, operation.rule, operation.factor_map, operation.check_vma
    sizes = _block_counts(fitted)
    if not sizes:
        return
    layout = FactorLayout(fitted, {factor: (factor,) for factor in sizes}, sizes)
    ctx = operation.context(layout, typed=check_vma)
    seen: list[Any] = []

    def look(*blocks: Any) -> tuple[()]:
        seen.append([jax.typeof(result) for result in operation.local(ctx, *blocks)])
        return ()

    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    specs = tuple(layout.spec(factors) for factors in fitted.operands)
    mapped = jax.shard_map(look, mesh=mesh, in_specs=specs, out_specs=(), check_vma=check_vma)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            jax.eval_shape(mapped, *operands)
    except Exception as error:
        error.add_note(
            f'{name} ({rule.text!r}) was tried on blocks: {_counts_text(sizes)}. A factor that the function '
            'needs unsharded belongs in need_replication_factors'
            + ('; check_vma=False stops JAX from tracking which values differ.' if check_vma else '.')
        )
        raise
    _check_blocks(name, rule, layout, mesh, seen[-1], whole)
    for i, (factors, block) in enumerate(zip(fitted.results, seen[-1], strict=True)):
        # As far as JAX followed it.
        varying = varying_axes(block)
        differs = [factor for factor in sizes if factor in varying and factor not in factors]
        if differs:
            raise _forgotten(name, rule, differs[0], f'result {i} still differs between its blocks')
    if not check_vma:
        for factor in rule.reduction_factors:
            if factor in sizes and factor not in ctx.combined:
                raise _forgotten(name, rule, factor, 'the function never combines its blocks')


def _check_blocks(
    name: str, rule: Rule, layout: FactorLayout, mesh: Any, blocks: Sequence[Any], whole: Sequence[Any]
) -> None:
    expected = [
        NamedSharding(mesh, layout.spec(factors)).shard_shape(result.shape)
        for factors, result in zip(layout.factor_map.results, whole, strict=True)
    ]
    wrong = [
        f'{describe_leaf(f"result {i}", result)}, in blocks {list(block)}, but the function returned '
        f'{list(returned.shape)}'
        for i, (result, block, returned) in enumerate(zip(whole, expected, blocks, strict=True))
        if tuple(returned.shape) != block
    ]
    if wrong:
        counts = _counts_text(layout.sizes)
        head = f'{name}: on blocks the results contradict the rule {rule.text!r} ({counts})'
        remedy = (
            'What to do: return blocks of the results, computed from the shapes of the blocks given; a '
            'factor that the function needs unsharded belongs in need_replication_factors.'
        )
        raise RuleError(message(head, wrong, [remedy]))


def _forgotten(name: str, rule: Rule, factor: str, fact: str) -> RuleError:
    remedy = (
        f'combine the blocks before returning, with ctx.psum(x, {factor!r}), ctx.pmax, ctx.pmin or '
        f'ctx.all_gather; or keep the factor unsharded, with need_replication_factors=({factor!r},).'
    )
    return RuleError(
        f'{name}: factor {factor!r} is neither reduced nor kept: {fact} (rule {rule.text!r})\n'
        f'What to do: {remedy}'
    )


def _block_counts(fitted: FactorMap) -> dict[str, int]:
    """Into how many blocks each factor is cut: few, and factors of equal size differently if possible.

    A result whose dimensions are in another order than in the rule then has blocks of another shape.
    """
    counts: dict[str, int] = {}
    for factor, size in fitted.sizes.items():
        if size > 1 and factor not in fitted.replicated:
            taken = {count for other, count in counts.items() if fitted.sizes[other] == size}
            divisors = _divisors(size)
            counts[factor] = next((count for count in divisors if count not in taken), divisors[0])
    return counts


def _counts_text(counts: Mapping[str, int]) -> str:
    return ', '.join(f'{factor!r} in {count}' for factor, count in counts.items())


def _divisors(size: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return sorted({*small, *[size // n for n in small]})[1:]
