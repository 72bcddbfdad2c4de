"""Plans as JSON, and the difference of two plans, on simulated devices."""

import json

import jax
import pytest

from scalax.errors import ArgumentError, DataError
from scalax.plan import Memory, Plan
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P


def plan_on(dims, rule, width=64):
    helper = MeshShardingHelper(dims, ['fsdp', 'tp'])

    def forward(w, x):
        return x @ w

    step = helper.sjit(forward, in_shardings=(rule, P('fsdp')), out_shardings=P('fsdp'))
    arguments = jax.ShapeDtypeStruct((64, width), 'float32'), jax.ShapeDtypeStruct((64, 64), 'float32')
    return helper.plan(step, *arguments)


RULE = FSDPShardingRule('fsdp', min_fsdp_size=1)


def test_a_plan_survives_a_round_trip(tmp_path):
    plan = plan_on([4, 2], RULE)
    path = tmp_path / 'plan.json'
    path.write_text(plan.to_json())
    assert Plan.load(path) == Plan.load(str(path)) == Plan.load(plan.to_json()) == plan
    assert json.loads(plan.to_json())['collectives'][0]['kind'] == 'all-gather'


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('{"version": 1', 'the text is not the JSON of a plan: '),
        ('{"version": 9}', 'the text is a plan of version 9, this scalax reads version 1: '),
        ('{"name": "step"}', 'the text is not the JSON of a plan: it has no version'),
        (7, 'Plan.load takes text, or the path of a file, got int: pass the result of plan.to_json(), or'),
        ('{"version": 1, "name": "step"}', 'the text is not a complete plan: '),
    ],
)
def test_invalid_json(text, message):
    with pytest.raises((DataError, ArgumentError)) as wrong:
        Plan.load(text)
    assert str(wrong.value).startswith(message)


def written():
    """Returns a plan with every field set, as plain values."""
    values = json.loads(plan_on([4, 2], RULE).to_json())
    values['device_positions'] = [
        {'slice': 0, 'coords': [i % 2, i // 2 % 2, i // 4], 'core': 0} for i in range(8)
    ]
    values |= {'device_kind': 'TPU v5', 'platform': 'tpu', 'model_flops': 10**9}
    values['collectives'][0] |= {'networks': ['ici'], 'replica_group': [0, 1]}
    source = {'annotation': 'a', 'file': 'f.py', 'line': 3, 'function': 'g', 'operand': ''}
    values['buffers'] = [{'bytes': 10, 'array': 'f32[3]', 'source': source, 'count': 1}]
    return values


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'memory': {}}, "it has no 'arguments'"),
        ({'flops_exactness': 'badly'}, "'badly' is not a valid Exactness"),
        ({'collectives': [3]}, "'int' object is not"),
        ({'collectives': 'ab'}, "'ab' is not of type list"),
        ({'flops': '3'}, "'3' is not of type int"),
    ],
)
def test_incomplete_plans(changes, message):
    values = written()
    assert Plan.load(json.dumps(values)).device_positions
    with pytest.raises(DataError) as wrong:
        Plan.load(json.dumps({**values, **changes}))
    assert str(wrong.value).startswith(f'the text is not a complete plan: {message}')


def test_a_plan_of_a_release_that_did_not_write_all():
    values = written()
    del values['schedule']
    with pytest.raises(DataError) as wrong:
        Plan.load(json.dumps(values))
    assert str(wrong.value) == (
        "the text is not a complete plan: it has no 'schedule'. If another release of scalax wrote it, write "
        'it again with plan.to_json()'
    )


def test_nothing_changed():
    assert plan_on([4, 2], RULE).diff(plan_on([4, 2], RULE)) == ''


def test_diff_with_something_else():
    with pytest.raises(ArgumentError) as wrong:
        plan_on([4, 2], RULE).diff('plan.json')
    assert str(wrong.value) == 'diff takes another plan, got str: Plan.load reads one'


def test_diff_of_changed_lines():
    before, after = plan_on([4, 2], RULE), plan_on([2, 4], P())
    lines = before.diff(after).splitlines()
    assert '-forward on 8 cpu devices (fsdp=4, tp=2)' in lines
    assert '+forward on 8 cpu devices (fsdp=2, tp=4)' in lines
    assert '-along fsdp: 16.0 KiB in all-gathers' in lines
    assert '+collectives in one call: none' in lines
    assert [line[:3] for line in before.inputs.diff(after.inputs).splitlines()[:2]] == ['w: ', 'x: ']


def test_memory_without_a_number_of_the_compiler():
    assert Memory(3, 2, 1).peak == Memory(3, 2, 1).total == 6
    assert Memory(3, 2, 1, peak=5).peak == 5


def test_whether_a_plan_fits_is_not_known_without_a_limit():
    plan = plan_on([4, 2], RULE)
    assert (plan.fits, plan.memory.limit, plan.known_roofline, plan.refusal) == (None, None, None, '')
