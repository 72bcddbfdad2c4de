"""Functions derived from an sjit function do not inherit its methods when libraries copy attributes."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import pydoc
import subprocess
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from scalax import microbatch
from scalax.axes import named_jit
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, SjitFunction
from scalax.sharding import PartitionSpec as P
from scalax.testing import assert_collectives, assert_no_recompile

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def plain(x):
    """A sum of squares."""
    return (x**2).sum()


def wrapped(fun):
    @functools.wraps(fun)
    def plus_one(x):
        return fun(x) + 1

    return plus_one


DERIVED = {
    'grad': jax.grad,
    'value_and_grad': jax.value_and_grad,
    'hessian': lambda fun: jax.hessian(lambda x: fun(x[:1, :2])),
    'vmap': jax.vmap,
    'jit': lambda fun: jax.jit(lambda x: fun(x) * 2),
    'checkpoint': lambda fun: jax.grad(jax.checkpoint(fun)),
    'named_scope': lambda fun: jax.named_scope('here')(fun),
    'microbatch': lambda fun: microbatch(fun, 4, batch=0),
    'shard_map': lambda fun: HELPER.shard_map(lambda x: fun(x)[None], P('fsdp'), P('fsdp')),
    'sjit': lambda fun: HELPER.sjit(jax.grad(fun), P('fsdp')),
    'wraps': wrapped,
    'partial': functools.partial,
    'Partial': jax.tree_util.Partial,
    'named_jit': lambda fun: jax.grad(named_jit(fun)),
    'copy': copy.copy,
    'deepcopy': copy.deepcopy,
}


def exported(fun):
    pytest.importorskip('flatbuffers', reason='jax.export serializes with it')
    exported = jax.export.export(jax.jit(fun))(jax.ShapeDtypeStruct(X.shape, X.dtype))
    # Without the types' information about the active mesh.
    outputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.out_avals]
    return jax.tree.unflatten(exported.out_tree, outputs)


def by_jaxpr(fun):
    jaxpr, out = jax.make_jaxpr(fun, return_shape=True)(X)
    return jax.tree.unflatten(jax.tree.structure(out), jaxpr_as_fun(jaxpr)(X))


def own_lower(fun):
    """Returns the text of the function's ``lower``, if it has this method."""
    return fun.lower(X).compile()(X) if hasattr(fun, 'lower') else fun(X)


def planned(fun):
    plan = HELPER.plan(HELPER.sjit(fun, P('fsdp')) if not hasattr(fun, 'lower') else fun, X)
    return plan.flops


QUESTIONS = {
    'call': lambda fun: fun(X),
    'lower': lambda fun: jax.jit(fun).lower(X).compile()(X),
    'user-defined lower': own_lower,
    'trace': lambda fun: jaxpr_as_fun(jax.jit(fun).trace(X).jaxpr)(X),
    'eval_shape': lambda fun: jax.eval_shape(fun, X),
    'make_jaxpr': by_jaxpr,
    'export': exported,
    'sjit': lambda fun: HELPER.sjit(fun)(X),
    'sjit, eval_shape': lambda fun: HELPER.sjit(fun, P('fsdp')).eval_shape(X),
    'plan': planned,
}


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('question', QUESTIONS)
@pytest.mark.parametrize('derivation', DERIVED)
def test_derived_functions_do_not_inherit_methods(derivation, question):
    actual = QUESTIONS[question](DERIVED[derivation](HELPER.sjit(plain)))
    expected = QUESTIONS[question](DERIVED[derivation](plain))
    assert [np.shape(leaf) for leaf in jax.tree.leaves(actual)] == [
        np.shape(leaf) for leaf in jax.tree.leaves(expected)
    ]
    if question in ('eval_shape', 'export', 'sjit, eval_shape'):
        assert actual == expected
    else:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), actual, expected)


def test_methods_stay_with_the_function():
    compiled = HELPER.sjit(plain)
    assert isinstance(compiled, SjitFunction)
    methods = [name for name in vars(SjitFunction) if not name.startswith('_')]
    assert methods == [
        'lower',
        'trace',
        'eval_shape',
        'explain_propagation',
        'shardings_for',
        'get_jitted_function_by_args',
        'clear_cache',
    ]
    for derivation in ('grad', 'vmap', 'checkpoint', 'wraps', 'microbatch'):
        assert not {*methods, '_dispatcher'} & {*vars(DERIVED[derivation](compiled))}
    assert not hasattr(jax.grad(named_jit(plain)), 'lower')


def test_a_donation_of_a_jit_around_it_is_kept():
    lowered = jax.jit(HELPER.sjit(lambda x: x + 1), donate_argnums=0).lower(X)
    assert [leaf.donated for leaf in jax.tree.leaves(lowered.args_info)] == [True]


def test_derived_functions_have_the_same_collectives():
    total = HELPER.sjit(lambda x: (x**2).sum(), P('fsdp'))
    assert_collectives(total, X, all_reduce={'fsdp': 1})
    with pytest.raises(AssertionError, match='all-reduce: 0, expected 1'):
        assert_collectives(jax.jit(jax.grad(total)), HELPER.shard(X, P('fsdp')), helper=HELPER, all_reduce=1)


def test_assert_no_recompile_accepts_compiled_functions():
    compiled = HELPER.sjit(plain)
    compiled(X)
    with assert_no_recompile(compiled):
        compiled(X)


