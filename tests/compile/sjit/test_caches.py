"""sjit and JAX's caches: bindings do not leak, and the user's code is traced once per signature."""

from __future__ import annotations

import dataclasses
import enum
import gc
import random
import sys
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from scalax.errors import UnusedAnnotationWarning
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
    get_global_annotation_shardings,
    get_global_mesh_helper,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.sharding import (
    PartitionSpec as P,
)

HELPER = MeshShardingHelper([4, 2], ['data', 'model'])
X = np.arange(64, dtype=np.float32).reshape(8, 8)
ROWS, COLUMNS = P('data'), P(None, 'model')


def inner_jit(x):
    return _shared(x)


@jax.jit
def _shared(x):
    return with_sharding_annotation(x * 2, 'h')


def inner_scan(x):
    return jax.lax.scan(_body, x, None, length=2)[0]


def _body(carry, _):
    return with_sharding_annotation(carry * 2, 'h'), None


def inner_checkpoint(x):
    return jax.checkpoint(lambda v: with_sharding_annotation(v * 2, 'h'))(x)


_remat = jax.checkpoint(lambda v: with_sharding_annotation(v * 2, 'h'))


def inner_shared_checkpoint(x):
    return _remat(x)


def inner_vmap(x):
    return jax.vmap(_shared)(x[None])[0]


def inner_while(x):
    return jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, _shared(s[1])), (0, x))[1]


def inner_grad(x):
    return jax.grad(lambda v: (_shared(v) ** 2).sum())(x)


@jax.custom_vjp
def _custom(x):
    return with_sharding_annotation(x * 2, 'h')


_custom.defvjp(
    lambda x: (with_sharding_annotation(x * 2, 'h'), None),
    lambda _, g: (with_sharding_annotation(g * 2, 'h'),),
)


def inner_custom_vjp(x):
    return jax.grad(lambda v: _custom(v).sum())(x) + _custom(x)


INNER = [
    inner_jit,
    inner_scan,
    inner_checkpoint,
    inner_shared_checkpoint,
    inner_vmap,
    inner_while,
    inner_grad,
    inner_custom_vjp,
]


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('inner', INNER)
@pytest.mark.parametrize('order', ['unbound first', 'rows first', 'columns first'])
def test_every_caller_gets_its_own_binding(inner, order):
    rows = HELPER.sjit(inner, annotation_shardings={'h': ROWS})
    columns = HELPER.sjit(inner, annotation_shardings={'h': COLUMNS})
    plain = jax.jit(inner)
    expected = inner(jnp.asarray(X))
    first = {'unbound first': plain, 'rows first': rows, 'columns first': columns}[order]
    first(X)
    for _ in range(2):
        for compiled, spec in ((rows, ROWS), (columns, COLUMNS), (plain, None)):
            out = compiled(X)
            np.testing.assert_allclose(out, expected)
            if spec is not None:
                assert out.sharding.spec == spec
            else:
                assert isinstance(out.sharding, jax.sharding.SingleDeviceSharding)


def test_nested_sjit_inherits_and_overrides():
    def leaf(x):
        a = with_sharding_annotation(x + 1, 'a')
        b = with_sharding_annotation(x + 2, 'b')
        return a, b

    nested = HELPER.sjit(leaf, annotation_shardings={'b': COLUMNS})
    outer = HELPER.sjit(lambda x: nested(x), annotation_shardings={'a': ROWS, 'b': ROWS})
    a, b = outer(X)  # the inner 'b' takes effect
    assert (a.sharding.spec, b.sharding.spec) == (ROWS, COLUMNS)
    other = HELPER.sjit(lambda x: nested(x), annotation_shardings={'a': COLUMNS})
    assert other(X)[0].sharding.spec == COLUMNS
    assert nested(X)[1].sharding.spec == COLUMNS


