"""The domains of a step's arguments, inferred from their uses, and the values sampled from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.unchanged.catalogue import all_models
from benchmarks.unchanged.measure import arguments, training_step
from scalax._verification.input_domains import ValueDomain
from scalax._verification.sample_inputs import domains_of, resample, sample

MODELS = {model.name: model for model in all_models('small')}
# Halves the compile time.
QUICKLY = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


def array(*shape: int, dtype: Any = 'float32') -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def int_array(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype='int32')


def domains_in(function: Any, *args: Any) -> list[ValueDomain]:
    return domains_of(jax.make_jaxpr(function)(*args))


def kind_and_bound(domain: ValueDomain) -> tuple[Any, ...]:
    return (domain.kind,) if domain.bound is None else (domain.kind, domain.bound)


# --- Domains ---------------------------------------------------------------------------------------

TABLE, ROWS = array(10, 4), int_array(3)


def update(table: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(table, jnp.ones((4, 4)), (x, 0))


def decode(table: jax.Array, x: jax.Array) -> jax.Array:
    """Looks up a row in each iteration, starting with the row x."""
    return jax.lax.scan(lambda i, _: (i + 1, table[i]), x, None, 3)[1]


def in_blocks(table: jax.Array, x: jax.Array) -> jax.Array:
    """Looks up two rows in each of five blocks of two rows."""
    return jax.vmap(lambda rows, i: rows[i])(
        table.reshape(5, 2, 4), x.reshape(5, 2) - 2 * jnp.arange(5)[:, None]
    )


INDICES = {
    'rows': (lambda table, x: table[x], ROWS, ('index', 10)),
    'take': (lambda table, x: jnp.take(table, x, axis=1), ROWS, ('index', 4)),
    'take_along_axis': (
        lambda table, x: jnp.take_along_axis(table, x[:, None], 1),
        int_array(10),
        ('index', 4),
    ),
    'with row indices': (lambda table, x: table[jnp.arange(10), x], int_array(10), ('index', 4)),
    'of other integers': (lambda table, x: table[2 * x + 1], ROWS, ('index', 1)),
    'of a quotient': (lambda table, x: table[x // 3], ROWS, ('index', 10)),
    'of positions': (lambda table, x: table[x + jnp.arange(4)], int_array(), ('index', 7)),
    'of squared positions': (
        lambda table, x: table[x + jnp.arange(3) * jnp.arange(3)],
        int_array(),
        ('index', 6),
    ),
    'of fractions of positions': (lambda table, x: table[x + jnp.arange(7) // 3], int_array(), ('index', 4)),
    'of its square': (lambda table, x: table[x * x], ROWS, ('index', 1)),
    'of unknown values': (lambda table, x: table[x + jnp.argmax(table[:5, 0])], ROWS, ('index', 1)),
    'of a difference, clipped': (
        lambda table, x: table[jnp.clip(x[:, None] - x, 0, 9)],
        ROWS,
        ('integer', 8),
    ),
    'converted': (lambda table, x: table[x.astype('uint8').T], int_array(2, 3), ('index', 10)),
    'where': (lambda table, x: table[jnp.where(x > 2, x, 0)], ROWS, ('index', 10)),
    'of two': (lambda table, x: (table[x], table[:7][x]), ROWS, ('index', 7)),
    'a part': (lambda table, x: table[x[1:], x[:-1]], ROWS, ('index', 4)),
    'dynamic_slice': (lambda table, x: jax.lax.dynamic_slice_in_dim(table, x, 4), int_array(), ('index', 7)),
    'dynamic_update_slice': (update, int_array(), ('index', 7)),
    'scatter': (lambda table, x: table.at[x].add(1), ROWS, ('index', 10)),
    'segment_sum': (lambda table, x: jax.ops.segment_sum(table, x, 6), int_array(10), ('index', 6)),
    'one_hot': (lambda table, x: jax.nn.one_hot(x, 7), ROWS, ('index', 7)),
    'in a loop': (
        lambda table, x: jax.lax.scan(lambda i, y: (i, table[y]), 0, x)[1],
        int_array(5, 3),
        ('index', 10),
    ),
    'carried': (decode, int_array(), ('index', 1)),
    'in a gradient': (
        lambda table, x: jax.grad(lambda table: table[x].sum())(table),
        ROWS,
        ('index', 10),
    ),
    'in blocks': (in_blocks, int_array(10), ('index', 2)),
    'lengths': (lambda table, x: jnp.arange(8) < x[:, None], ROWS, ('length', 9)),
    'round': (
        lambda table, x: jax.lax.cond(x == 3, jnp.sin, jnp.cos, table),
        int_array(),
        ('index', 4),
    ),
    'last of a length': (
        lambda table, x: jnp.where(jnp.arange(10) < x[:, None], 1, 0) + table[x - 1, 0, None],
        ROWS,
        ('length', 4),
    ),
    'divisor': (lambda table, x: table[:3] / x[:, None].astype('float32'), ROWS, ('length', 8)),
    'steps': (lambda table, x: table * 0.9**x, int_array(), ('count', 100)),
    'segments': (lambda table, x: x[:, None] == x, ROWS, ('integer', 8)),
    'a remainder': (lambda table, x: table[x % 10], ROWS, ('integer', 8)),
}


@pytest.mark.parametrize('name', INDICES)
def test_domains_of_integers(name: str) -> None:
    function, integers, expected = INDICES[name]
    [_, domain] = domains_in(function, TABLE, integers)
    assert kind_and_bound(domain) == expected


FLOATS = {
    'sqrt': (lambda x: jnp.sqrt(0.9 * x + 0.1 * jnp.square(jnp.sin(x))), 'positive'),
    'rsqrt of a sum': (lambda x: jax.lax.rsqrt(x.sum(0) + 1e-6), 'positive'),
    'log': (lambda x: jnp.log(jnp.maximum(x.reshape(-1), 1e-6)), 'positive'),
    'weighted mean': (lambda x: (jnp.sin(x) * x).sum() / x.sum(), 'positive'),
    'power': (lambda x: x**-0.5, 'positive'),
    'integer power': (lambda x: x**3.0, 'number'),
    'the rest': (lambda x: jnp.sqrt(x) + jnp.sqrt(1 - x), 'fraction'),
    'the rest of a square': (lambda x: jnp.sqrt(1 - x**2), 'fraction'),
    'remainder of products': (lambda x: jnp.sqrt(jnp.cumprod(1 - x, 0)), 'fraction'),
    'a difference': (lambda x: jnp.sqrt(x - 0.1 * jnp.sin(x)), 'positive'),
    'norm': (lambda x: x / jnp.sqrt(jnp.square(x).sum()), 'number'),
    'layer norm': (lambda x: (x - x.mean()) / jnp.sqrt(x.var() + 1e-6), 'number'),
    'product': (lambda x: jnp.log(jnp.exp(x @ x.T)), 'number'),
    'in a loop': (lambda x: jax.lax.scan(lambda c, y: (c + y, jnp.sqrt(c)), jnp.ones(4), x)[1], 'positive'),
}


@pytest.mark.parametrize('name', FLOATS)
def test_domains_of_floats(name: str) -> None:
    function, expected = FLOATS[name]
    [domain] = domains_in(function, TABLE)
    assert domain.kind == expected


def test_numbers_of_several_dimensions_are_within_each() -> None:
    domains = domains_in(lambda table, x, y: table[x, y], TABLE, ROWS, ROWS)
    assert [domain.bound for domain in domains[1:]] == [4, 4]


def test_full_slices_are_not_lookups() -> None:
    [_, domain] = domains_in(jax.vmap(lambda table, x: table[x], (None, 0)), TABLE, ROWS)
    assert kind_and_bound(domain) == ('index', 10)


def test_keys_and_masks() -> None:
    key, raw, mask = array(2, dtype=jax.random.key(0).dtype), array(2, dtype='uint32'), array(3, dtype='bool')

    def step(key: Any, raw: Any, mask: Any) -> Any:
        return jax.random.normal(key[0]), jnp.where(mask, jax.random.normal(raw, (3,)), 0)

    assert [domain.kind for domain in domains_in(step, key, raw, mask)] == ['key', 'key', 'mask']


def test_domain_has_a_reason() -> None:
    def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table[tokens]

    [_, domain] = domains_in(jax.jit(embed), TABLE, ROWS)
    assert domain.reason.startswith('index in dimension 0 of (10, 4) in test_input_domains.py:')
    assert domain.reason.endswith(' embed')


def test_inside_a_shard_map() -> None:
    mesh = jax.make_mesh((1,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
    whole_spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(lambda table, x: table[x], mesh=mesh, in_specs=whole_spec, out_specs=whole_spec)
    [_, domain] = domains_in(mapped, TABLE, ROWS)
    assert kind_and_bound(domain) == ('index', 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('optimizer', 'positive'),
    [(optax.adamw(1e-3), 'nu'), (optax.rmsprop(1e-3), 'nu'), (optax.adafactor(1e-3), 'v_row')],
    ids=['adamw', 'rmsprop', 'adafactor'],
)
def test_variances_of_optimizers(optimizer: Any, positive: str) -> None:
    params = {'w': array(256, 128)}
    args = params, jax.eval_shape(optimizer.init, params), params
    domains = domains_in(optimizer.update, *args)
    leaves, structure = jax.tree.flatten_with_path(args)
    kinds = {
        jax.tree_util.keystr(path): domain.kind for (path, _), domain in zip(leaves, domains, strict=True)
    }
    assert {kind for path, kind in kinds.items() if f'.{positive}' in path} == {'positive'}
    for seed in range(3):
        values = jax.tree.unflatten(structure, sample([leaf for _, leaf in leaves], domains, seed))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(optimizer.update(*values)))


# --- Values ----------------------------------------------------------------------------------------

KINDS = [
    *('float32', 'bfloat16', 'float16', 'float8_e4m3fn', 'complex64', 'int32', 'int8', 'uint32', 'int4'),
    'bool',
]


@pytest.mark.parametrize('dtype', KINDS)
def test_values_differ_along_each_dimension(dtype: str) -> None:
    aval = array(12, 16, dtype=dtype)
    domain = (
        ValueDomain('mask')
        if dtype == 'bool'
        else ValueDomain('index', 1000)
        if 'int' in dtype
        else ValueDomain('number')
    )
    [value], [again], [other] = (sample([aval], [domain], seed) for seed in (1, 1, 2))
    assert (value.shape, value.dtype) == (aval.shape, aval.dtype)
    wide, rest = value.astype('complex64'), other.astype('complex64')
    np.testing.assert_array_equal(wide, again.astype('complex64'))
    assert (wide != rest).any()
    for matrix in (wide, wide.T):
        assert all((np.abs(matrix[i]) != np.abs(matrix[i + 1])).any() for i in range(len(matrix) - 1))


def test_leaves_differ() -> None:
    first, second = sample([TABLE, TABLE], [ValueDomain('number'), ValueDomain('number')], 0)
    assert (first != second).any()


def test_sampled_values_are_in_their_domains() -> None:
    shape = (50, 40)

    def values(kind: Any, bound: int | None = None, dtype: str = 'int32') -> np.ndarray:
        [value] = sample([array(*shape, dtype=dtype)], [ValueDomain(kind, bound)], 0)
        return value

    assert {*values('index', 3).flat} == {0, 1, 2}
    assert {*values('length', 4).flat} == {1, 2, 3}
    assert values('index', 2**31, 'int8').max() <= 127
    fractions = values('fraction', None, 'float32')
    assert fractions.min() > 0
    assert fractions.max() < 1
    assert values('positive', None, 'float32').min() > 0
    assert np.std(values('number', None, 'float32')) == pytest.approx(50**-0.5, rel=0.1)
    mask = values('mask', None, 'bool')
    assert mask.any(-1).all()
    assert not mask.all()
    [count] = sample([int_array()], [ValueDomain('count', 100)], 0)
    assert 3 <= count < 100


@pytest.mark.medium
@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
def test_sampled_keys_have_the_implementation_of_the_argument(impl: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    [value] = sample([jax.ShapeDtypeStruct(keys.shape, keys.dtype)], [ValueDomain('key')], 0)
    assert (value.shape, value.dtype) == (keys.shape, keys.dtype)
    assert len({*map(float, jax.vmap(jax.random.uniform)(value))}) == 3


def test_arrays_of_users_as_they_are_and_varied(rng: np.random.Generator) -> None:
    leaves = [
        rng.normal(size=(6, 4)).astype('float32'),
        rng.permutation(12),
        rng.random(5) < 0.5,
        np.zeros((2, 3), 'float32'),
        jax.random.key(7),
        np.sort(rng.integers(0, 5, 9)),
        np.linspace(0, 1, 5),
        np.int32(17),
        np.array([1, 2], 'uint32'),
    ]
    kinds = 'number', 'index', 'mask', 'positive', 'key', 'index', 'fraction', 'count', 'key'
    domains = [*map(ValueDomain, kinds)]
    assert all(value is leaf for value, leaf in zip(resample(leaves, domains, 0), leaves, strict=True))
    numbers, index, mask, zeros, key, in_order, fractions, count, raw = resample(leaves, domains, 1)
    assert (np.sign(numbers) == np.sign(leaves[0])).all()
    assert (numbers != leaves[0]).all()
    np.testing.assert_allclose(numbers / leaves[0], 1, atol=0.2501)
    np.testing.assert_array_equal(index, leaves[1])
    np.testing.assert_array_equal(mask, leaves[2])
    assert (zeros > 0).all()
    assert zeros.max() < 0.1
    assert (jax.random.key_data(key) != jax.random.key_data(leaves[4])).any()
    np.testing.assert_array_equal(in_order, leaves[5])
    assert (fractions[1:-1] != leaves[6][1:-1]).all()
    assert fractions.max() == 1
    assert count == 17
    assert (raw.dtype, raw.shape) == ('uint32', (2,))
    assert (raw != leaves[8]).any()


def test_python_scalars_keep_their_type() -> None:
    avals = jax.make_jaxpr(lambda rate, count, x: rate * count * x)(1.0, 2, TABLE).in_avals
    rate, count, x = sample(
        avals, [ValueDomain('number'), ValueDomain('count', 100), ValueDomain('number')], 0
    )
    assert [type(value) for value in (rate, count, x)] == [float, int, np.ndarray]
    assert resample([rate, count], [ValueDomain('number'), ValueDomain('count')], 1) == [rate, count]


# --- Models ----------------------------------------------------------------------------------------

# Integers of batches that are not the tokens of a single embedding.
INTEGERS = {
    'BERT': {'kinds': 2, 'labels': 64, 'mask': 8, 'places': 8, 'tokens': 64},
    'encoder-decoder': {'inputs': 64, 'targets': 64},
    'vision transformer': {'labels': 16},
    'diffusion transformer': {'labels': 16},
    'recommender': {'indices': 8},
    'graph network': {'receivers': 64, 'senders': 64},
    'graphs, mapped': {'receivers': 4, 'senders': 4},
    'actor-critic': {'actions': 8},
    'LLaMA-3 8B': {'tokens': 256},
}


def model_domains(name: str) -> tuple[Any, Any, list[ValueDomain]]:
    """Returns the step of a model, its arguments, and their domains."""
    model = MODELS[name]
    step, args = training_step(model, model.loss), arguments(model, 8 * model.rows)
    return step, args, domains_in(step, *args)


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('name', INTEGERS)
def test_integers_of_models(name: str) -> None:
    _, args, domains = model_domains(name)
    batch = jax.tree.unflatten(jax.tree.structure(args), domains)[1]
    integers = {key: domain.bound for key, domain in batch.items() if domain.bound is not None}
    assert integers == INTEGERS[name]


def assert_finite(name: str, seed: int) -> None:
    step, args, domains = model_domains(name)
    leaves, structure = jax.tree.flatten(args)
    values = jax.tree.unflatten(structure, sample(leaves, domains, seed))
    results = jax.jit(step, compiler_options=QUICKLY)(*values)
    assert all(np.isfinite(np.asarray(x, 'float32')).all() for x in jax.tree.leaves(results))


@pytest.mark.medium
def test_a_model_has_finite_results() -> None:
    assert_finite('recommender', 0)


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_models_have_finite_results(name: str) -> None:
    assert_finite(name, 1)
