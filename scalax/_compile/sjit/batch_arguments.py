"""The arguments of a call that are its batch, and why a step is not partitioned along one.

Unless the user says which, a batch is what specs alone shard: state is placed by rules that look at paths or
shapes. Of several such arguments, those that are donated may be state, and the others are the batch; if all
are donated, all are the batch. A step without one may make its batch itself, and shard it by a constraint.
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
from scalax.rules._rule_tree import is_rule

NO_BATCH = (
    'no argument looks like a batch, which is sharded by specs alone, and comes with an argument that a rule '
    'shards; and no constraint in the function shards a batch that it makes'
)
"""Why a step is not partitioned if nothing looks like a batch, as many functions have none."""
_EXPLICIT = 'on Explicit mesh axes, shardings are part of types'
_SPECS_ALONE = 'specs place all arguments, and batch_argnums does not name the batch among them'
_TURNED_OFF = 'partition_batch=False of the helper turns it off'
_NOT_SHARDED = 'no array of the arguments that batch_argnums or batch_argnames names is on several devices'
_NAME = 'name the batch: batch_argnums=1, or batch_argnames'
_REMEDIES = {
    _EXPLICIT: 'make a mesh of Auto axes',
    _SPECS_ALONE: _NAME,
    _TURNED_OFF: _NAME,
    _NOT_SHARDED: 'shard them over mesh axes of several devices',
    NO_BATCH: f'{_NAME}; or shard it by with_sharding_constraint where the function makes it',
}


def batch_of(rules: FunctionRules, call: Call, shardings: Shardings) -> BatchArguments | None:
    """Returns which arguments of a call are the batch; None if there is none.

    Args:
        rules: those of the function.
        call: the call.
        shardings: those of the arguments inside the function.

    Raises:
        ArgumentError: an argument that the user names as a batch has no sharding.
    """
    if rules.any_explicit:  # types say where values are
        return None
    if not rules.signature.has_explicit_batch:
        return _arguments(call, shardings, _found(rules, call))
    batches = _named(rules, call)
    _reject_unsharded(rules, call, batches, shardings)
    return _arguments(call, shardings, batches)


def batch_axes(shardings: Sequence[DimSharding]) -> frozenset[str]:
    """Returns the mesh axes of a batch: those that shard the dimensions which all of its arrays share.

    The axis that shards the heads of a cache is none of them, since tokens have no heads. Axes that shard one
    dimension of some array together shard the same dimension of others. If the arrays share no dimension, all
    axes count.

    Args:
        shardings: the sharding of each array of the batch that is sharded.
    """
    groups = list[set[str]]()
    for axes in [axes for sharding in shardings for axes in sharding if axes]:
        joined = [group for group in groups if not group.isdisjoint(axes)]
        groups = [group for group in groups if group.isdisjoint(axes)] + [set(axes).union(*joined)]
    shared = [group for group in groups if all(group & axes_of(sharding) for sharding in shardings)]
    return frozenset().union(*(shared or groups))


def batch_paths(call: Call, batch: BatchArguments | None) -> list[str]:
    """Returns the paths of the arguments that hold the batch of a call; none if the step makes its batch.

    Args:
        call: the call.
        batch: what is known of its arguments.
    """
    if batch is None:
        return []
    holding = [place for i, place in enumerate(call.leaf_paths) if batch.example_dim(i) is not None]
    paths = [call.layout.paths[slot] or optional_path(path[:1]) or '' for slot, path in holding]
    return [*dict.fromkeys(paths)]


def why_not_partitioned(rules: FunctionRules, call: Call) -> tuple[str, str]:
    """Why nothing is partitioned, given that there is no batch; and what users do about it, which may be ''.

    Args:
        rules: those of the function.
        call: the call.
    """
    why = _why_no_batch(rules, call)
    return why, _REMEDIES.get(why, '')


def _why_no_batch(rules: FunctionRules, call: Call) -> str:
    if rules.any_explicit:
        return _EXPLICIT
    if jax.config.jax_disable_jit:
        return 'jax.disable_jit is in force'
    if rules.signature.disables_batch:
        return 'batch_argnums=() turns it off'
    if rules.signature.has_explicit_batch:
        return _NOT_SHARDED
    if any(_found(rules, call)) and not rules.partition_batch:
        return _TURNED_OFF
    given = [each for each in _given(rules, call).values() if each]
    sharding = [each for each in given if any(map(_axes, each))]
    if len(sharding) > 1 and all(map(_specs_alone, given)):
        return _SPECS_ALONE
    return NO_BATCH


def batch_made_inside(call: Call, shardings: Shardings, jaxpr: Any) -> BatchArguments | None:
    """What is known of the arguments of a function that makes its batch itself; None if it makes none.

    Args:
        call: the call.
        shardings: those of the arguments inside the function.
        jaxpr: that of the function.
    """
    by_dim = _by_dim(call, shardings)
    sources = batch_sources(jaxpr, [any(sharding) for sharding in by_dim])
    axes = frozenset([axis for source in sources for axis in source.axes])
    if not axes:
        return None
    return BatchArguments(
        [without(sharding, axes) for sharding in by_dim],
        [only_along(sharding, axes) for sharding in by_dim],
        axes,
    )


def _by_dim(call: Call, shardings: Shardings) -> list[DimSharding]:
    return [
        UNSHARDED if to is None else of_sharding(to, np.ndim(leaf))  # a token has no dimensions
        for leaf, to in zip(call.leaves, shardings, strict=True)
    ]


def _arguments(call: Call, shardings: Shardings, batches: Sequence[bool]) -> BatchArguments | None:
    """What is known of the arguments if these leaves are batches; None if no axis shards them."""
    if not any(batches):
        return None
    by_dim = list(zip(_by_dim(call, shardings), batches, strict=True))
    axes = batch_axes([sharding for sharding, is_batch in by_dim if is_batch and sharding])
    if not axes:
        return None
    return BatchArguments(
        [sharding if is_batch else without(sharding, axes) for sharding, is_batch in by_dim],
        [UNSHARDED if is_batch else only_along(sharding, axes) for sharding, is_batch in by_dim],
        axes,
    )


def _named(rules: FunctionRules, call: Call) -> list[bool]:
    """A column: the leaves that are batches as the user says."""
    layout, keywords = call.layout, rules.signature.batch_keywords
    return [
        slot in layout.batch
        or (layout.names[slot] == EXTRA_KEYWORDS and getattr(path[0], 'key', None) in keywords)
        for slot, path in call.leaf_paths
    ]


def _found(rules: FunctionRules, call: Call) -> list[bool]:
    """A column: the leaves that are batches as far as the rules tell."""
    given = {slot: each for slot, each in _given(rules, call).items() if each}
    by_specs = [slot for slot, each in given.items() if _specs_alone(each)]
    if len(by_specs) == len(given):
        return [False] * len(call.leaves)
    kept = [slot for slot in by_specs if slot not in call.layout.donated]
    holding = kept if any(_axes(rule) for slot in kept for rule in given[slot]) else by_specs
    return [slot in holding for slot, tree in call.treedefs.items() for _ in range(tree.num_leaves)]


def _given(rules: FunctionRules, call: Call) -> dict[int, list[Any]]:
    """The rules and specs that in_shardings and args_sharding_constraint give each dynamic slot."""
    given: dict[int, list[Any]] = {slot: [] for slot in call.layout.dynamic}
    for option in (rules.options.in_shardings, rules.options.args_sharding_constraint):
        if option is not None:
            by_slot = rules.signature.rules_by_slot(option, call.layout, call.flat_args, '', '')
            for slot, each in by_slot.items():
                given[slot] += [rule for rule in jax.tree.leaves(each, is_leaf=is_rule) if rule is not None]
    return given


def _specs_alone(given: Sequence[Any]) -> bool:
    return not [each for each in given if not isinstance(each, PartitionSpec | NamedSharding)]


def _axes(given: Any) -> Sequence[str]:
    """The mesh axes of a spec; none of a rule."""
    spec = given.spec if isinstance(given, NamedSharding) else given
    return spec_axes(spec) if isinstance(spec, PartitionSpec) else ()


def _reject_unsharded(
    rules: FunctionRules, call: Call, batches: Sequence[bool], shardings: Shardings
) -> None:
    """Raises ArgumentError about an argument that the user names as a batch, and that nothing shards."""
    by_slot, batches_by_slot = call.by_slot(shardings), call.by_slot(batches)
    for slot, holds in batches_by_slot.items():
        given = [to for to, is_batch in zip(by_slot[slot], holds, strict=True) if is_batch]
        if not given or any(to is not None and spec_axes(to.spec) for to in given):
            continue
        if any(map(_axes, _given(rules, call)[slot])):
            continue  # the batch dimension does not divide, and need not
        axis = next((name for name, size in rules.mesh.shape.items() if size > 1), 'data')
        argument = call.layout.paths[slot] or 'the keywords'
        raise ArgumentError(
            f'{argument} of {rules.signature.name} is named as a batch '
            '(batch_argnums, batch_argnames), and nothing shards it (in_shardings, '
            f'args_sharding_constraint): give it a spec such as PartitionSpec({axis!r}), or leave it out'
        )
