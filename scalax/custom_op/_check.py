"""The check that a function follows its rule, before anything is compiled.

The function is traced twice, without computing: on global arrays, and on blocks of every factor that may be
sharded. JAX then tracks which values vary over mesh axes, so that a forgotten ``ctx.psum`` is detected for
any later mesh.
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
from scalax.custom_op._rule import FactorMap, Rule, error_message, match_rule
from scalax.custom_op._run import Operation
from scalax.errors import RuleError

_NO_MESH = AbstractMesh((), ())


def check_operation(operation: Operation, operands: Sequence[Any]) -> Operation:
    """Returns the operation with the factors of its results, after the check.

    Raises:
        RuleError: the results contradict the rule, on global arrays or on blocks, or the function does not
            combine the blocks of a factor.
    """
    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in map(jax.typeof, operands)
    ]
    name, operands_by_name = operation.name, dict(zip(operation.labels, structs, strict=True))
    # The check is independent of the caller's mesh.
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        results = jax.eval_shape(operation.on_global_arrays, *structs)
        if not all(hasattr(result, 'shape') for result in results):
            types = ', '.join(type(result).__name__ for result in results)
            raise RuleError(f'{name}: the function returns one array, or a tuple of arrays, got {types}')
        results_by_name = {f'result {i}': result for i, result in enumerate(results)}
        factor_map = match_rule(operation.rule, name, operands_by_name, results_by_name)
        operation = dataclasses.replace(operation, factor_map=factor_map)
        _check_on_blocks(operation, structs, results)
    return operation


def _check_on_blocks(operation: Operation, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Traces the function on blocks, and compares the results with those on global arrays."""
    name, rule, factor_map = operation.name, operation.rule, operation.factor_map
    check_vma = operation.check_vma
    counts = _block_counts(factor_map)
    if not counts:
        return
    layout = FactorLayout(factor_map, {factor: (factor,) for factor in counts}, counts)
    ctx = operation.context(layout, check_vma)
    traces: list[list[Any]] = []

    def record_results(*blocks: Any) -> tuple[()]:
        traces.append([jax.typeof(result) for result in operation.local_fn(ctx, *blocks)])
        return ()

    mesh = AbstractMesh(tuple(counts.values()), tuple(counts), axis_types=(AxisType.Auto,) * len(counts))
    specs = tuple(layout.spec(factors) for factors in factor_map.operands)
    mapped = jax.shard_map(record_results, mesh=mesh, in_specs=specs, out_specs=(), check_vma=check_vma)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            jax.eval_shape(mapped, *operands)
    except Exception as error:
        error.add_note(
            f'{name} ({rule.text!r}) was tried on blocks: {_counts_text(counts)}. A factor that the function '
            'needs unsharded belongs in need_replication_factors'
            + ('; check_vma=False stops JAX from tracking which values differ.' if check_vma else '.')
        )
        raise
    result_blocks = traces[-1]
    _check_shapes(name, rule, layout, mesh, result_blocks, results)
    for i, (factors, block) in enumerate(zip(factor_map.results, result_blocks, strict=True)):
        varying = varying_axes(block)  # without check_vma, JAX does not track all of them
        uncombined = [factor for factor in counts if factor in varying and factor not in factors]
        if uncombined:
            raise _uncombined_error(name, rule, uncombined[0], f'result {i} still differs between its blocks')
    if not check_vma:
        for factor in rule.reduction_factors:
            if factor in counts and factor not in ctx.combined:
                raise _uncombined_error(name, rule, factor, 'the function never combines its blocks')


def _check_shapes(
    name: str, rule: Rule, layout: FactorLayout, mesh: Any, blocks: Sequence[Any], results: Sequence[Any]
) -> None:
    """Raises if the result blocks do not have the shapes that the rule implies."""
    expected_shapes = [
        NamedSharding(mesh, layout.spec(factors)).shard_shape(result.shape)
        for factors, result in zip(layout.factor_map.results, results, strict=True)
    ]
    problems = [
        f'{describe_leaf(f"result {i}", result)}, in blocks {list(expected)}, but the function returned '
        f'{list(block.shape)}'
        for i, (result, expected, block) in enumerate(zip(results, expected_shapes, blocks, strict=True))
        if tuple(block.shape) != expected
    ]
    if problems:
        counts = _counts_text(layout.sizes)
        head = f'{name}: on blocks the results contradict the rule {rule.text!r} ({counts})'
        remedy = (
            'What to do: return blocks of the results, computed from the shapes of the blocks given; a '
            'factor that the function needs unsharded belongs in need_replication_factors.'
        )
        raise RuleError(error_message(head, problems, [remedy]))


def _uncombined_error(name: str, rule: Rule, factor: str, fact: str) -> RuleError:
    """Returns the error about a factor whose blocks the function does not combine."""
    remedy = (
        f'combine the blocks before returning, with ctx.psum(x, {factor!r}), ctx.pmax, ctx.pmin or '
        f'ctx.all_gather; or keep the factor unsharded, with need_replication_factors=({factor!r},).'
    )
    return RuleError(
        f'{name}: factor {factor!r} is neither reduced nor kept unsharded: {fact} (rule {rule.text!r})\n'
        f'What to do: {remedy}'
    )


def _block_counts(factor_map: FactorMap) -> dict[str, int]:
    """Chooses the number of blocks of each factor: small, and different for factors of equal size.

    If the results have dimensions in another order than the rule, their blocks then have other shapes. Equal
    counts are used if a size has too few divisors.
    """
    counts: dict[str, int] = {}
    for factor, size in factor_map.sizes.items():
        if size > 1 and factor not in factor_map.replicated:
            used = {count for other, count in counts.items() if factor_map.sizes[other] == size}
            divisors = _divisors(size)
            counts[factor] = next((count for count in divisors if count not in used), divisors[0])
    return counts


def _counts_text(counts: Mapping[str, int]) -> str:
    return ', '.join(f'{factor!r} in {count}' for factor, count in counts.items())


def _divisors(size: int) -> list[int]:
    """Returns the divisors of a size above 1, in increasing order."""
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return sorted({*small, *[size // n for n in small]})[1:]
