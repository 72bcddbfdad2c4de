"""The programs of examples/ops, and their output."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from examples.ops.cross_entropy import cross_entropy
from scalax.errors import PlanError
from scalax.plan import Plan
from scalax.sharding import MeshShardingHelper
from tests.support import tpu_compiler

P = PartitionSpec

PRINTED = {
    'scalar_parameters': """
        P('data', 'tp')    soften: P('data', 'tp')    count_above: P('data',) [0, 4, 8, 8]
        P('data',)         soften: P('data',)         count_above: P('data',) [0, 4, 8, 8]
        P()                soften: P()                count_above: P()        [0, 4, 8, 8]
        collectives of soften: 0
        """,
    'scalar_or_array': """
        a scalar: each device has (), the result is sharded as P('data', 'tp')
        an array as P(): each device has (4,), the result is sharded as P('data', 'tp')
        an array as P('tp',): each device has (4,), the result is sharded as P('data', 'tp')
        """,
    'axis_index': """
        P('rows', 'columns')     each device adds [0, 100, 100, 200]
        P(('rows', 'columns'),)  each device adds [0, 100, 200, 300]
        P()                      each device adds [0, 0, 0, 0]
        P('rows', 'columns')     number_elements is the same as on one device: True
        P(('rows', 'columns'),)  number_elements is the same as on one device: True
        row 1: [8, 9, 10, 11, 12, 13, 14, 15]
        """,
    'top_k': """
        the results are sharded as P('data',) and P('data',)
        values of row 0: [4095.0, 4094.0, 4093.0, 4092.0]
        the same as on one device: True
        top_k: 512 bytes gathered for a group of devices
        jax.lax.top_k: 196,608 bytes gathered for a group of devices
        """,
    'top_p': """
        the tokens are sharded as P('data',)
        tokens drawn: [0, 1, 2]
        as often as they should be: True
        the same tokens as on one device: True
        """,
    'cross_entropy': """
        loss: 9.594, gradients are sharded as P('data',) and P(None, 'tp')
        the same as by the compiler: True
        logits of the rows of one device: 4.0 MiB
        cross_entropy: holds 0.50 of that while it runs, sends 546 KiB
        by_the_compiler: holds 0.75 of that while it runs, sends 546 KiB
        """,
    'pallas_kernel': """
        the result is sharded as P('data',), and is right: True
        rms_norm: sends 0 bytes, the result is sharded as P('data',)
        rms_norm: the same as on one device: True
        by_kernel: sends 65,536 bytes, the result is sharded as P()
        by_kernel: the same as on one device: True
        """,
}


@pytest.mark.medium
@pytest.mark.sampled(5)
@pytest.mark.parametrize('name', PRINTED)
def test_its_output(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(f'examples.ops.{name}').main()
    printed = [line.strip() for line in capsys.readouterr().out.strip().splitlines()]
    assert printed == [line.strip() for line in PRINTED[name].strip().splitlines()]


# --- The loss at full size, on absent TPUs ---------------------------------------------------------

ROWS, WIDTH, VOCABULARY = 4096, 2048, 131_072


def plan_on_tpus(kind: AxisType, *, quick: bool = False) -> Plan:
    """Returns the plan of the loss and its gradients on 2x4 chips."""
    helper = MeshShardingHelper.from_topology('v5e:4x2', [2, 4], ['data', 'tp'], axis_types=kind)
    step = helper.sjit(
        jax.value_and_grad(lambda *args: cross_entropy(*args).mean(), argnums=(0, 1)),
        in_shardings=(P('data'), P(None, 'tp'), P('data')),
    )
    shapes = (ROWS, WIDTH), (WIDTH, VOCABULARY), (ROWS,)
    dtypes = jnp.float32, jnp.float32, jnp.int32
    return helper.plan(step, *map(jax.ShapeDtypeStruct, shapes, dtypes), quick=quick)


@pytest.mark.slow
@tpu_compiler.needed
def test_no_device_holds_the_logits_of_its_rows() -> None:
    plan = plan_on_tpus(AxisType.Explicit)
    logits = ROWS // 2 * VOCABULARY * 4
    assert plan.memory.temporaries < 0.6 * logits
    # After the vocabulary matmul: maxima, sums, labels, the gradient of the hidden state, but no logits.
    assert plan.totals['tp',]['all-reduce'] < 2 * ROWS * WIDTH * 4
    assert set(plan.totals) == {('data',), ('tp',)}


@pytest.mark.medium
@tpu_compiler.needed
@pytest.mark.parametrize('quick', [True, False])
def test_plans_over_auto_axes_are_errors(quick: bool) -> None:
    """A quick plan would count gathers of global arrays instead of reaching the compiler's error."""
    with pytest.raises(PlanError, match='has an operation with custom_partitioning, which') as raised:
        plan_on_tpus(AxisType.Auto, quick=quick)
    assert 'axis_types=AxisType.Explicit' in str(raised.value)