def test_active_bindings_are_returned():
    seen = []

    def inner(x):
        seen.append((get_global_mesh_helper(), get_global_annotation_shardings()))
        return with_sharding_annotation(with_sharding_annotation(x, 'a'), 'b')

    nested = HELPER.sjit(inner, annotation_shardings={'b': COLUMNS})
    HELPER.sjit(lambda x: nested(x), annotation_shardings={'a': ROWS})(X)
    assert seen == [(HELPER, {'a': ROWS, 'b': COLUMNS})]
    assert get_global_mesh_helper() is None
    assert get_global_annotation_shardings() is None


def test_unused_names_warn_once_with_near_names():
    @HELPER.sjit(annotation_shardings={'hiden': ROWS})
    def model(x):
        return with_sharding_annotation(x, 'hidden')

    with pytest.warns(UnusedAnnotationWarning) as caught:
        model(X)
    assert [str(warning.message) for warning in caught] == [
        'model: annotation_shardings binds names that no with_sharding_annotation in it used: '
        "'hiden' (did you mean 'hidden'?)"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model(X)
        model(X[:4])


def test_names_used_in_a_trace_that_jax_had_cached_count():
    compiled = HELPER.sjit(lambda x, y: inner_jit(x) + y.sum(), annotation_shardings={'h': ROWS})
    compiled(X, X)
    assert compiled(X, X[:3]).sharding.spec == ROWS


def test_annotations_without_bindings_do_nothing():
    np.testing.assert_array_equal(inner_jit(X), X * 2)
    np.testing.assert_array_equal(HELPER.sjit(inner_jit)(X), X * 2)


@pytest.mark.medium
@pytest.mark.parametrize(
    'options',
    [
        {},
        {'in_shardings': ROWS},
        {'in_shardings': ROWS, 'out_shardings': COLUMNS},
        {'in_shardings': ROWS, 'args_sharding_constraint': COLUMNS},
        {'in_shardings': ROWS, 'out_shardings': ROWS, 'donate_argnums': 0},
        {'out_shardings': FSDPShardingRule('data', min_fsdp_size=0)},
    ],
    ids=str,
)
def test_one_trace_for_all_argument_shardings(options):
    traces = []

    @HELPER.sjit(**options)
    def double(x):
        traces.append(1)
        return x * 2

    def placed():
        return HELPER.shard(X, ROWS)

    for make in (lambda: X, lambda: jnp.asarray(X), placed) * 2:
        np.testing.assert_array_equal(double(make()), X * 2)
    double.lower(X)
    double.eval_shape(jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert len(traces) == 1


def test_a_replay_never_crosses_trace_contexts():
    precisions = []

    @HELPER.sjit(in_shardings=ROWS)
    def product(x):
        precisions.append(jax.config.jax_default_matmul_precision)
        return x @ x.T

    product(X)
    product(jnp.asarray(X))
    product(HELPER.shard(X, ROWS))
    with jax.default_matmul_precision('float32'):
        product(HELPER.shard(X, ROWS))
        text = str(product.trace(X).jaxpr)
    assert precisions[0] is None
    assert set(precisions[1:]) == {'float32'}
    assert 'HIGHEST' in text or 'float32' in text.lower()
    assert 'HIGHEST' not in str(product.trace(X).jaxpr)


def test_x64_is_another_signature():
    # One device: on several, JAX 0.12 may shard a numpy array in one x64 mode and run in the other,
    # with jax.jit too.
    helper = MeshShardingHelper([1], ['data'], devices=jax.devices()[:1])
    double = helper.sjit(lambda x: x * 2, in_shardings=ROWS)
    wide = X.astype(np.float64)
    assert double(wide).dtype == np.float32
    with jax.enable_x64(True):
        assert double(wide).dtype == np.float64
    assert double(wide).dtype == np.float32


@pytest.mark.medium
@pytest.mark.parametrize('committed', [True, False])
@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('wide_first', [True, False])
def test_x64_arrays_keep_their_dtype_without_x64(wide_first, kind, committed):
    helper = MeshShardingHelper([4, 2], ['data', 'model'], axis_types=kind)
    with jax.enable_x64(True):
        wide = helper.shard(np.ones(8), ROWS) if committed else jnp.ones(8)
    fill = helper.sjit(jnp.zeros_like, in_shardings=ROWS, out_shardings=ROWS)
    for x in [wide, np.ones(8), wide][not wide_first :]:
        out = fill(x)
        assert out.dtype == jax.typeof(x).dtype
        assert out.sharding.is_equivalent_to(NamedSharding(helper.mesh, ROWS), 1)


def test_partial_keys_distinguish_x64_arrays(monkeypatch):
    with jax.enable_x64(True):
        wide = HELPER.shard(np.ones(8), ROWS)
    by_dtype = PolicyShardingRule(lambda path, leaf: ROWS if leaf.dtype == np.float64 else P())
    fill = HELPER.sjit(jnp.zeros_like, out_shardings=by_dtype)
    calls = [wide, HELPER.shard(np.ones(8), P())]
    expected = [fill(x).sharding for x in calls]
    state = fill._dispatcher
    monkeypatch.setattr(type(state), 'dispatch', lambda *_: pytest.fail('the slow path'))
    assert [fill(x).sharding for x in calls] == expected
    assert [sharding.spec for sharding in expected] == [ROWS, P()]


@pytest.mark.medium
def test_x64_dtypes_that_are_requested_by_name():
    before = jax.config.jax_explicit_x64_dtypes
    jax.config.update('jax_explicit_x64_dtypes', 'allow')
    try:
        arguments = [X, X.astype(np.float64), jnp.asarray(X), jnp.asarray(X, np.float64), np.float64(2), 2.0]
        for f in (lambda x: x * 2, lambda x: jnp.asarray(x, np.float64)):
            compiled, jitted = HELPER.sjit(f), jax.jit(f)
            for x in arguments * 2:
                assert compiled(x).dtype == jitted(x).dtype
    finally:
        jax.config.update('jax_explicit_x64_dtypes', before)


def test_weak_types_are_another_signature():
    @HELPER.sjit
    def add(x, y):
        return x + y

    half = jnp.ones(8, jnp.bfloat16)
    assert add(half, 1.0).dtype == jnp.bfloat16
    assert add(half, np.float32(1)).dtype == np.float32
    assert add(half, 1.0).dtype == jnp.bfloat16


def test_signatures_with_equal_shardings_share_one_program():
    compiled = HELPER.sjit(lambda x: x * 2, in_shardings=ROWS, out_shardings=ROWS)
    for n in (4, 8, 12):
        compiled.eval_shape(np.ones((n, 2)))
    assert len(compiled._dispatcher.programs) == 1
    for n in (4, 8, 12, 4, 8, 12):
        assert compiled(np.ones((n, 2))).shape == (n, 2)


@pytest.mark.medium
def test_alternating_shapes_trees_and_statics():
    """A bug of 0.2.5: calls with a second shape or tree structure reused the first shardings."""
    rule = FSDPShardingRule('data', min_fsdp_size=16)
    compiled = HELPER.sjit(
        lambda tree, n: jax.tree.map(lambda leaf: leaf * n, tree), (rule,), rule, static_argnums=1
    )
    trees = [
        {'a': np.ones((4, 8), np.float32)},
        {'a': np.ones((8, 4), np.float32)},
        {'a': np.ones((2, 2), np.float32), 'b': np.ones((4, 4, 4), np.float32)},
        [np.ones((16,), np.float32), np.float32(1)],
        {'a': None, 'b': np.ones((3, 8), np.float32)},
    ]
    for _ in range(3):
        for tree in trees:
            for n in (2, 3):
                out = compiled(tree, n)
                expected = HELPER.match_sharding_rule(rule, tree)
                assert jax.tree.structure(out) == jax.tree.structure(tree)
                for leaf, sharding in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
                    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
                    assert (np.asarray(leaf) == n).all()


def test_training_from_an_sjit_init_compiles_one_program():
    rule = FSDPShardingRule('data', min_fsdp_size=0)
    init = HELPER.sjit(lambda: {'w': jnp.ones((8, 8)), 'step': jnp.zeros((), int)}, out_shardings=rule)
    step = HELPER.sjit(
        lambda state, x: {'w': state['w'] + x.mean(), 'step': state['step'] + 1},
        (rule, ROWS),
        donate_argnums=0,
    )
    state = init()
    for _ in range(3):
        state = step(state, X)
    assert cache_sizes(step) == [1]
    assert state['w'].sharding.spec == P('data')


@pytest.mark.medium
def test_many_threads_functions_and_bindings():
    """16 threads, 8 functions over shared inner jits, 2,000 calls: every value and sharding is right."""
    specs = [ROWS, COLUMNS, P('data', 'model'), P()]
    functions = []
    for number in range(8):
        spec = specs[number % 4]
        inner = INNER[number % len(INNER)]
        functions.append((HELPER.sjit(inner, annotation_shardings={'h': spec}), inner, spec))
    inputs = [X, X[:4], np.ones((8, 4), np.float32)]
    with jax.disable_jit():
        expected = {
            (i, j): np.asarray(inner(jnp.asarray(x)))
            for i, (_, inner, _) in enumerate(functions)
            for j, x in enumerate(inputs)
        }
    failures = []

    def work(seed):
        choose = random.Random(seed)
        try:
            for _ in range(125):
                i, j = choose.randrange(8), choose.randrange(3)
                compiled, _, spec = functions[i]
                out = compiled(inputs[j])
                np.testing.assert_allclose(out, expected[i, j])
                wanted_sharding = HELPER.match_sharding_rule(spec, out)
                assert out.sharding.is_equivalent_to(wanted_sharding, out.ndim)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    assert not failures, failures[0]


def test_constraints_in_functions_that_threads_share():
    @jax.jit
    def shared(x):
        return with_sharding_constraint(x * 2, P('data'))

    small = MeshShardingHelper([2], ['data'], devices=jax.devices()[:2])
    for helper in (HELPER, small, HELPER):
        with helper.get_context():
            assert shared(X).sharding.mesh == helper.mesh


def by_dtype(path, leaf):
    return {'float32': ROWS, 'float64': COLUMNS}.get(str(leaf.dtype), P())


def test_shardings_of_outputs_belong_to_the_trace_context():
    """Under x64, the output for the same int32 argument is float64."""
    compiled = HELPER.sjit(lambda x: x * np.pi, out_shardings=PolicyShardingRule(by_dtype))
    x = X.astype(np.int32)
    for _ in range(2):
        assert compiled(x).sharding.spec == ROWS
        with jax.enable_x64(True):
            assert compiled(x).sharding.spec == COLUMNS


def test_outputs_of_another_trace_context_may_have_other_leaves():
    def pair(x):
        return (x, x) if jax.config.jax_enable_x64 else x

    compiled = HELPER.sjit(pair, out_shardings=ROWS)
    assert compiled(X).sharding.spec == ROWS
    with jax.enable_x64(True):
        assert [leaf.sharding.spec for leaf in compiled(X)] == [ROWS, ROWS]
    assert compiled(X).sharding.spec == ROWS


@dataclasses.dataclass(frozen=True)
class Label:
    name: str = dataclasses.field(compare=False)


@jax.tree_util.register_pytree_with_keys_class
class Labelled:
    """A node whose child name is static data that JAX considers equal for different names."""

    def __init__(self, child, label):
        self.child, self.label = child, label

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey(self.label.name), self.child)], self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(children[0], label)


