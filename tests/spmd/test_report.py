"""The report of a partitioned step: collectives with reasons and source lines, and redundant work."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._spmd.report.redundant_work import matmul_flops
from scalax.errors import DataError, PartitioningWarning
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, PropagationReport, TreePathShardingRule
from scalax.sharding import PartitionSpec as P
from tests.support.partitioned import HSDP
from tests.support.partitioned import partitioned as on_blocks

pytestmark = pytest.mark.medium

FSDP = FSDPShardingRule(min_fsdp_size=1)
LAYERS, WIDTH, EXAMPLES = 3, 16, 32


def loss(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params['blocks'])
    return jnp.mean(x**2)


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def params():
    return {'blocks': np.ones((LAYERS, WIDTH, WIDTH), 'float32') / WIDTH}


X = np.ones((EXAMPLES, WIDTH), 'float32')


def compiled(fun, out=None):
    helper = MeshShardingHelper([8], ['fsdp'])
    return helper.sjit(fun, in_shardings=(FSDP, P('fsdp')), out_shardings=out, batch_argnums=1)


def line(fun, after):
    return f'test_report.py:{fun.__code__.co_firstlineno + after}'


def test_weights_and_gradients():
    report = compiled(step, (FSDP, P())).explain_propagation(params(), X)
    assert report.axes == ('fsdp',) and not report.reason and not report.gathered_examples
    rows = {(row.kind, row.reason, row.is_backward): row for row in report.collectives}
    forward = rows['all_gather', 'weight params/blocks for dot_general', False]
    assert (forward.path, forward.primitive, forward.axes) == ('params/blocks', 'dot_general', ('fsdp',))
    assert forward.line == f'{line(loss, 2)} layer'
    assert (forward.array, forward.bytes) == (f'float32[{WIDTH},{WIDTH}]', 4 * WIDTH**2)
    assert (forward.count, forward.step_bytes) == (LAYERS, LAYERS * 4 * WIDTH**2)
    assert rows['all_gather', 'weight params/blocks for dot_general', True].count == LAYERS
    gradient = rows['reduce_scatter', 'gradient of params/blocks', True]
    assert (gradient.what, gradient.count) == ('gradient', LAYERS)
    assert {row.what for row in report.collectives} == {'weight', 'gradient', 'sum'}
    # Three matmuls of a layer on the rows of a device.
    assert report.flops == 3 * LAYERS * 2 * EXAMPLES // 8 * WIDTH**2


def test_text():
    text = str(compiled(step, (FSDP, P())).explain_propagation(params(), X))
    head = (
        "step on fsdp=8 is partitioned along fsdp; its batch is 'x'. In a step, each device:\n"
        '- gathers weights: 3.0 KiB in the forward pass and the update, 3.0 KiB in the backward pass\n'
        '- reduces gradients: 3.0 KiB by reduce_scatter\n'
        '- reduces other sums, such as a loss or a norm: 4 B\n'
        '- keeps its examples: no operation mixes examples\n'
    )
    assert text.startswith(head)
    [gather] = [line for line in text.splitlines() if line.strip().startswith('all_gather')]
    assert gather.split()[:8] == ['all_gather', 'float32[16,16]', '1.0', 'KiB', '3', '3', '6.0', 'KiB']


def sorting(w, x):
    ordered = jnp.sort(x, 0)
    return jnp.tanh(ordered) @ w


def test_gathered_examples_and_the_redundant_work_on_them():
    report = compiled(sorting).explain_propagation(np.ones((WIDTH, WIDTH), 'float32'), X)
    [row] = report.gathered_examples
    assert row.reason == 'examples gathered for sort'
    assert (row.line, row.bytes) == (f'{line(sorting, 1)} sorting', X.nbytes)
    assert report.redundant[0].operand_kind == 'examples'
    alike = {work.primitive: work for work in report.redundant}
    assert (alike['sort'].bytes, alike['sort'].count) == (X.nbytes, 1)
    assert alike['sort'].line == row.line
    text = str(report)
    assert 'gathers or moves examples: 2.0 KiB in 1 collective, because these operations mix examples' in text
    assert 'repeats the work of other devices on gathered examples' in text


def test_products_of_gathered_examples_are_counted():
    def fun(w, x):
        return jnp.sort(x, 0) @ x.T  # each device multiplies all sorted examples with its own

    report = compiled(fun).explain_propagation(np.ones((WIDTH, WIDTH), 'float32'), X)
    assert report.flops == 2 * EXAMPLES * EXAMPLES * WIDTH // 8 or report.redundant[0].flops


def test_replicated_state_is_updated_by_all_devices():
    helper = MeshShardingHelper([8], ['data'])
    ddp = helper.sjit(step, in_shardings=(P(), P('data')), out_shardings=(P(), P()), batch_argnums=1)
    report = ddp.explain_propagation(params(), X)
    assert 'gathers no weights: each device holds all weights that its examples use' in str(report)
    assert ('all_reduce', 'gradient of params/blocks') in {(x.kind, x.reason) for x in report.collectives}
    update = [work for work in report.redundant if work.line.startswith(line(step, 2))]
    assert {work.primitive for work in update} == {'mul', 'sub'}
    assert all(work.operand_kind == 'replicated' for work in update)


def test_an_unpartitioned_step_reports_the_reason():
    def writing(w, x):
        return jax.new_ref(2 * x)[...] @ w

    w = np.ones((WIDTH, WIDTH), 'float32')
    with pytest.warns(PartitioningWarning):
        report = compiled(writing).explain_propagation(w, X)
    assert 'it changes an array in place (jax.new_ref)' in report.reason and line(writing, 1) in report.reason
    assert str(report) == f'writing is not partitioned along its batch: {report.reason}'
    helper = MeshShardingHelper([8], ['fsdp'])
    off = helper.sjit(sorting, in_shardings=(FSDP, P('fsdp')), batch_argnums=())
    assert off.explain_propagation(w, X).reason == 'batch_argnums=() turns it off'


def test_a_gradient_outside_of_the_compiled_function_is_reported():
    function = compiled(loss, P())
    assert not function.explain_propagation(params(), X).gradient_outside
    jax.grad(function)(params(), X)
    report = function.explain_propagation(params(), X)
    assert report.gradient_outside
    assert (
        'A gradient of loss was taken outside of it. That program is not partitioned: compile the function '
        'that calls jax.grad, with the optimizer in it.'
    ) in report.to_text(400)


def test_files_and_pages(tmp_path):
    report = compiled(step, (FSDP, P())).explain_propagation(params(), X)
    path = tmp_path / 'report.json'
    path.write_text(report.to_json())
    assert PropagationReport.load(path) == report
    assert json.loads(report.to_json())['collectives'][0]['kind'] == 'all_gather'
    with pytest.raises(DataError, match='not a complete report'):
        PropagationReport.load('{"version": 1}')
    report.to_html(tmp_path / 'report.html')
    page = (tmp_path / 'report.html').read_text()
    assert 'weight params/blocks for dot_general' in page and 'weights gathered' in page
    assert 'weight params/blocks for dot_general' in report._repr_html_()


def test_collectives_with_unused_results_are_left_out():
    def fun(w, x):
        jnp.sort(x, 0)
        return x @ w

    partitioned_step, _ = on_blocks(fun, np.ones((WIDTH, WIDTH), 'float32'), X)
    assert [row.what for row in partitioned_step.collective_rows] == ['weight']


def test_collectives_of_unused_results_of_calls_are_left_out():
    @jax.jit
    def moments(x):
        mean = jnp.mean(x)
        return mean, jnp.mean((x - mean) ** 2), jnp.sort(x, 0)[0]

    def fun(w, x):
        mean, _, _ = moments(x)
        return (x - mean) @ w

    partitioned_step, run = on_blocks(fun, np.ones((WIDTH, WIDTH), 'float32'), X)
    assert [row.what for row in partitioned_step.collective_rows] == ['sum', 'weight']
    assert len(partitioned_step.collectives) > 2
    np.testing.assert_allclose(run()[0], np.zeros_like(X), atol=1e-5)


def test_sums_over_state_are_distinguished_from_sums_over_examples():
    @jax.jit
    def norm(w):
        return jnp.sqrt(jnp.sum(w**2))

    def fun(w, x):
        return x @ w / norm(w), jnp.sum(w), jnp.mean(x)

    partitioned_step, _ = on_blocks(fun, np.ones((WIDTH, WIDTH), 'float32'), X)
    reasons = [row.reason for row in partitioned_step.collective_rows if row.what == 'sum']
    assert reasons == [
        'sum over blocks of state for sqrt',
        'sum over blocks of state for a result',
        'sum over examples for a result',
    ]


def test_reductions_report_what_they_reduce():
    """Also in loops, whose sums start from zero."""

    def fun(ws, x):
        norm, _ = jax.lax.scan(lambda norm, w: (norm + jnp.sum(w**2), None), 0.0, ws)
        total, _ = jax.lax.scan(lambda total, w: (total + jnp.sum(x @ w), None), 0.0, ws)
        return jnp.sqrt(norm), jnp.exp(total), x - x.max(0), x * x.sum()

    partitioned_step, _ = on_blocks(fun, np.ones((2, WIDTH, WIDTH), 'float32'), X)
    reasons = [row.reason for row in partitioned_step.collective_rows if row.what == 'sum']
    assert reasons == [
        'sum over blocks of state for sqrt',
        'sum over examples for exp',
        'maximum over examples',
        'sum over examples for mul',
    ]
    assert sorted(partitioned_step.collective_reasons.values()) == sorted(
        row.reason for row in partitioned_step.collective_rows
    )


def test_a_barrier_passes_each_operand_through():
    def fun(w, x):
        w, x = jax.lax.optimization_barrier((w, x))
        return jnp.sqrt(jnp.sum(w**2)), jnp.sqrt(jnp.sum(x**2))

    partitioned_step, _ = on_blocks(fun, np.ones((WIDTH, WIDTH), 'float32'), X)
    assert [row.reason for row in partitioned_step.collective_rows] == [
        'sum over blocks of state for sqrt',
        'sum over examples for sqrt',
    ]


def test_examples_that_move_to_a_weight_name_it():
    def fun(w, x):
        return jax.nn.softmax(x @ w['table'])

    partitioned_step, run = on_blocks(fun, {'table': np.ones((WIDTH, 4096), 'float32')}, X)
    assert {(row.what, row.path) for row in partitioned_step.collective_rows} == {('examples', "['table']")}
    assert {row.reason for row in partitioned_step.collective_rows} == {
        f"examples {how} to meet blocks of ['table']" for how in ('gathered', 'moved')
    }
    np.testing.assert_allclose(run()[0], np.full((EXAMPLES, 4096), 1 / 4096), rtol=1e-5)
    report = compiled(fun).explain_propagation({'table': np.ones((WIDTH, 4096), 'float32')}, X)
    [line] = [line for line in str(report).splitlines() if line.startswith('- moves')]
    assert line.startswith('- moves examples, or rows that they look up, instead of weights: ')


def test_the_gradient_of_a_table_is_state():
    """It receives rows of gradients, and the norm of all gradients is a sum over its shards."""

    def fun(params, at):
        def loss(params):
            return jnp.mean(jnp.tanh(params['table'][at] @ params['w']) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(gradients)))
        return value, jax.tree.map(lambda w, g: w - g / norm, params, gradients)

    params = {'table': np.ones((4096, WIDTH), 'float32'), 'w': np.ones((WIDTH, WIDTH), 'float32')}
    report = compiled(fun, (P(), FSDP)).explain_propagation(params, np.arange(EXAMPLES, dtype='int32'))
    assert 'gradients of rows of params/table moved' in {row.reason for row in report.collectives}
    reasons = {row.reason for row in report.collectives if row.what == 'sum'}
    assert reasons == {'sum over examples for a result', 'sum over blocks of state for sqrt'}


def test_lines_of_results_are_those_that_compute_them():
    report = compiled(step, (FSDP, P())).explain_propagation(params(), X)
    lines = {row.reason: row.line for row in report.collectives}
    assert lines['gradient of params/blocks'] == f'{line(loss, 2)} layer'
    assert lines['sum over examples for a result'] == f'{line(loss, 5)} loss'


def test_rows_of_a_table_are_named():
    def fun(table, at):
        return table[at]

    at = np.arange(EXAMPLES, dtype='int32')
    report = compiled(fun).explain_propagation(np.ones((4096, WIDTH), 'float32'), at)
    assert {(row.kind, row.reason, row.path) for row in report.gathered_examples} == {
        ('all_gather', 'indices of rows of table gathered', 'table'),
        ('reduce_scatter', 'rows of table moved', 'table'),
    }


@pytest.mark.parametrize('replicate', [True, False])
def test_a_constraint_keeps_state_marked_as_state(replicate):
    def fun(w, x):
        return x @ jax.lax.with_sharding_constraint(w['w'], P(None, 'fsdp'))

    partitioned_step, run = on_blocks(
        fun,
        {'w': np.ones((EXAMPLES, EXAMPLES), 'float32')},
        np.ones((EXAMPLES, EXAMPLES)),
        replicate=replicate,
    )
    assert [row.reason for row in partitioned_step.collective_rows if 'dot_general' in row.reason] == [
        "weight ['w'] for dot_general"
    ]
    assert not [row for row in partitioned_step.collective_rows if row.what == 'examples']
    np.testing.assert_allclose(run()[0], np.full((EXAMPLES, EXAMPLES), EXAMPLES))


def test_axes_along_which_values_vary():
    """Under HSDP, state varies along one axis: computations on a shard are not redundant."""
    w = np.ones((WIDTH, WIDTH), 'float32')
    partitioned_step, _ = on_blocks(lambda w, x: (w * 2, x @ w), w, X, HSDP)
    assert not [*partitioned_step.redundancy]


def test_flops_of_matmuls():
    x, kernel = jnp.ones((4, 8, 6)), jnp.ones((3, 2, 10))

    def conv(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'), feature_group_count=3
        )

    [equation] = jax.make_jaxpr(conv)(x, jnp.ones((3, 2, 12))).eqns
    assert matmul_flops(equation) == 2 * 4 * 8 * 12 * 3 * 2
    [equation] = jax.make_jaxpr(jnp.matmul)(jnp.ones((4, 6)), jnp.ones((6, 8))).eqns
    assert matmul_flops(equation) == 2 * 4 * 6 * 8
    [equation] = jax.make_jaxpr(jnp.sin)(kernel).eqns
    assert matmul_flops(equation) == 0


def test_collectives_with_other_mesh_axes_are_reported():
    """With tensor parallelism inside, a collective is in a separate call, with its index there."""
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    rule = TreePathShardingRule(('.*', P(None, 'fsdp', 'tp')))
    function = helper.sjit(step, in_shardings=(rule, P('fsdp')), out_shardings=(rule, P()), batch_argnums=1)
    report = function.explain_propagation(params(), X)
    assert report.axes == ('fsdp',)
    kinds = {(row.kind, row.what) for row in report.collectives}
    assert {('all_gather', 'weight'), ('reduce_scatter', 'gradient')} <= kinds
    assert not report.redundant
