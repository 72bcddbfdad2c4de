"""States are sharded like their parameters: optimizers of all kinds, on real shardings."""

import dataclasses
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._core.pytree.partition_specs import canonical
from scalax.errors import ShardingError
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    OptimizerStateShardingRule,
    TreePathShardingRule,
)
from tests.support.random_examples import examples

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])

SPECS = {
    'embed': P('tp', 'fsdp'),
    'layers': {'w': P('fsdp', 'tp'), 'b': P('tp')},
    'qkv': P(None, 'fsdp', 'tp'),
    'scale': P(),
}
BY_PATH = TreePathShardingRule(
    ('embed', P('tp', 'fsdp')),
    ('^layers/w$', P('fsdp', 'tp')),  # anchored: the rule is asked about parameters, not about the state
    ('^layers/b$', P('tp')),
    ('qkv', P(None, 'fsdp', 'tp')),
    ('scale', P()),
)


def make_params():
    rng = np.random.default_rng(0)
    shapes = {'embed': (16, 8), 'layers': {'w': (8, 16), 'b': (16,)}, 'qkv': (2, 8, 4), 'scale': ()}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), 'float32'),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


PARAMS = make_params()


def struct(*shape, dtype='float32'):
    return jax.ShapeDtypeStruct(shape, dtype)


def is_spec(value):
    return isinstance(value, P)


def labels(params):
    return jax.tree.map(lambda x: 'matrix' if x.ndim == 2 else 'rest', params)


def path_to_leaf(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


# --- Optimizers, on real shardings ----------------------------------------------------------------

# Each with the path prefixes of the statistics that it keeps for every parameter.
OPTIMIZERS = {
    'adamw': (optax.adamw(1e-3), ['0/mu', '0/nu']),
    'sgd': (optax.sgd(1e-3, momentum=0.9), ['0/trace']),
    'lion': (optax.lion(1e-3), ['0/mu']),
    'adafactor unfactored': (optax.adafactor(1e-3, factored=False, momentum=0.9), ['0/v']),
    'schedule_free': (optax.contrib.schedule_free_adamw(1e-3), ['z']),
    'MultiSteps': (
        optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
        ['acc_grads', 'inner_opt_state/0/mu'],
    ),
    'inject_hyperparams': (
        optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1e-3, 0, 9)),
        ['inner_state/0/mu'],
    ),
    'apply_if_finite': (optax.apply_if_finite(optax.adam(1e-3), 3), ['inner_state/0/mu']),
    'chain': (
        optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.adamw(1e-3)),
        ['1/trace', '2/0/mu'],
    ),
    'ema': (optax.chain(optax.adam(1e-3), optax.ema(0.9)), ['0/0/mu', '1/ema']),
    'amsgrad': (optax.amsgrad(1e-3), ['0/nu_max']),
    'lbfgs': (optax.scale_by_lbfgs(memory_size=3), ['params', 'updates']),
    # Some parameters only:
    'masked': (optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.ndim == 2, p)), []),
    'multi_transform': (
        optax.multi_transform({'matrix': optax.adamw(1e-3), 'rest': optax.sgd(1e-3, 0.9)}, labels),
        [],
    ),
    'muon': (optax.contrib.muon(1e-3), []),
}


def assert_mirrors(state: Any, params: Any, everywhere: list[str]) -> int:
    """Asserts that copies of parameters are sharded like the parameters, and returns their number."""
    by_path, seen = path_to_leaf(params), 0
    leaves = path_to_leaf(state)
    for name, param in by_path.items():
        for path, leaf in leaves.items():
            if path.endswith(f'/{name}') and leaf.shape == param.shape:
                assert leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim), path
                seen += 1
        for prefix in everywhere:
            assert f'{prefix}/{name}' in leaves
    return seen


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_state_of_each_optimizer_is_placed_like_its_parameters(name):
    """Resolves the shardings of abstract arrays, without compiling anything."""
    optimizer, everywhere = OPTIMIZERS[name]
    rule = OptimizerStateShardingRule(BY_PATH, PARAMS)
    state = HELPER.abstract(jax.eval_shape(optimizer.init, PARAMS), rule)
    assert assert_mirrors(state, HELPER.abstract(PARAMS, BY_PATH), everywhere) >= 3


