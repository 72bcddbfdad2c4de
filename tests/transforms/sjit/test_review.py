"""sjit, what a review found: each test is a way in which it was once wrong."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax.errors import ArgumentError, MeshError, StructureError
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    ShardingRule,
    with_sharding_annotation,
)
from scalax.sharding import (
    PartitionSpec as P,
)

HELPER = MeshShardingHelper([4, 2], ['data', 'model'])
EXPLICIT = MeshShardingHelper([4, 2], ['data', 'model'], axis_types=AxisType.Explicit)
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def test_explicit_arguments_without_rules_keep_their_own_types():
    double = EXPLICIT.sjit(lambda x: x * 2)
    for spec in (P('data'), P(None, 'model'), P('data', 'model'), P(), P('data')):
        out = double(EXPLICIT.shard(X, spec))
        assert out.sharding.is_equivalent_to(EXPLICIT.match_sharding_rule(spec, X), 2)

    @EXPLICIT.sjit
    def by_type(x):
        return x * (2 if jax.typeof(x).sharding.spec[0] == 'data' else 3)

    for spec, factor in ((P('data'), 2), (P(None, 'model'), 3), (P('data'), 2)):
        np.testing.assert_array_equal(by_type(EXPLICIT.shard(X, spec)), X * factor)


def test_memory_spaces_are_not_mixed_up_by_replays():
    host = jax.sharding.NamedSharding(HELPER.mesh, P('data'), memory_kind='pinned_host')

    @HELPER.sjit
    def by_memory(x):
        on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jnp.full((), 3.0 if on_host else 2.0)

    assert by_memory(HELPER.shard(X, P('data'))) == 2.0
    assert by_memory(HELPER.shard(X, host)) == 3.0
    assert by_memory(X) == 2.0


def test_wrappers_are_called_as_they_are_written():
    def tenfold(fun):
        @functools.wraps(fun)
        def wrapper(*args, **kwargs):
            return fun(*args, **kwargs) * (10 if 'scale' in kwargs else 1)

        return wrapper

    def with_rng(fun):
        @functools.wraps(fun)
        def wrapper(x):
            return fun(x, rng=jax.random.key(0))

        return wrapper

    scaled = tenfold(lambda x, scale=1: x * scale)
    compiled = HELPER.sjit(scaled, in_shardings={'x': P('data')}, static_argnames='scale')
    for args, kwargs in (((X,), {}), ((X,), {'scale': 2}), ((X, 2), {}), ((), {'x': X, 'scale': 3})):
        np.testing.assert_array_equal(compiled(*args, **kwargs), scaled(*args, **kwargs))
    assert compiled.shardings_for(X)[0][0].spec == P('data')
    drawn = with_rng(lambda x, rng: x + jax.random.uniform(rng))
    np.testing.assert_allclose(HELPER.sjit(drawn)(X), drawn(X))


def test_a_failed_first_call_leaves_nothing_behind():
    ran = []

    @HELPER.sjit(in_shardings=FSDPShardingRule('data', min_fsdp_size=64))
    def picky(x):
        ran.append(x.shape)
        if x.ndim == 1:
            raise ValueError('mine')
        return x * 2

    for count, bad in enumerate((np.ones(4), np.ones(128), np.ones(4))):
        with pytest.raises(ValueError, match='mine'):
            picky(bad)
        assert len(ran) == 2 * count + 1  # the user's code runs once a call
        np.testing.assert_array_equal(picky(np.ones((8 + count, 8))), 2)


def test_threads_that_race_for_many_programs():
    failures = []
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns as often as they can

    def work(compiled, seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(40):
                n, k = (int(rng.choice([2, 8, 16, 64])), int(rng.integers(3)))
                out = compiled({'a': np.ones((n, 8), np.float32)}, k)
                assert (np.asarray(out['a']) == k).all()
                if rng.integers(10) == 0:
                    compiled.clear_cache()
        except BaseException as error:
            failures.append(error)

    rule = FSDPShardingRule('data', min_fsdp_size=64)
    compiled = HELPER.sjit(
        lambda tree, k: jax.tree.map(lambda x: x * k, tree), (rule,), rule, static_argnums=1
    )
    threads = [threading.Thread(target=work, args=(compiled, seed), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    sys.setswitchinterval(usual)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures[0]


@pytest.mark.parametrize('transform', ['grad', 'vmap'])
def test_functions_that_close_over_tracers_are_not_replayed(transform):
    def loss(w):
        compiled = HELPER.sjit(lambda x: x * w, in_shardings=P('data'))
        return compiled(jnp.ones(8)).sum() + compiled(HELPER.shard(np.ones(8), P('data'))).sum()

    if transform == 'grad':
        assert jax.grad(loss)(2.0) == 16.0
    else:
        np.testing.assert_array_equal(jax.vmap(loss)(jnp.arange(3.0)), 16 * jnp.arange(3.0))


@dataclasses.dataclass
class Unhashable(ShardingRule):
    """A user's rule, as a plain dataclass: it has no hash."""

    axis: str

    def apply(self, pytree):
        return jax.tree.map(lambda _: P(self.axis), pytree)


