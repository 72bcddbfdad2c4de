"""Non-batch mesh axes stay Auto inside, and collectives along the batch run on their shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax._jax.equations import all_equations, shard_map_manual_axes
from scalax._spmd.placements.auto_shardings import AutoShardings, auto_dims, auto_spec
from scalax.sharding import MeshShardingHelper, TreePathShardingRule
from tests.support.partitioned import FSDP, TP, P, assert_equal, collectives, partitioned

pytestmark = pytest.mark.medium

OPEN = P.UNCONSTRAINED
EXCHANGES = ('all_gather', 'reduce_scatter', 'psum', 'all_to_all')


def array(*shape, dtype='float32'):
    seed = sum(size * 7**i for i, size in enumerate(shape))
    return np.asarray(np.random.default_rng(seed).normal(size=shape) / 4, dtype)


def exchanged(step):
    """Returns each exchange, with its local shapes before and after, and the manual axes around it."""
    return [
        (
            equation.primitive.name,
            equation.invars[0].aval.shape,
            equation.outvars[0].aval.shape,
            equation.ctx.cur_abstract_mesh.manual_axes,
        )
        for equation in all_equations(step.jaxpr)
        if equation.primitive.name in EXCHANGES
    ]


def momentum(loss):
    """A step of gradient descent with momentum."""

    def step(state, x):
        w, m = state
        value, gradient = jax.value_and_grad(loss)(w, x)
        m = jax.tree.map(lambda m, g: 0.9 * m + g.astype(m.dtype), m, gradient)
        return (jax.tree.map(lambda a, m: a - 0.1 * m, w, m), m), value

    return step


def run_momentum(loss, weights, batch, specs, mesh=TP, **options):
    state = weights, jax.tree.map(np.zeros_like, weights)
    fun, specs = momentum(loss), [*specs, *specs]
    step, run = partitioned(fun, state, batch, mesh, specs=specs, result_specs=[*specs, P()], **options)
    assert_equal(run(), jax.jit(fun)(state, batch))
    return step, run


def mlp(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w['a']) @ w['b']) ** 2)


def layers(w, x):
    def block(x, p):
        return x + jnp.tanh(x @ p['a']) @ p['b'], None

    return jnp.mean(lax.scan(jax.checkpoint(block), x, w)[0] ** 2)


def narrow(w, x):
    hidden = jnp.tanh(x @ w['a'].astype('bfloat16').T.astype('float32'))
    return jnp.mean((hidden @ w['b']) ** 2)


def test_parts_of_specs():
    spec, sizes = P(('fsdp', 'tp'), 'fsdp', OPEN, 'tp'), {'tp': 2}
    assert auto_spec(spec, 5, sizes) == P('tp', None, OPEN, 'tp', None)
    assert auto_dims(P(('fsdp', 'tp')), 2, sizes) == (('tp',), ())
    assert auto_dims(P('fsdp'), 2, sizes) == ()


def shared(fun):
    """A function that is called with a matrix, and with its transpose."""
    inner = jax.jit(lambda w: jnp.sin(w))
    return lambda w: fun(inner(w), inner(w.T))


@pytest.mark.parametrize(
    'fun, expected',
    [
        (lambda w: w.T.reshape(2, 4, 8), ((), (), ('tp',))),
        (lambda w: w.reshape(2, 4, 8), (('tp',), (), ())),
        (lambda w: w.reshape(1, 8, 8), ((), ('tp',), ())),
        (lambda w: w.reshape(64), (('tp',),)),
        (lambda w: jnp.ones((4, 8)) @ w, ()),
        (lambda w: w @ w.T, (('tp',), ())),
        (lambda w: lax.cond(w[0, 0] > 0, lambda: w, lambda: w + 1), (('tp',), ())),
        (lambda w: lax.scan(lambda c, row: (c + w, row), w, jnp.ones(3))[0], (('tp',), ())),
        (lambda w: lax.scan(lambda c, row: (c, row), 0.0, w.T)[1], ((), ('tp',))),
        (
            lambda w: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, w))[1],
            (('tp',), ()),
        ),
        (lambda w: jax.checkpoint(jnp.sin)(w), (('tp',), ())),
        (lambda w: lax.with_sharding_constraint(w, P(None, 'tp')), ((), ('tp',))),
        (lambda w: lax.with_sharding_constraint(w, P(OPEN, None)), (('tp',), ())),
        (lambda w: lax.with_sharding_constraint(w, P()), ()),
        # An argument of a function that is called with two shardings is ambiguous inside it, but not after
        # it.
        (shared(lambda a, b: a + b.T), (('tp',), ())),
    ],
)
def test_dimensions_along_other_axes(fun, expected):
    mesh = jax.sharding.AbstractMesh((4, 2), ('fsdp', 'tp'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(fun)(jnp.ones((8, 8)))
    auto_shardings = AutoShardings(jaxpr, [(('tp',), ())], {'tp': 2})
    assert auto_shardings.of(jaxpr.jaxpr.outvars[0]) == expected


def test_a_function_called_with_two_shardings_is_ambiguous():
    jaxpr = jax.make_jaxpr(shared(jnp.add))(jnp.ones((8, 8)))
    auto_shardings = AutoShardings(jaxpr, [(('tp',), ())], {'tp': 2})
    [inner, *_] = [x.params['jaxpr'].jaxpr for x in jaxpr.jaxpr.eqns if x.primitive.name == 'jit']
    assert auto_shardings.of(inner.invars[0]) == ()


WEIGHTS = {'a': array(8, 16), 'b': array(16, 8)}
STACKS = {'a': array(3, 8, 16), 'b': array(3, 16, 8)}
BOTH = ('fsdp', 'tp')


def test_blocks_along_tp_are_gathered_and_reduced():
    """Devices exchange the half of a weight that they hold along tp; it is not gathered along tp first."""
    step, _ = run_momentum(mlp, WEIGHTS, array(8, 8), [P('fsdp', 'tp'), P('tp', 'fsdp')])
    assert sorted(x for x in exchanged(step) if x[0] != 'psum') == [
        ('all_gather', (2, 8), (8, 8), BOTH),
        ('all_gather', (8, 2), (8, 8), BOTH),
        ('reduce_scatter', (8, 8), (2, 8), BOTH),
        ('reduce_scatter', (8, 8), (8, 2), BOTH),
    ]


def test_blocks_of_layers():
    step, _ = run_momentum(layers, STACKS, array(8, 8), [P(None, 'fsdp', 'tp'), P(None, 'tp', 'fsdp')])
    kinds = {x for x in exchanged(step) if x[0] != 'psum'}
    assert kinds == {
        ('all_gather', (2, 8), (8, 8), BOTH),
        ('all_gather', (8, 2), (8, 8), BOTH),
        ('reduce_scatter', (8, 8), (2, 8), BOTH),
        ('reduce_scatter', (8, 8), (8, 2), BOTH),
    }


def test_casts_and_transposes_keep_the_blocks():
    weights = {'a': array(16, 8), 'b': array(16, 8)}
    fun, specs = momentum(narrow), [P('tp', 'fsdp'), P('tp', 'fsdp')] * 2
    state = weights, jax.tree.map(np.zeros_like, weights)
    step, run = partitioned(fun, state, array(8, 8), TP, specs=specs, result_specs=[*specs, P()])
    assert_equal(run(), jax.jit(fun)(state, array(8, 8)), 5e-3)
    assert {x[1:] for x in exchanged(step) if x[0] == 'all_gather'} == {
        ((8, 2), (8, 8), BOTH),
        ((2, 8), (8, 8), BOTH),
    }


@pytest.mark.parametrize('mesh', [TP, {'tp': 2, 'fsdp': 4}], ids=['fsdp first', 'tp first'])
@pytest.mark.parametrize(
    'spec', [P(('fsdp', 'tp')), P(('tp', 'fsdp')), P(None, ('fsdp', 'tp')), P('tp'), P('fsdp')]
)
@pytest.mark.sampled(2)
def test_one_dimension_over_both_axes(spec, mesh):
    step, run = run_momentum(mlp, WEIGHTS, array(64, 8), [spec, spec], mesh)
    types = (jax.sharding.AxisType.Auto,) * 2
    expected = jax.NamedSharding(jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=types), spec)
    for result in run()[:-1]:
        assert result.sharding.is_equivalent_to(expected, 2), result.sharding
    if spec == P(('tp', 'fsdp')):  # devices exchange the blocks of their block over tp
        assert {x for x in exchanged(step) if x[0] != 'psum'} == {
            ('all_gather', (1, 16), (4, 16), BOTH),
            ('all_gather', (2, 8), (8, 8), BOTH),
            ('reduce_scatter', (4, 16), (1, 16), BOTH),
            ('reduce_scatter', (8, 8), (2, 8), BOTH),
        }


def test_axes_of_size_one():
    mesh = {'replica': 1, 'fsdp': 8, 'tp': 1}
    specs = [P('fsdp', 'tp'), P('tp', 'fsdp')]
    step, _ = run_momentum(mlp, WEIGHTS, array(8, 8), specs, mesh, batch_specs=[P(('replica', 'fsdp'))])
    assert step.auto_axes == frozenset()
    assert step.in_specs[-1] == P('fsdp')


def test_several_axes_of_each_kind():
    mesh = {'replica': 2, 'fsdp': 2, 'tp': 2}
    step, _ = run_momentum(mlp, WEIGHTS, array(8, 8), [P('fsdp', 'tp'), P('tp', 'fsdp')], mesh)
    assert step.auto_axes == {'tp'}
    assert {x[3] for x in exchanged(step) if x[0] == 'reduce_scatter'} == {('replica', 'fsdp', 'tp')}


# Constraints ------------------------------------------------------------------------------------------


def constraints(step):
    """Returns the constraints inside."""
    return [
        equation.params['sharding'].spec
        for equation in all_equations(step.jaxpr)
        if equation.primitive.name == 'sharding_constraint'
    ]


@pytest.mark.parametrize(
    'spec, expected',
    [
        (P('fsdp', None, 'tp'), [P(None, None, 'tp')]),
        (P(OPEN, OPEN, 'tp'), [P(OPEN, OPEN, 'tp')]),
        (P('fsdp'), [P(None, None, None)]),
        (P(('fsdp', 'tp')), [P('tp', None, None)]),
        (P('fsdp', OPEN, OPEN), [P(None, OPEN, OPEN)]),
        (P(OPEN, OPEN, OPEN), []),
    ],
)
def test_constraints_along_other_axes_stay_constraints(spec, expected):
    def fun(w, x):
        return jnp.tanh(lax.with_sharding_constraint(jnp.einsum('btd,de->bte', x, w), spec))

    w, x = array(8, 16), array(16, 4, 8)
    step, run = partitioned(fun, w, x, TP, specs=[P('fsdp', 'tp')])
    assert constraints(step) == expected
    assert step.out_specs == (P('fsdp'),)
    assert_equal(run(), np.tanh(x @ w))


def test_a_constraint_along_both_kinds_of_axes_is_split():
    """Along the batch axis it moves blocks; along the other axis it is a constraint."""

    def fun(w, x):
        return lax.with_sharding_constraint(jnp.tanh(x @ w), P(None, ('fsdp', 'tp')))

    w, x = array(8, 16), array(16, 8)
    step, run = partitioned(fun, w, x, TP, specs=[P('fsdp', 'tp')])
    assert constraints(step) == [P(None, 'tp')]
    assert step.out_specs == (P(None, 'fsdp'),)
    assert [x[0] for x in exchanged(step)] == ['all_gather', 'all_to_all']
    assert_equal(run(), np.tanh(x @ w))


def test_shardings_of_a_jit_inside_are_constraints():
    def fun(w, x):
        mesh = jax.sharding.get_abstract_mesh()
        sharding = [jax.NamedSharding(mesh, spec) for spec in (P('fsdp'), P('fsdp', 'tp'))]
        return jax.jit(jnp.tanh, in_shardings=sharding[0], out_shardings=sharding[1])(x @ w)

    w, x = array(8, 16), array(16, 8)
    step, run = partitioned(fun, w, x, TP, specs=[P('fsdp', 'tp')])
    assert constraints(step) == [P(None, None), P(None, 'tp')]
    assert_equal(run(), np.tanh(x @ w))


def test_results_have_their_specs():
    def fun(w, x):
        return jnp.tanh(x @ w), jnp.tanh(w)

    w, x = array(8, 16), array(16, 8)
    specs = [P('fsdp', 'tp'), P(None, ('tp', 'fsdp'))]
    step, run = partitioned(fun, w, x, TP, specs=[P()], result_specs=specs)
    assert step.auto_specs == (P(None, 'tp'), P(None, 'tp'))
    results = run()
    assert_equal(results, fun(w, x))
    assert results[0].sharding.spec == P('fsdp', 'tp')


# The mesh, and the spec of the batch.
ROUNDS = {'tp': (TP, P('fsdp')), 'features': (FSDP, P(None, 'fsdp'))}


@pytest.mark.parametrize('name', ROUNDS)
def test_devices_run_a_loop_with_a_test_for_each_example_equally_long(name):
    """Otherwise devices would run different numbers of iterations with collectives inside."""

    def fun(w, x):
        def until(x):
            return lax.while_loop(lambda x: x.sum() < 4, lambda x: x + jnp.abs(x @ w) + 1, x)

        return jax.vmap(until)(x)

    w, x, (mesh, spec) = array(8, 8), array(8, 8), ROUNDS[name]
    step, run = partitioned(fun, w, x, mesh, specs=[P('fsdp')], batch_specs=[spec])
    assert collectives(step) == {
        'all_gather examples gathered for while': 1,
        'all_gather state gathered for while': 1,
    }
    assert_equal(run(), fun(w, x))


# Caches -----------------------------------------------------------------------------------------------


def decode(weights, cache, x, position):
    """One token of one layer of attention."""
    query, key = (jnp.einsum('bd,dhk->bhk', x, weights[name]) for name in ('query', 'key'))
    cache = lax.dynamic_update_slice(cache, key[:, None], (0, position, 0, 0))
    chances = jax.nn.softmax(jnp.einsum('bhk,bshk->bhs', query, cache))
    return cache, x + jnp.einsum('bhs,bshk,hkd->bd', chances, cache, weights['output'])


@pytest.mark.parametrize('batch', [{}, {'batch_argnums': (1, 2)}, {'batch_argnums': 2}], ids=str)
def test_heads_of_a_cache_stay_where_they_are(batch):
    """The axis of its heads is not a batch axis: no feature is gathered along it."""
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    weights = {'query': array(8, 4, 6), 'key': array(8, 4, 6) + 1, 'output': array(4, 6, 8)}
    rule = TreePathShardingRule(('query|key', P('fsdp', 'tp')), ('output', P('tp', None, 'fsdp')))
    spec = P('fsdp', None, 'tp')
    step = helper.sjit(
        decode, in_shardings=(rule, spec, P('fsdp'), P()), out_shardings=(spec, P('fsdp')), **batch
    )
    operands = weights, array(8, 16, 4, 6), array(8, 8), np.int32(3)
    mapped = [x for x in all_equations(step.trace(*operands).jaxpr) if x.primitive.name == 'shard_map']
    assert 'tp' not in shard_map_manual_axes(mapped[0])
    assert_equal([*step(*operands)], jax.jit(decode)(*operands))


def test_indivisible_heads_stay_replicated():
    """Two heads of a cache and four devices: the cache has one sharding before, in and after the loop."""

    def grouped(w, cache, x):
        def layer(x, both):
            p, c = both
            c = lax.dynamic_update_slice_in_dim(c, jnp.einsum('bd,dhk->bhk', x, p['key'])[:, None], 2, 1)
            query = jnp.einsum('bd,dhk->bhk', x, p['query']).reshape(x.shape[0], 2, 4, 8)
            chances = jax.nn.softmax(jnp.einsum('bhgk,bshk->bhgs', query, c))
            seen = jnp.einsum('bhgs,bshk->bhgk', chances, c).reshape(x.shape[0], 8, 8)
            return x + jnp.einsum('bhk,hkd->bd', seen, p['output']), c

        return lax.scan(layer, x, (w, cache))

    w = {'key': array(3, 16, 2, 8), 'output': array(3, 8, 8, 16), 'query': array(3, 16, 8, 8)}
    specs = [P(), P(None, 'tp'), P(None, None, 'tp')]
    cache, x = array(3, 4, 16, 2, 8), array(4, 16)
    step, run = partitioned(
        *(lambda w, batch: grouped(w, *batch), w, (cache, x), {'fsdp': 2, 'tp': 4}),
        specs=specs,
        batch_specs=[P(None, 'fsdp'), P('fsdp')],
        result_specs=[P('fsdp'), P(None, 'fsdp')],
    )
    assert P(None, None, None, None) in constraints(step)
    assert_equal(run(), grouped(w, cache, x))


def test_kernel_whose_groups_have_channels_over_tp():
    """Without a constraint on its gradient, XLA aborts the process."""

    def step(w, x):
        def loss(w):
            options = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC'), 'feature_group_count': 4}
            return jnp.mean(jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), 'SAME', **options)) ** 2)

        return w - jax.grad(loss)(w)

    w, x, spec = array(3, 3, 2, 8), array(16, 6, 6, 8), P(None, None, 'tp', 'fsdp')
    _, run = partitioned(step, w, x, TP, specs=[spec], result_specs=[spec])
    assert_equal(run(), step(w, x))
