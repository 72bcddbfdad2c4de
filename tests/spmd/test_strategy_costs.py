"""Examples move to state if they are smaller: to rows of tables, to experts, to weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.spmd.test_partition import array, sgd
from tests.support.partitioned import (
    FSDP,
    HSDP,
    P,
    assert_equal,
    collectives,
    partitioned,
    state_spec,
)

pytestmark = pytest.mark.medium


def indices(*shape, below=256):
    return np.random.default_rng(sum(shape)).integers(0, below, shape).astype('int32')


def squares(w, tokens):
    return jnp.mean(jnp.tanh(w['table'][tokens]) ** 2)


def experts(w, x):
    """The tokens of each group go to the experts that the router selects, within a capacity."""
    capacity = 4
    chosen = jax.nn.one_hot(jnp.argmax(x @ w['router'], -1), w['up'].shape[0])
    positions = (jnp.cumsum(chosen, 1) * chosen - 1).astype('int32')
    dispatch = chosen[..., None] * jax.nn.one_hot(positions, capacity)
    expert_tokens = jnp.einsum('gsec,gsd->egcd', dispatch, x)
    hidden = jnp.tanh(jnp.einsum('egcd,edh->egch', expert_tokens, w['up']))
    out = jnp.einsum('egch,ehd->egcd', hidden, w['down'])
    return jnp.mean(jnp.einsum('gsec,egcd->gsd', dispatch, out) ** 2 * x)


ROWS, COLUMNS = {'table': array(512, 16)}, {'table': array(30, 128)}
EXPERTS = {'router': array(16, 16), 'up': array(16, 16, 16), 'down': array(16, 16, 16)}
WIDE = {'up': array(32, 256), 'down': array(256, 32)}


def wide(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w['up']) @ w['down']) ** 2)


KERNELS = {'first': array(3, 3, 16, 64), 'second': array(3, 3, 64, 16)}


def convolved(w, x):
    """Two convolutional layers on small images with many features."""

    def conv(x, kernel):
        numbers = ('NHWC', 'HWIO', 'NHWC')
        return lax.conv_general_dilated(x, kernel, (1, 1), 'SAME', dimension_numbers=numbers)

    return jnp.mean(jnp.tanh(conv(jnp.tanh(conv(x, w['first'])), w['second'])) ** 2)


CASES = {
    'few images': (convolved, KERNELS, array(8, 3, 3, 16)),
    'rows': (squares, ROWS, indices(8, 2)),
    'columns': (squares, COLUMNS, indices(8, below=30)),
    'experts': (experts, EXPERTS, array(8, 6, 16)),
    'few examples': (wide, WIDE, array(8, 32)),
}
EXPECTED = {
    'rows': {
        # Row indices move to the table, and rows back; gradients of rows move to the table.
        "all_gather indices of rows of ['table'] gathered": 1,
        "reduce_scatter rows of ['table'] moved": 1,
        "all_gather gradients of rows of ['table'] moved": 1,
        'all_reduce sum over examples for a result': 1,
    },
    'columns': {
        "all_gather indices of rows of ['table'] gathered": 1,
        "all_to_all rows of ['table'] moved": 1,
        "all_to_all gradients of rows of ['table'] moved": 1,
        'all_reduce sum over examples for a result': 1,
    },
}


def specs_of(state, size=8):
    return [*[state_spec(leaf.shape, size=size) for leaf in jax.tree.leaves(state)], P()]


@pytest.mark.parametrize('name', EXPECTED)
def test_rows_of_a_table_move_and_the_table_stays(name):
    loss, state, batch = CASES[name]
    step, _ = partitioned(sgd(loss), state, batch, result_specs=specs_of(state))
    assert collectives(step) == EXPECTED[name]


@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.parametrize('name', CASES)
@pytest.mark.sampled(3)
def test_values_match_one_device(name, mesh):
    loss, state, batch = CASES[name]
    _, run = partitioned(sgd(loss), state, batch, mesh, result_specs=specs_of(state, mesh['fsdp']))
    assert_equal(run(), jax.jit(sgd(loss))(state, batch))


def test_tokens_move_to_experts_and_the_experts_stay():
    step, _ = partitioned(sgd(experts), EXPERTS, array(8, 6, 16), result_specs=specs_of(EXPERTS))
    counts = collectives(step)
    gathered = [reason for reason in counts if reason.startswith('all_gather')]
    assert gathered == ["all_gather weight ['router'] for dot_general"]
    # To the experts and back, and gradients to the experts; gradients of tokens are not needed.
    assert sum(count for reason, count in counts.items() if reason.startswith('all_to_all')) == 3


@pytest.mark.parametrize('name', ['few examples', 'few images'])
def test_few_examples_move_to_wide_weights(name):
    loss, state, batch = CASES[name]
    step, _ = partitioned(sgd(loss), state, batch, result_specs=specs_of(state))
    assert not any('weight' in reason for reason in collectives(step)), collectives(step)
    # Less than the gathers of the weights and the reductions of their gradients, and the loss.
    assert (
        sum(row.bytes * row.count for row in step.collective_rows) < sum(x.nbytes for x in state.values()) / 2
    )


@pytest.mark.parametrize('name', ['rows', 'columns', 'few examples', 'few images'])
def test_many_examples_stay_and_state_is_gathered(name):
    loss, state, batch = CASES[name]
    many = np.tile(batch, (256, *[1] * (batch.ndim - 1)))
    step, _ = partitioned(sgd(loss), state, many, result_specs=specs_of(state))
    assert not [row.reason for row in step.collective_rows if row.what == 'examples']


@pytest.mark.parametrize(
    ('mesh', 'reason'),
    [
        ({'replica': 4, 'fsdp': 2}, "reduce_scatter rows of ['table'] moved"),
        # Rows that move along fsdp would be gathered along replica first.
        ({'fsdp': 2, 'replica': 4}, "all_gather weight ['table'] for gather"),
    ],
)
def test_minor_axes_make_moves_along_major_axes_more_expensive(mesh, reason):
    step, run = partitioned(
        sgd(squares), ROWS, indices(64, 8), mesh, result_specs=specs_of(ROWS, mesh['fsdp'])
    )
    assert collectives(step)[reason] == 1
    assert_equal(run(), jax.jit(sgd(squares))(ROWS, indices(64, 8)))


@pytest.mark.parametrize('mesh', [{'replica': 4, 'fsdp': 2}, {'fsdp': 2, 'replica': 4}])
def test_rows_move_along_all_axes_of_their_table(mesh):
    spec = P(tuple(mesh))
    step, run = partitioned(
        *(sgd(squares), ROWS, indices(8, 2), mesh), specs=[spec], result_specs=[spec, P()]
    )
    assert not any('weight' in reason for reason in collectives(step)), collectives(step)
    assert_equal(run(), jax.jit(sgd(squares))(ROWS, indices(8, 2)))


def test_loop_invariant_state_is_gathered_once_for_all_iterations():
    def loss(w, x):
        def cell(h, _):
            return jnp.tanh(h @ w['h']), None

        return jnp.mean(lax.scan(cell, x, None, length=64)[0])

    step, _ = partitioned(loss, {'h': array(64, 64)}, array(8, 64))
    assert collectives(step)["all_gather weight ['h'] for scan"] == 1


@pytest.mark.parametrize('form', ['dg,bd->bg', 'gd,bd->bg'])
def test_gradients_that_a_loop_accumulates_are_reduced_after_it(form):
    def loss(w, x):
        def cell(h, _):
            return jnp.tanh(jnp.einsum(form, w['h'], h)), None

        return jnp.mean(lax.scan(cell, x, None, length=64)[0] ** 2)

    # One matmul with the weight moves fewer bytes than its gradient; all iterations together move more.
    state, batch = {'h': array(64, 64) / 16}, array(8, 64)  # small, so that rounding does not grow
    step, run = partitioned(sgd(loss), state, batch, result_specs=specs_of(state))
    counts = collectives(step)
    assert counts.pop("reduce_scatter gradient of ['h']") == 1, counts
    assert all(count <= 2 for count in counts.values()), counts
    assert_equal(run(), jax.jit(sgd(loss))(state, batch))


MODES = ['fill', 'clip', 'promise_in_bounds']


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('dtype', ['int32', 'uint8', 'int8'])
@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
@pytest.mark.sampled(3)
def test_indices_out_of_bounds_in_rows_of_a_table(mode, dtype, mesh):
    below = {'int8': 128, 'uint8': 256, 'int32': 600}[dtype]
    # JAX does not define out-of-bounds indices in the mode 'promise_in_bounds'.
    size = below if mode == 'promise_in_bounds' else 64
    table, at = {'table': array(-(-size // 8) * 8, 16)}, indices(8, 1, below=below).astype(dtype)
    if mode != 'promise_in_bounds' and dtype != 'uint8':
        at[:3] = -at[:3]

    def rows_of(w, at):
        return w['table'].at[at].get(mode=mode, wrap_negative_indices=False)

    def step(w, at):
        def loss(w):
            rows = rows_of(w, at)
            return jnp.sum(jnp.where(jnp.isnan(rows), 3.0, jnp.tanh(rows)) * jnp.arange(16))

        return rows_of(w, at), jax.grad(loss)(w)

    step_on_blocks, run = partitioned(step, table, at, mesh, result_specs=[P(), P('fsdp')])
    assert "reduce_scatter rows of ['table'] moved" in collectives(step_on_blocks)
    rows, gradient = jax.jit(step)(table, at)
    results, added = run()
    np.testing.assert_array_equal(results, rows)
    assert_equal([added], gradient)
