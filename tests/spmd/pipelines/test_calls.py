"""Calls of pipelined steps: with donation, static arguments, and verification."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.errors import ArgumentError, PipelineError, PipelineWarning
from scalax.sharding import PartitionSpec as P
from scalax.sharding import Pipeline, TreePathShardingRule
from scalax.testing import assert_equal_to_one_device
from tests.spmd.pipelines.programs import RULE, Program, arguments, block, entered, error, of_layers, plain
from tests.spmd.pipelines.test_programs import QUICKLY, assert_close

STAGES = Pipeline('stage', 2)
HELPER = Program(plain).helper
# Excludes weights that the backward pass gathers again, which also have barriers.
LAYERS_ALONE = TreePathShardingRule(('layers', P('stage')), ('.*', P()))
staged = functools.partial(dict, batch_argnums=1, pipeline=STAGES)


def dropping(params, batch, key):
    keys = jax.random.split(key, len(params['layers']['bias']))

    def layer(x, layer_inputs):
        w, key = layer_inputs
        return block(x, w) * jax.random.bernoulli(key, 0.8, x.shape), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), entered(params, batch), (params['layers'], keys))
    return error(params, x, batch)


def step(params, batch, key, rate=0.01):
    value, grads = jax.value_and_grad(dropping)(params, batch, key)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), value


@pytest.mark.parametrize('name', ['num_microbatches', 'num_repeats'])
@pytest.mark.parametrize('value', [True, 0, -2, 2.0, '2', None], ids=repr)
def test_numbers_of_stages_are_positive(name, value):
    with pytest.raises(ArgumentError) as refused:
        Pipeline('stage', **{'num_microbatches': 2, name: value})
    assert str(refused.value) == f"Pipeline('stage', ...): {name} is a positive number, got {value!r}"


ALIKE = 'outside of the pipeline, as in the embedding and the head, all stages compute the same'


@pytest.mark.parametrize(
    ('microbatches', 'rows', 'faults'),
    [(1, 8, f'each stage is idle in 1 of 2 ticks, and {ALIKE}'), (3, 6, ALIKE)],
)
def test_idle_stages_warn(microbatches, rows, faults):
    pipeline = Pipeline('stage', microbatches)
    fun = HELPER().sjit(
        lambda *args: of_layers(block, *args),
        in_shardings=(RULE, P('fsdp')),
        batch_argnums=1,
        pipeline=pipeline,
    )
    params, batch, _ = arguments()
    text = f'{pipeline}: {faults}\nWhat to do: choose more microbatches, a multiple of the 2 stages.'
    with pytest.warns(PipelineWarning, match=f'^{re.escape(text)}$'):
        fun.eval_shape(params, jax.tree.map(lambda x: x[:rows], batch))


@pytest.mark.slow
def test_donated_parameters_and_static_arguments_over_steps():
    fun = HELPER().sjit(
        step,
        in_shardings=(RULE, P('fsdp'), P()),
        out_shardings=(RULE, P()),
        donate_argnums=0,
        static_argnames='rate',
        compiler_options=QUICKLY,
        **staged(),
    )
    params, batch, key = arguments()
    sharded, expected_params = HELPER().shard(params, RULE), params
    for i in range(3):
        sharded, value = fun(sharded, batch, jax.random.fold_in(key, i), rate=0.05)
        expected_params, expected_value = jax.jit(step)(
            expected_params, batch, jax.random.fold_in(key, i), 0.05
        )
        assert_close((sharded, value), (expected_params, expected_value), 1e-5)


def test_a_gradient_is_taken_inside_of_the_function():
    fun = HELPER().sjit(
        lambda *args: of_layers(block, *args[:2]), in_shardings=(RULE, P('fsdp'), P()), **staged()
    )
    with pytest.raises(PipelineError, match=r'cannot differentiate.*\n.*take the gradient inside'):
        jax.grad(fun)(*arguments())


@pytest.mark.medium
@pytest.mark.parametrize('prevents', [True, False])
def test_recomputed_layers_have_the_barriers_of_jax(prevents):
    """A nested checkpoint keeps its barrier; layers recomputed in another loop need none."""
    inner = jax.checkpoint(block, prevent_cse=prevents)
    outer = jax.checkpoint(lambda x, w: inner(jnp.sin(x), w), prevent_cse=not prevents)
    fun = HELPER().sjit(
        jax.value_and_grad(lambda *args: of_layers(outer, *args[:2])),
        in_shardings=(LAYERS_ALONE, P('stage'), P()),
        **staged(),
    )
    assert ('optimization_barrier' in fun.lower(*arguments()).as_text()) == prevents


@pytest.mark.slow
def test_two_models_in_one_step():
    def both(params, batch, key):
        teacher_params, student_params = params
        teacher = jax.lax.stop_gradient(of_layers(block, teacher_params, batch))
        return (of_layers(jax.checkpoint(block), student_params, batch) - 0.5 * teacher) ** 2

    params, batch, key = arguments()
    params = params, jax.tree.map(lambda x: 1.1 * x, params)
    fun = HELPER().sjit(
        jax.value_and_grad(both), in_shardings=(RULE, P('fsdp'), P()), compiler_options=QUICKLY, **staged()
    )
    assert_close(fun(params, batch, key), jax.jit(jax.value_and_grad(both))(params, batch, key), 1e-5)


@pytest.mark.slow
def test_assert_equal_to_one_device_accepts_pipelined_steps():
    fun = HELPER().sjit(
        step,
        in_shardings=(RULE, P('fsdp'), P()),
        out_shardings=(RULE, P()),
        **staged(),
    )
    assert_equal_to_one_device(fun, *arguments(), seeds=1)


def test_errors_are_raised_by_each_call_and_before_arguments_are_donated():
    def mixed(params, batch):
        return jax.tree.map(jnp.sin, params), of_layers(lambda x, w: x / jnp.max(x), params, batch)

    fun = HELPER().sjit(mixed, in_shardings=(RULE, P('fsdp')), donate_argnums=0, **staged())
    params, batch, _ = arguments()
    sharded = HELPER().shard(params, RULE)
    for _ in range(2):
        with pytest.raises(ValueError, match='reduce_max mixes examples of the batch'):
            fun(sharded, batch)
    assert np.asarray(sharded['layers']['up']).shape == params['layers']['up'].shape
