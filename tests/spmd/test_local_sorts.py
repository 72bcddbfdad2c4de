"""Tokens that are sorted by expert and restored: each device sorts its local tokens if that is equivalent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import FSDP, HSDP, P, assert_equal, collectives, partitioned, state_spec

pytestmark = pytest.mark.medium

TOKENS, WIDTH, HIDDEN, EXPERTS = 64, 8, 16, 4


def weights():
    random = np.random.default_rng(0)
    shapes = {
        'router': (WIDTH, EXPERTS),
        'up': (EXPERTS, WIDTH, HIDDEN),
        'down': (EXPERTS, HIDDEN, WIDTH),
        'bias': (EXPERTS, HIDDEN),
    }
    return {name: random.normal(size=shape).astype('float32') / 2 for name, shape in shapes.items()}


def tokens():
    """Returns tokens with very different numbers per expert, also on each device."""
    x = np.random.default_rng(1).normal(size=(TOKENS, WIDTH)).astype('float32')
    return x + np.linspace(-2, 2, TOKENS, dtype='float32')[:, None]


def argsort(keys):
    return jnp.argsort(keys)


def sorted_with(keys):
    return lax.sort((keys, lax.iota('int32', keys.size)), num_keys=1)[1]


def bincount(keys):
    return jnp.bincount(keys, length=EXPERTS)


def one_hot(keys):
    return jax.nn.one_hot(keys, EXPERTS, dtype='int32').sum(0)


def compared(keys):
    return jnp.sum((keys[:, None] == jnp.arange(EXPERTS)).astype('float32'), 0).astype('int32')


def segments(keys):
    return jax.ops.segment_sum(jnp.ones_like(keys), keys, EXPERTS)


def added(keys):
    return jnp.zeros(EXPERTS, 'int32').at[keys].add(1)


def gathered(out, order, count):
    del count
    return out[jnp.argsort(order)]


def gathered_by_take(out, order, count):
    del count
    return jnp.take(out, jnp.argsort(order), axis=0)


def scattered(out, order, count):
    del count
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True)


def put_back(out, order, count):
    """Without unique_indices, JAX's gradient determines which update of a row is kept."""
    del count
    return jnp.zeros_like(out).at[order].set(out)


def by_scattered_numbers(out, order, count):
    del count
    return out[jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))]


