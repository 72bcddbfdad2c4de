"""Shardings of sjit: arguments, outputs and constraints, donation, and placement."""

from __future__ import annotations

import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding

from scalax.errors import (
    ArgumentError,
    IndivisibleWarning,
    PlacementError,
    ShardingError,
    StructureError,
    UnshardedWarning,
)
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    OptimizerStateShardingRule,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.sharding import (
    PartitionSpec as P,
)

HELPER = MeshShardingHelper([4, 2], ['data', 'model'])
X = np.arange(64, dtype=np.float32).reshape(8, 8)
FSDP = FSDPShardingRule('data', min_fsdp_size=16)
STATE = {'params': {'w': np.ones((8, 4), np.float32), 'b': np.ones(4, np.float32)}, 'step': np.int32(0)}


def specs(tree):
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


def identity(*args):
    return args


@pytest.mark.parametrize(
    ('rules', 'expected'),
    [
        ((FSDP, P('data')), {'params': {'w': P('data'), 'b': P()}, 'step': P()}),
        (
            ({'params': FSDP, 'step': P()}, P('data')),
            {'params': {'w': P('data'), 'b': P()}, 'step': P()},
        ),
        (
            (TreePathShardingRule(('w$', P(None, 'model')), ('.*', P())), P('data')),
            {'params': {'w': P(None, 'model'), 'b': P()}, 'step': P()},
        ),
        (
            (PolicyShardingRule(lambda path, leaf: P('data') if leaf.ndim == 2 else P()), P('data')),
            {'params': {'w': P('data'), 'b': P()}, 'step': P()},
        ),
        (
            (NamedSharding(HELPER.mesh, P()), P('data')),
            {'params': {'w': P(), 'b': P()}, 'step': P()},
        ),
    ],
)
def test_in_shardings(rules, expected):
    compiled = HELPER.sjit(identity, rules, rules)
    state, batch = compiled(STATE, X)
    assert specs(state) == expected
    assert batch.sharding.spec == P('data')
    (inputs, _), outputs = compiled.shardings_for(STATE, X)
    assert jax.tree.map(lambda sharding: sharding.spec, inputs) == expected
    assert outputs[1].spec == P('data')


def test_one_rule_for_all_arguments_sees_paths_inside_each():
    """A bug of 0.2.5: the paths began with the index of the argument."""
    rule = TreePathShardingRule(('^w$', P('data')), ('^b$', P('model')))
    compiled = HELPER.sjit(identity, rule, (rule, rule))
    first, second = compiled({'w': X}, {'b': X})
    assert (first['w'].sharding.spec, second['b'].sharding.spec) == (P('data'), P('model'))


def test_none_inside_a_tuple_is_left_to_the_compiler():
    """A bug of 0.2.5: it raised a TypeError."""
    placed = HELPER.shard(X, P(None, 'model'))
    compiled = HELPER.sjit(identity, (None, P('data')), (None, P('data')))
    first, second = compiled(placed, X)
    assert first.sharding.spec == P(None, 'model')
    assert second.sharding.spec == P('data')


def test_arguments_are_constrained_inside():
    compiled = HELPER.sjit(
        lambda x: (x * 2, jax.typeof(x)) and x * 2,
        P('data'),
        args_sharding_constraint=(P(None, 'model'),),
    )
    hlo = compiled.lower(X).as_text()
    assert hlo.count('sdy.sharding_constraint') == 1
    assert compiled(X).sharding.spec == P(None, 'model')


def test_indivisible_arguments_are_an_error_before_tracing():
    ran = []

    @HELPER.sjit(in_shardings=(P('data'), P('data')))
    def step(state, x):
        ran.append(1)
        return state

    with pytest.raises(ShardingError) as error:
        step({'w': np.ones((6, 2)), 'b': np.ones(4)}, np.ones((3,)))
    assert ran == []
    text = str(error.value)
    assert "of the arguments of 'step' (in_shardings)" in text.splitlines()[0]
    assert [problem.leaf for problem in error.value.problems] == [
        'state/w: float64[6, 2]',
        'x: float64[3]',
    ]
    assert 'dimension 0 of size 6 is not divisible by 4' in text


def test_indivisible_outputs_are_an_error_before_compiling():
    compiled = HELPER.sjit(lambda x: {'y': x[:3]}, out_shardings=P('data'))
    with pytest.raises(ShardingError) as error:
        compiled(X)
    assert [problem.leaf for problem in error.value.problems] == ['y: float32[3, 8]']


