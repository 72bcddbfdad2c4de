"""What a plan says of the batch: what is followed, and where its rows are lost."""

import dataclasses
import functools
import html
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from scalax.plan import Plan
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P
from tests.support.leaves import leaf

HELPER = MeshShardingHelper([-1], ['fsdp'])
OFF = MeshShardingHelper([-1], ['fsdp'], follow_batch=False)
RULE = FSDPShardingRule(min_fsdp_size=1)
WEIGHTS = {'up': leaf(8, 256, 1024), 'down': leaf(8, 1024, 256)}
X = leaf(8192, 256)
NAMED = {'annotation_shardings': {'rows': P('fsdp')}}


def block(x, weights):
    x = with_sharding_annotation(x, 'rows')
    hidden = jax.nn.relu(x @ weights['up'])
    return with_sharding_annotation(x + hidden @ weights['down'], 'rows'), None


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
    """Rows become columns, and rows again."""
    columns = with_sharding_constraint(x * x, P(None, 'fsdp'))
    return jnp.mean(weights['up'][0]) * with_sharding_constraint(jnp.sin(columns), P('fsdp'))


def summed_by_hand(weights, x):
    def gathered(x):
        return jax.lax.all_gather(x, 'fsdp', tiled=True).sum(0)

    rows = HELPER.shard_map(gathered, in_specs=P('fsdp'), out_specs=P(), check_vma=False)(x)
    return jnp.mean(weights['up'][0]) * rows


@functools.cache
def planned(fun, helper=HELPER, out=RULE, named=False, **options):
    if named:
        options |= NAMED
    compiled = helper.sjit(fun, in_shardings=(RULE, P('fsdp')), out_shardings=out, **options)
    return helper.plan(compiled, WEIGHTS, X)


def said(plan):
    """What the text of a plan says below its collectives, a line for each sentence."""
    below = plan.to_text(1000).rpartition('\n\n')[2]
    return below.splitlines()


SILENT = {
    'followed': (step, {}),
    'several steps': (steps, {}),
    'in parts': (in_parts, {}),
    'forward': (blocks, {'out': P('fsdp')}),
    'the output is replicated': (blocks, {'out': P()}),
    'constrained': (constrained, {'out': P('fsdp')}),
    'shard_map': (summed_by_hand, {'out': P()}),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize('fun, options', SILENT.values(), ids=SILENT)
def test_where_no_rows_are_lost_nothing_is_said(fun, options):
    plan = planned(fun, **options)
    assert plan.followed.axes == ('fsdp',) and not plan.followed.lost
    assert not any('lost' in line for line in said(plan))


SPEAKING = {
    'switched off': (step, {'batch_argnums': ()}),
    'switched off for all': (step, {'helper': OFF}),
    'behind a transform': (mixed, {}),
    'named behind a transform': (mixed, {'named': True}),
    'sorted': (sorted_rows, {}),
    'one row after the other': (one_by_one, {'out': P('fsdp')}),
}


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('fun, options', SPEAKING.values(), ids=SPEAKING)
def test_what_is_said(fun, options, snapshot):
    # How many values there are depends on the version of JAX.
    text = re.sub(r'^\d+ values on \d+ lines', 'some values', '\n'.join(said(planned(fun, **options))))
    snapshot(re.sub(r'(test_batch\.py):\d+', r'\1', text))


def test_a_batch_that_is_constrained_inside():
    fun = HELPER.sjit(blocks, args_sharding_constraint=(RULE, P('fsdp')), out_shardings=P('fsdp'))
    plan = HELPER.plan(fun, WEIGHTS, X)
    assert plan.followed.axes == ('fsdp',)
    assert plan.followed == fun.followed(WEIGHTS, X)


def test_arguments_by_name_and_methods():
    class Model:
        @HELPER.sjit(in_shardings={'weights': RULE, 'x': P('fsdp')}, out_shardings=P(), static_argnums=0)
        def apply(self, weights, x):
            return blocks(weights, x)

    plan = HELPER.plan(Model().apply, WEIGHTS, x=X)
    assert plan.followed.count == 3


def test_why_nothing_is_followed():
    def on(helper, *shardings, **options):
        fun = helper.sjit(lambda w, x: x @ w, in_shardings=shardings, out_shardings=P(), **options)
        plan = helper.plan(fun, leaf(64, 64), leaf(64, 64))
        assert plan.followed == fun.followed(leaf(64, 64), leaf(64, 64))
        return next((line for line in said(plan) if line.startswith('no batch')), None)

    start = 'no batch sharding is propagated: '
    assert on(HELPER, RULE, P('fsdp'), batch_argnums=()) == f'{start}batch_argnums=() turns it off'
    assert on(HELPER, P('fsdp'), P('fsdp')) == (
        f'{start}specs place all arguments, and batch_argnums does not name the batch among them'
    )
    explicit = MeshShardingHelper([-1], ['fsdp'], axis_types=AxisType.Explicit)
    shown = explicit.sjit(jnp.sin, in_shardings=P('fsdp')).followed(X)
    assert (
        str(shown) == 'sin propagates no batch sharding: on Explicit mesh axes, shardings are part of types'
    )
    # Nothing looks like a batch.
    assert on(HELPER, P(), P('fsdp')) is None
    assert on(HELPER, RULE, None) is None


@pytest.mark.medium
def test_functions_that_sjit_did_not_make():
    x = HELPER.shard(jnp.ones((8, 8)), P('fsdp'))
    for fun in (jnp.sin, jax.jit(jnp.sin)):
        assert HELPER.plan(fun, x).followed is None


def test_the_function_is_traced_once():
    times = []

    def counted(weights, x):
        times.append(1)
        return blocks(weights, x)

    fun = HELPER.sjit(counted, in_shardings=(RULE, P('fsdp')))
    assert HELPER.plan(fun, WEIGHTS, X).followed.count == 3
    assert times == [1]


@pytest.mark.slow
def test_json_and_differences():
    plans = [planned(step), planned(step, batch_argnums=()), planned(mixed)]
    for plan in plans:
        assert Plan.load(plan.to_json()) == plan
        assert str(Plan.load(plan.to_json())) == str(plan)
    followed, alone, _ = plans
    assert 'stay sharded along the batch dimension' in followed.diff(alone)
    assert followed.diff(followed) == ''


@pytest.mark.medium
def test_page(tmp_path):
    plan = planned(mixed)
    plan.to_html(tmp_path / 'plan.html')
    page = (tmp_path / 'plan.html').read_text(encoding='utf-8')
    section = page.partition('Batch sharding</h2>')[2].partition('</section>')[0]
    for line in said(plan):
        assert html.escape(line.strip()) in section
    assert 'Batch sharding' not in dataclasses.replace(plan, followed=None)._repr_html_()
