"""Optimizers that multiply matrices: each device computes whole ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, muon

from scalax._follow import matrices
from scalax._jaxprs.other_rows import Known, OnOtherRows
from scalax._jaxprs.rows import Rows, RowsOf
from scalax.sharding import (
    MeshShardingHelper,
    TreePathShardingRule,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P
from tests.support.following import equations

LAYERS, WIDTH, HIDDEN = 3, 64, 96
COLUMNS, ROWS = P('fsdp', 'tp'), P('tp', 'fsdp')


@pytest.fixture
def free_moves(monkeypatch):
    """As if it took no time to begin a collective: these matrices are small."""
    monkeypatch.setattr(matrices, '_BEGIN', 0)


pytestmark = pytest.mark.usefixtures('free_moves')


def shapes(stacked):
    """Of stacks, or of matrices of layers that are written out."""
    each = {'q': (WIDTH, WIDTH), 'o': (WIDTH, WIDTH), 'up': (WIDTH, HIDDEN), 'down': (HIDDEN, WIDTH)}
    layers = {name: (LAYERS, *shape) for name, shape in each.items()}
    return {'layers': layers if stacked else [each] * LAYERS, 'scale': (WIDTH,)}


def arguments(stacked):
    random = np.random.default_rng(0)
    draw = lambda shape: (random.standard_normal(shape) / 11).astype('float32')  # noqa: E731
    params = jax.tree.map(draw, shapes(stacked), is_leaf=lambda x: isinstance(x, tuple))
    return params, draw((64, WIDTH)) * 11


def loss(params, x):
    def layer(x, w):
        x = x + jnp.tanh(x @ w['q']) @ w['o']
        return x + jnp.tanh(x @ w['up']) @ w['down'], None

    if isinstance(params['layers'], dict):
        x, _ = jax.lax.scan(layer, x, params['layers'])
    else:
        for w in params['layers']:
            x, _ = layer(x, w)
    return jnp.mean((x * params['scale']) ** 2)


def numbers(params):
    """Of stacks, and of matrices; what has no matrices is left to adam."""
    each = {3: MuonDimensionNumbers(1, 2), 2: MuonDimensionNumbers(0, 1)}
    return jax.tree.map(lambda x: each.get(jnp.ndim(x)), params)


def masked(params):
    return jax.tree.map(
        lambda x: x if isinstance(x, optax.MaskedNode) else numbers(x),
        params,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def optimizer(**options):
    return muon(1e-2, muon_weight_dimension_numbers=masked, **options)


def step_of(optimizer, update=None):
    update = update or optimizer.update

    def step(state, x):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def sharded(step, tp=1, stacked=True, **options):
    helper = MeshShardingHelper([-1, tp], ['fsdp', 'tp'])
    stack = [None] if stacked else []
    rule = TreePathShardingRule(
        ('scale|count|coeffs|step', P()),
        ('(down|o)$', P(*stack, *ROWS)),
        ('(q|up)$', P(*stack, *COLUMNS)),
        ('.*', P()),
    )
    shardings = {'in_shardings': (rule, P('fsdp')), 'out_shardings': (rule, P())}
    return helper.sjit(step, **shardings, **options)


def spread(step, *args):
    """The equations that compute whole matrices."""
    return [each for each in equations(step.trace(*args).jaxpr) if each.params.get('name') == 'spread']


def assert_same(step, optimizer, stacked, tp, count):
    params, x = arguments(stacked)
    state = params, optimizer.init(params)
    with jax.default_matmul_precision('highest'):
        on_devices = sharded(step, tp, stacked=stacked)
        assert len(spread(on_devices, state, x)) == count
        found, expected = state, state
        found, a = on_devices(found, x)
        expected, b = jax.jit(step)(expected, x)
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(each, 'float32') for each in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('options', 'tp', 'stacked', 'count'),
    [
        ({}, 1, True, 2),
        ({}, 2, True, 2),
        ({}, 1, False, 2),
        pytest.param({'mu_dtype': 'bfloat16'}, 2, False, 2, marks=pytest.mark.medium),
        pytest.param({'ns_coeffs': 'dion', 'nesterov': False}, 1, True, 2, marks=pytest.mark.medium),
        pytest.param({'adaptive': True, 'weight_decay': 0.1}, 1, True, 2, marks=pytest.mark.medium),
    ],
    ids=str,
)
def test_the_same_values(options, tp, stacked, count):
    """The square ones are one stack, and so are the others, some of which are transposed."""
    assert_same(step_of(optimizer(**options)), optimizer(**options), stacked, tp, count)


def newton_schulz(x):
    """As many write it: without a loop, for one matrix."""
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(3):
        a = x @ x.T
        x = 1.5 * x - 0.5 * a @ x
    return x


def by_hand(transform, ndim=2):
    """An optimizer that transforms the momentum of weights of so many dimensions."""

    def update(grads, state, params):
        momentum = jax.tree.map(lambda g, m: 0.9 * m + g, grads, state)
        return jax.tree.map(lambda m: -0.01 * (transform(m) if m.ndim == ndim else m), momentum), momentum

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


@pytest.mark.slow
@pytest.mark.parametrize('transform', [newton_schulz, jax.jit(newton_schulz)], ids=['plain', 'jit'])
def test_without_a_loop(transform):
    """The square ones are one stack; others are two, because this transposes none."""
    found = by_hand(transform)
    assert_same(step_of(found), found, False, 1, 3)


@pytest.mark.slow
def test_an_update_that_is_jitted():
    assert_same(step_of(optimizer(), jax.jit(optimizer().update)), optimizer(), True, 1, 2)


@pytest.mark.slow
def test_an_update_in_a_branch():
    found = optax.MultiSteps(optimizer(), 2).gradient_transformation()
    assert_same(step_of(found), found, True, 1, 2)


@pytest.mark.medium
def test_steps_in_a_loop():
    step = step_of(optimizer())

    def steps(state, x):
        return jax.lax.scan(lambda state, _: step(state, x), state, None, 2)

    params, x = arguments(True)
    assert len(spread(sharded(steps), (params, optimizer().init(params)), x)) == 2


@pytest.mark.slow
def test_what_depends_on_another_one():
    """The first ones are spread, and what comes behind stays where it is."""

    def twice(x):
        y = newton_schulz(x)
        return newton_schulz(y + 0.1 * x @ jnp.ones((x.shape[1], x.shape[1])))

    found = by_hand(twice)
    assert_same(step_of(found), found, False, 1, 3)


def mixing(x):
    """Each matrix, less the mean of all."""
    y = x - jnp.mean(x, 0)
    return y @ y.swapaxes(1, 2) @ y


def running(x):
    y = jnp.cumsum(x, 0)
    return y @ y.swapaxes(1, 2) @ y


def all_products(x):
    return jnp.einsum('aij,bkj->aik', x, x) @ x


def placed(x):
    x = with_sharding_constraint(x, P())
    return x @ x.swapaxes(1, 2) @ x


@pytest.mark.slow
@pytest.mark.parametrize('transform', [mixing, running, all_products, placed])
def test_what_stays_as_it_is(transform):
    found = by_hand(transform, 3)
    assert_same(step_of(found), found, True, 1, 0)


def test_small_ones_stay(monkeypatch):
    monkeypatch.undo()
    step, (params, x) = step_of(optimizer()), arguments(True)
    halved = jax.tree.map(lambda a: a[..., :32, :32] if a.ndim == 3 else a[:32], params)
    assert not spread(sharded(step), (halved, optimizer().init(halved)), x[:, :32])


@pytest.mark.medium
@pytest.mark.parametrize(('times', 'count'), [(64, 2), (16, 0)])
def test_weights_that_are_whole_everywhere(times, count):
    """With data parallelism alone, each device computes some matrices, too, where moving them pays."""
    helper, step = MeshShardingHelper([-1], ['data']), step_of(optimizer())
    rule = TreePathShardingRule(('.*', P()))
    params, x = arguments(False)

    def enlarged(a):
        return jnp.tile(a, (times,) * a.ndim)

    def init():
        return jax.tree.map(enlarged, params), optimizer().init(jax.tree.map(enlarged, params))

    on_devices = helper.sjit(step, in_shardings=(rule, P('data')), out_shardings=(rule, P()))
    assert len(spread(on_devices, jax.eval_shape(init), jax.eval_shape(enlarged, x))) == count


def test_stacks_of_another_size():
    def normalized(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y / jnp.linalg.norm(y, axis=(1, 2), keepdims=True), x)

    jaxpr = jax.make_jaxpr(normalized)(jnp.ones((3, 4, 5)))
    x = np.random.default_rng(0).standard_normal((7, 4, 5)).astype('float32')
    rows, many = RowsOf(3), Known(jnp.asarray(x), Rows(0))
    assert rows.results(jaxpr, [many.fact]) == [many.fact]
    [found] = OnOtherRows(rows, 7, share=None).values(jaxpr, [many], [many.fact])
    np.testing.assert_allclose(found, normalized(x), rtol=1e-6)


@jax.custom_vjp
def times_five(x):
    """The identity, whose gradient is another one."""
    return x + 0


times_five.defvjp(lambda x: (x, None), lambda _, gradient: (5 * gradient,))


@pytest.mark.medium
@pytest.mark.sampled(2)
@pytest.mark.parametrize('stacked', [True, False])
def test_gradients_of_its_own(stacked):
    """Where a function is differentiated from outside."""

    def value(weights, x):
        products = [times_five(w @ w.swapaxes(-1, -2)) @ w for w in weights.values()]
        return sum(jnp.sum(jnp.sin(y)) for y in products) + x.sum()

    params, x = arguments(stacked)
    weights = params['layers'] if stacked else params['layers'][0]
    sharded_value = MeshShardingHelper([-1], ['fsdp']).sjit(
        value,
        in_shardings=(TreePathShardingRule(('.*', P(*[None] * stacked, 'fsdp'))), P('fsdp')),
        out_shardings=P(),
    )
    with jax.default_matmul_precision('highest'):
        found, expected = jax.grad(sharded_value)(weights, x), jax.jit(jax.grad(value))(weights, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def with_own_keys(x):
    """Under vmap, the generator draws all of the first key."""
    data = jnp.int32(20 * x[0, 0])
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0, impl='rbg'), data), x.shape)
    return newton_schulz(x) + 0.1 * noise


def with_callback(x):
    y = newton_schulz(x)
    return y @ jax.pure_callback(lambda y: np.asarray(y) * 2, y, y).T @ y


@pytest.mark.slow
@pytest.mark.parametrize('transform', [with_own_keys, with_callback])
def test_what_is_not_the_same_under_vmap(transform):
    found = by_hand(transform)
    assert_same(step_of(found), found, False, 1, 0)


@pytest.mark.slow
def test_a_loop_over_the_matrices_of_a_stack():
    found = by_hand(lambda x: jax.lax.map(newton_schulz, x) @ jnp.ones((x.shape[2],) * 2), 3)
    assert_same(step_of(found), found, True, 1, 0)


@pytest.mark.medium
def test_one_value_for_all_matrices_besides():
    """The loop also gives a scalar: it stays, and each of its rounds is spread."""

    def scaled(x):
        def again(_, pair):
            y, scale = pair
            return 1.5 * y - 0.5 * y @ y.swapaxes(1, 2) @ y, scale * 2

        y, scale = jax.lax.fori_loop(0, 4, again, (x / 100, jnp.float32(1)))
        return y * scale

    found = by_hand(scaled, 3)
    assert_same(step_of(found), found, True, 1, 4)


def until_it_stays(x):
    def stays_not(pair):
        return ~(jnp.max(jnp.abs(pair[0] - pair[1])) < 0.1)  # always of nan

    def again(pair):
        return 1.5 * pair[0] - 0.5 * (pair[0] @ pair[0].T) @ pair[0], pair[0]

    return jax.lax.while_loop(stays_not, again, (x / jnp.linalg.norm(x), jnp.zeros_like(x)))[0]


@pytest.mark.slow
def test_a_branch_that_is_not_taken_does_not_run():
    """Its loop would not end with a matrix of zeros."""

    def transform(x):
        return jax.lax.cond(jnp.any(x != 0), until_it_stays, lambda x: x, x)

    def step(params, x):
        return jax.tree.map(lambda w: transform(w) if w.ndim == 2 else w, params), x.sum()

    params, x = arguments(False)
    params = {**params, 'layers': [*params['layers'][:2], jax.tree.map(np.zeros_like, params['layers'][2])]}
    found, expected = sharded(step, stacked=False)(params, x)[0], jax.jit(step)(params, x)[0]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.medium
def test_what_is_written_before_it_is_read():
    """A reference that gets what a function gives is read behind it."""

    def step(params, x):
        first, second, *_ = params['layers']
        ref = jax.new_ref(jnp.zeros((WIDTH, WIDTH)))
        ref[...] = newton_schulz(first['q']) + first['o']
        return ref[...] + second['o'], newton_schulz(second['q']), x.sum()

    params, x = arguments(False)
    helper = MeshShardingHelper([-1], ['fsdp'])
    rule = TreePathShardingRule(('scale', P()), ('.*', P('fsdp')))
    on_devices = helper.sjit(step, in_shardings=(rule, P('fsdp')), out_shardings=P())
    assert len(spread(on_devices, params, x)) == 1
    for a, b in zip(on_devices(params, x), jax.jit(step)(params, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
