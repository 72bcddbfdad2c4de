"""Assertions for tests of sharded programs: values, collectives, compilations and shardings."""

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
    """Asserts how often a function's compiled program runs which collectives; nothing is run.

    Args:
        fun: a function that `sjit` made; with *helper* also one of ``jax.jit``.
        *args: its arguments, which may be ``jax.ShapeDtypeStruct``.
        kwargs: its keyword arguments, as a dict.
        helper: the helper of its mesh, if `sjit` did not make it.
        **expected: for each kind that is checked (``all_gather``, ``all_reduce``, ``reduce_scatter``,
            ``all_to_all``, ``collective_permute``, ``collective_broadcast``, ``ragged_all_to_all``), how
            often it runs in one call: a number, or mesh axis (or tuple of axes) -> number. Other kinds,
            and with a mapping other axes, are not checked.

    Raises:
        AssertionError: they run more or less often, or in a loop of unknown length; lists them with their
            lines. Also if the program runs on one device, because no argument or output has a sharding.
        ArgumentError: an unknown kind or mesh axis, nothing expected, or no helper.

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
            named = (axes,) if isinstance(axes, str) else axes
            found = plan.count(kinds[name], named)
            vague = [
                row
                for row in plan.collectives
                if row.kind == kinds[name]
                and row.exactness is not Exactness.EXACT
                and (named is None or set(named) == set(row.axes))
            ]
            if found != count or vague:
                along = '' if named is None else f' along {", ".join(named)}'
                known = f' (known: {vague[0].exactness.value})' if vague else ''
                wrong.append(f'{kinds[name]}{along}: {found}{known}, expected {count}')
    if wrong:
        rows = (
            f'{row.count} x {row.kind} along {", ".join(row.axes)}, {row.bytes:,} bytes: {row.source}'
            for row in plan.collectives
        )
        listed = shown(rows) or '  none'
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
    """Asserts that a step computes on its mesh what it computes on one device.

    Args:
        fun: a function that `sjit` made; with *helper* also one of ``jax.jit``, or, without arguments, what
            makes a step and its arguments for a helper.
        *args: its arguments, as for `MeshShardingHelper.verify`.
        kwargs: its keyword arguments, as a dict.
        helper: the helper of its mesh, if `sjit` did not make it.
        seeds: the number of sets of arguments that it runs with.
        steps: the number of steps that run in a row.

    Raises:
        AssertionError: results differ, or had no finite value to compare; the message is the report.
        ArgumentError: no helper; or as for `MeshShardingHelper.verify`.

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
    found = verify(helper, fun, args, kwargs or {}, seeds=seeds, steps=steps)
    if found.interrupted:  # the report is of use to nobody here, and the other tests are to end, too
        raise KeyboardInterrupt
    if not found.ok:
        raise AssertionError(str(found))


def _owner(fun: Callable[..., Any], caller: str) -> MeshOwner:
    if (owner := helper_of(fun)) is None:
        raise ArgumentError(f'{caller}: give helper=..., because sjit did not make the function')
    return owner


@contextlib.contextmanager
def assert_no_recompile(fun: Callable[..., Any]) -> Iterator[None]:
    """A context in which calls of a function in this thread must not compile anything.

    Args:
        fun: a function that `sjit` or ``jax.jit`` made. Compilations are recognised by its name: give it one
            (all lambdas share theirs).

    Raises:
        ArgumentError: another function.
        AssertionError: it was compiled; the message gives how often.

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
        tree: jax.Arrays, or anything else with shardings.
        rules: as for ``helper.match_sharding_rule``.
        helper: the helper of the mesh that the rules are for; by default the mesh of the arrays is used.

    Raises:
        AssertionError: some leaves are sharded otherwise; all of them are named.
        ShardingError: the rules do not fit the tree.

    Example:
        >>> import numpy as np
        >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
        >>> helper = MeshShardingHelper([-1], ['data'])
        >>> assert_sharded_like(helper.shard(np.ones(8), PartitionSpec('data')), PartitionSpec('data'))
    """
    named = NamedTree.of(tree)
    has = [getattr(leaf, 'sharding', None) for leaf in named.leaves]
    meshes = [sharding.mesh for sharding in has if isinstance(sharding, NamedSharding)]
    if helper is None and not meshes and len(named):
        raise AssertionError(f'no leaf is on a mesh:\n{shown_leaves(map(named.describe, range(len(named))))}')
    if not len(named):
        return
    mesh = meshes[0] if helper is None else helper.mesh
    expected = resolve(
        rules, tree, mesh, on_indivisible='error' if helper is None else helper.on_indivisible
    ).shardings
    wrong = [
        f'{named.describe(i)} {_difference(mine, theirs)}'
        for i, (mine, theirs) in enumerate(zip(has, expected, strict=True))
        if theirs is not None and (mine is None or not mine.is_equivalent_to(theirs, len(named.shapes[i])))
    ]
    if wrong:
        raise AssertionError(f'arrays are not sharded as the rules specify:\n{shown_leaves(wrong)}')


def _difference(mine: Any, theirs: Any) -> str:
    if mine is None:
        return (
            f'has no sharding: it is not an array on devices; expected {describe_difference(mine, theirs)[1]}'
        )
    return 'is sharded as {}, expected {}'.format(*describe_difference(mine, theirs))
