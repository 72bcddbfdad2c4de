"""Plans as JSON, and the difference of two; on simulated devices."""

import copy
import dataclasses
import functools
import json
import random

import jax
import pytest

from scalax.errors import ArgumentError, DataError
from scalax.plan import HostMoves, Memory, Plan
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.plain_values import change


def plan_on(dims, rule, width=64):
    helper = MeshShardingHelper(dims, ['fsdp', 'tp'])

    def forward(w, x):
        return x @ w

    step = helper.sjit(forward, in_shardings=(rule, P('fsdp')), out_shardings=P('fsdp'))
    arguments = jax.ShapeDtypeStruct((64, width), 'float32'), jax.ShapeDtypeStruct((16, 64), 'float32')
    return helper.plan(step, *arguments)


RULE = FSDPShardingRule('fsdp', min_fsdp_size=1)


def test_a_plan_comes_back(tmp_path):
    plan = plan_on([4, 2], RULE)
    path = tmp_path / 'plan.json'
    path.write_text(plan.to_json())
    assert Plan.load(path) == Plan.load(str(path)) == Plan.load(plan.to_json()) == plan
    assert json.loads(plan.to_json())['collectives'][0]['kind'] == 'all-gather'


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('{"version": 1', 'the text is not the JSON of a plan: '),
        ('{"version": 9}', 'the text is a plan of version 9, this scalax reads version 1: '),
        ('{"name": "step"}', 'the text is not the JSON of a plan: it has no version'),
        (7, 'Plan.load takes text, or the path of a file, got int: give it what plan.to_json() returns, or'),
        ('{"version": 1, "name": "step"}', "the text is not a whole plan: it has no 'mesh'"),
    ],
)
def test_what_is_no_plan(text, said):
    with pytest.raises((DataError, ArgumentError)) as wrong:
        Plan.load(text)
    assert str(wrong.value).startswith(said)


def written():
    """A plan with all that one may have, as plain values."""
    values = json.loads(plan_on([4, 2], RULE).to_json())
    values['places'] = [{'slice': 0, 'coords': [i % 2, i // 2 % 2, i // 4], 'core': 0} for i in range(8)]
    values |= {'device_kind': 'TPU v5', 'platform': 'tpu', 'model_flops': 10**9}
    values['collectives'][0] |= {'networks': ['ici'], 'part': [0, 1]}
    source = {'annotation': 'a', 'file': 'f.py', 'line': 3, 'function': 'g', 'operand': ''}
    values['buffers'] = [{'bytes': 10, 'array': 'f32[3]', 'source': source}]
    return values


@functools.cache
def _written():
    return written()


def written_once():
    return copy.deepcopy(_written())


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'name': 3}, 'name is not of type str: 3'),
        ({'devices': True}, 'devices is not of type int: True'),
        ({'devices': 0}, 'devices are 0, and the mesh has 8'),
        ({'flops': 10**300}, 'flops is not a number from 0 to 2**128: 1000000'),
        (
            {'mesh': {'fsdp': 10**18, 'tp': 10**18}},
            'mesh has 1000000000000000000000000000000000000 devices along 2',
        ),
        ({'memory': {}}, "memory has no 'arguments'"),
        ({'more': 3}, "it has what none of this version has: ['more']"),
        (
            {'flops_counted': 'badly'},
            "flops_counted is none of 'exactly', 'at least', 'at most', 'about': 'badly'",
        ),
        ({'places': [{'slice': 0, 'coords': [10**9], 'core': 0}] * 8}, 'places are too far from one another'),
        (
            {'places': [{'slice': 0}] * 3},
            'places are not one for each of 8 devices, of as many coordinates each',
        ),
        ({'inputs': {'mesh': {}}}, "inputs has no 'rows'"),
        ({'collectives': [3]}, 'collectives[0] is not of type dict: 3'),
    ],
)
def test_what_is_not_a_whole_plan(changes, message):
    values = written()
    assert Plan.load(json.dumps(values)).places
    with pytest.raises(DataError) as wrong:
        Plan.load(json.dumps({**values, **changes}))
    assert str(wrong.value).startswith(f'the text is not a whole plan: {message}')


