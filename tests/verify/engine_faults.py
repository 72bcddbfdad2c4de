"""Steps that are wrong where the partitioner along the batch has a mistake in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from scalax._jax import manual
from scalax._spmd import edit, op_rules, parts
from scalax._spmd.op_rules import Op, Strategy
from scalax._spmd.placement import REPLICATE, Partial
from scalax._spmd.placement import Step as Conversion
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from tests.verify.fault import FSDP, Step, always, fault, normal

HSDP = {'replica': 2, 'fsdp': 4}


def seeded(
    expects: tuple[str, ...], *changes: tuple[Any, str, Any], mesh: Any = FSDP
) -> Callable[[Any], Any]:
    """Adds a fault of the partitioner: while the step is traced, these attributes of modules are others.

    Equations that JAX made for the right functions are forgotten before, and those for the wrong ones behind.
    """

    @contextlib.contextmanager
    def put_in() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(manual._cached.cache_clear)
            for where, name, value in changes:
                stack.enter_context(mock.patch.object(where, name, value))
            manual._cached.cache_clear()
            yield

    return fault('pass', expects, seeded=put_in, mesh=mesh)


def stepped(helper: MeshShardingHelper, fun: Any, *args: Any, out: bool = False) -> Step:
    """A function of weights that are sharded and of a batch."""
    rule = FSDPShardingRule('fsdp', min_fsdp_size=1)
    specs = {'out_shardings': (rule, P())} if out else {}
    return helper.sjit(fun, in_shardings=(rule, P('fsdp')), batch_argnums=1, **specs), args


def gradient_step(w: Any, x: Any) -> Any:
    """A step of gradient descent."""
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - gradient, value


redistribute = edit.redistribute


def _converting(change: Callable[[Conversion], Sequence[Conversion]]) -> Any:
    """Conversions between placements, with others in the place of some of their operations."""
    return lambda *placements: [new for step in redistribute(*placements) for new in change(step)]


def _without_sum(step: Conversion) -> Sequence[Conversion]:
    if step.kind == 'reduce_scatter':
        return [step._replace(kind='slice')]
    return [] if step.kind == 'all_reduce' else [step]


@seeded(('reduce_sum', 'sub'), (edit, 'redistribute', _converting(_without_sum)))
def gradient_that_is_not_summed_over_devices(helper: MeshShardingHelper) -> Step:
    """A lost reduction: each device takes its own terms for the sum."""
    return stepped(helper, gradient_step, normal(16, 8), normal(64, 16), out=True)


rule_of_product = op_rules.by_dims


def _forgetting_sums(op: Op) -> Strategy | None:
    found = rule_of_product(op)
    if found is None:
        return None
    return Strategy(found.operands, tuple(REPLICATE if isinstance(x, Partial) else x for x in found.results))


@seeded(('reduce_sum',), (op_rules, 'RULES', {**op_rules.RULES, 'reduce_sum': _forgetting_sums}))
def partial_sum_taken_for_a_sum(helper: MeshShardingHelper) -> Step:
    """A lost `Partial`: the rule of a reduction says that devices hold all of its result."""
    return stepped(helper, lambda w, x: jnp.tanh((x @ w).sum(0)), normal(8, 8), normal(64, 8))


def _maximum_added_up(op: Op) -> Strategy | None:
    found = rule_of_product(op)
    return None if found is None else Strategy(found.operands, (Partial('sum'),) * len(found.results))


@seeded(('reduce_max',), (op_rules, 'RULES', {**op_rules.RULES, 'reduce_max': _maximum_added_up}))
def maximum_that_is_added_up(helper: MeshShardingHelper) -> Step:
    """A wrong reduction: the largest elements of devices are added up."""
    return stepped(helper, lambda w, x: jnp.exp((x @ w).max(0)), normal(8, 8), normal(64, 8))


def _local(op: Op) -> Strategy:
    return Strategy(op.placements, op.placements[: len(op.equation.outvars)])


def alone(name: str) -> tuple[Any, str, Any]:
    """A rule that runs an operation on each device's examples alone."""
    return op_rules, 'RULES', {**op_rules.RULES, name: _local}