def test_annotations_that_do_not_divide_warn_with_the_name():
    compiled = HELPER.sjit(
        lambda x: with_sharding_annotation(x[:3], 'h') * 2, annotation_shardings={'h': P('data')}
    )
    with pytest.warns(IndivisibleWarning, match="annotation 'h'"):
        compiled(X)


@pytest.mark.parametrize('policy', ['replicate', 'warn'])
def test_on_indivisible_of_the_helper(policy):
    helper = MeshShardingHelper([4, 2], ['data', 'model'], on_indivisible=policy)
    compiled = helper.sjit(lambda x: x * 2, P(('data', 'model')), P('data'))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        out = compiled(X[:6])
    assert out.sharding.spec == P()
    kinds = [warning.category for warning in caught]
    assert set(kinds) == ({IndivisibleWarning} if policy == 'warn' else set())


def test_structure_of_output_rules():
    compiled = HELPER.sjit(lambda x: {'a': x, 'b': x}, out_shardings={'a': P(), 'c': P()})
    with pytest.raises(StructureError, match=r"the outputs of '<lambda>' \(out_shardings\)"):
        compiled(X)


# Donation ---------------------------------------------------------------------------------------------


def test_a_donated_argument_gives_its_output_its_sharding():
    @HELPER.sjit(in_shardings=(FSDP, P('data')), donate_argnums=0)
    def step(state, x):
        return jax.tree.map(lambda leaf: leaf + 1, state), x.sum()

    state, loss = step(STATE, X)
    assert specs(state)['params'] == {'w': P('data'), 'b': P()}
    previous = state
    state, loss = step(state, X)
    assert previous['params']['w'].is_deleted()
    assert loss.shape == ()


@pytest.mark.parametrize(
    ('out_shardings', 'expected'),
    [
        (None, P('data')),
        ((None, None), P('data')),
        ((P(None, 'model'), None), P(None, 'model')),
    ],
)
def test_out_shardings_win_over_donation(out_shardings, expected):
    with warnings.catch_warnings():
        # XLA warns if the requested shardings make a donation useless.
        warnings.filterwarnings('ignore', message='Some donated buffers were not usable')
        compiled = HELPER.sjit(lambda x: (x + 1, x.sum()), P('data'), out_shardings, donate_argnums=0)
        out, _ = compiled(X)
    assert out.sharding.spec == expected


def test_two_donated_arguments_of_one_kind_keep_their_order():
    compiled = HELPER.sjit(lambda a, b: (a + 1, b + 1), (P('data'), P('model')), donate_argnums=(0, 1))
    first, second = compiled(X, X)
    assert (first.sharding.spec, second.sharding.spec) == (P('data'), P('model'))


def test_donation_by_name():
    compiled = HELPER.sjit(lambda *, state: state + 1, {'state': P('data')}, donate_argnames='state')
    state = HELPER.shard(X, P('data'))
    assert compiled(state=state).sharding.spec == P('data')
    assert state.is_deleted()


def test_deleted_arguments_are_named_before_the_call(snapshot):
    @HELPER.sjit(in_shardings=(FSDP, P('data')), donate_argnums=0)
    def step(state, x):
        return jax.tree.map(lambda leaf: leaf + 1, state)

    state = HELPER.shard(STATE, FSDP)
    step(state, X)
    for _ in range(2):
        with snapshot.raises(ArgumentError):
            step(state, X)


def test_a_failed_call_donates_nothing():
    def step(state, x):
        return state + x

    compiled = HELPER.sjit(step, (P('data'), P('data')), donate_argnums=0)
    state = HELPER.shard(X, P('data'))
    with pytest.raises(ShardingError):
        compiled(state, X[:3])
    with pytest.raises(TypeError):
        compiled(state, np.ones((8, 3), np.float32))
    assert not state.is_deleted()
    np.testing.assert_array_equal(compiled(state, X), X + X)


# Placement --------------------------------------------------------------------------------------------


def test_a_committed_argument_with_another_sharding_is_an_error():
    @HELPER.sjit(in_shardings=({'w': P('data'), 'b': None}, P('data')))
    def step(state, x):
        return state

    placed = HELPER.shard({'w': X, 'b': X}, P(None, 'model'))
    for _ in range(2):
        with pytest.raises(PlacementError) as error:
            step(placed, X)
        assert str(error.value).startswith(
            'step got arrays that are committed to another sharding than in_shardings gives them:\n'
            "  state/w: float32[8, 8] is sharded as P(None, 'model') on (data=4, model=2), asked for: "
            "P('data',) on (data=4, model=2)\n"
            'What to do: move them first (helper.shard), pass '
            "on_mismatch='reshard' to sjit to have them moved at every such call, or use None in "
            'in_shardings to leave arguments where they are.'
        )
        step(HELPER.shard({'w': X, 'b': X}, {'w': P('data'), 'b': P()}), X)


