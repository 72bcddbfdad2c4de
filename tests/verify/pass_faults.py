"""Steps that are wrong where scalax's own pass has a mistake in it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

from scalax._follow import (
    loops_over_rows,
    matrices,
    rows_by_number,
    run,
)
from scalax._jax import kernels
from scalax._jaxprs import dims, orders
from scalax._transforms.sjit import dispatch
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule
from tests.verify.fault import (
    FSDP,
    Step,
    always,
    normal,
    seeded,
)
from tests.verify.partitioner_faults import conv_gradient, depthwise_gradient


def alone(value: Any, *args: Any, **kwargs: Any) -> Any:
    """The value of a device, of which a collective would make that of all."""
    return value


def twice(value: Any, axes: Any) -> Any:
    """What is added up over devices, and then once more."""
    return parallel_sum(parallel_sum(value, axes), axes)


parallel_sum = lax.psum


class Module:
    """A module with other functions."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self._module = module
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _numbered(x: Any, out: Any) -> None:
    out[...] = x[...] * (1 + pallas.program_id(0)).astype(jnp.float32)


def _added_up(x: Any, doubled: Any, total: Any) -> None:
    doubled[...] = 2 * x[...]

    @pallas.when(pallas.program_id(0) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += x[...].sum(0, keepdims=True)


def _of_rows(body: Any, with_total: bool, x: Any) -> Any:
    """A kernel of Pallas that walks over the rows of an array, two at a time; of all it may have a total."""
    rows = pallas.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
    whole = pallas.BlockSpec((1, x.shape[1]), lambda i: (0, 0))
    like = [jax.ShapeDtypeStruct((count, x.shape[1]), x.dtype) for count in (len(x), 1)]
    count = 1 + with_total
    return pallas.pallas_call(
        body,
        like[:count],
        grid=(len(x) // 2,),
        in_specs=[rows],
        out_specs=[rows, whole][:count],
        interpret=True,
    )(x)


def _dealt(kernel: Callable[[Any], Any]) -> Sequence[tuple[Any, str, Any]]:
    """A kernel that is interpreted is dealt to devices, as those of hardware are, whatever it does."""

    def run_part(equation: Any, operands: Any, shards: Any) -> Any:
        return [*kernel(*operands)]

    changes = {'is_interpreted': always(False), '_steps_are_apart': always(True), 'run_part': run_part}
    return [(kernels, name, value) for name, value in changes.items()]


numbered = functools.partial(_of_rows, _numbered, False)
added_up = functools.partial(_of_rows, _added_up, True)


def followed(helper: MeshShardingHelper, fun: Any, *args: Any, rule: Any = None) -> Step:
    """A function of weights that are sharded and of a batch, whose rows are followed."""
    rule = rule or FSDPShardingRule('fsdp', min_fsdp_size=1)
    return helper.sjit(fun, in_shardings=(rule, P('fsdp'))), args


@seeded(('pallas_call',), *_dealt(numbered), mesh=FSDP)
def kernel_that_asks_for_its_step(helper: MeshShardingHelper) -> Step:
    """Dealt to devices, it gets the number of a device's own step."""
    return followed(helper, lambda w, x: numbered(x @ w)[0], normal(8, 8), normal(16, 8))


@seeded(('total', 'pallas_call'), *_dealt(added_up), (kernels, '_walks_apart', always(True)), mesh=FSDP)
def kernel_that_adds_up_over_its_steps(helper: MeshShardingHelper) -> Step:
    """A missing sum: each device adds up its own rows."""

    def step(w: Any, x: Any) -> Any:
        doubled, total = added_up(x @ w)
        return {'doubled': doubled, 'total': total}

    return followed(helper, step, normal(8, 8), normal(16, 8))


def _by_experts(w: Any, x: Any, *, back: Any = None) -> Any:
    """Tokens that are sorted by expert, multiplied in groups, and put back."""
    expert = jnp.argmax(x @ w['router'], -1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=4)
    hidden = jnp.tanh(lax.ragged_dot(x[order], w['up'], sizes))
    out = lax.ragged_dot(hidden, w['down'], sizes)
    return out[jnp.argsort(order)] if back is None else back(out, order)


EXPERTS = {'router': normal(8, 4), 'up': normal(4, 8, 12) / 3, 'down': normal(4, 12, 8) / 3}
COLUMNS = TreePathShardingRule(
    ('router', P()), ('up', P(None, 'fsdp', 'tp')), ('down', P(None, 'tp', 'fsdp')), strict=True
)


@seeded(('ragged_dot_general',), (lax, 'psum', alone))
def experts_without_a_sum(helper: MeshShardingHelper) -> Step:
    """A missing sum: hidden columns are split, and their products are not added up."""

    def step(w: Any, x: Any) -> Any:
        sizes = jnp.asarray([10, 20, 0, 34])
        return lax.ragged_dot(jnp.tanh(lax.ragged_dot(x, w['up'], sizes)), w['down'], sizes)

    return followed(helper, step, EXPERTS, normal(64, 8), rule=COLUMNS)


@seeded(('ragged_dot_general',), (lax, 'axis_index', always(np.int32(0))))
def experts_of_the_first_device(helper: MeshShardingHelper) -> Step:
    """Each device takes its rows for the first ones, and multiplies them with the first experts."""

    def step(w: Any, x: Any) -> Any:
        return lax.ragged_dot(x, w['up'], jnp.asarray([10, 20, 0, 34]))

    return followed(helper, step, EXPERTS, normal(64, 8))


@seeded(('sort',), (orders, '_require', always(None)), mesh=FSDP)
def order_of_the_sort_is_seen(helper: MeshShardingHelper) -> Step:
    """Devices sort their own rows, and what comes out shows in which order all are."""

    def step(w: Any, x: Any) -> Any:
        def back(out: Any, order: Any) -> Any:
            return jnp.cumsum(out, axis=0)[jnp.argsort(order)]

        return _by_experts(w, x, back=back)

    return followed(helper, step, EXPERTS, normal(64, 8))


def turned(rule: dims.Rule) -> dims.Rule:
    """The rule with the dimensions of results the other way around, where their sizes do not show it."""

    def wrong(equation: Any) -> dims.Dims:
        right, shapes = rule(equation), [var.aval.shape for var in equation.outvars]
        pairs = zip(right.results, shapes, strict=True)
        results = [each[::-1] if len({*shape}) == 1 else each for each, shape in pairs]
        return dataclasses.replace(right, results=tuple(results))

    return wrong


def _swapped(rule: dims.Rule) -> dims.Rule:
    """The rule with the first two dimensions of its operand swapped."""

    def wrong(equation: Any) -> dims.Dims:
        def other(sources: Any) -> Any:
            return tuple([(operand, 1 - dim) for operand, dim in sources])

        right = rule(equation)
        results = tuple([tuple(map(other, result)) for result in right.results])
        return dims.Dims(results, tuple(map(other, right.summed)))

    return wrong


SQUARE = 64  # rows, and columns: else shapes show that a trail is wrong

WRONG_TRAILS: Mapping[str, tuple[Callable[[dims.Rule], dims.Rule], Callable[[Any], Any]]] = {
    'transpose': (turned, lambda out: out.T),
    'broadcast_in_dim': (turned, lambda out: lax.broadcast_in_dim(out.sum(1), out.shape, (1,))),
    'dot_general': (turned, lambda out: (out @ (normal(SQUARE, SQUARE) / 8)).T),
    'reshape': (turned, lambda out: lax.reshape(lax.expand_dims(out, [1]), (SQUARE, SQUARE)).T),
    'squeeze': (turned, lambda out: lax.squeeze(lax.expand_dims(out, [1]) * 2, [1]).T),
    'top_k': (turned, lambda out: lax.top_k(out, SQUARE)[0].T),
    'argmax': (_swapped, lambda out: jnp.argmax(out, 0)),
    'argmin': (_swapped, lambda out: jnp.argmin(out, 0)),
    'reduce_prod': (_swapped, lambda out: jnp.prod(1 + out / 4, 0)),
}
"""Primitive -> its rule made wrong, and what is computed of sorted rows, which has others where they were."""


def _wrong_trail(name: str) -> None:
    """Adds a fault: a wrong trail in what is sorted by expert.

    A trail says where constraints are put, which change no value. It also says what has rows between a sort
    and where these are put back, and there a wrong one does: devices sort their own rows, where the order of
    all is seen.
    """
    wrong, computed = WRONG_TRAILS[name]

    def make(helper: MeshShardingHelper) -> Step:
        def step(w: Any, x: Any) -> Any:
            expert = jnp.argmax(x[:, :4], -1) if name != 'argmax' else lax.top_k(x[:, :4], 1)[1][:, 0]
            order = jnp.argsort(expert)
            out = jnp.tanh(lax.ragged_dot(x[order], w['up'], jnp.bincount(expert, length=4)))
            return computed(out)[jnp.argsort(order)]

        return followed(helper, step, {'up': normal(4, 8, SQUARE) / 3}, normal(SQUARE, 8))

    make.__name__ = f'wrong_trail_of_{name}'
    rules = {**dims.RULES, name: wrong(dims.RULES[name])}
    seeded(('sort',), (dims, 'RULES', rules), mesh=FSDP)(make)


for _name in WRONG_TRAILS:
    _wrong_trail(_name)


def _over_rows(helper: MeshShardingHelper, each: Any, first: Any) -> Step:
    """A loop over the rows of a batch."""

    def step(w: Any, x: Any) -> Any:
        last, rows = lax.scan(lambda state, row: each(w, state, row), first, x)
        return {'last': last, 'rows': rows}

    return followed(helper, step, normal(8, 8) / 3, normal(64, 8))


@seeded(('last', 'scan'), (loops_over_rows, 'added_by_round', always([])), mesh=FSDP)
def running_average_taken_for_a_sum(helper: MeshShardingHelper) -> Step:
    """Devices run over their own rows, and the order of all rows counts."""

    def each(w: Any, state: Any, row: Any) -> Any:
        out = jnp.tanh(row @ w)
        return 0.9 * state + out, out

    return _over_rows(helper, each, jnp.zeros(8))


@seeded(
    ('last', 'scan'),
    (loops_over_rows, 'jnp', Module(jnp, zeros=lambda shape, dtype: jnp.full(shape, 0.5, dtype))),
    mesh=FSDP,
)
def each_device_begins_its_sum_with_something(helper: MeshShardingHelper) -> Step:
    """A doubled sum: what the loop begins with is added up over devices."""

    def each(w: Any, state: Any, row: Any) -> Any:
        out = jnp.tanh(row @ w)
        return state + out, out

    return _over_rows(helper, each, jnp.full(8, 0.5))


@seeded(
    ('rows', 'scan'),
    (
        loops_over_rows,
        'jnp',
        Module(jnp, moveaxis=lambda x, a, b: x if x.shape[0] == 4 else jnp.moveaxis(x, a, b)),
    ),
    mesh={'fsdp': 8},
)
def rows_put_together_in_a_transposed_order(helper: MeshShardingHelper) -> Step:
    """A transposed dimension: the first row of each device comes first."""

    def each(w: Any, state: Any, row: Any) -> Any:
        out = jnp.tanh(row @ w)
        return state + out, out

    def step(w: Any, x: Any) -> Any:
        last, rows = lax.scan(lambda state, row: each(w, state, row), jnp.zeros(8), x)
        return {'last': last, 'rows': rows}

    return followed(helper, step, normal(8, 8) / 3, normal(32, 8))


def _is_handed_on(var: Any, out: Any, makers: Any) -> bool:
    """As if keys were handed on from round to round."""
    return out is var or jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key)


@seeded(('rows', 'random_bits'), (loops_over_rows, '_is_same', _is_handed_on), mesh=FSDP)
def random_key_used_again_in_each_round(helper: MeshShardingHelper) -> Step:
    """A loop that splits its key in each round draws with the first one in all."""

    def each(w: Any, key: Any, row: Any) -> Any:
        key, used = jax.random.split(key)
        return key, jnp.where(jax.random.bernoulli(used, 0.5, (8,)), row @ w, 0)

    return _over_rows(helper, each, jax.random.key(0))


@seeded(('rng_bit_generator',), (loops_over_rows, 'draws_alike', always(True)), mesh=FSDP)
def random_key_of_one_device_used_by_all(helper: MeshShardingHelper) -> Step:
    """Mapped over devices, keys of this kind draw with the first one alone."""

    def step(w: Any, x: Any) -> Any:
        key = jax.random.key(0, impl='rbg')

        def noisy(given: Any) -> Any:
            row, number = given
            return row @ w + jax.random.normal(jax.random.fold_in(key, number), (8,))

        return lax.map(noisy, (x, jnp.arange(len(x))))

    return followed(helper, step, normal(8, 8) / 3, normal(64, 8))


@seeded(('scan',), (rows_by_number, '_is_number', always(True)), mesh=FSDP)
def row_of_another_number(helper: MeshShardingHelper) -> Step:
    """A loop that takes the last row first gets the first one."""

    def step(w: Any, x: Any) -> Any:
        return lax.map(lambda i: jnp.tanh(x[len(x) - 1 - i] @ w), jnp.arange(len(x)))

    return followed(helper, step, normal(8, 8) / 3, normal(64, 8))


@seeded(('kernel', 'conv_general_dilated'), (lax, 'psum', alone))
def mended_convolution_without_its_sum(helper: MeshShardingHelper) -> Step:
    """A missing sum: the gradient of a depthwise convolution is that of a device's own rows."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@seeded(('kernel', 'conv_general_dilated'), (lax, 'psum', twice))
def mended_convolution_summed_up_twice(helper: MeshShardingHelper) -> Step:
    """A doubled sum: the same gradient, added up over devices that have it already."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@seeded(('kernel', 'conv_general_dilated'), (dispatch, 'with_right_gradients', lambda jaxpr, *_, **__: jaxpr))
def convolution_that_is_not_mended(helper: MeshShardingHelper) -> Step:
    """The gradient of a depthwise convolution as XLA has it."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@seeded(('dynamic_update_slice',), (run, 'within_bounds', lambda equation: equation), mesh=FSDP)
def row_out_of_bounds_that_is_not_mended(helper: MeshShardingHelper) -> Step:
    """A row written out of bounds, as XLA has it where devices have rows."""

    def step(w: Any, x: Any, number: Any) -> Any:
        return lax.dynamic_update_slice(x @ w, 3 * jnp.ones((1, 8)), (number, 0))

    args = normal(8, 8), normal(16, 8), np.int32(17)
    return helper.sjit(step, in_shardings=(P(), P('fsdp'), P())), args


def _with_optimizer(helper: MeshShardingHelper, orthogonal: Any) -> Step:
    """A step whose optimizer computes a function of matrices, which devices compute of whole ones."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            out, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params['q'])
            return jnp.mean(out**2)

        return jax.tree.map(lambda w, g: w - 0.1 * orthogonal(g), params, jax.grad(loss)(params))

    rule = TreePathShardingRule(('.*', P(None, 'fsdp', 'tp')))
    return followed(helper, step, {'q': normal(16, 16, 16) / 4}, normal(64, 16), rule=rule)


def _orthogonal(x: Any) -> Any:
    x = x / jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ (x.swapaxes(1, 2) @ x)
    return x


def _next_ones(function: Any, stack: Any, free: Any) -> Any:
    return [jnp.roll(x, 1, 0) for x in matrices_of_stack(function, stack, free)]


matrices_of_stack = matrices._of_stack
SPREAD = (matrices, '_BEGIN', 0), (matrices, '_pays', always(True))  # however small they are


@seeded(('q', 'dot_general'), *SPREAD, (matrices, '_of_stack', _next_ones))
def matrices_given_back_to_others(helper: MeshShardingHelper) -> Step:
    """Devices compute whole matrices of an optimizer, and each matrix gets that of its neighbour."""
    return _with_optimizer(helper, _orthogonal)


@seeded(('q',), *SPREAD, (dims, 'RULES', {**dims.RULES, 'sub': turned(dims.RULES['sub'])}))
def wrong_trail_of_sub(helper: MeshShardingHelper) -> Step:
    """A wrong trail in a stack of matrices: its last dimension is taken for the stack."""

    def cubed(x: Any) -> Any:
        squared = x.swapaxes(1, 2) @ x
        return x @ squared - x @ squared @ squared

    return _with_optimizer(helper, lambda x: cubed(30 * x))
