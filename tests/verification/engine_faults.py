"""Steps that are wrong because a fault is seeded into the partitioner along the batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

from scalax._jax import kernels, manual_axes
from scalax._jaxpr import local_sort_analysis
from scalax._spmd import conversions as edit
from scalax._spmd.batch import replicated_parts as parts
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.loops import example_loops as apart
from scalax._spmd.operations import embedding_tables as tables
from scalax._spmd.operations import local_sorts
from scalax._spmd.operations import ragged_dot as ragged
from scalax._spmd.placements import op_rules
from scalax._spmd.placements.op_rules import Op, Strategy
from scalax._spmd.placements.placement import REPLICATE, SUM, Partial
from scalax._spmd.placements.placement import RedistributeOp as Conversion
from scalax._spmd.rewrites import distributed_matrices as matrices
from scalax._spmd.rewrites import indexed_loops
from scalax._spmd.values import is_replicated
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule
from tests.verification.fault import FSDP, Step, always, fault, normal

HSDP = {'replica': 2, 'fsdp': 4}


def seeded(
    expects: tuple[str, ...], *changes: tuple[Any, str, Any], mesh: Any = FSDP
) -> Callable[[Any], Any]:
    """Registers a fault of the partitioner: `changes` replace attributes of modules while the step is traced.

    The caches of equations and traces are cleared before and after, because JAX caches them per function.
    """

    def forget() -> None:
        manual_axes._cached.cache_clear()
        for where, _, _ in changes:
            for function in vars(where).values():
                if hasattr(function, 'clear_cache'):
                    function.clear_cache()

    @contextlib.contextmanager
    def put_in() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(forget)
            for where, name, value in changes:
                stack.enter_context(mock.patch.object(where, name, value))
            forget()
            yield

    return fault('scalax', expects, seeded=put_in, mesh=mesh)


def stepped(helper: MeshShardingHelper, fun: Any, *args: Any, out: bool = False) -> Step:
    """A compiled step of sharded weights and a batch."""
    rule = FSDPShardingRule('fsdp', min_fsdp_size=1)
    specs = {'out_shardings': (rule, P())} if out else {}
    return helper.sjit(fun, in_shardings=(rule, P('fsdp')), batch_argnums=1, **specs), args


def gradient_step(w: Any, x: Any) -> Any:
    """A step of gradient descent."""
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - gradient, value


redistribute = edit.redistribute


def _converting(change: Callable[[Conversion], Sequence[Conversion]]) -> Any:
    """Returns a `redistribute` that replaces each conversion by those that `change` returns for it."""
    return lambda *placements: [new for step in redistribute(*placements) for new in change(step)]


def _without_sum(step: Conversion) -> Sequence[Conversion]:
    if step.kind == 'reduce_scatter':
        return [step._replace(kind='slice')]
    return [] if step.kind == 'all_reduce' else [step]


@seeded(('reduce_sum', 'sub'), (edit, 'redistribute', _converting(_without_sum)))
def gradient_without_a_reduction(helper: MeshShardingHelper) -> Step:
    """A lost reduction: each device uses its local sum as the global sum."""
    return stepped(helper, gradient_step, normal(16, 8), normal(64, 16), out=True)


rule_of_product = op_rules.by_dims


def _forgetting_sums(op: Op) -> Strategy | None:
    strategy = rule_of_product(op)
    if strategy is None:
        return None
    return Strategy(
        strategy.operands, tuple(REPLICATE if isinstance(x, Partial) else x for x in strategy.results)
    )


@seeded(('reduce_sum',), (op_rules, 'RULES', {**op_rules.RULES, 'reduce_sum': _forgetting_sums}))
def partial_sum_declared_replicated(helper: MeshShardingHelper) -> Step:
    """A lost `Partial`: the rule of a reduction declares partial sums replicated."""
    return stepped(helper, lambda w, x: jnp.tanh((x @ w).sum(0)), normal(8, 8), normal(64, 8))


def _maximum_added_up(op: Op) -> Strategy | None:
    strategy = rule_of_product(op)
    return (
        None if strategy is None else Strategy(strategy.operands, (Partial('sum'),) * len(strategy.results))
    )


@seeded(('reduce_max',), (op_rules, 'RULES', {**op_rules.RULES, 'reduce_max': _maximum_added_up}))
def local_maxima_that_are_summed(helper: MeshShardingHelper) -> Step:
    """A wrong reduction: local maxima are summed over devices."""
    return stepped(helper, lambda w, x: jnp.exp((x @ w).max(0)), normal(8, 8), normal(64, 8))


def _local(op: Op) -> Strategy:
    return Strategy(op.placements, op.placements[: len(op.equation.outvars)])


def alone(name: str) -> tuple[Any, str, Any]:
    """A rule that runs an operation on the local examples of each device."""
    return op_rules, 'RULES', {**op_rules.RULES, name: _local}


@seeded(('sort',), alone('sort'))
def examples_sorted_locally(helper: MeshShardingHelper) -> Step:
    """A missing gather: each device sorts its local examples."""
    return stepped(helper, lambda w, x: jnp.sort(x @ w, 0), normal(8, 8), normal(64, 8))


@seeded(('cumsum',), alone('cumsum'))
def cumulative_sum_of_local_examples(helper: MeshShardingHelper) -> Step:
    """A missing gather: a cumulative sum starts from zero on each device."""
    return stepped(helper, lambda w, x: jnp.cumsum(x @ w, 0), normal(8, 8), normal(64, 8))


@seeded(('rev',), alone('rev'))
def examples_reversed_locally(helper: MeshShardingHelper) -> Step:
    """A missing exchange: devices reverse their local examples, but not the order of their blocks."""
    return stepped(helper, lambda w, x: jnp.tanh(x @ w)[::-1], normal(8, 8), normal(64, 8))


def _in_another_order(step: Conversion) -> Sequence[Conversion]:
    return [step._replace(axes=step.axes[::-1])]


@seeded(('rev',), (edit, 'redistribute', _converting(_in_another_order)), mesh=HSDP)
def blocks_gathered_in_the_wrong_order(helper: MeshShardingHelper) -> Step:
    """A wrong order of mesh axes: blocks of examples are gathered in another order."""
    rule = FSDPShardingRule('fsdp', min_fsdp_size=1)
    batch = P(('replica', 'fsdp'))
    function = helper.sjit(
        lambda w, x: jnp.flip(jnp.tanh(x @ w), 0), in_shardings=(rule, batch), batch_argnums=1
    )
    return function, (normal(8, 8), normal(64, 8))


@seeded(('iota', 'mul'), (parts, 'dim_of', always(1)))
def iota_along_the_wrong_dimension(helper: MeshShardingHelper) -> Step:
    """A wrong dimension: an iota along the examples is sliced like an iota along the features."""

    def step(w: Any, x: Any) -> Any:
        return (x @ w) * jax.lax.broadcasted_iota(x.dtype, x.shape, 0)

    return stepped(helper, step, normal(8, 8), normal(64, 8))


def _from_zero(local: Sequence[int], *_: Any) -> list[Any]:
    return [0] * len(local)


@seeded(('random_bits', 'select_n'), (parts, '_starts', _from_zero))
def random_bits_of_the_first_examples(helper: MeshShardingHelper) -> Step:
    """Wrong random bits: all devices draw the bits of the first examples."""

    def step(w: Any, x: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        return jnp.where(kept, x, 0) @ w

    return stepped(helper, step, normal(8, 8), normal(64, 8))


@seeded(('iota', 'mul'), (parts, '_starts', _from_zero))
def indices_of_the_first_examples(helper: MeshShardingHelper) -> Step:
    """A wrong block: each device counts its examples from zero."""
    return stepped(helper, lambda w, x: (x @ w) * jnp.arange(len(x))[:, None], normal(8, 8), normal(64, 8))


def _without_mask(step: Conversion) -> Sequence[Conversion]:
    return [] if step.kind == 'mask' else [step]


@seeded(('scatter-add',), (edit, 'redistribute', _converting(_without_mask)))
def replicated_operand_summed_once_per_device(helper: MeshShardingHelper) -> Step:
    """A missing mask: the operand of a scatter-add is summed once per device."""

    def step(w: Any, x: Any) -> Any:
        rows = jnp.argmax(x, 1) % len(w)
        return jnp.tanh(w.at[rows].add(x))

    return stepped(helper, step, normal(8, 8), normal(64, 8))


# --- Gathered weights -------------------------------------------------------------------------------


convert = JaxprEditor.convert


def _gathered_before(self: JaxprEditor, value: Any, target: Any, *args: Any, **options: Any) -> Any:
    """Caches gathered weights by their shapes, so that two weights of one shape share an entry."""
    if not value.is_state or not is_replicated(target):
        return convert(self, value, target, *args, **options)
    gathered = self.__dict__.setdefault('gathered_by_shape', {})
    if value.shape not in gathered:
        gathered[value.shape] = convert(self, value, target, *args, **options)
    return gathered[value.shape]


@seeded(('dot_general',), (JaxprEditor, 'convert', _gathered_before))
def gathered_weight_of_another_layer(helper: MeshShardingHelper) -> Step:
    """A stale cache of weights: the second layer uses the gathered weight of the first layer."""

    def step(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w['first']) @ w['second']

    return stepped(helper, step, {'first': normal(8, 8), 'second': normal(8, 8, seed=1)}, normal(64, 8))


def _gathered_once(self: JaxprEditor, value: Any, target: Any, *args: Any, **options: Any) -> Any:
    """Caches gathered weights by the arguments that they come from, even after an update."""
    if not value.is_state or not is_replicated(target) or value.shape != (16, 8):
        return convert(self, value, target, *args, **options)
    if 'gathered_weight' not in self.__dict__:
        self.__dict__['gathered_weight'] = convert(self, value, target, *args, **options)
    return self.__dict__['gathered_weight']


@seeded(('dot_general',), (JaxprEditor, 'convert', _gathered_once))
def gathered_weight_before_the_update(helper: MeshShardingHelper) -> Step:
    """A stale cache of weights: after an update, the second pass uses weights gathered before it."""

    def two_steps(w: Any, x: Any) -> Any:
        w, _ = gradient_step(w, x)
        return w, jnp.mean((x @ w) ** 2)

    return stepped(helper, two_steps, normal(16, 8), normal(64, 16), out=True)


# --- Algorithms -------------------------------------------------------------------------------------


def _numbered(x: Any, out: Any) -> None:
    out[...] = x[...] * (1 + pallas.program_id(0)).astype(jnp.float32)


def _added_up(x: Any, doubled: Any, total: Any) -> None:
    doubled[...] = 2 * x[...]

    @pallas.when(pallas.program_id(0) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += x[...].sum(0, keepdims=True)


def _kernel(body: Any, with_total: bool, x: Any) -> Any:
    """A Pallas kernel whose grid steps over the rows of an array, two at a time; it may also sum all rows."""
    rows = pallas.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
    total = pallas.BlockSpec((1, x.shape[1]), lambda i: (0, 0))
    like = [jax.ShapeDtypeStruct((count, x.shape[1]), x.dtype) for count in (len(x), 1)]
    count = 1 + with_total
    return pallas.pallas_call(
        body,
        like[:count],
        grid=(len(x) // 2,),
        in_specs=[rows],
        out_specs=[rows, total][:count],
        interpret=True,
    )(x)


STEPS_APART = (kernels, '_steps_are_apart', always(True))


@seeded(('pallas_call',), STEPS_APART)
def kernel_that_reads_its_grid_step(helper: MeshShardingHelper) -> Step:
    """A missing gather: the kernel numbers its grid steps from zero on each device."""
    return stepped(helper, lambda w, x: _kernel(_numbered, False, x @ w)[0], normal(8, 8), normal(16, 8))


@seeded(('pallas_call',), STEPS_APART, (kernels, '_walks_apart', always(True)))
def kernel_that_sums_over_its_grid(helper: MeshShardingHelper) -> Step:
    """A missing reduction: the kernel returns the sum over local rows."""

    def step(w: Any, x: Any) -> Any:
        doubled, total = _kernel(_added_up, True, x @ w)
        return {'doubled': doubled, 'total': total}

    return stepped(helper, step, normal(8, 8), normal(16, 8))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sizes_from_zero(axes: Sequence[str], count: int, sizes: Any) -> Any:
    ends = jnp.cumsum(sizes)
    first, last = (jnp.clip(rows, 0, count) for rows in (ends - sizes, ends))
    return last - first


EXPERTS = {'router': normal(8, 4), 'up': normal(4, 8, 12) / 3, 'down': normal(4, 12, 8) / 3}


@seeded(('ragged_dot_general',), (ragged, '_sizes_in_block', _sizes_from_zero))
def expert_groups_of_the_first_rows(helper: MeshShardingHelper) -> Step:
    """A wrong block: each device uses the experts of the first rows for its own rows."""
    sizes = jnp.asarray([10, 20, 0, 34])
    return stepped(helper, lambda w, x: lax.ragged_dot(x, w['up'], sizes), EXPERTS, normal(64, 8))


def _by_experts(w: Any, x: Any, back: Callable[[Any, Any], Any]) -> Any:
    """Sorts tokens by expert, multiplies them in groups, and restores their order by `back`."""
    expert = jnp.argmax(x @ w['router'], -1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=4)
    hidden = jnp.tanh(lax.ragged_dot(x[order], w['up'], sizes))
    return back(lax.ragged_dot(hidden, w['down'], sizes), order)


@seeded(('sort',), (local_sort_analysis, '_require', always(None)))
def local_sort_whose_order_matters(helper: MeshShardingHelper) -> Step:
    """A missing gather: devices sort local tokens, but the result depends on the global order."""

    def back(out: Any, order: Any) -> Any:
        return jnp.cumsum(out, axis=0)[jnp.argsort(order)]

    return stepped(helper, lambda w, x: _by_experts(w, x, back), EXPERTS, normal(64, 8))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _numbers_of_all(axes: Sequence[str], count: int, numbers: Any) -> Any:
    return jnp.minimum(numbers, count - 1)


@seeded((), (local_sorts, '_local_indices', _numbers_of_all))
def local_tokens_indexed_globally(helper: MeshShardingHelper) -> Step:
    """A wrong block: devices look up local tokens by their global indices."""

    def back(out: Any, order: Any) -> Any:
        return out[jnp.argsort(order)]

    return stepped(helper, lambda w, x: _by_experts(w, x, back), EXPERTS, normal(64, 8))


@functools.partial(jax.jit, static_argnums=0)
def _look_up_in_all(block: Any, table: Any, indices: Any) -> Any:
    numbers = indices % table.shape[block.dim]
    return lax.gather(table, numbers, block.numbers, block.slice_sizes, mode=block.mode)


@seeded(('gather',), (tables, '_look_up', _look_up_in_all))
def lookup_without_a_mask(helper: MeshShardingHelper) -> Step:
    """A missing mask: every device adds a row of its shard of the table to the result of a lookup."""
    tokens = (normal(16, 2) * 100).astype('int32') % 4096
    return stepped(helper, lambda table, tokens: jnp.tanh(table[tokens]), normal(4096, 8), tokens)


def _over_rows(helper: MeshShardingHelper, body: Any, first: Any) -> Step:
    """A loop over the examples of a batch."""

    def step(w: Any, x: Any) -> Any:
        last, rows = lax.scan(lambda state, row: body(w, state, row), first, x)
        return {'last': last, 'rows': rows}

    return stepped(helper, step, normal(8, 8) / 3, normal(64, 8))


@seeded(('mul',), (apart, '_reductions', lambda loop: [SUM] * loop.num_carry))
def running_average_treated_as_a_sum(helper: MeshShardingHelper) -> Step:
    """A wrong reduction: devices loop over local examples, but the result depends on the global order."""

    def body(w: Any, state: Any, row: Any) -> Any:
        out = jnp.tanh(row @ w)
        return 0.9 * state + out, out

    return _over_rows(helper, body, jnp.zeros(8))


@seeded((), (edit, 'redistribute', _converting(_without_mask)))
def initial_carry_summed_once_per_device(helper: MeshShardingHelper) -> Step:
    """A missing mask: the initial carry of a loop is summed once per device."""

    def body(w: Any, state: Any, row: Any) -> Any:
        out = jnp.tanh(row @ w)
        return state + out, out

    return _over_rows(helper, body, jnp.full(8, 0.5))


@seeded(('random_split',), (apart, '_reductions', lambda loop: [REPLICATE] * loop.num_carry))
def random_key_of_the_first_iteration(helper: MeshShardingHelper) -> Step:
    """Wrong random bits: a loop splits its key in each iteration; all devices start with the first key."""

    def body(w: Any, key: Any, row: Any) -> Any:
        key, used = jax.random.split(key)
        return key, jnp.where(jax.random.bernoulli(used, 0.5, (8,)), row @ w, 0)

    return _over_rows(helper, body, jax.random.key(0))


@seeded(('dynamic_slice',), (indexed_loops, '_is_row_index', always(True)))
def loop_over_reversed_examples(helper: MeshShardingHelper) -> Step:
    """A wrong order: a loop that reads the examples from last to first gets them from first to last."""

    def step(w: Any, x: Any) -> Any:
        return lax.map(lambda i: jnp.tanh(x[len(x) - 1 - i] @ w), jnp.arange(len(x)))

    return stepped(helper, step, normal(8, 8) / 3, normal(64, 8))


def _orthogonal(x: Any) -> Any:
    x = x / jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ (x.swapaxes(1, 2) @ x)
    return x


def _next_ones(function: Any, stack: Any, scalars: Any) -> Any:
    return [jnp.roll(x, 1, 0) for x in apply_to_stack(function, stack, scalars)]


apply_to_stack = matrices._apply_to_stack


@seeded(('mul',), (matrices, '_is_faster', always(True)), (matrices, '_apply_to_stack', _next_ones))
def results_of_neighbouring_matrices(helper: MeshShardingHelper) -> Step:
    """A wrong block: each matrix of a distributed optimizer gets its neighbour's result."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            out, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params['q'])
            return jnp.mean(out**2)

        return jax.tree.map(lambda w, g: w - 0.1 * _orthogonal(g), params, jax.grad(loss)(params))

    rule = TreePathShardingRule(('.*', P(None, 'fsdp')))
    function = helper.sjit(step, in_shardings=(rule, P('fsdp')), out_shardings=rule)
    return function, ({'q': normal(16, 16, 16) / 4}, normal(64, 16))
