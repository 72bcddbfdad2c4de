"""The batch among the arguments of a call, or the reason why the call is not partitioned along a batch.

If the user does not name the batch, it is inferred: a batch is an argument that is sharded by specs alone,
because rules, which look at paths or shapes, place state. Among several such arguments, the donated ones may
be state, so the others are the batch. If all of them are donated, all of them are the batch. A function
without such an argument may make its batch itself, and shard it by a constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from scalax._compile.call.call_key import Call, Shardings
from scalax._compile.call.resolve_arguments import FunctionRules
from scalax._compile.call.signature import EXTRA_KEYWORDS
from scalax._core.pytree.partition_specs import spec_axes
from scalax._core.pytree.paths import optional_path
from scalax._jaxpr.dim_sharding import UNSHARDED, DimSharding, axes_of, of_sharding, only_along, without
from scalax._spmd.batch.batch_arguments import BatchArguments
from scalax._spmd.batch.batch_sources import batch_sources
from scalax.errors import ArgumentError
from scalax.rules._rule import is_rule

_EXPLICIT = 'on Explicit mesh axes, shardings are part of types'
_SPECS_ALONE = 'specs place all arguments, and batch_argnums does not name the batch among them'
_TURNED_OFF = 'partition_batch=False of the helper turns it off'
_NOT_SHARDED = 'no array in the arguments of batch_argnums or batch_argnames is sharded over several devices'
_ONE_DEVICE = 'the mesh axes of its specs have one device'
_NO_BATCH = (
    'no argument looks like a batch (sharded by a spec, while a rule shards another argument), and no '
    'constraint in the function shards a batch that it makes'
)
TENSOR_PARALLEL = 'constraints in the function move all mesh axes of its batch to the features of weights'
_NAME_IT = 'name the batch: batch_argnums=1, or batch_argnames'
_REMEDIES = {
    _EXPLICIT: 'make a mesh of Auto axes',
    _SPECS_ALONE: _NAME_IT,
    _TURNED_OFF: _NAME_IT,
    _NOT_SHARDED: 'shard them over mesh axes of several devices',
    _NO_BATCH: f'{_NAME_IT}; or shard it by with_sharding_constraint where the function makes it',
}


def find_batch(rules: FunctionRules, call: Call, shardings: Shardings) -> BatchArguments | None:
    """Returns which arguments of a call are its batch, or None if none is.

    Args:
        rules: the rules of the function.
        call: the call.
        shardings: the shardings of the arguments inside the function.

    Raises:
        ArgumentError: an argument that the user names as a batch has no sharding.
    """
    if rules.any_explicit:  # types hold the shardings of all values
        return None
    if not rules.signature.has_explicit_batch:
        return _batch_arguments(call, shardings, _inferred_batch(rules, call))
    is_batch = _explicit_batch(rules, call)
    _reject_unsharded(rules, call, is_batch, shardings)
    return _batch_arguments(call, shardings, is_batch)


def batch_axes(shardings: Sequence[DimSharding]) -> frozenset[str]:
    """Returns the mesh axes of a batch: the axes that shard a dimension which all arrays of the batch have.

    For example, the axis that shards the heads of a KV cache is not an axis of the batch, because tokens have
    no heads. Axes that shard one dimension together form a group. A group counts if each array has a
    dimension that is sharded by an axis of the group. If no group counts, all axes are axes of the batch.

    Args:
        shardings: the sharding of each sharded array of the batch.
    """
    groups = list[set[str]]()  # groups of axes that shard one dimension together
    for axes in [axes for sharding in shardings for axes in sharding if axes]:
        overlapping = [group for group in groups if not group.isdisjoint(axes)]
        groups = [group for group in groups if group.isdisjoint(axes)] + [set(axes).union(*overlapping)]
    shared = [group for group in groups if all(group & axes_of(sharding) for sharding in shardings)]
    return frozenset().union(*(shared or groups))


def batch_paths(call: Call, batch: BatchArguments | None) -> list[str]:
    """Returns the paths of the arguments that hold the batch of a call.

    Args:
        call: the call.
        batch: its batch. It has no paths if the function makes it.
    """
    if batch is None:
        return []
    leaf_paths = [path for i, path in enumerate(call.leaf_paths) if batch.example_dim(i) is not None]
    paths = [call.layout.paths[slot] or optional_path(path[:1]) or '' for slot, path in leaf_paths]
    return [*dict.fromkeys(paths)]


def why_not_partitioned(rules: FunctionRules, call: Call) -> tuple[str, str]:
    """Returns why a call without a batch has none, and what the user can do about it, which may be ''.

    Args:
        rules: the rules of the function.
        call: the call.
    """
    reason = _why_no_batch(rules, call)
    return reason, _REMEDIES.get(reason, '')


def _why_no_batch(rules: FunctionRules, call: Call) -> str:
    if rules.any_explicit:
        return _EXPLICIT
    if jax.config.jax_disable_jit:
        return 'jax.disable_jit is active'
    if rules.signature.disables_batch:
        return 'batch_argnums=() turns it off'
    if rules.signature.has_explicit_batch:
        return _NOT_SHARDED
    if any(_inferred_batch(rules, call)) and not rules.partition_batch:
        return _TURNED_OFF
    specified = [slot_rules for slot_rules in _rules_by_slot(rules, call).values() if slot_rules]
    sharding = [slot_rules for slot_rules in specified if any(map(_axes_of_spec, slot_rules))]
    axes = {axis for slot_rules in sharding for rule in slot_rules for axis in _axes_of_spec(rule)}
    if axes and all(rules.mesh.shape[axis] == 1 for axis in axes):
        return _ONE_DEVICE
    if len(sharding) > 1 and all(map(_are_specs, specified)):
        return _SPECS_ALONE
    return _NO_BATCH


def find_batch_made_inside(call: Call, shardings: Shardings, jaxpr: Any) -> BatchArguments | None:
    """Returns the batch arguments of a function that makes its batch itself, or None if it makes none.

    No argument is a batch then, but the axes of the batch may shard arguments.

    Args:
        call: the call.
        shardings: the shardings of the arguments inside the function.
        jaxpr: the jaxpr of the function.
    """
    dim_shardings = _dim_shardings(call, shardings)
    sources = batch_sources(jaxpr, [any(sharding) for sharding in dim_shardings])
    axes = frozenset([axis for source in sources for axis in source.axes])
    if not axes:
        return None
    return BatchArguments(
        [without(sharding, axes) for sharding in dim_shardings],
        [only_along(sharding, axes) for sharding in dim_shardings],
        axes,
    )


def without_batch_axes(
    call: Call, batch: BatchArguments, shardings: Shardings, axes: frozenset[str]
) -> BatchArguments | None:
    """Returns a batch without some of its axes; None if no other axes shard it.

    Args:
        call: the call.
        batch: its batch.
        shardings: the shardings of the arguments inside the function.
        axes: the axes that are not batch axes.
    """
    is_batch = [batch.example_dim(i) is not None for i in range(len(call.leaves))]
    return _batch_arguments(call, shardings, is_batch, axes)


def _dim_shardings(call: Call, shardings: Shardings) -> list[DimSharding]:
    return [
        UNSHARDED if sharding is None else of_sharding(sharding, np.ndim(leaf))  # a token has no dimensions
        for leaf, sharding in zip(call.leaves, shardings, strict=True)
    ]


def _batch_arguments(
    call: Call, shardings: Shardings, is_batch: Sequence[bool], excluded: frozenset[str] = frozenset()
) -> BatchArguments | None:
    """Returns the batch arguments for these flags of the leaves, or None if no axis shards the batch.

    Args:
        call: the call.
        shardings: the shardings of its arguments.
        is_batch: for each leaf, whether it is part of the batch.
        excluded: axes that are not batch axes.
    """
    if not any(is_batch):
        return None
    dim_shardings = list(zip(_dim_shardings(call, shardings), is_batch, strict=True))
    axes = batch_axes([sharding for sharding, in_batch in dim_shardings if in_batch and sharding]) - excluded
    if not axes:
        return None
    return BatchArguments(
        [sharding if in_batch else without(sharding, axes) for sharding, in_batch in dim_shardings],
        [UNSHARDED if in_batch else only_along(sharding, axes) for sharding, in_batch in dim_shardings],
        axes,
    )


def _explicit_batch(rules: FunctionRules, call: Call) -> list[bool]:
    """Returns for each leaf whether the user names it as a batch."""
    layout, keywords = call.layout, rules.signature.batch_keywords
    return [
        slot in layout.batch
        or (layout.names[slot] == EXTRA_KEYWORDS and getattr(path[0], 'key', None) in keywords)
        for slot, path in call.leaf_paths
    ]


def _inferred_batch(rules: FunctionRules, call: Call) -> list[bool]:
    """Returns for each leaf whether it is a batch according to the rules."""
    specified = {slot: slot_rules for slot, slot_rules in _rules_by_slot(rules, call).items() if slot_rules}
    by_specs = [slot for slot, slot_rules in specified.items() if _are_specs(slot_rules)]
    if len(by_specs) == len(specified):
        return [False] * len(call.leaves)
    not_donated = [slot for slot in by_specs if slot not in call.layout.donated]
    any_sharded = any(_axes_of_spec(rule) for slot in not_donated for rule in specified[slot])
    batch_slots = not_donated if any_sharded else by_specs
    return [slot in batch_slots for slot, tree in call.treedefs.items() for _ in range(tree.num_leaves)]


def _rules_by_slot(rules: FunctionRules, call: Call) -> dict[int, list[Any]]:
    """Returns the rules and specs of in_shardings and args_sharding_constraint for each dynamic slot."""
    result: dict[int, list[Any]] = {slot: [] for slot in call.layout.dynamic}
    for option in (rules.options.in_shardings, rules.options.args_sharding_constraint):
        if option is not None:
            by_slot = rules.signature.rules_by_slot(option, call.layout, call.flat_args, '', '')
            for slot, tree in by_slot.items():
                result[slot] += [rule for rule in jax.tree.leaves(tree, is_leaf=is_rule) if rule is not None]
    return result


def _are_specs(rules: Sequence[Any]) -> bool:
    return not [rule for rule in rules if not isinstance(rule, PartitionSpec | NamedSharding)]


def _axes_of_spec(rule: Any) -> Sequence[str]:
    """Returns the mesh axes of a spec. Other rules have none."""
    spec = rule.spec if isinstance(rule, NamedSharding) else rule
    return spec_axes(spec) if isinstance(spec, PartitionSpec) else ()


def _reject_unsharded(
    rules: FunctionRules, call: Call, is_batch: Sequence[bool], shardings: Shardings
) -> None:
    """Raises ArgumentError about an argument that the user names as a batch but does not shard."""
    by_slot = call.by_slot(shardings)
    for slot, slot_is_batch in call.by_slot(is_batch).items():
        batch = [sharding for sharding, flag in zip(by_slot[slot], slot_is_batch, strict=True) if flag]
        if not batch or any(sharding is not None and spec_axes(sharding.spec) for sharding in batch):
            continue
        if any(map(_axes_of_spec, _rules_by_slot(rules, call)[slot])):
            continue  # a policy replicates the batch, whose size is not divisible
        axis = next((name for name, size in rules.mesh.shape.items() if size > 1), 'data')
        argument = call.layout.paths[slot] or 'the keywords'
        raise ArgumentError(
            f'{rules.signature.name}: batch_argnums or batch_argnames includes {argument}, but neither '
            'in_shardings nor args_sharding_constraint shards it: pass a spec such as '
            f'PartitionSpec({axis!r}) for it, or leave it out of the batch'
        )