def test_equal_structures_with_other_paths_get_their_own_shardings():
    a, b = (Labelled(X, Label(name)) for name in 'ab')
    assert jax.tree.structure(a) == jax.tree.structure(b)
    rule = TreePathShardingRule(('^a$', ROWS), ('^b$', COLUMNS))
    compiled = HELPER.sjit(lambda node: jax.tree.map(lambda x: x * 2, node), rule, rule)
    for _ in range(3):
        for node, spec in ((a, ROWS), (b, COLUMNS)):
            assert HELPER.shard(node, rule).child.sharding.spec == spec
            assert HELPER.match_sharding_rule(rule, node).child.spec == spec
            assert compiled(node).child.sharding.spec == spec
            assert compiled(HELPER.shard(node, rule)).child.sharding.spec == spec


def test_equal_structures_with_other_paths_get_their_own_shardings_before_any_call():
    compiled = HELPER.sjit(lambda node: node.child, TreePathShardingRule(('^a$', ROWS), ('^b$', COLUMNS)))
    nodes = [Labelled(X, Label(name)) for name in 'ab']
    assert [compiled.shardings_for(node)[0][0].child.spec for node in nodes] == [ROWS, COLUMNS]


def test_equal_keys_of_dicts_have_one_path():
    """JAX treats ``{1: x}`` and ``{True: x}`` as the same structure, and so do rules."""
    rule = TreePathShardingRule(('^1$', ROWS), ('^a$', COLUMNS))
    compiled = HELPER.sjit(lambda tree: jax.tree.map(lambda x: x * 2, tree), rule, rule)
    for key, spec in ((1, ROWS), (True, ROWS), (1.0, ROWS), ('a', COLUMNS), (Letter.A, COLUMNS)):
        for place_tree in (compiled, lambda tree: HELPER.shard(tree, rule)):
            [placed] = place_tree({key: X}).values()
            assert placed.sharding.spec == spec


