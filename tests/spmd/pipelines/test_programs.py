"""Unusual programs as pipelines have the results of one device; errors name the line that mixes examples."""

import inspect
import re
import warnings

import jax
import numpy as np
import pytest

from scalax.errors import PipelineError, PipelineWarning
from scalax.sharding import PartitionSpec as P
from scalax.sharding import Pipeline
from tests.spmd.pipelines.programs import LAYERS, PROGRAMS, REFUSED, RULE, arguments

# These options halve the compile time.
QUICKLY = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
# Some programs of each kind; `make test-all` runs all programs.
OFTEN = (
    'several_values_carried',
    'tokens_in_one_dimension',
    'constants_with_rows',
    'draws_of_gamma',
    'outputs_of_layers',
    'fewer_microbatches_than_stages',
    'evaluation',
    'loops_in_layers',
    'branches_in_layers',
    'branches_that_keep_nothing',
    'numbers_of_rows',
    'windows_and_convolutions',
    'checkpoints_by_name',
    'groups_of_layers',
    'two_loops',
    'balance_losses',
    'carried_balance_losses_computed_again',
    'masks_of_the_batch',
)


def named(table):
    marks = {name: [pytest.mark.medium] if name in OFTEN else [pytest.mark.slow] for name in table}
    return [pytest.param(name, marks=marks[name]) for name in table]


def staged(program, **how):
    return program.helper().sjit(
        program.compiled,
        in_shardings=(RULE, program.spec, P()),
        batch_argnums=1,
        pipeline=Pipeline('stage', program.parts, **how),
        compiler_options=QUICKLY,
    )


def assert_close(actual, expected, tolerance):
    """Compares relative to the largest value of an array; integers and booleans must be equal."""
    for actual_leaf, expected_leaf in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        actual_leaf, expected_leaf = np.asarray(actual_leaf), np.asarray(expected_leaf)
        if np.issubdtype(expected_leaf.dtype, np.inexact):
            assert np.all(np.isfinite(expected_leaf))
            np.testing.assert_allclose(
                actual_leaf, expected_leaf, rtol=0, atol=tolerance * np.max(np.abs(expected_leaf))
            )
        else:
            np.testing.assert_array_equal(actual_leaf, expected_leaf)


@pytest.mark.medium
@pytest.mark.sampled(4)
@pytest.mark.parametrize('name', named(PROGRAMS))
def test_programs_match_one_device(name):
    program, args = PROGRAMS[name], arguments()
    expected = jax.jit(program.compiled, compiler_options=QUICKLY)(*args)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', PipelineWarning)
        step = staged(program)
        assert_close(step(*args), expected, program.tolerance)
        assert 'collective_permute' in step.lower(*args).as_text()


def has_rounds(name):
    """Returns whether layers and microbatches are divisible for two repeats."""
    program, layers = PROGRAMS[name], 2 if name == 'groups_of_layers' else LAYERS
    return program.parts % program.mesh['stage'] == 0 and layers % (2 * program.mesh['stage']) == 0


@pytest.mark.slow
@pytest.mark.parametrize('gather', ['tick', 'step'])
@pytest.mark.parametrize('name', [name for name in PROGRAMS if has_rounds(name)])
def test_programs_with_repeats(name, gather):
    program, args = PROGRAMS[name], arguments()
    expected = jax.jit(program.compiled, compiler_options=QUICKLY)(*args)
    assert_close(staged(program, num_repeats=2, fsdp_gather=gather)(*args), expected, program.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name, loops',
    [('balance_losses', 2), ('balance_losses_saved_by_name', 2), ('balance_losses_computed_again', 3)],
)
def test_unsaved_sums_in_a_checkpoint_need_another_backward_loop(name, loops):
    program = PROGRAMS[name]
    plan = program.helper().plan(staged(program), *arguments(), quick=True)
    assert [loop.is_backward for loop in plan.pipelines] == [False, *[True] * (loops - 1)]


def test_programs_that_run_often_exist():
    assert set(OFTEN) <= {*PROGRAMS}