# Other structures: statistics of all parameters, of some parameters, of several steps, and nested ones.
COMPUTED = ('adamw', 'MultiSteps', 'lbfgs', 'multi_transform', 'muon')


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    'name', [name if name in COMPUTED else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)
def test_moments_are_sharded_like_their_parameters(name):
    optimizer, everywhere = OPTIMIZERS[name]
    rule = OptimizerStateShardingRule(BY_PATH, PARAMS)
    params = HELPER.shard(PARAMS, BY_PATH)
    state = HELPER.sjit(optimizer.init, out_shardings=rule)(params)
    assert assert_mirrors(state, params, everywhere) >= 3
    shardings = HELPER.match_sharding_rule(rule, state)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    for path, leaf in path_to_leaf(state).items():
        assert leaf.size > 1 or leaf.sharding.is_fully_replicated, path

    def step(state, params):
        grads = jax.tree.map(jnp.ones_like, params)
        extra = {'value': 0.0, 'grad': grads, 'value_fn': None}
        updates, state = optax.with_extra_args_support(optimizer).update(grads, state, params, **extra)
        return state, optax.apply_updates(params, updates)

    sharded = HELPER.sjit(step, in_shardings=(rule, BY_PATH), out_shardings=(rule, BY_PATH))
    state, params = sharded(state, params)
    plain = jax.jit(step)(jax.jit(optimizer.init)(PARAMS), PARAMS)
    assert assert_mirrors(state, params, everywhere) >= 3
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), (state, params), plain)


def test_history_is_a_stack_of_copies():
    state = jax.eval_shape(optax.scale_by_lbfgs(memory_size=3).init, PARAMS)
    specs = OptimizerStateShardingRule(BY_PATH, PARAMS).apply(state)
    assert specs.diff_params_memory['layers']['w'] == P(None, 'fsdp', 'tp')
    assert specs.weights_memory == P()
    assert specs.params == SPECS


def test_adafactor_factors_have_the_specs_of_their_dimensions():
    # optax drops the largest dimension for v_row, and the second largest for v_col.
    params = {
        'tall': struct(512, 256),
        'wide': struct(256, 512),
        'heads': struct(2, 512, 256),
        'square': struct(256, 256),
        'bias': struct(512),
        'narrow': struct(512, 4),
    }
    specs = {
        'tall': P('fsdp', 'tp'),
        'wide': P('fsdp', 'tp'),
        'heads': P('tp', None, 'fsdp'),
        'square': P('fsdp', 'tp'),
        'bias': P('tp'),
        'narrow': P('fsdp'),
    }
    optimizer = optax.adafactor(1e-3, momentum=0.9)
    state = jax.eval_shape(optimizer.init, params)
    first = OptimizerStateShardingRule(specs, params).apply(state)[0]
    assert state[0].v_row['wide'].shape == (256,)
    assert first.v_row == {
        'tall': P('tp'),
        'wide': P('fsdp'),
        'heads': P('tp', 'fsdp'),
        'square': P('fsdp'),
        'bias': P(),
        'narrow': P(),
    }
    assert first.v_col == {
        'tall': P('fsdp'),
        'wide': P('tp'),
        'heads': P('tp'),
        'square': P('tp'),
        'bias': P(),
        'narrow': P(),
    }
    assert first.v == {**dict.fromkeys(params, P()), 'bias': P('tp'), 'narrow': P('fsdp')}
    assert first.count == P()


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    'shape', [(256, 512), (512, 256), (256, 256), (2, 256, 256), (256, 2, 256), (128, 256, 384)]
)
def test_factors_agree_with_a_reduction_in_xla(shape):
    """Compares with the sharding of a mean over the dimension that optax drops."""
    mesh = MeshShardingHelper([2, 2, 2], ['a', 'b', 'c'], axis_types=AxisType.Explicit)
    spec = P(*['a', 'b', 'c'][: len(shape)])
    rule = OptimizerStateShardingRule(spec, {'w': struct(*shape)})
    second, largest = (int(dim) for dim in np.argsort(shape)[-2:])
    w = jax.device_put(jnp.zeros(shape), NamedSharding(mesh.mesh, spec))
    factors = {'v_row': {'w': jnp.mean(w, axis=largest)}, 'v_col': {'w': jnp.mean(w, axis=second)}}
    optimizer = optax.scale_by_factored_rms()
    state = jax.eval_shape(optimizer.init, {'w': struct(*shape)})
    shardings = mesh.match_sharding_rule(rule, {'v_row': state.v_row, 'v_col': state.v_col})
    for name, tree in factors.items():
        assert canonical(shardings[name]['w'].spec) == canonical(jax.typeof(tree['w']).sharding.spec)