def test_rules_that_cannot_be_hashed_bind():
    def model(x):
        return with_sharding_annotation(x * 2, 'h')

    rule = Unhashable('data')
    assert HELPER.sjit(model, annotation_shardings={'h': rule})(X).sharding.spec == P('data')
    with HELPER.get_context({'h': rule}):
        assert jax.jit(model)(X).sharding.spec == P('data')


@pytest.mark.parametrize(
    ('bindings', 'message'),
    [
        (P('data'), 'annotation_shardings is a dict of annotation name -> rule, got {kind}'),
        ({1: P()}, 'annotation names are strings, got 1 in annotation_shardings'),
        (
            {'h': 'data'},
            "the rules of annotation_shardings['h'] hold 'data' of type str, which is not a rule: give a "
            "ShardingRule, a PartitionSpec, a NamedSharding or None; write PartitionSpec('data')",
        ),
    ],
)
def test_bindings_are_checked(bindings, message):
    for make in (
        lambda: HELPER.get_context(bindings),
        lambda: HELPER.sjit(lambda x: x, annotation_shardings=bindings),
    ):
        with pytest.raises(StructureError) as error:
            make()
        assert str(error.value) == message.format(kind=P.__name__)


def test_a_jitted_function_for_other_arguments_says_so():
    compiled = HELPER.sjit(lambda x: x * 2, FSDPShardingRule('data', min_fsdp_size=0))
    jitted = compiled.get_jitted_function_by_args(X)
    with pytest.raises(ArgumentError) as error:
        jitted(np.ones((4, 16), np.float32))
    assert str(error.value) == (
        'this compiled program of <lambda> was asked for with other arguments (another tree, other '
        'shapes, dtypes or static values; on Explicit axes also other shardings, and a ShapeDtypeStruct has '
        'one from helper.abstract): call <lambda> itself, which has a program for each'
    )


@jax.tree_util.register_pytree_node_class
class Strict:
    """A node that holds matrices only, as nodes of other libraries do."""

    def __init__(self, w):
        if not isinstance(w, np.ndarray | jax.Array) or w.ndim != 2:
            raise TypeError(f'w must be a matrix, got {type(w).__name__}')
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_nodes_that_refuse_anything_but_arrays():
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
        with pytest.raises(StructureError) as error:
            HELPER.sjit(lambda node: node, P('data')).shardings_for(node)
        assert str(error.value) == (
            'a node of the tree refuses to hold shardings in place of arrays (TypeError: w must be a '
            'matrix, got NamedSharding), so they cannot be shown in place'
        )
    for rules in (P('data'), FSDPShardingRule('data', min_fsdp_size=0)):
        out = HELPER.sjit(lambda node: Strict(node.w * 2), out_shardings=rules)(node)
        np.testing.assert_array_equal(out.w, X * 2)
        assert out.w.sharding.spec == P('data')
    placed = HELPER.shard(node, P('data'))
    assert placed.w.sharding.spec == P('data')
    np.testing.assert_array_equal(HELPER.gather(placed).w, X)


def test_shard_map_over_a_mesh_of_ones_own_inside():
    own = Mesh(HELPER.mesh.devices.reshape(8), ('all',))
    by_jax = jax.shard_map(lambda y: y * 2, mesh=own, in_specs=P('all'), out_specs=P('all'))
    by_helper = MeshShardingHelper.from_mesh(own).shard_map(lambda y: y * 2, P('all'), P('all'))

    def entered(x):
        with jax.sharding.use_abstract_mesh(own.abstract_mesh):
            return by_jax(x)

    for mapped in (entered, by_helper):
        np.testing.assert_array_equal(HELPER.sjit(mapped, in_shardings=P('data'))(X), X * 2)
    with pytest.raises(ValueError, match='context mesh'):  # the mesh in force is the helper's
        HELPER.sjit(by_jax, in_shardings=P('data'))(X)