def test_a_collective_of_other_devices():
    for wrong in ({'axes': ['dp']}, {'axes': ['tp', 'tp']}, {'part': [0, 8]}):
        values = written()
        values['collectives'][0] |= wrong
        with pytest.raises(
            DataError, match='a collective is of devices that the mesh does not have: Collective'
        ):
            Plan.load(json.dumps(values))


def test_a_kind_that_the_partitioner_does_not_know():
    values = written()
    values['collectives'][0]['partitioned_as'] = 'a\nb'
    with pytest.raises(DataError, match=r"collectives\[0\].partitioned_as is none of '', 'all-gather', "):
        Plan.load(json.dumps(values))


def test_whatever_is_in_a_file_is_refused_or_can_be_shown():
    """Plain values in which some were changed: what is read has to print, and ends."""
    good = Plan.load(json.dumps(written()))
    shown = refused = 0
    for seed in range(400):
        rng, values = random.Random(seed), written_once()
        for _ in range(rng.choice((1, 1, 2, 3))):
            change(rng, values)
        try:
            plan = Plan.load(json.dumps(values))
        except DataError as error:
            assert len(str(error)) < 500
            refused += 1
            continue
        shown += 1
        text = '\n'.join(
            [str(plan), plan.to_text(60), str(plan.inputs), str(plan.diff(good)), str(good.diff(plan))]
        )
        assert all(char.isprintable() for char in text.replace('\n', ''))
        assert plan.to_json() and plan._repr_html_() and plan.inputs._repr_html_()
        assert plan.totals is not None and plan.networks is not None
    assert shown > 30
    assert refused > 200


def test_nothing_changed():
    diff = plan_on([4, 2], RULE).diff(plan_on([4, 2], RULE))
    assert not diff
    assert str(diff) == 'forward: nothing changed'


def test_what_is_no_other_plan():
    with pytest.raises(ArgumentError) as wrong:
        plan_on([4, 2], RULE).diff('plan.json')
    assert str(wrong.value) == 'diff takes another plan, got str: Plan.load reads one'


def test_a_change_is_told():
    before, after = plan_on([4, 2], RULE), plan_on([2, 4], P())
    diff = before.diff(after)
    assert diff
    assert diff.collectives == {('all-gather', ('fsdp',), 64 * 64 * 4): (1, 0)}
    lines = str(diff).splitlines()
    assert lines[0] == 'forward: (fsdp=4, tp=2) -> (fsdp=2, tp=4)'
    assert '  all-gather  fsdp  16.0 KiB  1 -> 0' in lines
    assert [after.path for _, after in diff.inputs.changed] == ['w', 'x']
    assert '  arguments     5.0 KiB -> 18.0 KiB' in lines


def test_what_goes_to_the_host_and_single_bytes_are_compared():
    plan = plan_on([4, 2], RULE)
    memory = dataclasses.replace(plan.memory, host=2048, peak=plan.memory.peak + 1)
    moved = dataclasses.replace(plan, memory=memory, host_moves=HostMoves(1024, 512), flops=plan.flops + 1)
    assert str(plan.diff(moved)).splitlines() == [
        'forward: (fsdp=4, tp=2)',
        f'  peak          {plan.memory.peak:,} B -> {plan.memory.peak + 1:,} B',
        '  on the host   0 B -> 2.0 KiB',
        '  host:out      0 B -> 1.0 KiB',
        '  host:in       0 B -> 512 B',
        f'  flops         {plan.flops:,} -> {plan.flops + 1:,}',
    ]


def test_memory_without_a_number_of_the_compiler():
    assert Memory(3, 2, 1).peak == Memory(3, 2, 1).total == 6
    assert Memory(3, 2, 1, peak=5).peak == 5


def test_whether_a_plan_fits_is_not_known_without_a_limit():
    plan = plan_on([4, 2], RULE)
    assert (plan.fits, plan.memory.limit, plan.known_roofline, plan.refusal) == (None, None, None, '')