class Letter(str, enum.Enum):  # noqa: UP042 - a StrEnum prints as the string
    A = 'a'


def test_a_shared_inner_function_is_traced_once():
    traces = []

    @jax.jit
    def shared(x):
        traces.append(x.shape)
        return with_sharding_annotation(x * 2, 'h')

    HELPER.sjit(lambda x: shared(x) + 1)(X)
    HELPER.sjit(lambda x: shared(x) + 2, out_shardings=ROWS)(X)
    HELPER.sjit(lambda x: HELPER.sjit(shared)(x) + 3)(X)
    assert len(traces) == 1
    for _ in range(2):
        HELPER.sjit(lambda x: shared(x) + 1, annotation_shardings={'h': ROWS})(X)
    assert len(traces) == 2


def test_sjit_again_of_one_function_shares_its_traces():
    traces = []

    def f(x):
        traces.append(x.shape)
        return x * 2

    for _ in range(3):
        assert HELPER.sjit(f, in_shardings=ROWS)(X).sharding.spec == ROWS
    HELPER.sjit(f, in_shardings=(ROWS,))(X)  # other options
    assert len(traces) == 2
    once, again = HELPER.sjit(f), HELPER.sjit(f)
    once(X)
    once.clear_cache()
    again(X)
    assert len(traces) == 4