@pytest.mark.parametrize('in_specs', [P('data', 'model'), P()], ids=str)
@pytest.mark.parametrize(
    'options',
    [{'in_shardings': P('data')}, {'out_shardings': P('data')}, {'args_sharding_constraint': P('data')}],
    ids=str,
)
def test_what_runs_already_runs_inline_inside_shard_map(options, in_specs):
    compiled = HELPER.sjit(lambda x: x * 2, **options)
    compiled(X)
    mapped = jax.shard_map(compiled, mesh=HELPER.mesh, in_specs=in_specs, out_specs=in_specs)
    for call in (mapped, jax.jit(mapped), mapped):
        np.testing.assert_array_equal(call(X), X * 2)


def test_an_abstract_mesh_answers_questions_about_arrays():
    mesh = AbstractMesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
    compiled = MeshShardingHelper.from_mesh(mesh).sjit(lambda x: x * 2, P('data'), P('data'))
    assert compiled.shardings_for(jnp.asarray(X))[1].spec == P('data')
    assert compiled.eval_shape(HELPER.shard(X, P())).shape == X.shape


@pytest.mark.parametrize('options', [{}, {'in_shardings': P('data')}, {'out_shardings': P()}])
def test_every_shape_reaches_the_fast_path(options, monkeypatch):
    compiled = HELPER.sjit(lambda x: x * 2, **options)
    inputs = [HELPER.shard(np.ones((n, 4), np.float32), P('data')) for n in (8, 16, 24)]
    for x in inputs * 2:
        compiled(x)
    traces = []
    with jax.log_compiles(False):
        state = compiled._dispatcher
        monkeypatch.setattr(type(state), 'dispatch', lambda *_: traces.append('dispatch'))
        monkeypatch.setattr(type(state), '_in_trace', lambda *_: traces.append('traced'))
        monkeypatch.setattr(type(state), 'explain_or_retry', lambda *_: traces.append('explain_or_retry'))
        for x in inputs * 2:
            compiled(x)
    assert traces == []
    jitted = compiled.get_jitted_function_by_args(inputs[0])
    assert jitted._cache_size() == 3


def never_slow(compiled, calls, monkeypatch):
    """Each call once, then each again without the slow path."""
    wanted = [compiled(*call) for call in calls]
    state = compiled._dispatcher
    monkeypatch.setattr(type(state), 'dispatch', lambda *_: pytest.fail('the slow path'))
    for call, out in zip(calls, wanted, strict=True):
        jax.tree.map(np.testing.assert_array_equal, compiled(*call), out)


def test_many_signatures_of_two_programs_are_told_apart(monkeypatch):
    compiled = HELPER.sjit(lambda x: x * 2, FSDPShardingRule('data', min_fsdp_size=64))
    calls = [(np.full((4 * n, 3), n, np.float32),) for n in range(1, 41)]
    never_slow(compiled, calls, monkeypatch)


def test_programs_whose_calls_look_alike_are_told_apart_by_the_trace_context(monkeypatch):
    by_dtype = PolicyShardingRule(lambda path, leaf: P('data') if leaf.dtype == np.float64 else P())
    compiled = HELPER.sjit(lambda x: x * 1.0, out_shardings=by_dtype)
    x = np.ones(8, np.int32)
    wanted = {}
    for x64 in (False, True, False, True):
        with jax.enable_x64(x64):
            wanted[x64] = compiled(x).sharding
    monkeypatch.setattr(type(compiled._dispatcher), 'dispatch', lambda *_: pytest.fail('dispatched'))
    for x64 in (False, True) * 2:
        with jax.enable_x64(x64):
            assert compiled(x).sharding == wanted[x64]
    assert wanted[False].spec != wanted[True].spec


def test_programs_are_told_apart_by_dtypes_as_they_are_on_the_devices(monkeypatch):
    by_dtype = PolicyShardingRule(lambda path, leaf: P('data') if leaf.dtype == np.float32 else P())
    compiled = HELPER.sjit(lambda x: x * 2, in_shardings=by_dtype)
    wide = np.ones(8, np.float64), np.ones(8, np.int64)
    never_slow(compiled, [(wide[0],), (wide[1],), (jnp.asarray(wide[0]),)], monkeypatch)