def plain_rows(x, order, count):
    return x[order // count]


def repeated_rows(x, order, count):
    return jnp.repeat(x, count, axis=0)[order]


@jax.custom_vjp
def permuted(x, order):
    return x[order]


def permuted_forward(x, order):
    return x[order], order


def permuted_backward(order, gradient):
    return gradient[jnp.argsort(order)], None


permuted.defvjp(permuted_forward, permuted_backward)


def rows_by_own_gradient(x, order, count):
    return permuted(jnp.repeat(x, count, axis=0), order)


def back_by_own_gradient(out, order, count):
    del count
    return permuted(out, jnp.argsort(order))


def plain(w, rows, sizes, keys):
    del keys
    return lax.ragged_dot(jnp.tanh(lax.ragged_dot(rows, w['up'], sizes)), w['down'], sizes)


def with_bias(w, rows, sizes, keys):
    hidden = lax.ragged_dot(rows, w['up'], sizes) + w['bias'][keys]
    return lax.ragged_dot(jax.nn.relu(hidden), w['down'], sizes)


def gated(w, rows, sizes, keys):
    gate, up = jnp.split(lax.ragged_dot(rows, w['up'], sizes), 2, axis=-1)
    hidden = jnp.concatenate([jax.nn.silu(gate) * up, up], axis=-1)
    hidden = hidden / jnp.linalg.norm(hidden, axis=-1, keepdims=True)
    return plain({'up': w['up'], 'down': w['down']}, lax.ragged_dot(hidden, w['down'], sizes), sizes, keys)


def sliced(w, rows, sizes, keys):
    del keys
    hidden = lax.ragged_dot(rows, w['up'], sizes)
    hidden = jax.nn.softmax(hidden[:, : HIDDEN // 2] * 2 + hidden[:, HIDDEN // 2 :])
    return lax.ragged_dot(jnp.pad(hidden, ((0, 0), (0, HIDDEN // 2))), w['down'], sizes)


def dense_too(w, rows, sizes, keys):
    return plain(w, jnp.tanh(rows @ w['router'] @ w['router'].T), sizes, keys)


def experts(w, x, sort=argsort, count_of=bincount, rows=plain_rows, layer=plain, back=gathered, chosen=2):
    """A layer that sorts tokens by expert; the arguments are the ways in which users write its parts."""
    gates, expert = lax.top_k(jax.nn.softmax(x @ w['router']), chosen)
    keys = expert.reshape(-1)
    order = sort(keys)
    out = layer(w, rows(x, order, chosen), count_of(expert.reshape(-1)), keys[order])
    out = back(out, order, chosen).reshape(len(x), chosen, -1)
    return jnp.einsum('rkd,rk->rd', out, gates)


def summed(w, x, chosen=2):
    """Weights the tokens in the order of experts, and sums over the choices of a token."""
    gates, expert = lax.top_k(jax.nn.softmax(x @ w['router']), chosen)
    order = jnp.argsort(expert.reshape(-1))
    out = plain(w, x[order // chosen], bincount(expert.reshape(-1)), None)
    return jnp.zeros_like(x).at[order // chosen].add(out * gates.reshape(-1)[order][:, None])


def numbered_tokens(w, x, chosen=2):
    """Gathers by token index, and scatters the positions of their choices."""
    gates, expert = lax.top_k(jax.nn.softmax(x @ w['router']), chosen)
    order = jnp.argsort(expert.reshape(-1))
    numbers = jnp.arange(order.size, dtype='int32')
    token = (numbers // chosen)[order]
    positions = jnp.zeros_like(numbers).at[order].set(numbers).reshape(-1, chosen)
    out = plain(w, x[token], bincount(expert.reshape(-1)), None)
    added = jnp.zeros_like(x).at[token].add(out * gates.reshape(-1)[order][:, None])
    return added + jnp.einsum('rkd,rk->rd', out[positions], gates)


def one_expert(w, x):
    expert = jnp.argmax(x @ w['router'], axis=-1)
    order = jnp.argsort(expert)
    return x + gathered(plain(w, x[order], bincount(expert), None), order, 1)


def layers(w, x, checkpoint=jax.checkpoint):
    def layer(x, scale):
        return jnp.tanh(x + scale * experts(w, x)), jnp.sum(x)

    return lax.scan(checkpoint(layer), x, jnp.arange(1.0, 3.0))[0]


def written_out(w, x):
    for _ in range(2):
        x = jnp.tanh(x + experts(w, x))
    return x


def jitted(w, x):
    return jax.jit(experts)(w, x)


FORMS = {
    'plain': experts,
    'sorted with indices': functools.partial(experts, sort=sorted_with),
    'segments': functools.partial(experts, count_of=segments),
    'added': functools.partial(experts, count_of=added),
    'take': functools.partial(experts, back=gathered_by_take),
    'scattered': functools.partial(experts, back=scattered),
    'restored': functools.partial(experts, back=put_back),
    'by scattered indices': functools.partial(experts, back=by_scattered_numbers),
    'repeated rows': functools.partial(experts, rows=repeated_rows),
    'bias': functools.partial(experts, layer=with_bias),
    'gated': functools.partial(experts, layer=gated),
    'sliced': functools.partial(experts, layer=sliced),
    'dense too': functools.partial(experts, layer=dense_too),
    'all experts': functools.partial(experts, chosen=4),
    'summed': summed,
    'numbered tokens': numbered_tokens,
    'one expert': one_expert,
    'layers': layers,
    'written out': written_out,
    'jitted': jitted,
}


def with_gradients(fun):
    def both(w, x):
        def loss(w, x):
            out = fun(w, x)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(w, x)

    return both


def moved(fun, mesh=FSDP):
    """Returns the primitives for which examples move."""
    step, _ = partitioned(fun, weights(), tokens(), mesh)
    return {row.primitive for row in step.collective_rows if row.what == 'examples'}


def compare(fun, mesh=FSDP, tolerance=1e-5):
    """Returns the collectives of a function whose values match one device."""
    step, run = partitioned(fun, weights(), tokens(), mesh)
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), jax.jit(fun)(weights(), tokens()), tolerance)
    return collectives(step)


@pytest.mark.parametrize('name', FORMS)
@pytest.mark.sampled(2)
def test_each_device_sorts_its_own_tokens(name):
    """Nothing is compiled."""
    assert not moved(with_gradients(FORMS[name]))


@pytest.mark.parametrize(
    'name',
    [
        name if name in ('plain', 'restored', 'layers') else pytest.param(name, marks=pytest.mark.slow)
        for name in FORMS
    ],
)
@pytest.mark.sampled(3)
def test_values_match_one_device(name):
    compare(with_gradients(FORMS[name]))


@pytest.mark.parametrize(
    'name', ['summed', *[pytest.param(x, marks=pytest.mark.slow) for x in ('gated', 'layers')]]
)
def test_values_over_two_axes(name):
    compare(with_gradients(FORMS[name]), HSDP)


def test_collectives_only_move_weights():
    state = {name: x for name, x in weights().items() if name != 'bias'}
    specs = [state_spec(leaf.shape) for leaf in jax.tree.leaves(state)]
    fun = with_gradients(experts)
    step, _ = partitioned(fun, state, tokens(), result_specs=[*specs, P('fsdp'), P('fsdp')])
    gathered = {
        f"all_gather weight ['{name}'] for {primitive}": count
        for name, primitive, count in (
            ('router', 'dot_general', 2),
            ('up', 'ragged_dot_general', 2),
            ('down', 'ragged_dot_general', 1),  # the forward pass ends with it
        )
    }
    reduced = {f"reduce_scatter gradient of ['{name}']": 1 for name in state}
    assert collectives(step) == gathered | reduced


@pytest.mark.parametrize('reduce', [jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.mean, jnp.argmax])
def test_feature_dims_may_be_reduced(reduce):
    def layer(w, rows, *more):
        return plain(w, rows * reduce(rows, -1, keepdims=True), *more)

    assert not moved(functools.partial(experts, layer=layer))


def test_rows_restored_by_a_custom_gradient():
    """JAX replaces the call by its forward rule only when it differentiates the call."""
    fun = functools.partial(experts, rows=rows_by_own_gradient, back=back_by_own_gradient)
    assert not moved(with_gradients(fun))
    assert compare(fun)


def of_sorted(layer):
    return functools.partial(experts, layer=layer)


def of_sizes(count_of):
    return functools.partial(experts, count_of=count_of)


def sorted_by(keys_of, count_of=bincount):
    def fun(w, x):
        keys = keys_of(lax.top_k(x @ w['router'], 1)[1].reshape(-1), x)
        order = jnp.argsort(keys)
        return gathered(plain(w, x[order], count_of(keys), None), order, 1)

    return fun


def numbered(w, rows, sizes, keys):
    return plain(w, rows * jnp.linspace(-1, 1, len(rows))[:, None], sizes, keys)


def unequal(w, rows, sizes, keys):
    return plain(
        w, rows + jnp.concatenate([jnp.ones((1, WIDTH)), jnp.zeros((len(rows) - 1, WIDTH))]), sizes, keys
    )


def written_over(w, rows, sizes, keys):
    return plain(w, lax.dynamic_update_slice(rows, jnp.ones((1, WIDTH)), (3, 0)), sizes, keys)


def padded(w, rows, sizes, keys):
    return plain(w, lax.pad(rows, jnp.float32(0), ((-1, 1, 0), (0, 0, 0))), sizes, keys)


@jax.custom_vjp
def summed_back(x):
    return x * 2


summed_back.defvjp(lambda x: (x * 2, None), lambda _, gradient: (jnp.cumsum(gradient, 0),))


ORDER_MATTERS = {
    'the gradient of one': of_sorted(lambda w, rows, *more: plain(w, summed_back(rows), *more)),
    'a sum of those before': of_sorted(lambda w, rows, *more: plain(w, jnp.cumsum(rows, 0) / 9, *more)),
    'reversed': of_sorted(lambda w, rows, *more: plain(w, rows[::-1], *more)),
    'a neighbour': of_sorted(lambda w, rows, *more: plain(w, jnp.roll(rows, 1, 0), *more)),
    'a position': of_sorted(numbered),
    'the first one': of_sorted(unequal),
    'written over': of_sorted(written_over),
    'padded': of_sorted(padded),
    'tokens as they were': lambda w, x: experts(
        w, x, layer=lambda w, rows, *more: plain(w, rows + jnp.concatenate([x, x]), *more)
    ),
    'noise': of_sorted(
        lambda w, rows, *more: plain(w, rows + jax.random.normal(jax.random.key(0), rows.shape), *more)
    ),
    'sorted still': functools.partial(experts, back=lambda out, order, count: out),
    'restored to other positions': functools.partial(experts, back=lambda out, order, count: out[order]),
    'restored to looked-up positions': functools.partial(
        experts, back=lambda out, order, count: out[jnp.arange(order.size)[order]]
    ),
    'one further': functools.partial(
        experts, back=lambda out, order, count: out[(jnp.argsort(order) + 1) % order.size]
    ),
    'scattered over others': functools.partial(
        experts, back=lambda out, order, count: jnp.zeros_like(out).at[order // 4].set(out)
    ),
    'the order itself': lambda w, x: experts(w, x) + jnp.argsort(jnp.argmax(x, 1))[:, None] / TOKENS,
    'indices_are_sorted': of_sorted(
        lambda w, rows, sizes, keys: plain(
            w, rows + w['bias'].at[keys, :WIDTH].get(indices_are_sorted=True), sizes, keys
        )
    ),
    'one-hot': of_sizes(one_hot),
    'compared': of_sizes(compared),
    'as many as fit': of_sizes(lambda keys: jnp.minimum(bincount(keys), 20)),
    'of the others': of_sizes(lambda keys: bincount(keys)[::-1]),
    'shifted sizes': of_sizes(lambda keys: bincount((keys + 1) % EXPERTS)),
    'even sizes': of_sizes(lambda keys: jnp.full(EXPERTS, keys.size // EXPERTS)),
    'twos': of_sizes(lambda keys: jnp.zeros(EXPERTS, 'int32').at[keys].add(2) // 2),
    'of one half': of_sizes(lambda keys: 2 * bincount(keys[: keys.size // 2])),
    'downwards': sorted_by(lambda keys, x: -keys),
    'keys below zero': sorted_by(
        lambda keys, x: keys - 2, lambda keys: jnp.zeros(EXPERTS, 'int32').at[keys].add(1)
    ),
    'keys of tokens': sorted_by(lambda keys, x: jnp.floor(x[:, 0]).astype('int32')),
    'keys of positions': sorted_by(lambda keys, x: (keys + jnp.arange(keys.size)) % EXPERTS),
}


@pytest.mark.parametrize('name', ORDER_MATTERS)
def test_where_the_order_may_matter_tokens_are_sorted_together(name):
    """Nothing is compiled."""
    assert 'sort' in moved(with_gradients(ORDER_MATTERS[name]))


@pytest.mark.slow
@pytest.mark.parametrize('name', ORDER_MATTERS)
def test_values_where_the_order_may_matter(name):
    compare(with_gradients(ORDER_MATTERS[name]))


@pytest.mark.slow
def test_tokens_of_other_devices_move():
    def rows(x, order, _):
        return x[(jnp.arange(order.size) * 3 % TOKENS)[order]]

    fun = with_gradients(functools.partial(experts, rows=rows))
    assert 'sort' not in moved(fun) and 'gather' in moved(fun)
    compare(fun)


@pytest.mark.slow
def test_a_loop_that_saves_sorted_rows_keeps_their_order():
    """Otherwise the loop of the gradient would read the rows in another order."""
    fun = with_gradients(functools.partial(layers, checkpoint=lambda layer: layer))
    assert 'sort' in moved(fun)
    compare(fun)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(10))
def test_random_layers(seed):
    """Values match one device, whether or not each device sorts its local tokens."""
    random = np.random.default_rng(seed)
    steps = random.choice(len(STEPS), 2)

    def layer(w, rows, sizes, keys):
        for step in steps:
            rows = STEPS[step](w, rows, sizes, keys)
        return plain(w, rows, sizes, keys)

    compare(with_gradients(functools.partial([*FORMS.values()][seed % 9], layer=layer)), tolerance=1e-3)


STEPS = [
    plain,
    with_bias,
    sliced,
    dense_too,
    numbered,
    lambda w, rows, *_: rows - jnp.mean(rows, 0),
    lambda w, rows, *_: rows * jnp.max(jnp.abs(rows), -1, keepdims=True),
    lambda w, rows, *_: jnp.sort(rows, -1),
    lambda w, rows, *_: rows @ (rows.T @ rows) / 100,
    lambda w, rows, *_: jnp.where(rows > 0, rows, jnp.flip(rows, -1)),
    lambda w, rows, *_: jnp.roll(rows, 1, -1),
    lambda w, rows, *_: jnp.cumsum(rows, -1),
    lambda w, rows, *_: lax.map(jnp.tanh, rows),
    lambda w, rows, *_: jnp.where(jnp.arange(len(rows))[:, None] < 9, 0, rows),
]
