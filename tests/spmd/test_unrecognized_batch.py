"""Steps for which no batch is recognized: the errors and warnings that users get."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from scalax.errors import PartitioningWarning
from scalax.sharding import BatchPartitioning, FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

AUTO = MeshShardingHelper([8], ['fsdp'])
EXPLICIT = MeshShardingHelper([8], ['fsdp'], axis_types=AxisType.Explicit)
UNFOLLOWED = MeshShardingHelper([8], ['fsdp'], partition_batch=False)
FSDP = FSDPShardingRule(min_fsdp_size=1)
W, X = jax.ShapeDtypeStruct((8, 8), 'float32'), jax.ShapeDtypeStruct((16, 8), 'float32')
CASES = {
    'Explicit axes': (
        EXPLICIT,
        {'in_shardings': (P(), P('fsdp'))},
        'on Explicit mesh axes, shardings are part of types',
        'make a mesh of Auto axes',
    ),
    'specs alone': (
        AUTO,
        {'in_shardings': (P('fsdp'), P('fsdp'))},
        'specs place all arguments, and batch_argnums does not name the batch among them',
        'name the batch: batch_argnums=1, or batch_argnames',
    ),
    'rules alone': (
        AUTO,
        {'in_shardings': (FSDP, FSDP)},
        'no argument looks like a batch (sharded by a spec, while a rule shards another argument), and no '
        'constraint in the function shards a batch that it makes',
        'name the batch: batch_argnums=1, or batch_argnames; or shard it by with_sharding_constraint where '
        'the function makes it',
    ),
    'partition_batch=False': (
        UNFOLLOWED,
        {'in_shardings': (FSDP, P('fsdp'))},
        'partition_batch=False of the helper turns it off',
        'name the batch: batch_argnums=1, or batch_argnames',
    ),
}
each_case = pytest.mark.parametrize(('helper', 'options', 'why', 'remedy'), CASES.values(), ids=CASES)


def product(w, x):
    return jnp.tanh(x @ w)


@each_case
def test_a_request_for_partitioning_warns_once(helper, options, why, remedy):
    step = helper.sjit(lambda w, x: product(w, x), partitioning=BatchPartitioning(), **options)
    with pytest.warns(PartitioningWarning) as warned:
        step.trace(W, X)
        step.trace(W, jax.ShapeDtypeStruct((32, 8), 'float32'))
    assert [str(warning.message) for warning in warned] == [
        f'<lambda>: partitioning={BatchPartitioning()} has no effect: {why}. It runs as jax.jit runs it, and '
        f'the compiler alone decides how activations are sharded.\nWhat to do: {remedy}.'
    ]
    assert warned[0].filename == __file__


def test_on_one_device_the_report_blames_the_mesh_and_not_the_specs():
    helper = MeshShardingHelper([1], ['fsdp'], devices=jax.devices()[:1])
    report = helper.sjit(product, in_shardings=(FSDP, P('fsdp'))).explain_propagation(W, X)
    assert str(report) == (
        'product is not partitioned along its batch: the mesh axes of its specs have one device'
    )


@each_case
def test_without_a_request_the_report_gives_the_reason(helper, options, why, remedy):
    step = helper.sjit(product, **options)
    report = step.explain_propagation(W, X)
    assert (report.axes, report.reason) == ((), f'{why}; {remedy}')
    assert f'product is not partitioned along its batch: {why}; {remedy}' in ' '.join(str(report).split())


@pytest.mark.medium
def test_plans_report_it():
    helper, options, why, remedy = CASES['rules alone']
    plan = helper.plan(helper.sjit(product, **options), W, X)
    assert ' '.join(str(plan).split()).endswith(f' not partitioned along its batch: {why}; {remedy}')


@pytest.mark.parametrize(
    ('helper', 'options'),
    [
        (AUTO, {'in_shardings': (FSDP, P('fsdp')), 'batch_argnums': ()}),
        (AUTO, {'in_shardings': (FSDP, P('fsdp'))}),
        (MeshShardingHelper([1], ['fsdp'], devices=jax.devices()[:1]), {'in_shardings': (FSDP, P('fsdp'))}),
    ],
    ids=['turned off', 'partitioned', 'one device'],
)
def test_no_warning_for_deliberate_choices(helper, options):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        helper.sjit(product, partitioning=BatchPartitioning(), **options).trace(W, X)


def test_a_helper_partitions_functions_with_a_batch_and_ignores_others():
    helper = MeshShardingHelper([8], ['fsdp'], partitioning=BatchPartitioning())
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        helper.sjit(lambda: jnp.ones((8, 8)), out_shardings=FSDP).trace()
