"""Assertions about sharded programs, for tests: their values, collectives, compilations and shardings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.sharding import NamedSharding

from scalax._compile.call.placement_errors import describe_difference
from scalax._compile.call.signature import name_of
from scalax._compile.sjit.function import helper_of
from scalax._core.context.active_helper import MeshOwner
from scalax._core.pytree.paths import NamedTree
from scalax._jax.events import compilations_of
from scalax._planning.cost.collective_instances import KINDS
from scalax._planning.program.exactness import Exactness
from scalax._planning.report.make_plan import make_plan
from scalax._verification.report import Ablation, Argument, Difference, FirstDifference, VerificationReport
from scalax._verification.verify import verify
from scalax.errors import ArgumentError, did_you_mean, plural, shown, shown_leaves
from scalax.rules import RuleLike
from scalax.rules._resolve import resolve

__all__ = [
    'Ablation',
    'Argument',
    'Difference',
    'FirstDifference',
    'VerificationReport',
    'assert_collectives',
    'assert_equal_to_one_device',
    'assert_no_recompile',
    'assert_sharded_like',
]

Expected = int | Mapping[str | tuple[str, ...], int]


def assert_collectives(
    fun: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    helper: MeshOwner | None = None,
    **expected: Expected,
) -> None:
    """Asserts how often a compiled function executes collectives. The function is not run.

    Args:
        fun: a function of `sjit`, or, with *helper*, of ``jax.jit``.
        *args: its arguments, which may be ``jax.ShapeDtypeStruct``.
        kwargs: its keyword arguments, as a dict.
        helper: the helper of its mesh. Required for functions of ``jax.jit``.
        **expected: how often each kind of collective executes in one call: a number, or a dict from a mesh
            axis (or a tuple of axes) to a number. The kinds are ``all_gather``, ``all_reduce``,
            ``reduce_scatter``, ``all_to_all``, ``collective_permute``, ``collective_broadcast`` and
            ``ragged_all_to_all``. Kinds, or axes of a dict, that are not listed are not checked.

    Raises:
        AssertionError: collectives execute more or less often than expected, or in a loop with an unknown
            trip count. The message lists all collectives with their source lines. Also raised if the program
            runs on one device, because no argument or output has a sharding.
        ArgumentError: a kind or a mesh axis is unknown, nothing is expected, or the helper is missing.

    Example:
        >>> import numpy as np
        >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
        >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
        >>> @helper.sjit(in_shardings=PartitionSpec('fsdp'), out_shardings=PartitionSpec())
        ... def total(x):
        ...     return x.sum()
        >>> assert_collectives(total, np.ones(8), all_reduce={'fsdp': 1}, all_gather=0)
    """
    helper = helper or _owner(fun, 'assert_collectives')
    kinds = {kind.replace('-', '_'): kind for kind in KINDS}
    for name in expected:
        if name not in kinds:
            raise ArgumentError(
                f'assert_collectives: there is no collective {name!r} ({did_you_mean(name, kinds)}); the '
                "function's own keyword arguments go into kwargs={...}"
            )
    if not expected:
        raise ArgumentError(f'assert_collectives: nothing is expected; name some of {", ".join(kinds)}')
    plan = make_plan(helper, fun, args, kwargs or {})
    if plan.devices < helper.mesh.size:
        raise AssertionError(
            f'{plan.name} runs on {plan.devices} of {helper.mesh.size} devices, so nothing is sent: '
            'neither arguments nor outputs have shardings (in_shardings=..., or placed arguments)'
        )
    wrong = []
    for name, counts in expected.items():
        for axes, count in counts.items() if isinstance(counts, Mapping) else [(None, counts)]:
            axis_names = (axes,) if isinstance(axes, str) else axes
            actual_count = plan.count(kinds[name], axis_names)
            inexact = [
                row
                for row in plan.collectives
                if row.kind == kinds[name]
                and row.exactness is not Exactness.EXACT
                and (axis_names is None or set(axis_names) == set(row.axes))
            ]
            if actual_count != count or inexact:
                along = '' if axis_names is None else f' along {", ".join(axis_names)}'
                exactness = f' (known: {inexact[0].exactness.value})' if inexact else ''
                wrong.append(f'{kinds[name]}{along}: {actual_count}{exactness}, expected {count}')
    if wrong:
        lines = (
            f'{row.count} x {row.kind} along {", ".join(row.axes)}, {row.bytes:,} bytes: {row.source}'
            for row in plan.collectives
        )
        listed = shown(lines) or '  none'
        raise AssertionError(
            f'{plan.name} runs other collectives than expected:\n{shown(wrong)}\nAll of its collectives:\n'
            f'{listed}'
        )


def assert_equal_to_one_device(
    fun: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    helper: MeshOwner | None = None,
    seeds: int = 3,
    steps: int = 2,
) -> None:
    """Asserts that a step gives the same results on its mesh as on one device.

    Args:
        fun: a function of `sjit`; or, with *helper*, a function of ``jax.jit``, or, without *args*, a
            function that returns a step and its arguments for a helper.
        *args: its arguments, as for `MeshShardingHelper.verify`.
        kwargs: its keyword arguments, as a dict.
        helper: the helper of its mesh. Required for other functions than those of `sjit`.
        seeds: the number of sets of arguments.
        steps: the number of steps in a row.

    Raises:
        AssertionError: results differ, or have no finite values to compare. The message is the report.
        ArgumentError: the helper is missing; or as for `MeshShardingHelper.verify`.

    Example:
        >>> import jax
        >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
        >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
        >>> @helper.sjit(in_shardings=(PartitionSpec(None, 'tp'), PartitionSpec('fsdp')))
        ... def layer(w, x):
        ...     return jax.nn.relu(x @ w)
        >>> w, x = jax.ShapeDtypeStruct((16, 32), 'float32'), jax.ShapeDtypeStruct((8, 16), 'float32')
        >>> assert_equal_to_one_device(layer, w, x)
    """
    helper = helper or _owner(fun, 'assert_equal_to_one_device')
    report = verify(helper, fun, args, kwargs or {}, seeds=seeds, steps=steps)
    if report.interrupted:  # `verify` returns a partial report after Ctrl-C, which has to end the other tests
        raise KeyboardInterrupt
    if not report.ok:
        raise AssertionError(str(report))


def _owner(fun: Callable[..., Any], caller: str) -> MeshOwner:
    if (owner := helper_of(fun)) is None:
        raise ArgumentError(f'{caller}: give helper=..., because sjit did not make the function')
    return owner


@contextlib.contextmanager
def assert_no_recompile(fun: Callable[..., Any]) -> Iterator[None]:
    """Asserts that the calls of a function in a ``with`` block, in this thread, compile nothing.

    Args:
        fun: a function of `sjit` or ``jax.jit``. Its compilations are recognized by its name, so it needs a
            unique name. (All lambdas have the same name.)

    Raises:
        ArgumentError: *fun* is not such a function.
        AssertionError: the function was compiled. The message contains how often.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> double = jax.jit(lambda x: 2 * x)
        >>> x = double(np.ones(3))
        >>> with assert_no_recompile(double):
        ...     x = double(np.zeros(3))
    """
    name = name_of(fun)
    if not hasattr(fun, 'lower'):
        raise ArgumentError(
            f'assert_no_recompile: neither sjit nor jax.jit made {name}; what it calls has names of its own'
        )
    with compilations_of(name) as compiled:
        yield
    if compiled:
        raise AssertionError(
            f'{name} was compiled {plural(len(compiled), "more time")}: a shape, dtype, weak '
            'type, static value or sharding was new, or a value was on other devices than in earlier calls '
            "(jax.config.update('jax_explain_cache_misses', True) logs which)"
        )


def assert_sharded_like(tree: Any, rules: RuleLike, helper: MeshOwner | None = None) -> None:
    """Asserts that arrays are sharded as rules specify.

    Args:
        tree: a tree of jax.Arrays, or of other objects with shardings.
        rules: as for ``helper.match_sharding_rule``.
        helper: the helper of the mesh of the rules. By default, the mesh of the arrays.

    Raises:
        AssertionError: some leaves have other shardings. The message lists all of them.
        ShardingError: some leaves cannot be sharded as the rules specify.

    Example:
        >>> import numpy as np
        >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
        >>> helper = MeshShardingHelper([-1], ['data'])
        >>> assert_sharded_like(helper.shard(np.ones(8), PartitionSpec('data')), PartitionSpec('data'))
    """
    named = NamedTree.of(tree)
    actual = [getattr(leaf, 'sharding', None) for leaf in named.leaves]
    meshes = [sharding.mesh for sharding in actual if isinstance(sharding, NamedSharding)]
    if helper is None and not meshes and len(named):
        raise AssertionError(f'no leaf is on a mesh:\n{shown_leaves(map(named.describe, range(len(named))))}')
    if not len(named):
        return
    mesh = meshes[0] if helper is None else helper.mesh
    expected = resolve(
        rules, tree, mesh, on_indivisible='error' if helper is None else helper.on_indivisible
    ).shardings
    wrong = [
        f'{named.describe(i)} {_difference(sharding, target)}'
        for i, (sharding, target) in enumerate(zip(actual, expected, strict=True))
        if target is not None
        and (sharding is None or not sharding.is_equivalent_to(target, len(named.shapes[i])))
    ]
    if wrong:
        raise AssertionError(f'arrays are not sharded as the rules specify:\n{shown_leaves(wrong)}')


def _difference(actual: Any, expected: Any) -> str:
    actual_text, expected_text = describe_difference(actual, expected)
    if actual is None:
        return f'has no sharding: it is not an array on devices; expected {expected_text}'
    return f'is sharded as {actual_text}, expected {expected_text}'
