"""A step of `sjit`: a decoder with AdamW and gradient clipping, under each strategy."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

from scalax._compile.sjit import partitioned
from scalax._jax.equations import all_equations
from scalax._spmd.placements import op_rules
from scalax.errors import PartitioningWarning
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P

pytestmark = pytest.mark.medium

WIDTH, HIDDEN, HEADS, LAYERS, VOCABULARY, TOKENS, EXAMPLES = 16, 32, 2, 3, 24, 8, 8
MATRICES = {
    **dict.fromkeys(('query', 'key', 'value', 'output'), (WIDTH, WIDTH)),
    'up': (WIDTH, HIDDEN),
    'gate': (WIDTH, HIDDEN),
    'down': (HIDDEN, WIDTH),
}
COLLECTIVES = frozenset(('all_gather', 'reduce_scatter', 'psum', 'all_to_all', 'pmax', 'pmin', 'ppermute'))


def initial():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / 4, 'float32')

    layers = {name: normal(LAYERS, *shape) for name, shape in MATRICES.items()}
    layers |= {'norm_1': jnp.ones((LAYERS, WIDTH)), 'norm_2': jnp.ones((LAYERS, WIDTH))}
    return {
        'embed': normal(VOCABULARY, WIDTH),
        'unembed': normal(WIDTH, VOCABULARY),
        'norm': jnp.ones(WIDTH),
        'layers': layers,
    }


def normalized(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotated(x):
    angles = jnp.arange(TOKENS)[:, None] * jnp.exp(-jnp.arange(x.shape[-1] // 2))
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def block(x, p):
    h = normalized(x, p['norm_1'])
    query, key, value = [(h @ p[n]).reshape(*x.shape[:2], HEADS, -1) for n in ('query', 'key', 'value')]
    scores = jnp.einsum('bqhd,bkhd->bhqk', rotated(query), rotated(key)) / 3
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -1e9)
    x += jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(scores), value).reshape(x.shape) @ p['output']
    h = normalized(x, p['norm_2'])
    return x + (jax.nn.silu(h @ p['gate']) * (h @ p['up'])) @ p['down']


def loss(params, tokens):
    x = params['embed'][tokens[:, :-1]]
    x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(block)(x, p), None), x, params['layers'])
    logits = normalized(x, params['norm']) @ params['unembed']
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def training_step(state, tokens):
    params, opt_state = state
    value, gradients = jax.value_and_grad(loss)(params, tokens)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def arguments():
    params = initial()
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (EXAMPLES, TOKENS + 1), 'int32')
    return (params, OPTIMIZER.init(params)), tokens


FSDP = FSDPShardingRule(min_fsdp_size=1)
# Weights: a gather in the forward loop, and one in the backward loop. Outside the loops, the backward
# pass does not use the embedding, and keeps the weight that it starts with.
WEIGHTS = len(MATRICES) + 2
COLUMNS, ROWS = P(None, 'fsdp', 'tp'), P(None, 'tp', 'fsdp')
TENSOR_PARALLEL = TreePathShardingRule(
    *[('query|key|value|up|gate', COLUMNS), ('output|down', ROWS)],
    *[('unembed', P('fsdp', 'tp')), ('embed', P('tp', 'fsdp')), ('layers/norm', P(None, 'fsdp'))],
    ('.*', P()),
)
STRATEGIES = {
    # Besides the gradients, the global norm and the loss are reduced.
    'FSDP': (
        [8],
        ['fsdp'],
        FSDP,
        P('fsdp'),
        {'all_gather': 2 * WEIGHTS + 4, 'reduce_scatter': WEIGHTS + 3, 'psum': 2},
    ),
    'DDP': ([8], ['data'], P(), P('data'), {'psum': WEIGHTS + 3 + 1}),
    'HSDP': (
        *([2, 4], ['replica', 'fsdp'], FSDP, P(('replica', 'fsdp'))),
        {'all_gather': 2 * WEIGHTS + 4, 'reduce_scatter': WEIGHTS + 3, 'psum': WEIGHTS + 3 + 2},
    ),
    # The norm after the layers is replicated, and the global norm is summed before and after it.
    'FSDP x TP': (
        *([4, 2], ['fsdp', 'tp'], TENSOR_PARALLEL, P('fsdp')),
        {'all_gather': 2 * WEIGHTS + 2, 'reduce_scatter': WEIGHTS + 2, 'psum': 4},
    ),
}


@pytest.mark.parametrize('name', STRATEGIES)
@pytest.mark.sampled(4)
def test_a_decoder(name):
    sizes, axes, rule, batch, expected = STRATEGIES[name]
    helper = MeshShardingHelper(sizes, axes)
    step = helper.sjit(training_step, in_shardings=(rule, batch), out_shardings=(rule, P()), batch_argnums=1)
    state, tokens = arguments()
    counts = Counter(equation.primitive.name for equation in all_equations(step.trace(state, tokens).jaxpr))
    assert {kind: counts[kind] for kind in COLLECTIVES if counts[kind]} == expected
    (params, _), value = step(state, tokens)
    (other, _), other_value = jax.jit(training_step)(state, tokens)
    np.testing.assert_allclose(value, other_value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    shardings = helper.match_sharding_rule(rule, params)
    for a, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        assert a.sharding.is_equivalent_to(sharding, a.ndim)


def test_an_unsupported_step_runs_unpartitioned():
    helper = MeshShardingHelper([8], ['fsdp'])

    def step(w, x):
        return jax.new_ref(2 * x)[...] @ w

    w, x = np.eye(8, dtype='float32'), np.ones((8, 8), 'float32')
    with pytest.warns(PartitioningWarning) as warned:
        result = helper.sjit(step, in_shardings=(FSDP, P('fsdp')), batch_argnums=1)(w, x)
    np.testing.assert_array_equal(result, 2 * x)
    line = step.__code__.co_firstlineno + 1
    assert [str(warning.message).replace(__file__, 'test_step.py') for warning in warned] == [
        'step is not partitioned along its batch: it changes an array in place (jax.new_ref) '
        f'(test_step.py:{line} step). It runs as jax.jit runs it, and the compiler alone decides how '
        'activations are sharded.\nWhat to do: return a new array, as x.at[i].set(y) and the carry of a loop '
        'do, or turn partitioning off with batch_argnums=().'
    ]


def test_a_gradient_around_a_step_is_right():
    """JAX differentiates the original step, since sums over devices have no gradient there."""
    helper = MeshShardingHelper([8], ['fsdp'])

    def value(w, x):
        return jnp.tanh(x @ w).mean()

    w, x = initial()['unembed'], np.asarray(np.random.default_rng(2).normal(size=(8, WIDTH)), 'float32')
    step = helper.sjit(value, in_shardings=(FSDP, P('fsdp')), batch_argnums=1)
    np.testing.assert_allclose(jax.grad(step)(w, x), jax.grad(value)(w, x), rtol=0, atol=1e-6)
    np.testing.assert_allclose(step(w, x), value(w, x), rtol=1e-6)


def test_a_partitioner_error_does_not_end_the_program(monkeypatch):
    def failing(*_, **__):
        raise IndexError('no such number')

    monkeypatch.setattr(partitioned, 'partition_step', failing)
    helper, x = MeshShardingHelper([8], ['fsdp']), np.ones((8, 8), 'float32')
    step = helper.sjit(lambda x: x + 1, in_shardings=P('fsdp'), batch_argnums=0)
    with pytest.warns(PartitioningWarning) as warned:
        np.testing.assert_array_equal(step(x), 2)
    assert [str(warning.message) for warning in warned] == [
        '<lambda> is not partitioned along its batch: IndexError: no such number. It runs as jax.jit runs '
        'it, and the compiler alone decides how activations are sharded.\nWhat to do: report this, which is '
        'a bug in scalax; batch_argnums=() turns partitioning off.'
    ]


def test_a_function_with_custom_partitioning_runs_on_local_shards():
    def double(x):
        return x * 2

    custom = custom_partitioning(double)
    custom.def_partition(
        partition=lambda mesh, operands, result: (mesh, double, result.sharding, (result.sharding,)),
        sharding_rule='... -> ...',
    )
    helper, x = MeshShardingHelper([4, 2], ['fsdp', 'tp']), np.ones((8, 8), 'float32')
    step = helper.sjit(lambda x: custom(jnp.sin(x)), in_shardings=P('fsdp'), batch_argnums=0)
    counts = Counter(equation.primitive.name for equation in all_equations(step.trace(x).jaxpr))
    assert not any(counts[kind] for kind in COLLECTIVES)
    np.testing.assert_allclose(step(x), 2 * np.sin(x), rtol=1e-6)


def test_a_partitioner_bug_is_reported_as_a_bug(monkeypatch):
    def broken(op):
        raise KeyError('no such rule')

    monkeypatch.setitem(op_rules.RULES, 'dot_general', broken)

    def step(w, x):
        return jnp.tanh(x) @ w

    w, x = np.eye(8, dtype='float32'), np.ones((8, 8), 'float32')
    with pytest.warns(PartitioningWarning) as warned:
        helper = MeshShardingHelper([8], ['fsdp'])
        result = helper.sjit(step, in_shardings=(FSDP, P('fsdp')), batch_argnums=1)(w, x)
    np.testing.assert_allclose(result, np.tanh(x) @ w, rtol=1e-6)
    [message] = [str(warning.message) for warning in warned]
    assert f"KeyError: 'no such rule' (test_step.py:{step.__code__.co_firstlineno + 1} step)" in message
    assert message.endswith(
        'What to do: report this, which is a bug in scalax; batch_argnums=() turns partitioning off.'
    )
