"""Optimizers that multiply or decompose matrices: each device computes some entire matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, muon

from scalax._spmd.rewrites import distributed_matrices as matrices
from tests.support.partitioned import FSDP, HSDP, P, assert_equal, partitioned, state_spec

WIDTH, HIDDEN = 16, 24
SHAPES = {'square': (WIDTH, WIDTH), 'up': (WIDTH, HIDDEN), 'down': (HIDDEN, WIDTH)}

pytestmark = pytest.mark.medium


@pytest.fixture(autouse=True)
def free_exchanges(monkeypatch):
    """Removes the latency of collectives, because these matrices are small."""
    monkeypatch.setattr(matrices, '_EXCHANGE_LATENCY', 0)


def initial(layers, stacked):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.normal(size=shape) / 4).astype('float32')

    if stacked:
        return {name: normal(layers, *shape) for name, shape in SHAPES.items()}
    return [{name: normal(*shape) for name, shape in SHAPES.items()} for _ in range(layers)]


def loss(params, x):
    def layer(x, w):
        x = x + jnp.tanh(x @ w['square'])
        return x + jnp.tanh(x @ w['up']) @ w['down'], None

    if isinstance(params, dict):
        x, _ = jax.lax.scan(layer, x, params)
    else:
        for w in params:
            x, _ = layer(x, w)
    return jnp.mean(x**2)


def numbers(params):
    """Returns which dimensions are matrix dimensions."""

    def of(x):
        if isinstance(x, optax.MaskedNode):
            return x
        return MuonDimensionNumbers(1, 2) if jnp.ndim(x) == 3 else MuonDimensionNumbers(0, 1)

    return jax.tree.map(of, params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))


def newton_schulz(x):
    """The common form: without a loop, for one matrix."""
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return x


def inverse_root(x):
    """The inverse root of Shampoo."""
    values, vectors = jnp.linalg.eigh(x @ x.mT + jnp.eye(x.shape[-2]))
    return (vectors * values[..., None, :] ** -0.25) @ vectors.mT @ x


def basis(x):
    """The eigenvector basis of SOAP."""
    return jnp.linalg.qr(x @ x.mT + jnp.eye(x.shape[-2]))[0] @ x


def whitened(x):
    """Uses a factorization, and solves triangular systems."""
    factor = jnp.linalg.cholesky(x @ x.mT + jnp.eye(x.shape[-2]))
    return jax.lax.linalg.triangular_solve(factor, x, left_side=True, lower=True)


def polar(x):
    left, _, right = jnp.linalg.svd(x, full_matrices=False)
    return left @ right


def by_hand(transform):
    """Returns an optimizer that transforms the momentum of weights."""

    def update(grads, state, params):
        momentum = jax.tree.map(lambda g, m: 0.9 * m + g, grads, state)
        return jax.tree.map(lambda m: -0.01 * transform(m), momentum), momentum

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def run_step(optimizer, params, mesh=FSDP, replicate=False):
    """Returns a training step on a mesh, its values, and the values of one device."""

    def step(state, x):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    state = params, optimizer.init(params)
    specs = [P() if replicate else state_spec(x.shape, size=mesh['fsdp']) for x in jax.tree.leaves(state)]
    x = np.random.default_rng(1).normal(size=(16, WIDTH)).astype('float32')
    with jax.default_matmul_precision('highest'):
        step_on_mesh, run = partitioned(step, state, x, mesh, result_specs=[*specs, P()], replicate=replicate)
        return step_on_mesh, run, lambda: jax.jit(step)(state, x)


def of_the_optimizer(step):
    """Counts the collectives of a step by kind, except those of gradients and layer weights."""
    counts = {}
    for row in step.collective_rows:
        if row.what not in ('gradient', 'sum') and row.primitive not in ('dot_general', 'mul'):
            counts[row.kind] = counts.get(row.kind, 0) + row.count
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ('layers', 'stacked', 'expected'),
    [
        # Each of three stacks is resharded to entire matrices and back.
        (8, True, {'all_to_all': 6}),
        # One stack of square matrices, and one of the others, some of them transposed.
        (3, True, {'all_to_all': 4}),
        (3, False, {'all_to_all': 4}),
    ],
)
def test_muon_moves_each_matrix_twice(layers, stacked, expected):
    params, optimizer = initial(layers, stacked), muon(1e-2, muon_weight_dimension_numbers=numbers)
    step, run, one_device = run_step(optimizer, params)
    assert of_the_optimizer(step) == expected
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), one_device())


@pytest.mark.slow
@pytest.mark.parametrize('transform', [newton_schulz, inverse_root, basis, whitened, polar])
def test_custom_matrix_functions(transform):
    """If each layer has separate weights, three functions of each shape share the devices."""
    step, run, one_device = run_step(by_hand(transform), initial(2, False))
    assert of_the_optimizer(step).keys() == {'all_to_all'}
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), one_device(), 5e-5)


@pytest.mark.parametrize('transform', [inverse_root, basis, whitened, polar])
@pytest.mark.sampled(4)
def test_functions_of_stacks(transform):
    step, run, one_device = run_step(by_hand(transform), initial(8, True))
    assert of_the_optimizer(step) == {'all_to_all': 6}
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), one_device(), 5e-5)


@pytest.mark.slow
def test_replicas_of_shards():
    """The matrices are distributed along the axis that shards them."""
    optimizer = muon(1e-2, muon_weight_dimension_numbers=numbers)
    step, run, one_device = run_step(optimizer, initial(3, True), HSDP)
    assert of_the_optimizer(step) == {'all_to_all': 4}
    assert {row.axes for row in step.collective_rows if row.kind == 'all_to_all'} == {('fsdp',)}
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), one_device())


@pytest.mark.slow
def test_replicated_weights(monkeypatch):
    """Each device computes some matrices, without communication, and all are gathered, if that is faster."""
    optimizer = muon(1e-2, muon_weight_dimension_numbers=numbers)
    monkeypatch.setattr(matrices, 'SECONDS_PER_BYTE', 0)
    step, run, one_device = run_step(optimizer, initial(3, False), replicate=True)
    assert of_the_optimizer(step) == {'all_gather': 2}
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), one_device())


def test_matrices_that_are_not_worth_a_collective(monkeypatch):
    monkeypatch.undo()
    step, run, one_device = run_step(by_hand(newton_schulz), initial(2, False))
    assert 'all_to_all' not in of_the_optimizer(step)
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), one_device())


def mixing(x):
    """Subtracts the mean of all matrices."""
    y = x - jnp.mean(x, 0)
    return y @ y.mT @ y


def running(x):
    y = jnp.cumsum(x, 0)
    return y @ y.mT @ y


def of_two_weights(x):
    return jnp.einsum('aij,bkj->aik', x, x) @ x


@pytest.mark.parametrize('transform', [mixing, running, of_two_weights])
def test_functions_that_mix_matrices(transform):
    step, run, one_device = run_step(by_hand(transform), initial(3, True))
    assert not any(row.primitive == 'sharding_constraint' for row in step.collective_rows)
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), one_device())


def twice(x):
    """Applies a function of matrices to its result plus a term of the matrix."""
    return newton_schulz(newton_schulz(x) + 0.1 * x @ jnp.ones((x.shape[1],) * 2))


def with_own_keys(x):
    """Under vmap, this generator draws all numbers from the first key."""
    key = jax.random.fold_in(jax.random.key(0, impl='rbg'), jnp.int32(20 * x[0, 0]))
    return newton_schulz(x) + 0.1 * jax.random.normal(key, x.shape)


def with_callback(x):
    y = newton_schulz(x)
    return y @ jax.pure_callback(lambda y: np.asarray(y) * 2, y, y).T @ y


def until_it_stays(x):
    """Has a branch that a zero matrix skips, since its loop would not end."""

    def changes(pair):
        return ~(jnp.max(jnp.abs(pair[0] - pair[1])) < 0.1)  # for NaN

    def again(pair):
        return 1.5 * pair[0] - 0.5 * (pair[0] @ pair[0].T) @ pair[0], pair[0]

    def loop(x):
        return jax.lax.while_loop(changes, again, (x / jnp.linalg.norm(x), jnp.zeros_like(x)))[0]

    return jax.lax.cond(jnp.any(x != 0), loop, lambda x: x, x)


def with_a_scalar(x):
    """A loop that also returns a scalar."""

    def again(_, pair):
        return 1.5 * pair[0] - 0.5 * pair[0] @ pair[0].T @ pair[0], pair[1] * 2

    y, scale = jax.lax.fori_loop(0, 4, again, (x / 100, jnp.float32(1)))
    return y * scale


def one_by_one(x):
    """Loops over the matrices of a stack."""
    return jax.lax.map(newton_schulz, jnp.stack([x, 2 * x])).sum(0)


UNLIKE = [twice, with_own_keys, with_callback, until_it_stays, with_a_scalar, one_by_one]


@pytest.mark.slow
def test_functions_that_depend_on_the_size_of_the_stack():
    """Two matrices, and a zero matrix."""
    params = [x['up'] for x in initial(2, False)]

    def step(params, x):
        moved = [w * jnp.mean(jnp.abs(x)) for w in params]
        return [[transform(w) for w in moved] for transform in UNLIKE], until_it_stays(moved[0] * 0)

    x = np.random.default_rng(1).normal(size=(16, WIDTH)).astype('float32')
    specs = [state_spec((WIDTH, HIDDEN))] * (2 * len(UNLIKE) + 1)
    with jax.default_matmul_precision('highest'):
        _, run = partitioned(step, params, x, result_specs=specs)
        assert_equal(run(), jax.jit(step)(params, x), 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    'options',
    [
        {'mu_dtype': 'bfloat16'},
        {'ns_coeffs': 'dion', 'nesterov': False},
        {'adaptive': True, 'weight_decay': 0.1},
    ],
    ids=str,
)
def test_options_of_muon(options):
    optimizer = muon(1e-2, muon_weight_dimension_numbers=numbers, **options)
    step, run, one_device = run_step(optimizer, initial(2, False))
    assert of_the_optimizer(step)
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), one_device(), 1e-3 if 'mu_dtype' in options else 1e-5)


@pytest.mark.slow
def test_a_branch_distributes_its_matrices():
    optimizer = optax.MultiSteps(by_hand(newton_schulz), 2).gradient_transformation()
    step, run, one_device = run_step(optimizer, initial(2, False))
    assert of_the_optimizer(step) == {'all_to_all': 6}
    with jax.default_matmul_precision('highest'):
        assert_equal(run(), one_device())


@pytest.mark.parametrize('seed', range(4))
def test_stacks_of_any_size(seed):
    """Random numbers and shapes of stacks, on either mesh."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.choice([8, 16, 24, 13], 2)
    params = [
        rng.normal(size=(*([rng.integers(1, 18)] if rng.integers(2) else []), rows, columns)).astype(
            'float32'
        )
        for _ in range(rng.integers(1, 4))
    ]

    def step(params, x):
        grads = jax.tree.map(lambda w: w * jnp.mean(x), params)
        return jax.tree.map(lambda w, g: w - basis(w + g), params, grads)

    mesh = (FSDP, HSDP)[seed % 2]
    specs = [state_spec(x.shape, size=mesh['fsdp']) for x in params]
    x = rng.normal(size=(8,)).astype('float32')
    with jax.default_matmul_precision('highest'):
        _, run = partitioned(step, params, x, mesh, result_specs=specs)
        assert_equal(run(), jax.jit(step)(params, x), 5e-5)
