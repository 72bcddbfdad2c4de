"""The numbers of traces and compilations, compared with ``jax.jit`` with the same shardings."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from scalax.errors import PlacementError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
HELPERS = {
    'auto': MeshShardingHelper([4, 2], ['data', 'model']),
    'explicit': MeshShardingHelper([4, 2], ['data', 'model'], axis_types=EXPLICIT),
    'mixed': MeshShardingHelper([4, 2], ['data', 'model'], axis_types=[EXPLICIT, AUTO]),
}
X = np.arange(64, dtype=np.float32).reshape(8, 8)
ROWS, COLUMNS = P('data'), P(None, 'model')
OTHER = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(EXPLICIT, EXPLICIT))
each_mesh = pytest.mark.parametrize('helper', HELPERS.values(), ids=HELPERS)
each_donation = pytest.mark.parametrize('donated', [False, True], ids=['kept', 'donated'])

ARRIVALS: dict[str, Callable[[MeshShardingHelper], Any]] = {
    'numpy': lambda helper: X,
    'number': lambda helper: 2.5,
    'uncommitted': lambda helper: jnp.asarray(X),
    'one device': lambda helper: jax.device_put(X, jax.devices()[3]),
    'placed': lambda helper: jax.device_put(X, NamedSharding(helper.mesh, ROWS)),
    'elsewhere': lambda helper: jax.device_put(X, NamedSharding(helper.mesh, COLUMNS)),
    'typed': lambda helper: jax.device_put(X, NamedSharding(OTHER, ROWS)),
}
SEQUENCES = [
    *itertools.product(['numpy', 'uncommitted', 'placed'], repeat=3),
    *([name] * 3 for name in ('number', 'one device', 'elsewhere', 'typed')),
    *itertools.permutations(['typed', 'uncommitted', 'placed'], 3),
    ('placed', 'elsewhere', 'placed'),
    ('uncommitted', 'one device', 'numpy'),
    ('numpy', 'number', 'numpy'),
]


@dataclasses.dataclass
class Counts:
    """The numbers of traces and compilations of a function so far."""

    traces: int = 0
    compilations: int = 0


@contextlib.contextmanager
def counted(name: str) -> Iterator[tuple[Counts, Callable[[Any], Any]]]:
    """Yields a function with this name, and counts its traces and compilations."""
    counts = Counts()

    def function(x: Any) -> Any:
        counts.traces += 1
        return x * 2

    def listen(event: str, seconds: float, **metadata: str | int) -> None:
        compiled = event == '/jax/core/compile/backend_compile_duration'
        counts.compilations += compiled and metadata.get('fun_name') in (name, f'jit({name})')

    function.__name__ = function.__qualname__ = name
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts, function
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def called(compiled: Any, arguments: Sequence[Any], counts: Counts) -> list[tuple[int, Any]]:
    """Returns for each call the compilations so far, and the sum of the result or the class of the error."""
    outcomes: list[tuple[int, Any]] = []
    for x in arguments:
        try:
            outcome: Any = float(compiled(x).sum())
        except ValueError as error:
            outcome = type(error)
        outcomes.append((counts.compilations, outcome))
    return outcomes


def compared(
    helper: MeshShardingHelper, spec: P, donated: bool, arrivals: Sequence[str], on_mismatch: str
) -> tuple[Counts, list[tuple[int, Any]], list[tuple[int, Any]]]:
    """Returns the counts of sjit for a sequence of calls, its outcomes, and the outcomes of ``jax.jit``."""
    sharding = NamedSharding(helper.mesh, spec)
    options: dict[str, Any] = {'donate_argnums': 0} if donated else {}

    def arguments() -> list[Any]:
        return [ARRIVALS[name](helper) for name in arrivals]

    with counted('jitted') as (counts, function):
        by_hand = jax.jit(function, in_shardings=sharding, out_shardings=sharding, **options)
        jit_arguments = arguments()
        if on_mismatch == 'reshard':
            moved = {'one device', 'elsewhere'}
            jit_arguments = [
                jax.device_put(x, sharding) if name in moved else x
                for name, x in zip(arrivals, jit_arguments, strict=True)
            ]
        jit_outcomes = called(by_hand, jit_arguments, counts)
    with counted('sjitted') as (counts, function):
        compiled = helper.sjit(
            function, in_shardings=spec, out_shardings=spec, on_mismatch=on_mismatch, **options
        )
        sjit_outcomes = called(compiled, arguments(), counts)
    return counts, sjit_outcomes, jit_outcomes


@pytest.mark.medium
@pytest.mark.sampled(11)
@each_mesh
@each_donation
@pytest.mark.parametrize('arrivals', SEQUENCES, ids=' '.join)
def test_no_sequence_of_calls_compiles_more_often(helper, donated, arrivals):
    if 'number' in arrivals and donated:
        pytest.skip('a number has no buffer to donate')
    spec = P() if 'number' in arrivals else ROWS
    for on_mismatch in ['error', 'reshard'] if {'one device', 'elsewhere'} & set(arrivals) else ['error']:
        counts, sjit_outcomes, jit_outcomes = compared(helper, spec, donated, arrivals, on_mismatch)
        for (count, outcome), (by_hand, expected) in zip(sjit_outcomes, jit_outcomes, strict=True):
            assert count <= by_hand
            assert outcome == (PlacementError if expected is ValueError else expected)
        signatures = len({name == 'number' for name in arrivals})
        assert counts.traces <= signatures


@pytest.mark.medium
@each_mesh
@each_donation
def test_replicated_arguments_are_accepted_from_any_devices(helper, donated):
    for arrivals in (['one device'] * 3, ['one device', 'numpy', 'one device']):
        counts, sjit_outcomes, jit_outcomes = compared(helper, P(), donated, arrivals, 'error')
        assert [outcome for _, outcome in sjit_outcomes] == [X.sum() * 2] * 3
        assert all(
            count <= by_hand for (count, _), (by_hand, _) in zip(sjit_outcomes, jit_outcomes, strict=True)
        )
        assert counts.traces == 1


@pytest.mark.medium
@pytest.mark.sampled(3)
@each_mesh
@each_donation
@pytest.mark.parametrize('typed', [False, True], ids=['struct', 'struct with a sharding'])
def test_ahead_of_time_compilation_and_calls(helper, donated, typed):
    options: dict[str, Any] = {'donate_argnums': 0} if donated else {}
    struct, sharding = jax.ShapeDtypeStruct(X.shape, X.dtype), NamedSharding(helper.mesh, ROWS)
    typed_struct = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)
    with counted('jitted') as (jit_counts, function):
        by_hand = jax.jit(function, in_shardings=sharding, out_shardings=sharding, **options)
        by_hand.lower(typed_struct if typed or helper is not HELPERS['auto'] else struct).compile()
        called(by_hand, [ARRIVALS['placed'](helper)] * (1 if donated else 3), jit_counts)
    with counted('sjitted') as (sjit_counts, function):
        compiled = helper.sjit(function, in_shardings=ROWS, out_shardings=ROWS, **options)
        executable = compiled.lower(typed_struct if typed else struct).compile()
        assert float(executable(ARRIVALS['placed'](helper)).sum()) == X.sum() * 2
        called(compiled, [ARRIVALS['placed'](helper) for _ in range(3)], sjit_counts)
    assert sjit_counts.traces == 1
    assert sjit_counts.compilations <= jit_counts.compilations


@pytest.mark.medium
@each_mesh
def test_arguments_with_different_placements(helper):
    """A training step with a placed state, a batch on the host, and an uncommitted key."""
    state = helper.shard({'w': X}, ROWS)
    with counted('sjitted') as (counts, _):

        def sjitted(state, batch, key):
            counts.traces += 1
            noise = jax.random.normal(key, batch.shape)
            return jax.tree.map(lambda leaf: leaf + (batch + noise).mean(0), state)

        options: dict[str, Any] = {'in_shardings': (ROWS, ROWS, P()), 'out_shardings': ROWS}
        step = helper.sjit(sjitted, **options, donate_argnums=0)
        for i in range(4):
            state = step(state, X, jax.random.key(i))
    assert dataclasses.astuple(counts) == (1, 1)


@pytest.mark.medium
@each_mesh
def test_sjit_of_the_same_function_and_options_again(helper):
    with counted('sjitted') as (counts, function):
        for _ in range(5):
            helper.sjit(function, in_shardings=ROWS)(X)
        assert dataclasses.astuple(counts) == (1, 1)
        helper.sjit(function, in_shardings=COLUMNS)(X)
        assert dataclasses.astuple(counts) == (2, 2)
