"""Errors of sharded operations, which are raised before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax.custom_op import FactorContext, sharded_op
from scalax.errors import ArgumentError, RuleError, ScalaxError
from tests.support.snapshots import Snapshot

Array = jax.Array
NUMBERS = np.ones((4, 6), np.float32)


def message(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# --- The rule --------------------------------------------------------------------------------------

RULES: list[tuple[str, dict[str, Any]]] = [
    ('b c, -> b', {}),
    ('b c', {}),
    ('b -> b -> b', {}),
    ('b, (h d) -> b', {}),
    ('b, c c -> b c', {}),
    ('b, c? -> b c', {}),
    ('b, ... c -> b c', {}),
    ('b c -> b, b c', {'reduction_factors': ('c',)}),
    ('batch c -> batch', {'reduction_factors': ('bath',)}),
    ('b c -> b', {'need_replication_factors': 'c'}),
]


@pytest.mark.parametrize(('rule', 'options'), RULES, ids=[rule for rule, _ in RULES])
def test_invalid_rules(rule: str, options: dict[str, Any], snapshot: Snapshot) -> None:
    snapshot(message(RuleError, lambda: sharded_op(rule, **options)))


def test_no_rule_at_all() -> None:
    def total(ctx: FactorContext, x: Array) -> Array:
        return x

    wrong: Any = total  # as a decorator without arguments gives it
    assert (
        message(RuleError, lambda: sharded_op(wrong))
        == "sharded_op takes a rule first, such as @sharded_op('b c, -> b'), got function"
    )


def test_a_function_without_the_operands(snapshot: Snapshot) -> None:
    def total(ctx: FactorContext, x: Array) -> Array:
        return x

    snapshot(message(RuleError, lambda: sharded_op('b c, -> b c')(total)))


# --- The operands ----------------------------------------------------------------------------------


@sharded_op('b c, b -> b', reduction_factors=('c',))
def weighted(ctx: FactorContext, x: Array, weights: Array) -> Array:
    return weights * ctx.psum(x.sum(axis=-1), 'c')


@sharded_op('b 3 c, c -> b c')
def many(ctx: FactorContext, x: Array, scale: Array, *, power: int = 1) -> Array:
    return (x[:, 0] * scale) ** power


OPERANDS: list[tuple[str, Callable[[], Any]]] = [
    ('two sizes', lambda: weighted(NUMBERS, np.ones(3))),
    ('a rank', lambda: weighted(np.ones((2, 3, 4)), np.ones(3))),
    ('a size', lambda: many(np.ones((5, 4, 2)), np.ones(7))),
    ('too few', lambda: weighted(NUMBERS)),
    ('a tree', lambda: weighted((NUMBERS, NUMBERS), np.ones(4))),
    ('by name', lambda: weighted(NUMBERS, weights=np.ones(4))),
]


@pytest.mark.parametrize('call', [call for _, call in OPERANDS], ids=[name for name, _ in OPERANDS])
def test_operands_that_do_not_fit(call: Callable[[], Any], snapshot: Snapshot) -> None:
    snapshot(message(ArgumentError, call))


# --- The function ----------------------------------------------------------------------------------


def op(rule: str, fun: Callable[..., Any], **options: Any) -> Any:
    fun.__name__ = 'total'
    return sharded_op(rule, **options)(fun)


def test_another_number_of_results(snapshot: Snapshot) -> None:
    pair = op('b c -> b c, b c', lambda ctx, x: x)
    snapshot(message(RuleError, lambda: pair(NUMBERS)))


def test_results_of_another_shape(snapshot: Snapshot) -> None:
    turned = op('b c -> c b, b', lambda ctx, x: (x, x))
    snapshot(message(RuleError, lambda: turned(NUMBERS)))


def test_blocks_of_another_shape(snapshot: Snapshot) -> None:
    # The sizes are equal, so that only the trace on blocks shows the mistake.
    turned = op('b c -> c b', lambda ctx, x: x)
    snapshot(message(RuleError, lambda: turned(np.ones((4, 4)))))


def test_a_factor_that_is_neither_reduced_nor_kept(snapshot: Snapshot) -> None:
    forgotten = op('b c -> b', lambda ctx, x: x.sum(axis=-1), reduction_factors=('c',))
    snapshot(message(RuleError, lambda: forgotten(NUMBERS)))


def test_results_that_are_not_arrays() -> None:
    for returned, kind in ((None, 'NoneType'), ({'a': 1}, 'dict')):
        wrong = op('b -> b', lambda ctx, x, *, returned=returned: returned)
        assert message(RuleError, lambda wrong=wrong: wrong(np.ones(2))) == (
            f'total: the function returns one array, or a tuple of arrays, got {kind}'
        )


def test_a_factor_that_is_never_combined(snapshot: Snapshot) -> None:
    forgotten = op('b c -> b', lambda ctx, x: x.sum(axis=-1), reduction_factors=('c',), check_vma=False)
    snapshot(message(RuleError, lambda: forgotten(NUMBERS)))


def test_an_incomplete_reduction_is_detected() -> None:
    # The maximum is combined but the sum is not, so a check for any collective would not be enough.
    def total(ctx: FactorContext, x: Array) -> Array:
        top = ctx.pmax(x.max(axis=-1), 'c')
        return top + jnp.log(jnp.exp(x - top[:, None]).sum(axis=-1))

    half = op('b c -> b', total, reduction_factors=('c',))
    assert 'result 0 still differs between its blocks' in message(RuleError, lambda: half(NUMBERS))


def test_a_result_that_depends_on_the_index_of_the_block() -> None:
    which = op('b c -> b', lambda ctx, x: x[:, 0] * 0 + ctx.index('c'), reduction_factors=('c',))
    assert 'result 0 still differs between its blocks' in message(RuleError, lambda: which(NUMBERS))


def test_a_function_that_fails_on_blocks_names_the_block(snapshot: Snapshot) -> None:
    def total(ctx: FactorContext, x: Array) -> Array:
        if x.shape[1] != 6:
            raise ValueError('six columns, please')
        return x

    with pytest.raises(ValueError, match='six columns') as caught:
        op('b c -> b c', total)(NUMBERS)
    snapshot(caught.value.__notes__[0])


def test_an_unknown_factor() -> None:
    misspelt = op('batch c -> batch c', lambda ctx, x: ctx.psum(x, 'bath'))
    assert (
        message(RuleError, lambda: misspelt(NUMBERS))
        == "ctx: the rule has no factor 'bath' (did you mean 'batch'?)"
    )


def test_nothing_is_compiled_before() -> None:
    compiled: list[str] = []

    def listen(event: str, duration: float, **metadata: str | int) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        forgotten = op('b c -> b', lambda ctx, x: x.sum(axis=-1), reduction_factors=('c',))
        with pytest.raises(ScalaxError):
            forgotten(NUMBERS)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled
    assert not [event for event in compiled if 'backend_compile' in event]


def test_an_array_that_depends_on_blocks() -> None:
    def total(ctx: FactorContext, x: Array) -> Array:
        return x + np.arange(x.shape[1], dtype=np.float32) * 2.5

    mesh = Mesh(np.array(jax.devices()[:2]), ('x',))
    x = jax.device_put(NUMBERS, NamedSharding(mesh, PartitionSpec(None, 'x')))
    with pytest.raises(Exception, match='outside JAX depends on its blocks') as caught:
        op('b c -> b c', total)(x)
    assert (
        'an array (float32[3]) that the function of a sharded_op creates outside JAX depends on its '
        'blocks: compute it with jax.numpy from ctx.index and ctx.size, or make it an operand'
    ) in str(caught.value)


# --- The gradient ----------------------------------------------------------------------------------


def test_defvjp() -> None:
    double = op('b c, b -> b c', lambda ctx, x, n: 2 * x)
    labels = np.arange(4)
    double.defvjp(double, lambda x, n, g: (2 * g, g))
    assert message(ArgumentError, lambda: jax.grad(lambda x: double(x, labels).sum())(NUMBERS)) == (
        'total.defvjp: backward has to return one cotangent for each floating-point operand (x), got 2'
    )
