"""The mesh axes of each factor, computed from specs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from scalax.custom_op._layout import FactorLayout
from scalax.custom_op._rule import FactorMap, match_rule, parse_rule

P = PartitionSpec
SIZES = {'x': 2, 'y': 4, 'z': 3}


def fit_of(
    text: str, *shapes: tuple[int, ...], results: tuple[tuple[int, ...], ...], **options: tuple[str, ...]
) -> FactorMap:
    rule = parse_rule(text, options.get('reduction_factors', ()), options.get('need_replication_factors', ()))
    operands = {f'operand {i}': jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}
    returned = {f'result {i}': jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(results)}
    return match_rule(rule, 'op', operands, returned)


PAIR = fit_of('b c, b -> b c', (8, 12), (8,), results=((8, 12),))

CASES = {
    'specs that fit': ([P('x', 'y')], {'b': ('x',), 'c': ('y',)}),
    'the largest operand wins': ([P('x'), P('y')], {'b': ('x',)}),
    'the next operand fills in': ([P(None, 'x'), P('y')], {'b': ('y',), 'c': ('x',)}),
    'an axis serves one factor': ([P(None, 'x'), P('x')], {'c': ('x',)}),
    'the free axes of a tuple': ([P(None, 'x'), P(('x', 'y'))], {'b': ('y',), 'c': ('x',)}),
    'results come last': ([P(), P(), P('x', 'y')], {'b': ('x',), 'c': ('y',)}),
    'an indivisible axis': ([P('z', 'z')], {'c': ('z',)}),
    'the divisible axes of a tuple': ([P(('x', 'z'), ('y', 'z'))], {'b': ('x',), 'c': ('y', 'z')}),
    'axes of another mesh': ([P('other', 'x')], {'c': ('x',)}),
    'unconstrained dimensions': ([P(P.UNCONSTRAINED, 'x')], {'c': ('x',)}),
}


@pytest.mark.parametrize(('specs', 'expected'), CASES.values(), ids=CASES)
def test_axes_of_factors(specs: list[PartitionSpec], expected: dict[str, tuple[str, ...]]) -> None:
    operands = [*specs, P(), P()][: max(2, len(specs))]
    assert FactorLayout.from_specs(PAIR, operands, SIZES).axes == expected


def test_unsharded_factors() -> None:
    fit = fit_of('b _ c -> k b', (8, 8, 8), results=((4, 8),), need_replication_factors=('c',))
    layout = FactorLayout.from_specs(fit, [P('x', 'y', 'z'), P('z')], {'x': 2, 'y': 2, 'z': 2})
    assert layout.axes == {'b': ('x',)}
    assert [layout.spec(factors) for factors in (*fit.operands, *fit.results)] == [P('x'), P(None, 'x')]


def test_the_rule_for_the_compiler() -> None:
    fit = fit_of('a b c, _ 1 -> a b k', (2, 3, 4), (5, 1), results=((2, 3, 6),), reduction_factors=('c',))
    assert fit.shardy_rule() == (
        'f0 f1 f2, n0 n1 -> f0 f1 f3',
        {'reduction_factors': ('f2',), 'need_replication_factors': ('f3', 'n0', 'n1')},
    )
    mapped = fit.batched([False, True], 7).batched([True, True], 9)
    assert mapped.shardy_rule()[0] == 'f0 f2 f3 f4, f0 f1 n0 n1 -> f0 f1 f2 f3 f5'
    assert list(mapped.sizes.values()) == [9, 7, 2, 3, 4, 6]