REFUSALS = {
    'norm_of_the_batch': (
        'sub uses a batch-wide sum, but a microbatch only has a partial sum',
        'y = y - jnp.mean(y, (0, 1))',
        'sum within each example, or sum outside of the loop',
    ),
    'largest_of_the_batch': (
        'reduce_max mixes examples of the batch',
        'jnp.max(jnp.abs(x))',
        'compute it for each example alone, or outside of the loop',
    ),
    'sorted_rows': (
        'sort mixes examples of the batch',
        'jnp.argsort',
        'compute it for each example alone, or outside of the loop',
    ),
    'capacity_of_the_batch': (
        'cumsum mixes examples of the batch',
        'jnp.cumsum(chosen, 0)',
        'compute it for each example alone, or outside of the loop',
    ),
    'balance_that_scales_rows': (
        'dot_general uses a batch-wide sum, but a microbatch only has a partial sum',
        '@ jnp.mean(probs > 0.1',
        'sum within each example, or sum outside of the loop',
    ),
    'one_row_after_the_other': (
        'a loop runs over the batch dimension',
        'jax.lax.map',
        'run it on all examples at once (jax.vmap)',
    ),
    'until_all_rows_are_small': (
        'gt uses a batch-wide sum, but a microbatch only has a partial sum',
        'jnp.sum(x * x) > 1',
        'sum within each example, or sum outside of the loop',
    ),
    'branch_by_the_batch': (
        'gt uses a batch-wide sum, but a microbatch only has a partial sum',
        'jnp.mean(x) > 0',
        'sum within each example, or sum outside of the loop',
    ),
    'rows_in_another_order': (
        'reshape reorders the batch dimension, or splits it',
        'reshape(-1, WIDTH)',
        'keep the batch in one dimension, in front of the dimensions that are merged with it',
    ),
    'keys_of_rows_of_another_generator': (
        'the examples have keys of a generator that draws for all keys at once',
        'jax.random.fold_in(key, number)',
        "use keys of jax.random.key(seed, impl='threefry2x32')",
    ),
    'gamma_of_rows': (
        'random_gamma draws for all examples from one key',
        'jax.random.gamma(key',
        'use a key for each example',
    ),
    'offloaded': (
        'layers offload values to host memory',
        'jax.lax.scan(',
        'recompute them (jax.checkpoint) instead of offloading them',
    ),
    'kernel': (
        'pallas_call takes examples of the batch, and scalax does not know how it treats them',
        'call(jax.lax.stop_gradient(x))',
        'write it in other operations, or compute it outside of the loop',
    ),
    'callback': (
        'pure_callback takes examples of the batch, and scalax does not know how it treats them',
        'jax.pure_callback',
        'write it in other operations, or compute it outside of the loop',
    ),
}


@pytest.mark.parametrize('name', [*REFUSALS])
def test_errors_name_the_line_that_mixes_rows(name):
    why, code, instead = REFUSALS[name]
    with pytest.raises(PipelineError) as caught:
        staged(REFUSED[name]).trace(*arguments())
    at = r'programs\.py:(\d+) \S+'
    match = re.fullmatch(
        f'the loop over layers at {at} cannot run on microbatches: {re.escape(why)}, at {at}\n'
        f'What to do: {re.escape(instead)}; or run without pipeline=.',
        str(caught.value),
    )
    assert match, str(caught.value)
    lines = inspect.getsource(inspect.getmodule(REFUSED[name].loss)).splitlines()
    assert code in lines[int(match[2]) - 1]


def test_effects_are_rejected():
    name = 'debug_print|debug_callback'
    with pytest.raises(
        PipelineError, match=f'({name}) has an effect, which would happen more often, at programs.py'
    ):
        staged(REFUSED['print_of_weights']).trace(*arguments())


def test_layers_without_a_loop_are_rejected():
    with pytest.raises(PipelineError) as caught:
        staged(REFUSED['layers_in_a_python_loop']).trace(*arguments())
    assert str(caught.value).startswith(
        "no loop runs over layers that are sharded over 'stage', so nothing is a pipeline. Beside the batch, "
        "in_shardings shard over it:\n  params['layers']['bias'] in dimension 0\n  params['layers']['down'] "
        "in dimension 0\n  params['layers']['up'] in dimension 0\nWhat to do: "
    )


def test_layers_that_do_not_use_the_batch_are_rejected():
    helper = PROGRAMS['evaluation'].helper()

    def product_of_layers(layers, x):
        return x * jax.lax.scan(lambda y, w: (y * w, None), np.ones(4, np.float32), layers)[0]

    step = helper.sjit(
        product_of_layers,
        in_shardings=(P('stage'), P('fsdp')),
        batch_argnums=1,
        pipeline=Pipeline('stage', 2),
    )
    with pytest.raises(
        PipelineError, match=r'no scan over layers consumes a batch-sharded value: test_p'
    ) as e:
        step.trace(np.ones((4, 4), np.float32), np.ones((8, 4), np.float32))
    assert str(e.value).endswith(
        'What to do: print step.explain_propagation(...) of the function without a pipeline to see where '
        'examples are gathered.'
    )


def test_layers_that_no_rule_shards_are_rejected():
    step = (
        PROGRAMS['evaluation']
        .helper()
        .sjit(
            PROGRAMS['evaluation'].compiled,
            in_shardings=(P(), P('fsdp'), P()),
            batch_argnums=1,
            pipeline=Pipeline('stage', 2),
        )
    )
    with pytest.raises(PipelineError, match='No argument but the batch is sharded over it by in_shardings'):
        step.trace(*arguments())