@pytest.mark.parametrize(
    ('spec', 'subset'),
    [
        (P('data'), "'data'"),
        (P(('model', 'data')), "('model', 'data')"),
        (P(None, 'data'), None),
        (P('data', 'model'), None),
        (P(), None),
    ],
)
def test_errors_about_batches_of_prefetch_name_its_option(spec, subset):
    step = HELPER.sjit(lambda batch: batch['x'], in_shardings=spec)
    with HELPER.prefetch([{'x': X, 'y': X}]) as batches, pytest.raises(PlacementError) as error:
        step(next(batches))
    advice = (
        ' If helper.prefetch or helper.local_data_to_global_array made the array: they shard examples over '
        f'all axes of the mesh, unless you pass mesh_axis_subset={subset}.'
    )
    assert str(error.value).endswith(f'leave arguments where they are.{"" if subset is None else advice}')
    with (
        HELPER.prefetch([{'x': X}], mesh_axis_subset='model') as some,
        pytest.raises(PlacementError) as error,
    ):
        step(next(some))
    assert str(error.value).endswith('leave arguments where they are.')


def test_errors_about_outputs_mention_the_compiler():
    rules = {'state': P('data'), 'x': None}

    def step(state, x):
        return jnp.outer(x, x) @ state

    compiled = HELPER.sjit(step, rules)
    x = HELPER.shard(X[0], P('model'))
    state = compiled(X, x)
    assert not state.sharding.is_equivalent_to(HELPER.match_sharding_rule(P('data'), X), 2)
    with pytest.raises(PlacementError) as error:
        compiled(state, x)
    assert str(error.value).endswith(
        'leave arguments where they are. If the array is an output of an earlier call of step: the compiler '
        'chose its sharding. Give out_shardings, or donate the argument that it replaces (donate_argnums), '
        'whose sharding it then gets.'
    )
    donating = HELPER.sjit(step, rules, donate_argnames='state')
    donating(donating(X, x), x)
    with pytest.raises(PlacementError) as error:
        HELPER.sjit(lambda state, x: state, rules)(state, x)
    assert str(error.value).endswith('leave arguments where they are.')


def test_mismatched_arguments_are_moved_on_request():
    traces = []

    @HELPER.sjit(in_shardings=P('data'), on_mismatch='reshard')
    def double(x):
        traces.append(1)
        return x * 2

    elsewhere = jax.device_put(X, jax.devices()[3])
    for x in (HELPER.shard(X, P(None, 'model')), HELPER.shard(X, P('data')), elsewhere, X) * 2:
        out = double(x)
        np.testing.assert_array_equal(out, X * 2)
        assert out.sharding.spec == P('data')
    assert len(traces) == 1


@pytest.mark.parametrize('on_mismatch', ['error', 'reshard'])
@pytest.mark.parametrize('called_before', [False, True])
def test_an_argument_on_other_devices_without_a_rule(called_before, on_mismatch):
    add = HELPER.sjit(lambda x, y: x + y['b'], in_shardings={'x': P('data')}, on_mismatch=on_mismatch)
    if called_before:
        add(X, {'b': X})
    four = MeshShardingHelper([4], ['data'], devices=jax.devices()[:4]).shard(X, P('data'))
    on_one_device = jax.device_put(X, jax.devices()[3])
    backwards = NamedSharding(Mesh(HELPER.mesh.devices[::-1], ('data', 'model')), P('data'))
    for y in (four, on_one_device, jax.device_put(X, backwards)):
        with pytest.raises(ValueError, match='Received incompatible devices'):  # of JAX
            add(X, {'b': y})


def test_equivalent_shardings_of_two_meshes_match():
    other = MeshShardingHelper([8], ['all'])
    placed = other.shard(X, P('all'))
    out = HELPER.sjit(lambda x: x + 1, P(('data', 'model')))(placed)
    np.testing.assert_array_equal(out, X + 1)


def test_errors_of_the_function_itself_pass_through_once():
    ran = []

    @HELPER.sjit(in_shardings=P('data'))
    def broken(x):
        ran.append(1)
        raise KeyError('mine')

    for count in (1, 2):
        with pytest.raises(KeyError, match='mine'):
            broken(X)
        assert len(ran) == count


