"""Plan section on partitioning: the batch, operations that mix examples, why a step is unpartitioned."""

import dataclasses
import functools
import html
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from scalax.errors import PartitioningWarning
from scalax.plan import Plan
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P
from tests.support.leaves import leaf

HELPER = MeshShardingHelper([-1], ['fsdp'])
OFF = MeshShardingHelper([-1], ['fsdp'], partition_batch=False)
RULE = FSDPShardingRule(min_fsdp_size=1)
WEIGHTS = {'up': leaf(8, 256, 1024), 'down': leaf(8, 1024, 256)}
X = leaf(8192, 256)


def block(x, weights):
    hidden = jax.nn.relu(x @ weights['up'])
    return x + hidden @ weights['down'], None


def blocks(weights, x):
    return jax.lax.scan(block, x, weights)[0]


def step(weights, x):
    """One step of SGD."""
    grads = jax.grad(lambda weights: jnp.mean(blocks(weights, x)))(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


def steps(weights, x):
    """Several steps: from the second one on, the weights depend on the batch."""
    return jax.lax.fori_loop(0, 3, lambda _, weights: step(weights, x), weights)


def in_parts(weights, x):
    parts = x.reshape(4, -1, x.shape[-1])
    return jax.lax.fori_loop(0, 4, lambda i, weights: step(weights, parts[i]), weights)


def mixed(weights, x):
    return step(weights, jnp.fft.fft(x, axis=0).real)


def sorted_rows(weights, x):
    order = jax.lax.sort((x[:, 0], jnp.arange(x.shape[0])), num_keys=1)[1]
    return step(weights, x[order])


def one_by_one(weights, x):
    return jax.lax.scan(lambda c, row: (blocks(weights, (c + row)[None])[0], None), x[0], x)[0]


def constrained(weights, x):
    """Shards by columns, and by rows again."""
    columns = with_sharding_constraint(x * x, P(None, 'fsdp'))
    return jnp.mean(weights['up'][0]) * with_sharding_constraint(jnp.sin(columns), P('fsdp'))


def compared(weights, x):
    """Returns the similarities of all pairs of examples, replicated."""
    x = jnp.sort(x @ weights['up'][0], 0)
    return jnp.mean(jnp.tanh(x @ x.T))


@functools.cache
def planned(fun, helper=HELPER, out=RULE, **options):
    compiled = helper.sjit(fun, in_shardings=(RULE, P('fsdp')), out_shardings=out, **options)
    return helper.plan(compiled, WEIGHTS, X)


def text_of_batch(plan):
    """Returns the lines of a plan's text below its collectives, one per sentence."""
    return plan.to_text(1000).rpartition('\n\n')[2].splitlines()


SILENT = {
    'a step': (step, {}),
    'several steps': (steps, {}),
    'forward': (blocks, {'out': P('fsdp')}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize('fun, options', SILENT.values(), ids=SILENT)
def test_a_plan_has_one_line_about_a_step_that_mixes_no_examples(fun, options):
    plan = planned(fun, **options)
    assert plan.propagation.axes == ('fsdp',) and not plan.propagation.gathered_examples
    [line] = text_of_batch(plan)
    assert re.fullmatch(
        r"partitioned along fsdp; its batch is 'x': \d+ collectives? of scalax in one call", line
    )


SPEAKING = {
    'switched off': (step, {'batch_argnums': ()}),
    'switched off for all': (step, {'helper': OFF}),
    'a transform': (mixed, {}),
    'sorted': (sorted_rows, {}),
    'in parts': (in_parts, {}),
    'row by row': (one_by_one, {'out': P('fsdp')}),
    'gathered by the output': (blocks, {'out': P()}),
    'gathered by a constraint': (constrained, {'out': P('fsdp')}),
    'matmuls of gathered examples': (compared, {'out': P()}),
}


@pytest.mark.medium
@pytest.mark.sampled(9)
@pytest.mark.parametrize('fun, options', SPEAKING.values(), ids=SPEAKING)
def test_operations_that_mix_examples_are_listed(fun, options, snapshot):
    # The number of collectives and of operations depends on the version of JAX.
    text = re.sub(
        r'\d+ (collective|more operation)s?', r'some \1s', '\n'.join(text_of_batch(planned(fun, **options)))
    )
    snapshot(re.sub(r'(test_partitioning_section\.py):\d+', r'\1', text))


def test_a_batch_that_is_constrained_inside():
    fun = HELPER.sjit(blocks, args_sharding_constraint=(RULE, P('fsdp')), out_shardings=P('fsdp'))
    plan = HELPER.plan(fun, WEIGHTS, X)
    assert plan.propagation.axes == ('fsdp',) and plan.propagation.batch == ('x',)
    assert plan.propagation == fun.explain_propagation(WEIGHTS, X)


def test_a_batch_that_the_step_makes_itself():
    def made_inside(weights):
        x = with_sharding_constraint(jnp.ones((8192, 256)), P('fsdp'))
        return jax.grad(lambda weights: jnp.mean(blocks(weights, x)))(weights)

    fun = HELPER.sjit(made_inside, in_shardings=RULE, out_shardings=RULE)
    plan = HELPER.plan(fun, WEIGHTS)
    assert plan.propagation.batch == ()
    assert text_of_batch(plan)[0].startswith('partitioned along fsdp; it creates its batch itself: ')


def test_arguments_by_name_and_methods():
    class Model:
        @HELPER.sjit(
            in_shardings={'weights': RULE, 'x': P('fsdp')}, out_shardings=P('fsdp'), static_argnums=0
        )
        def apply(self, weights, x):
            return blocks(weights, x)

    plan = HELPER.plan(Model().apply, WEIGHTS, x=X)
    assert plan.propagation.batch == ('x',)
    assert {row.what for row in plan.propagation.collectives} == {'weight'}


def test_batches_of_several_arguments_and_of_keywords():
    def product(weights, x, **others):
        return (x * others['y']) @ weights

    fun = HELPER.sjit(product, in_shardings={'weights': RULE, 'x': P('fsdp'), 'y': P('fsdp')})
    report = fun.explain_propagation(leaf(64, 64), leaf(64, 64), y=leaf(64, 64))
    assert report.batch == ('x', 'y')
    assert str(report).startswith(
        "product on fsdp=8 is partitioned along fsdp; its batch is 'x' and 'y'. In a step, each device:"
    )


def test_why_a_step_is_not_partitioned():
    def on(helper, *shardings, **options):
        fun = helper.sjit(lambda w, x: x @ w, in_shardings=shardings, out_shardings=P(), **options)
        plan = helper.plan(fun, leaf(64, 64), leaf(64, 64))
        assert plan.propagation == fun.explain_propagation(leaf(64, 64), leaf(64, 64))
        return next((line for line in text_of_batch(plan) if line.startswith('not partitioned')), None)

    start = 'not partitioned along its batch: '
    assert on(HELPER, RULE, P('fsdp'), batch_argnums=()) == f'{start}batch_argnums=() turns it off'
    assert on(HELPER, P('fsdp'), P('fsdp')) == (
        f'{start}specs place all arguments, and batch_argnums does not name the batch among them; '
        'name the batch: batch_argnums=1, or batch_argnames'
    )
    explicit = MeshShardingHelper([-1], ['fsdp'], axis_types=AxisType.Explicit)
    report = explicit.sjit(jnp.sin, in_shardings=P('fsdp')).explain_propagation(X)
    assert str(report) == (
        'sin is not partitioned along its batch: on Explicit mesh axes, shardings are part of types; make a '
        'mesh of Auto axes'
    )
    assert on(HELPER, RULE, None).startswith(f'{start}no argument looks like a batch ')


def test_an_operation_that_is_not_handled_is_named_with_its_line():
    def writing(weights, x):
        return jax.new_ref(x)[...] @ weights['up'][0]

    fun = HELPER.sjit(writing, in_shardings=(RULE, P('fsdp')), out_shardings=P('fsdp'))
    with pytest.warns(PartitioningWarning, match='writing is not partitioned along its batch'):
        plan = HELPER.plan(fun, WEIGHTS, X)
    line = writing.__code__.co_firstlineno + 1
    [sentence] = text_of_batch(plan)
    assert sentence == f'not partitioned along its batch: {plan.propagation.reason}'
    assert sentence.endswith(f'(test_partitioning_section.py:{line} writing)')


@pytest.mark.medium
def test_functions_that_sjit_did_not_make():
    x = HELPER.shard(jnp.ones((8, 8)), P('fsdp'))
    for fun in (jnp.sin, jax.jit(jnp.sin)):
        assert HELPER.plan(fun, x).propagation is None


def test_the_function_is_traced_once():
    times = []

    def counted(weights, x):
        times.append(1)
        return blocks(weights, x)

    fun = HELPER.sjit(counted, in_shardings=(RULE, P('fsdp')))
    assert HELPER.plan(fun, WEIGHTS, X).propagation.axes == ('fsdp',)
    assert times == [1]


@pytest.mark.slow
def test_json_and_differences():
    plans = [planned(step), planned(step, batch_argnums=()), planned(mixed)]
    for plan in plans:
        assert Plan.load(plan.to_json()) == plan
        assert str(Plan.load(plan.to_json())) == str(plan)
    partitioned, alone, _ = plans
    assert "-partitioned along fsdp; its batch is 'x'" in partitioned.diff(alone)
    assert '+not partitioned along its batch: batch_argnums=() turns it off' in partitioned.diff(alone)
    assert partitioned.diff(partitioned) == ''


@pytest.mark.medium
def test_page(tmp_path):
    plan = planned(mixed)
    plan.to_html(tmp_path / 'plan.html')
    page = (tmp_path / 'plan.html').read_text(encoding='utf-8')
    section = page.partition('Partitioning along the batch</h2>')[2].partition('</section>')[0]
    for line in text_of_batch(plan):
        assert html.escape(line.strip()) in html.escape(html.unescape(section))
    assert 'Partitioning along the batch' not in dataclasses.replace(plan, propagation=None)._repr_html_()