@pytest.mark.medium
@pytest.mark.parametrize('option', ['in_shardings', 'out_shardings', 'args_sharding_constraint'])
def test_rules_are_copied_when_sjit_is_called(option):
    def double(x):
        return {'y': x['y'] * 2}

    def rule_for(spec):
        return {'y': spec} if option == 'out_shardings' else [{'y': spec}]

    rules = rule_for(ROWS)
    before = HELPER.sjit(double, **{option: rules})
    (rules if option == 'out_shardings' else rules[0])['y'] = COLUMNS
    after = HELPER.sjit(double, **{option: rules})
    again = HELPER.sjit(double, **{option: rule_for(ROWS)})
    for compiled, spec in ((before, ROWS), (after, COLUMNS), (again, ROWS)):
        assert compiled({'y': X})['y'].sharding.spec == spec


def test_bindings_are_copied_when_sjit_is_called():
    rules = {'h': {'y': ROWS}}
    bound = HELPER.sjit(lambda x: with_sharding_annotation({'y': x * 2}, 'h'), annotation_shardings=rules)
    rules['h']['y'] = COLUMNS
    assert bound(X)['y'].sharding.spec == ROWS


def test_sjit_again_asks_policies_again():
    answers = [ROWS, COLUMNS]
    for spec in (ROWS, COLUMNS):
        policy = PolicyShardingRule(lambda path, leaf: answers.pop(0))
        assert HELPER.sjit(_double, in_shardings=policy)(X).sharding.spec == spec