def test_calls_with_runtime_errors_are_not_repeated():
    ran = []

    def host(x):
        ran.append(1)
        if len(ran) > 1:
            raise RuntimeError('from the host')
        return x

    @HELPER.sjit(in_shardings=P())
    def calls_back(x):
        return jax.pure_callback(host, jax.ShapeDtypeStruct((), np.float32), x)

    jax.block_until_ready(calls_back(np.float32(1)))
    count = len(ran)
    with pytest.raises(Exception, match='from the host'):
        jax.block_until_ready(calls_back(np.float32(1)))
    assert len(ran) == count + 1


def test_memory_kinds():
    host = NamedSharding(HELPER.mesh, P('data'), memory_kind='pinned_host')
    placed = HELPER.shard(X, host)
    assert placed.sharding.memory_kind == 'pinned_host'
    on_device = NamedSharding(HELPER.mesh, P('data'), memory_kind='device')
    compiled = HELPER.sjit(lambda x: jax.device_put(x, on_device) * 2, (host,))
    np.testing.assert_array_equal(compiled(placed), X * 2)


def test_typed_keys_and_scalars():
    key = jax.random.key(0)
    compiled = HELPER.sjit(
        lambda state, scale: (state, jax.random.normal(state['rng'], (8,)) * scale),
        (P(), None),
        (P(), P('data')),
    )
    state, noise = compiled({'rng': key, 'step': 3}, 2.0)
    assert state['rng'].dtype == key.dtype
    assert noise.sharding.spec == P('data')


def test_helper_context_is_active_inside():
    out = HELPER.sjit(lambda x: with_sharding_constraint(x + 1, P(None, 'model')))(X)
    assert out.sharding.spec == P(None, 'model')
    with pytest.raises(ShardingError, match="no axis 'modle'"):
        HELPER.sjit(lambda x: with_sharding_constraint(x, P('modle')))(X)


def test_empty_trees_and_zero_sizes():
    compiled = HELPER.sjit(lambda tree, x: (tree, x), (FSDP, P('data')), (FSDP, P('data')))
    tree, x = compiled({}, np.zeros((0, 4), np.float32))
    assert tree == {} and x.shape == (0, 4)
    assert compiled(None, X)[0] is None


def test_large_init_is_never_replicated():
    init = HELPER.sjit(lambda: {'w': jnp.zeros((512, 512))}, out_shardings=P('data', 'model'))
    memory = init.lower().compile().memory_analysis()
    assert memory.output_size_in_bytes == 512 * 512 * 4 // 8
    assert memory.temp_size_in_bytes < 512 * 512 * 4 // 4


def test_an_unsharded_optimizer_state_warns(snapshot):
    init = optax.adam(1e-3).init
    params = HELPER.shard({'b': X[0], 'w': X}, FSDP)
    compiled = HELPER.sjit(init)
    with pytest.warns(UnshardedWarning) as record:
        state = compiled(params)
    snapshot(record[0].message)
    assert len(record) == 1
    compiled(params)  # one warning
    state = HELPER.sjit(init, out_shardings=OptimizerStateShardingRule(FSDP, params))(params)
    assert state[0].mu['w'].sharding.spec == P('data')
    HELPER.sjit(lambda x: jnp.zeros(()))(params)
    HELPER.sjit(jnp.zeros_like)(X)


@pytest.mark.parametrize('donated', [True, False])
def test_a_donated_array_that_is_passed_twice(donated, snapshot):
    options = {'donate_argnums': (0, 1)} if donated else {'donate_argnums': 0}
    step = HELPER.sjit(lambda state, other: (state['w'] + 1, other + 2), P('data'), P('data'), **options)
    x = HELPER.shard(np.ones((8, 8), np.float32), P('data'))
    for _ in range(2):
        with snapshot.raises(ArgumentError):
            step({'w': x}, x)
    assert not x.is_deleted()


@pytest.mark.parametrize('called_before', [False, True])
def test_a_failing_run_is_not_taken_for_a_deleted_argument(called_before):
    """The error may have any message, and the donated arguments have been deleted."""
    helper = MeshShardingHelper([1], ['data'], devices=jax.devices()[:1])
    broken = []

    def host(x):
        if broken:
            raise RuntimeError('a temporary file was deleted')
        return x

    @helper.sjit(in_shardings=P('data'), donate_argnums=0)
    def step(x):
        return jax.pure_callback(host, jax.ShapeDtypeStruct((8,), np.float32), x)

    if called_before:
        for _ in range(2):
            jax.block_until_ready(step(helper.shard(np.ones(8, np.float32), P('data'))))
    broken.append(True)
    for _ in range(2):
        with pytest.raises(Exception, match='a temporary file was deleted') as error:
            jax.block_until_ready(step(helper.shard(np.ones(8, np.float32), P('data'))))
        assert not isinstance(error.value, ArgumentError)