@seeded(('sort',), alone('sort'))
def examples_sorted_on_each_device(helper: MeshShardingHelper) -> Step:
    """A missing gather: each device sorts its own examples."""
    return stepped(helper, lambda w, x: jnp.sort(x @ w, 0), normal(8, 8), normal(64, 8))


@seeded(('cumsum',), alone('cumsum'))
def running_sum_that_begins_on_each_device(helper: MeshShardingHelper) -> Step:
    """A missing gather: each device adds up from its own first example on."""
    return stepped(helper, lambda w, x: jnp.cumsum(x @ w, 0), normal(8, 8), normal(64, 8))


@seeded(('rev',), alone('rev'))
def examples_reversed_on_each_device(helper: MeshShardingHelper) -> Step:
    """A missing exchange: devices reverse their own examples, and stay in order."""
    return stepped(helper, lambda w, x: jnp.tanh(x @ w)[::-1], normal(8, 8), normal(64, 8))


def _in_another_order(step: Conversion) -> Sequence[Conversion]:
    return [step._replace(axes=step.axes[::-1])]


@seeded(('rev',), (edit, 'redistribute', _converting(_in_another_order)), mesh=HSDP)
def blocks_gathered_in_another_order(helper: MeshShardingHelper) -> Step:
    """A wrong order of mesh axes: the blocks of examples come together in another order."""
    rule = FSDPShardingRule('fsdp', min_fsdp_size=1)
    batch = P(('replica', 'fsdp'))
    function = helper.sjit(
        lambda w, x: jnp.flip(jnp.tanh(x @ w), 0), in_shardings=(rule, batch), batch_argnums=1
    )
    return function, (normal(8, 8), normal(64, 8))


@seeded(('iota', 'mul'), (parts, 'dim_of', always(1)))
def numbers_along_the_wrong_dimension(helper: MeshShardingHelper) -> Step:
    """A wrong dimension: examples are numbered, and the block is taken as if features were."""

    def step(w: Any, x: Any) -> Any:
        return (x @ w) * jax.lax.broadcasted_iota(x.dtype, x.shape, 0)

    return stepped(helper, step, normal(8, 8), normal(64, 8))


def _from_zero(local: Sequence[int], blocks: Sequence[Any]) -> list[Any]:
    return [0] * len(local)


@seeded(('random_bits', 'select_n'), (parts, '_starts', _from_zero))
def random_bits_of_the_first_device_on_all(helper: MeshShardingHelper) -> Step:
    """Wrong random bits: each device draws for the first examples."""

    def step(w: Any, x: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        return jnp.where(kept, x, 0) @ w

    return stepped(helper, step, normal(8, 8), normal(64, 8))


@seeded(('iota', 'mul'), (parts, '_starts', _from_zero))
def numbers_of_the_first_examples_on_all_devices(helper: MeshShardingHelper) -> Step:
    """A wrong block: each device numbers its examples from zero."""
    return stepped(helper, lambda w, x: (x @ w) * jnp.arange(len(x))[:, None], normal(8, 8), normal(64, 8))


def _without_mask(step: Conversion) -> Sequence[Conversion]:
    return [] if step.kind == 'mask' else [step]


@seeded(('scatter-add',), (edit, 'redistribute', _converting(_without_mask)))
def replicated_term_that_is_added_by_all_devices(helper: MeshShardingHelper) -> Step:
    """A missing mask: what a scatter adds to is there once on each device."""

    def step(w: Any, x: Any) -> Any:
        rows = jnp.argmax(x, 1) % len(w)
        return jnp.tanh(w.at[rows].add(x))

    return stepped(helper, step, normal(8, 8), normal(64, 8))