def test_programs_are_told_apart_by_looks_at_numbers_too(monkeypatch):
    by_rank = PolicyShardingRule(lambda path, leaf: P('data') if leaf.shape else P())
    by_dtype = PolicyShardingRule(lambda path, leaf: P() if leaf.dtype == np.float32 else None)
    for rule in (by_rank, by_dtype):
        with monkeypatch.context() as patched:
            never_slow(HELPER.sjit(lambda x: x * 2, rule, rule), [(2.0,), (X,), (3,)], patched)


def test_programs_are_told_apart_among_calls_of_one_length(monkeypatch):
    rule = FSDPShardingRule('data', min_fsdp_size=64)
    compiled = HELPER.sjit(lambda *arrays: [x * 2 for x in arrays], in_shardings=rule)
    small = np.ones(8, np.float32)
    calls = [(small,), (X,), (X, X), (X, small), (small, small, small)]
    never_slow(compiled, calls, monkeypatch)


def test_nothing_is_kept_alive_by_the_caches_of_jax():
    kept = []

    class Rule(ShardingRule):
        def apply(self, pytree):
            return jax.tree.map(lambda _: P('data'), pytree)

    @jax.jit
    def shared(x):
        return with_sharding_annotation(x * 2, 'h')

    for _ in range(3):
        helper, rule = MeshShardingHelper([8], ['data']), Rule()
        compiled = helper.sjit(shared, annotation_shardings={'h': rule})
        compiled(X)
        kept += [weakref.ref(helper), weakref.ref(rule)]
        del helper, rule, compiled
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6


def test_a_failing_run_with_donation_keeps_its_own_error():
    helper = MeshShardingHelper([1], ['data'], devices=jax.devices()[:1])
    broken = []

    def host(x):
        if broken:
            raise RuntimeError('from the host')
        return x

    @helper.sjit(in_shardings=P('data'), donate_argnums=0)
    def step(x):
        return jax.pure_callback(host, jax.ShapeDtypeStruct((8,), np.float32), x)

    state = step(helper.shard(np.ones(8, np.float32), P('data')))
    broken.append(1)
    for _ in range(2):
        with pytest.raises(Exception, match='from the host'):
            jax.block_until_ready(step(helper.shard(np.ones(8, np.float32), P('data'))))
    del state


def test_debug_nans_runs_the_users_lines():
    log = HELPER.sjit(lambda x: jnp.log(x), P('data'))
    log(np.ones(8, np.float32))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match='invalid value'):
        log(HELPER.shard(-np.ones(8, np.float32), P('data')))


def test_messages_of_jax_name_the_users_function():
    def returns_text(x):
        return 'text'

    with pytest.raises(TypeError, match=r'returns_text at .*test_sjit_review\.py'):
        HELPER.sjit(returns_text)(X)


def test_no_false_alarm_about_annotations_of_another_branch():
    @HELPER.sjit(annotation_shardings={'dropped': P('data')}, static_argnames='train')
    def model(x, train):
        return with_sharding_annotation(x, 'dropped') if train else x

    model(X, train=False)
    assert model(X, train=True).sharding.spec == P('data')


def test_a_foreign_mesh_of_another_size():
    compiled = EXPLICIT.sjit(lambda x: x * 2, P('data'))
    other = jax.make_mesh((2,), ('a',), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    with jax.set_mesh(other), pytest.raises(MeshError, match='is compiled for a mesh of 8 devices'):
        compiled(EXPLICIT.shard(X, P('data')))


def test_questions_move_nothing(monkeypatch):
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


def test_donated_names_among_extra_keywords():
    compiled = HELPER.sjit(lambda **k: k['x'] + k['y'], {'x': P('data')}, donate_argnames='y')
    y = HELPER.shard(X, P('data'))
    np.testing.assert_array_equal(compiled(x=X, y=y), X + X)
    assert y.is_deleted()


def test_rules_may_compute_while_jax_traces():
    class Computes(ShardingRule):
        def apply(self, pytree):
            def spec(leaf):
                return P('data') if jnp.prod(jnp.asarray(leaf.shape)) > 8 else P()

            return jax.tree.map(spec, pytree)

    nested = HELPER.sjit(lambda x: x * 2, Computes(), Computes())
    np.testing.assert_array_equal(jax.jit(lambda x: nested(x))(X), X * 2)


def test_arguments_named_like_ours():
    def f(self, row, call):
        return self + row + call

    compiled = HELPER.sjit(f, P('data'))
    np.testing.assert_array_equal(compiled(self=X, row=X, call=X), 3 * X)
    assert compiled.lower(self=X, row=X, call=X).compile() is not None
    assert HELPER.sjit(lambda x, n: x * n, static_argnums=np.int64(1))(X, 2).shape == X.shape