def test_errors_about_arguments_replace_jax_errors():
    """JAX's error about the same arguments is not printed before scalax's error."""
    step = HELPER.sjit(lambda x: x * 2, P('data'), donate_argnums=0)
    placed = HELPER.shard(np.ones((8, 8), np.float32), P('data'))
    step(placed)
    elsewhere = HELPER.shard(np.ones((8, 8), np.float32), P('model'))
    for x, kind in ((elsewhere, PlacementError), (placed, ArgumentError)):
        with pytest.raises(kind) as error:
            step(x)
        assert error.value.__cause__ is None
        assert 'Got jit sharding' not in ''.join(traceback.format_exception(error.value))
        assert 'has been deleted' not in ''.join(traceback.format_exception(error.value))


def test_memory_layouts_need_an_enclosing_jit():
    sharding = NamedSharding(HELPER.mesh, P('data'))
    rows_last = Format(Layout(major_to_minor=(0, 1)), sharding)
    with pytest.raises(StructureError, match='of type Format'):
        HELPER.sjit(lambda x: x * 2, in_shardings=(rows_last,))
    around = jax.jit(HELPER.sjit(lambda x: x * 2, P('data')), in_shardings=rows_last, out_shardings=rows_last)
    out = around(jax.device_put(X, rows_last))
    np.testing.assert_array_equal(out, 2 * X)
    assert (out.sharding, out.format.layout.major_to_minor) == (sharding, (0, 1))
    np.testing.assert_array_equal(HELPER.sjit(lambda x: x * 2, P('data'))(out), 4 * X)


def test_structures_that_do_not_fit_name_every_argument(snapshot):
    compiled = HELPER.sjit(
        lambda state, batch: batch, ({'a': P()}, {'a': P(), 'b': P()}), args_sharding_constraint=None
    )
    with snapshot.raises(StructureError):
        compiled({'b': X}, {'a': X, 'c': X})


@jax.tree_util.register_pytree_node_class
class Strict:
    """A node that accepts only matrices, like some nodes of other libraries."""

    def __init__(self, w):
        if not isinstance(w, np.ndarray | jax.Array) or w.ndim != 2:
            raise TypeError(f'w must be a matrix, got {type(w).__name__}')
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_nodes_that_accept_only_arrays():
    node = Strict(X)
    for options in (
        {},
        {'in_shardings': P('data')},
        {'in_shardings': FSDPShardingRule('data', min_fsdp_size=0), 'donate_argnums': 0},
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='Some donated buffers were not usable')
            out = HELPER.sjit(lambda node: Strict(node.w * 2), **options)(node)
        np.testing.assert_array_equal(out.w, X * 2)
        with pytest.raises(TypeError, match='w must be a matrix'):
            HELPER.sjit(lambda node: node, P('data')).shardings_for(node)
    for rules in (P('data'), FSDPShardingRule('data', min_fsdp_size=0)):
        out = HELPER.sjit(lambda node: Strict(node.w * 2), out_shardings=rules)(node)
        np.testing.assert_array_equal(out.w, X * 2)
        assert out.w.sharding.spec == P('data')
    placed = HELPER.shard(node, P('data'))
    assert placed.w.sharding.spec == P('data')
    np.testing.assert_array_equal(HELPER.gather(placed).w, X)


def test_methods_do_not_move_arguments(monkeypatch):
    compiled = HELPER.sjit(
        lambda x, y: x + y, (P('data'), P('data')), donate_argnums=0, on_mismatch='reshard'
    )
    elsewhere = HELPER.shard(X, P(None, 'model'))
    rows = [(jnp.asarray(X), X), (X, elsewhere)]
    monkeypatch.setattr(jax, 'device_put', lambda *_, **__: pytest.fail('moved'))
    for row in rows:
        compiled.shardings_for(*row)
        compiled.eval_shape(*row)
        compiled.trace(*row)
        compiled.lower(*row)
        compiled.get_jitted_function_by_args(*row)


def test_rules_may_compute_while_jax_traces():
    class Computes(ShardingRule):
        def apply(self, pytree):
            def spec(leaf):
                return P('data') if jnp.prod(jnp.asarray(leaf.shape)) > 8 else P()

            return jax.tree.map(spec, pytree)

    nested = HELPER.sjit(lambda x: x * 2, Computes(), Computes())
    np.testing.assert_array_equal(jax.jit(lambda x: nested(x))(X), X * 2)