def test_copied_attributes_do_not_hide_methods():
    def annotated(x: jax.Array) -> jax.Array:
        return x

    annotated.note = 'kept'
    annotated.lower = 'of the user'
    compiled = HELPER.sjit(annotated)
    assert (compiled.note, compiled.__name__, compiled.__wrapped__) == ('kept', 'annotated', annotated)
    assert compiled.__annotations__ == annotated.__annotations__
    assert (compiled.__module__, compiled.__doc__) == (__name__, None)
    assert compiled.__qualname__.endswith('.<locals>.annotated')
    assert compiled.lower(X).compile() is not None
    again = HELPER.sjit(HELPER.sjit(plain))
    np.testing.assert_allclose(again.lower(X).compile()(X), plain(X))
    assert inspect.signature(again) == inspect.signature(plain)
    assert repr(HELPER.sjit(plain)) == f'<SjitFunction of {plain!r}>'


def test_help_shows_documentation():
    assert 'shardings_for' in pydoc.render_doc(SjitFunction, renderer=pydoc.plaintext)
    assert inspect.getdoc(HELPER.sjit(plain)) == 'A sum of squares.'
    assert 'A sum of squares.' in pydoc.render_doc(HELPER.sjit(plain), renderer=pydoc.plaintext)


class Model:
    @functools.partial(HELPER.sjit, static_argnums=0)
    def scaled(self, x):
        return 2 * x


def test_methods_are_bound():
    model = Model()
    assert isinstance(model.scaled, types.MethodType)
    assert isinstance(Model.scaled, SjitFunction)
    np.testing.assert_array_equal(model.scaled(X), 2 * X)


@HELPER.sjit(in_shardings=P('fsdp'))
def importable(x):
    return x + 1


@pytest.mark.parametrize('function', [importable, Model.scaled])
def test_copies_are_the_function_itself(function):
    assert copy.deepcopy(function) is copy.copy(function) is function


def test_it_is_pickled_as_its_definition():
    rules = {'x': FSDPShardingRule('fsdp', min_fsdp_size=0)}
    compiled = HELPER.sjit(plain, rules, P(), on_mismatch='reshard', keep_unused=True)
    again = pickle.loads(pickle.dumps(compiled))
    assert again is not compiled
    np.testing.assert_allclose(again(X), plain(X))
    assert again.shardings_for(X) == compiled.shardings_for(X)
    np.testing.assert_allclose(again(HELPER.shard(X, P('tp'))), plain(X))


def test_cloudpickle_accepts_functions_that_pickle_rejects():
    cloudpickle = pytest.importorskip('cloudpickle', reason='flax brings it')
    factor = 3.0
    again = pickle.loads(cloudpickle.dumps(HELPER.sjit(lambda x: factor * x, P('fsdp'))))
    out = again(X)
    np.testing.assert_array_equal(out, 3 * X)
    assert out.sharding.spec == P('fsdp')
    assert not {'lower', '_dispatcher'} & {*vars(jax.vmap(again))}
    np.testing.assert_array_equal(cloudpickle.loads(cloudpickle.dumps(importable))(X), X + 1)


SCRIPT = """
import sys
import cloudpickle, jax, numpy as np
jax.config.update('jax_num_cpu_devices', 8)
if sys.argv[1] == 'write':
    from scalax.sharding import MeshShardingHelper, PartitionSpec as P
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], devices=jax.devices()[::-1])

    @helper.sjit(in_shardings=P('fsdp'))
    def step(x):
        return 2 * x

    step(np.ones(8))
    with open(sys.argv[2], 'wb') as file:
        cloudpickle.dump(lambda x: step(x), file)
else:
    with open(sys.argv[2], 'rb') as file:
        out = cloudpickle.load(file)(np.ones(8))
    print(out.sharding.spec, [device.id for device in out.sharding.mesh.devices.flat])
"""


@pytest.mark.slow
def test_functions_of_a_script_reach_another_process(tmp_path):
    pytest.importorskip('cloudpickle', reason='flax brings it')
    for action in ('write', 'read'):
        command = [sys.executable, '-c', SCRIPT, action, str(tmp_path / 'step')]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "P('fsdp',) [7, 6, 5, 4, 3, 2, 1, 0]"


KEPT = {
    'one program': ({}, [X]),
    'several programs': ({'in_shardings': {'x': FSDPShardingRule('fsdp', min_fsdp_size=16)}}, [X, X[:4, :2]]),
    'annotations': ({'annotation_shardings': {'h': P('fsdp')}}, [X]),
    'donated': ({'donate_argnums': 0, 'in_shardings': {'x': P('fsdp')}}, [X, jnp.asarray(X)]),
    'never called': ({}, []),
}


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings('ignore:.*annotation_shardings binds names')
@pytest.mark.parametrize('types', [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize(('options', 'calls'), KEPT.values(), ids=KEPT)
def test_a_function_is_freed_with_its_last_reference(options, calls, types):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=types)
    kept = []

    def made_and_called():
        closed_over = jnp.ones(())
        kept.append(weakref.ref(closed_over))
        # Without out_shardings Explicit axes need keep_unused, with which JAX keeps closed over arrays.
        compiled = helper.sjit(
            lambda x, y=1.0, *, z=2.0: x + closed_over + y + z, out_shardings=P('fsdp'), **options
        )
        for x in calls * 2:
            compiled(x)
            jax.jit(lambda x: compiled(x))(x)
            compiled.lower(x, z=3.0)
            compiled.shardings_for(x)

    gc.collect()
    gc.disable()
    try:
        made_and_called()
        assert kept[0]() is None
    finally:
        gc.enable()