class TrainState(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    averages: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DataclassState:
    step: Any
    params: Any
    opt_state: Any
    averages: Any


@pytest.mark.medium
@pytest.mark.parametrize('kind', [TrainState, DataclassState])
def test_one_rule_shards_a_train_state(kind):
    optimizer = optax.adamw(1e-3)

    def init():
        params = make_params()
        return kind(0, params, optimizer.init(params), params)

    rule = OptimizerStateShardingRule(BY_PATH, jax.eval_shape(make_params))
    state = HELPER.sjit(init, out_shardings=rule)()
    assert jax.tree.map(lambda x: x.sharding, state.params) == HELPER.match_sharding_rule(BY_PATH, PARAMS)
    assert jax.tree.map(lambda x: x.sharding, state.averages) == jax.tree.map(
        lambda x: x.sharding, state.params
    )
    assert (
        assert_mirrors(state, state.params, ['params', 'averages', 'opt_state/0/mu', 'opt_state/0/nu']) == 20
    )


def test_zero_1():
    helper = MeshShardingHelper([8], ['data'])
    optimizer = optax.adam(1e-3)
    state_rule = OptimizerStateShardingRule(P(), PARAMS) & FSDPShardingRule('data', min_fsdp_size=16)
    params = helper.shard(PARAMS, P())
    state = helper.sjit(optimizer.init, out_shardings=state_rule)(params)
    moments = state[0].mu
    assert moments['layers']['w'].sharding.spec == P(None, 'data')
    assert moments['embed'].sharding.spec == P('data')
    assert moments['scale'].sharding.is_fully_replicated
    assert state[0].count.sharding.is_fully_replicated


# --- Shapes and paths -----------------------------------------------------------------------------


def test_ambiguous_dimensions_are_replicated():
    rule = OptimizerStateShardingRule(
        {'w': P('a', 'b'), 'same': P()}, {'w': struct(8, 8), 'same': struct(8, 8)}
    )
    report = HELPER.explain(
        {'rows': {'w': struct(8), 'same': struct(8)}},
        OptimizerStateShardingRule(
            {'w': P('fsdp', 'tp'), 'same': P()}, {'w': struct(8, 8), 'same': struct(8, 8)}
        ),
    )
    rows = {row.path: row for row in report.rows}
    assert rows['rows/w'].reason == 'keeps dimension 0 or dimension 1 of its parameter: ambiguous'
    assert rows['rows/w'].is_replicated
    assert rows['rows/same'].reason == 'keeps dimension 0 of its parameter'
    assert rule.apply({'v_row': {'w': struct(8)}, 'v_col': {'w': struct(8)}}) == {
        'v_row': {'w': P('a')},
        'v_col': {'w': P('b')},
    }


def test_parameters_named_like_parts_of_the_state():
    # The path of the moment of 'w' ends with both 'w' and 'mu/w'.
    params = {'w': struct(8, 16), 'mu': {'w': struct(8, 16), 'b': struct(8)}}
    specs = {'w': P('a'), 'mu': {'w': P('b'), 'b': P('c')}}
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    rule = OptimizerStateShardingRule(specs, params)
    assert rule.apply(state)[0].mu == specs
    assert rule.apply(state)[0].nu == specs
    assert rule.apply({'params': params, 'opt_state': state})['params'] == specs
    # The same for a rule that only sees a part of the state.
    both = TreePathShardingRule(('mu/w$', rule), ('', P()))
    assert both.apply(state)[0].mu == {'w': P('a'), 'mu': {'w': P('b'), 'b': P()}}


def test_the_longest_path_wins():
    params = {'w': struct(8), 'inner': {'w': struct(8)}}
    specs = {'w': P('a'), 'inner': {'w': P('b')}}
    rule = OptimizerStateShardingRule(specs, params)
    masked = {'mu': {'inner': {'w': struct(8)}}}
    assert rule.apply(masked) == {'mu': {'inner': {'w': P('b')}}}


@pytest.mark.parametrize(('shape', 'spec'), [((8,), P('a')), ((4,), P('b'))])
def test_the_shape_decides_between_equal_paths(shape, spec):
    params = {'w': struct(8), 'inner': {'w': struct(4)}}
    rule = OptimizerStateShardingRule({'w': P('a'), 'inner': {'w': P('b')}}, params)
    masked = {'inner': {'w': struct(*shape)}}
    assert rule.apply(masked) == {'inner': {'w': spec}}


@pytest.mark.parametrize(
    ('params', 'specs'),
    [
        (struct(8, 16), P('a', 'b')),
        ([struct(8, 16), struct(16)], [P('a', 'b'), P('b')]),
        ((struct(8, 16), [struct(16)]), (P('a', 'b'), [P('b')])),
        ({'a/b': struct(8, 16)}, {'a/b': P('a', 'b')}),
        ({'': struct(8, 16)}, {'': P('a', 'b')}),
    ],
    ids=str,
)
def test_params_of_any_structure(params, specs):
    rule = OptimizerStateShardingRule(specs, params)
    for optimizer in (optax.adam(1e-3), optax.contrib.muon(1e-3), optax.MultiSteps(optax.adam(1e-3), 2)):
        state = jax.eval_shape(optimizer.init, params)
        specs_of = jax.tree.leaves(rule.apply(state), is_leaf=is_spec)
        mirrored = [pair for pair in zip(jax.tree.leaves(state), specs_of, strict=True) if pair[0].size > 4]
        assert mirrored
        assert all(spec == {(8, 16): P('a', 'b'), (16,): P('b')}[leaf.shape] for leaf, spec in mirrored)


def test_states_without_statistics():
    rule = OptimizerStateShardingRule(BY_PATH, PARAMS)
    for optimizer in (
        optax.sgd(1e-3),
        optax.noisy_sgd(1e-3, key=0),
        optax.sgd(optax.linear_schedule(1e-3, 0, 9)),
    ):
        state = jax.eval_shape(optimizer.init, PARAMS)
        assert set(jax.tree.leaves(rule.apply(state), is_leaf=is_spec)) <= {P()}


def test_a_rule_in_front_shards_leaves_without_a_parameter():
    # GaLore keeps projections, whose shapes are unrelated to the dimensions of the parameter.
    params = {'w': struct(256, 512), 'b': struct(512)}
    state = jax.eval_shape(optax.contrib.scale_by_galore(rank=64).init, params)
    rule = OptimizerStateShardingRule({'w': P('a', 'b'), 'b': P('b')}, params)
    with pytest.raises(ShardingError, match='projector/w'):
        rule.apply(state)
    specs = (TreePathShardingRule(('w$', P(None, 'b'))) | rule).apply(state)
    assert specs.base_optimizer_state.mu == {'w': P(None, 'b'), 'b': P('b')}
    assert specs.projector == {'w': P(None, 'b'), 'b': P()}


# --- Random trees ---------------------------------------------------------------------------------

keys = st.sampled_from(['w', 'b', 'mu', 'nu', 'layers', '0', 'a/b'])
arrays = st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=3).map(lambda shape: struct(*shape))
trees = st.recursive(
    arrays,
    lambda inner: st.one_of(st.dictionaries(keys, inner, min_size=1, max_size=3), st.tuples(inner, inner)),
    max_leaves=6,
)


@examples(150)
@hypothesis.given(trees, st.data())
def test_copies_of_parameters_have_their_specs(tree, data):
    params = {'params': tree}
    hypothesis.assume(len(path_to_leaf(params)) == len(jax.tree.leaves(params)))  # no path twice
    specs = jax.tree.map(lambda x: P(*data.draw(st.permutations(['a', 'b', 'c', None]))[: x.ndim]), params)
    optimizer = data.draw(
        st.sampled_from([optax.adamw(1e-3), optax.sgd(1e-3, 0.9), optax.contrib.schedule_free_sgd(1e-3)])
    )
    state = jax.eval_shape(optimizer.init, params)
    result = OptimizerStateShardingRule(specs, params).apply({'params': params, 'opt_state': state})
    structure = jax.tree.structure(params)

    def is_copy(node):
        return jax.tree.structure(node, is_leaf=is_spec) == structure

    # Subtrees of the state with the structure of the parameters have their specs. (A single array is put
    # into a tuple, because any leaf has its structure.)
    copies = [
        node for node in jax.tree.leaves(result, is_leaf=lambda x: is_copy(x) or is_spec(x)) if is_copy(node)
    ]
    assert len(copies) >= 2
    assert all(node == specs for node in copies)
