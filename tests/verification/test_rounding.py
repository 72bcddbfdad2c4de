"""Modeled rounding errors, compared with the differences between summation orders and precisions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._verification.rounding import PerturbedEvaluator, RoundingAnalysis, equation_paths

S = jax.ShapeDtypeStruct


def evaluated(function, *args, scale=0.0, seed=1):
    jaxpr = jax.make_jaxpr(function)(*args)
    run = jax.jit(
        lambda scale, *values: PerturbedEvaluator(RoundingAnalysis(jaxpr), scale, jnp.uint32(seed)).run(
            jaxpr, values
        )
    )
    return [*map(np.asarray, run(np.float32(scale), *args))]


def loop(x):
    def body(total, row):
        total = total + jnp.tanh(row)
        return total, total.sum()

    return jax.lax.scan(body, jnp.zeros(8), x)


def branches(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: jnp.exp(x @ x.T), x)


def until(x):
    return jax.lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, state[1] * 1.5), (0, x)
    )


def checkpointed(x):
    return jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x @ x.T).sum())(x))(x)


FUNCTIONS = (loop, branches, until, checkpointed, jnp.linalg.qr, lambda x: jax.nn.gelu(x).mean(0))


@pytest.mark.medium
@pytest.mark.parametrize('function', FUNCTIONS, ids=lambda function: function.__name__)
def test_evaluation_without_perturbation_matches_jax(function, rng):
    x = rng.normal(size=(8, 8)).astype('float32')
    expected = jax.tree.leaves(jax.jit(function)(x))
    for actual_leaf, expected_leaf in zip(evaluated(function, x), expected, strict=True):
        np.testing.assert_allclose(actual_leaf, expected_leaf, rtol=2e-6, atol=2e-6)


@pytest.mark.medium
def test_modeled_errors_of_a_sum_match_other_summation_orders(rng):
    x = (rng.normal(size=4096) * 100).astype('float32')
    exact = float(np.sum(x.astype('float64')))
    orders = [abs(float(np.add.accumulate(rng.permutation(x))[-1]) - exact) for _ in range(64)]
    [plain] = evaluated(jnp.sum, x)
    drawn = [abs(float(evaluated(jnp.sum, x, scale=1.0, seed=seed)[0]) - float(plain)) for seed in range(8)]
    # Sequential summation has the largest errors; compilers sum in a tree.
    assert max(orders) / 30 < max(drawn) < max(orders) * 3


def test_products_in_bfloat16_are_uncertain_by_its_unit(rng):
    a, b = (rng.normal(size=(64, 64)).astype(jnp.bfloat16) for _ in range(2))
    [plain] = evaluated(jnp.dot, a, b)
    [drawn] = evaluated(jnp.dot, a, b, scale=1.0)
    exact = a.astype('float64') @ b.astype('float64')
    error = np.abs(drawn.astype('float64') - plain.astype('float64'))
    assert 0.3 < np.sqrt(np.mean(error**2)) / (0.0078125 * np.sqrt(np.mean(exact**2))) < 3


@pytest.mark.parametrize(
    ('function', 'expected'),
    [
        (lambda x, n, key: x > 0, False),
        (lambda x, n, key: jnp.argmax(x), False),
        (lambda x, n, key: jnp.argmax(x @ x.T), True),
        (lambda x, n, key: x.sum(0) > 0, True),
        (lambda x, n, key: n.sum() + jnp.cumsum(n), False),
        (lambda x, n, key: jax.random.split(key), False),
        (lambda x, n, key: jax.random.bernoulli(key, 0.5, (4,)), False),
        (lambda x, n, key: x[n], False),
        (lambda x, n, key: jnp.exp(x), True),
        (lambda x, n, key: x * x, False),
        (lambda x, n, key: x * x > 0, False),
        (lambda x, n, key: (x * x).T - 1, True),
        (lambda x, n, key: n * n + n, False),
        (lambda x, n, key: jax.lax.scan(lambda c, r: (c @ c, r), x, n)[0], True),
        (lambda x, n, key: jax.lax.scan(lambda c, r: (c @ c, r), x, n)[1], False),
        (lambda x, n, key: jax.lax.cond(x.sum() > 0, lambda: 1, lambda: 2), True),
        (lambda x, n, key: jax.lax.while_loop(lambda i: i * x.sum() < 3, lambda i: i + 1, 0), True),
        (lambda x, n, key: jax.lax.while_loop(lambda i: i < n[0], lambda i: i + 1, 0), False),
    ],
)
def test_rounding_analysis_finds_exact_results(function, expected):
    jaxpr = jax.make_jaxpr(function)(S((4, 4), 'float32'), S((4,), 'int32'), jax.random.key(0))
    assert RoundingAnalysis(jaxpr).rounded_results == [expected]


def test_exact_results_have_no_errors(rng):
    def step(x, n):
        return x[n] > 0, n.sum(), jnp.where(n > 2, x, -x)

    args = rng.normal(size=(8, 8)).astype('float32'), np.arange(8)
    for perturbed, plain in zip(evaluated(step, *args, scale=100.0), evaluated(step, *args), strict=True):
        np.testing.assert_array_equal(perturbed, plain)


@pytest.mark.medium
@pytest.mark.parametrize(
    'function',
    [
        lambda x: (jnp.tanh(x) * 3 + jnp.tanh(x) * -3, jnp.tanh(x) * 3),
        lambda x: (jnp.tanh(x) * 3 - jnp.tanh(x) * 3, jnp.tanh(x) * 3),
        lambda x: ((x * x) - (x[::-1] * x[::-1])[::-1], x * x),
        lambda x: (jnp.sum(jnp.stack([jnp.exp(x) * 3, jnp.exp(x) * -3]), 0), jnp.exp(x) * 3),
    ],
)
def test_terms_that_cancel_exactly_have_independent_errors(function, rng):
    # A compiler that fuses a product with the sum does not round this product.
    x = rng.uniform(1, 2, size=(8, 64)).astype('float32')
    total, term = evaluated(function, x)
    assert not total.any()
    drawn, _ = evaluated(function, x, scale=1.0)
    unit = float(jnp.finfo('float32').eps)
    assert unit / 2 < np.sqrt(np.mean(np.square(drawn / term))) < 4 * unit


@pytest.mark.medium
def test_signs_of_errors_are_independent_of_signs_of_values(rng):
    x = rng.normal(size=4096).astype('float32')

    def errors(x, seed):
        return evaluated(jnp.tanh, x, scale=1.0, seed=seed)[0] - evaluated(jnp.tanh, x)[0]

    signs = [np.sign(errors(values, seed)) for values in (x, -x) for seed in (1, 2)]
    for i, later in enumerate(signs):
        assert abs(np.mean(later)) < 0.1
        assert all(abs(np.mean(later * earlier)) < 0.1 for earlier in signs[:i])


@pytest.mark.medium
def test_infinite_and_huge_values_have_no_new_nan():
    x = np.asarray([[np.inf, 1e30, 0.0, -np.inf]], 'float32')
    for function in (lambda x: jnp.exp(-x), lambda x: x.T @ jnp.ones((1, 2)), lambda x: jnp.max(x, 1)):
        [plain], [drawn] = evaluated(function, x), evaluated(function, x, scale=1.0)
        np.testing.assert_array_equal(np.isnan(plain), np.isnan(drawn))
        np.testing.assert_array_equal(np.isinf(plain), np.isinf(drawn))


def test_values_inside_are_recorded_by_the_path_of_their_equation(rng):
    x = rng.normal(size=(4, 8)).astype('float32')
    jaxpr = jax.make_jaxpr(loop)(x)
    here = [*equation_paths(jaxpr)]
    [(path, _, calls)] = [entry for entry in here if entry[1].primitive.name == 'tanh']

    def kept(x):
        evaluation = PerturbedEvaluator(RoundingAnalysis(jaxpr), jnp.float32(0), jnp.uint32(0), {path})
        evaluation.run(jaxpr, [x])
        return evaluation.recorded[path]

    np.testing.assert_allclose(jax.jit(kept)(x)[0], np.tanh(x), rtol=1e-6)
    assert [call.primitive.name for call in calls] == ['scan']