def _double(x):
    return x * 2


def test_shared_traces_keep_nothing_alive():
    def make_function():
        array, helper = jnp.ones(8), MeshShardingHelper([8], ['data'])

        def closing_over(x):
            return x + array.sum()

        for spec in (P(), ROWS):
            helper.sjit(closing_over, out_shardings=spec)(np.ones(8, np.float32))
        compiled = helper.sjit(closing_over)
        return compiled, weakref.ref(array), weakref.ref(helper), weakref.ref(closing_over)

    gc.collect()
    gc.disable()
    try:
        compiled, *refs = make_function()
        assert float(compiled(np.ones(8, np.float32))[0]) == 9  # on its own, it is replicated
        assert all(ref() is not None for ref in refs)
        del compiled
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


def test_a_function_does_not_keep_its_helper_alive():
    helper = MeshShardingHelper([8], ['data'])
    gone = weakref.ref(helper)
    helper.sjit(_double, annotation_shardings={'h': P()})
    with helper.get_context({'h': P('data')}):
        helper.sjit(_double)(np.ones(8, np.float32))
    gc.disable()
    try:
        del helper
        assert gone() is None
    finally:
        gc.enable()


def test_unused_names_are_reported_for_each_function():
    """Functions with equal bindings share a context, but one may use a name that the other does not."""
    names = {'used': ROWS, 'forgotten': ROWS}

    def both(x):
        return with_sharding_annotation(with_sharding_annotation(x, 'used'), 'forgotten')

    def uses_one_name(x):
        return with_sharding_annotation(x, 'used') * 2

    HELPER.sjit(both, annotation_shardings=names)(X)
    with pytest.warns(UnusedAnnotationWarning, match="used: 'forgotten'"):
        HELPER.sjit(uses_one_name, annotation_shardings=names)(X)


def test_memory_spaces_are_not_mixed_up_by_replays():
    host = jax.sharding.NamedSharding(HELPER.mesh, P('data'), memory_kind='pinned_host')

    @HELPER.sjit
    def by_memory(x):
        on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jnp.full((), 3.0 if on_host else 2.0)

    assert by_memory(HELPER.shard(X, P('data'))) == 2.0
    assert by_memory(HELPER.shard(X, host)) == 3.0
    assert by_memory(X) == 2.0


def test_a_failed_first_call_leaves_no_state():
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
        assert len(ran) == 2 * count + 1  # the user's code runs once per call
        np.testing.assert_array_equal(picky(np.ones((8 + count, 8))), 2)


@pytest.mark.medium
def test_threads_that_race_for_many_programs():
    failures = []
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads switch as often as possible

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


@pytest.mark.medium
def test_functions_that_close_over_tracers_are_not_replayed():
    def loss(w):
        compiled = HELPER.sjit(lambda x: x * w, in_shardings=P('data'))
        return compiled(jnp.ones(8)).sum() + compiled(HELPER.shard(np.ones(8), P('data'))).sum()

    assert jax.grad(loss)(2.0) == 16.0
    np.testing.assert_array_equal(jax.vmap(loss)(jnp.arange(3.0)), 16 * jnp.arange(3.0))
    assert [jax.jit(loss)(value) for value in (1.0, 2.0)] == [16.0, 32.0]


@dataclasses.dataclass
class Unhashable(ShardingRule):
    """A user's rule that is a plain dataclass, and so not hashable."""

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


@pytest.mark.medium
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
        monkeypatch.setattr(type(state), '_run_in_trace', lambda *_: traces.append('traced'))
        monkeypatch.setattr(type(state), 'explain_or_retry', lambda *_: traces.append('explain_or_retry'))
        for x in inputs * 2:
            compiled(x)
    assert traces == []
    assert cache_sizes(compiled) == [3]


def cache_sizes(compiled):
    return [program.jitted._cache_size() for program in compiled._dispatcher.programs.values()]


def never_slow(compiled, calls, monkeypatch):
    """Makes each call once, and then again without the slow path."""
    expected = [compiled(*call) for call in calls]
    state = compiled._dispatcher
    monkeypatch.setattr(type(state), 'dispatch', lambda *_: pytest.fail('the slow path'))
    for call, out in zip(calls, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, compiled(*call), out)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::scalax.errors.UnshardedWarning')  # of the small programs
def test_signatures_of_two_programs_are_distinguished(monkeypatch):
    compiled = HELPER.sjit(lambda x: x * 2, FSDPShardingRule('data', min_fsdp_size=64))
    calls = [(np.full((4 * n, 3), n, np.float32),) for n in range(1, 41)]
    never_slow(compiled, calls, monkeypatch)


def test_programs_are_distinguished_by_trace_context(monkeypatch):
    by_dtype = PolicyShardingRule(lambda path, leaf: P('data') if leaf.dtype == np.float64 else P())
    compiled = HELPER.sjit(lambda x: x * 1.0, out_shardings=by_dtype)
    x = np.ones(8, np.int32)
    expected = {}
    for x64 in (False, True, False, True):
        with jax.enable_x64(x64):
            expected[x64] = compiled(x).sharding
    monkeypatch.setattr(type(compiled._dispatcher), 'dispatch', lambda *_: pytest.fail('dispatched'))
    for x64 in (False, True) * 2:
        with jax.enable_x64(x64):
            assert compiled(x).sharding == expected[x64]
    assert expected[False].spec != expected[True].spec


def test_programs_are_distinguished_by_device_dtypes(monkeypatch):
    by_dtype = PolicyShardingRule(lambda path, leaf: P('data') if leaf.dtype == np.float32 else P())
    compiled = HELPER.sjit(lambda x: x * 2, in_shardings=by_dtype)
    wide = np.ones(8, np.float64), np.ones(8, np.int64)
    never_slow(compiled, [(wide[0],), (wide[1],), (jnp.asarray(wide[0]),)], monkeypatch)


def test_programs_are_distinguished_by_number_types(monkeypatch):
    by_rank = PolicyShardingRule(lambda path, leaf: P('data') if leaf.shape else P())
    by_dtype = PolicyShardingRule(lambda path, leaf: P() if leaf.dtype == np.float32 else None)
    for rule in (by_rank, by_dtype):
        with monkeypatch.context() as patched:
            never_slow(HELPER.sjit(lambda x: x * 2, rule, rule), [(2.0,), (X,), (3,)], patched)


def test_programs_of_calls_with_one_length_are_distinguished(monkeypatch):
    rule = FSDPShardingRule('data', min_fsdp_size=64)
    compiled = HELPER.sjit(lambda *arrays: [x * 2 for x in arrays], in_shardings=rule)
    small = np.ones(8, np.float32)
    calls = [(small,), (X,), (X, X), (X, small), (small, small, small)]
    never_slow(compiled, calls, monkeypatch)


def test_no_false_alarm_about_annotations_of_another_branch():
    @HELPER.sjit(annotation_shardings={'dropped': P('data')}, static_argnames='train')
    def model(x, train):
        return with_sharding_annotation(x, 'dropped') if train else x

    model(X, train=False)
    assert model(X, train=True).sharding.spec == P('data')
