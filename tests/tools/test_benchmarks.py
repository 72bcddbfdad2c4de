"""The benchmarks: their counts, and that all groups and the comparison with a release run, without times."""

import dataclasses
import math
import sys

import jax
import pytest

import benchmarks.__main__
from benchmarks import against, calls, checkpoints, decoder, groups, operations, programs, timing
from benchmarks.timing import Row
from examples import plan_llama

HEAD = ('what', 'scalax', 'by hand', 'ratio', 'aim')


@pytest.mark.slow
def test_counts_meet_their_aims():
    rows = [*calls.traces_per_signature(), *decoder.three_steps()]
    assert len(rows) == 4
    assert [(row.name, row.ours) for row in rows if row.ours != row.aim] == []


GROUPS = {
    'cached': lambda: groups.run(groups.shared_groups(5), 'cached'),
    'structures': lambda: groups.run(groups.all_groups(5), 'structures'),
    'shard': lambda: groups.run(groups.all_groups(5), 'shard'),
    'data': lambda: groups.run(groups.all_groups(5), 'data'),
    'processes': lambda: groups.run(groups.all_groups(5), 'pr'),
    'first': lambda: decoder.first_step(1, layers=1),
    'plan': lambda: programs.plans(1, layers=1),
    'microbatch': lambda: programs.microbatches(1, layers=1),
    'operations': lambda: operations.sharded_ops(1),
}


def quick(name, *chosen):
    """Returns one or two parameters, and marks the others slow."""
    return pytest.param(name, marks=[] if name in chosen else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize('group', [quick(name, 'cached', 'first') for name in GROUPS])
def test_groups_run(group):
    measured = GROUPS[group]()
    assert measured
    assert all(math.isfinite(row.ratio) and row.ratio > 0 for row in measured)
    assert len({row.name for row in measured}) == len(measured)


@pytest.mark.parametrize(
    ('main', 'message'),
    [
        (benchmarks.__main__.main, "no group holds 'nothing' in its name: cached, host, "),
        (plan_llama.main, "no name starts with 'nothing': 1b-v5e, 8b-v5e, "),
    ],
    ids=['benchmarks', 'plans'],
)
def test_an_unknown_group_is_an_error(main, message, monkeypatch, capsys):
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '8')  # they are set up already
    monkeypatch.setattr(sys, 'argv', ['program', '--only', 'nothing'])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


MEASURED = ['save', 'save-by-hand', 'restore', 'restore-by-hand', 'verify', 'load-rows', 'read']


@pytest.mark.slow
@pytest.mark.parametrize('contestant', [quick(contestant, 'restore') for contestant in MEASURED])
def test_checkpoints_are_measured(contestant, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / 'checkpoints'
    if not folder.exists():
        checkpoints.run('prepare', 4, folder)
    measured = checkpoints.run(contestant, 4, folder)
    assert measured['seconds'] > 0 and measured['cpu'] > 0 and 0 <= measured['peak'] < 2**31


def test_an_unknown_contestant_is_an_error(tmp_path):
    with pytest.raises(KeyError, match='load-rowz'):
        checkpoints.run('load-rowz', 4, tmp_path)


@pytest.mark.slow
def test_steps_by_hand_and_with_rules_are_equal():
    """Both steps compute the same results with the same shardings."""
    helper = decoder.mesh_helper()
    host = jax.device_get(decoder.init(jax.random.key(0), 1))
    hand = decoder.ByHand(helper, host)
    step_with_rules = decoder.with_rules(helper, decoder.new_step(decoder.with_sharding_annotation))
    step_by_hand = hand.jit(decoder.new_step(hand.constrain))
    (params, loss), (expected, expected_loss) = (
        step(host, decoder.tokens()) for step in (step_with_rules, step_by_hand)
    )
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    alike = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), params, expected)
    assert all(jax.tree.leaves(alike))


def test_the_table():
    rows = [Row('a call', 1.5e-6, 1e-6, 1.02), Row('traces', 1, 2, 1, counted=True), Row('b', 2.0, 1.0)]
    assert timing.render(HEAD, [row.cells for row in rows]) == (
        '| what   | scalax | by hand | ratio | aim  |\n'
        '|--------|--------|---------|-------|------|\n'
        '| a call | 1.5 us | 1 us    | 1.500 | 1.02 |\n'
        '| traces | 1      | 2       |       | 1    |\n'
        '| b      | 2 s    | 1 s     | 2.000 |      |'
    )


def test_each_takes_its_turns():
    called = []
    clock = iter(range(1000))
    medians = timing.medians(
        [lambda: called.append('a'), lambda: called.append('b')],
        rounds=3,
        warmup=1,
        before=lambda: called.append('-'),
        clock=lambda: next(clock),
    )
    assert ''.join(called) == 'ab-b-a-a-b-b-a'
    assert medians == [1, 1]


def test_libraries_side_by_side():
    ours = [Row('call', ratio, 1.0) for ratio in (1.0, 1.1, 9.0)]
    before = [Row('call', ratio, 1.0) for ratio in (2.0, 2.5, 3.0)]
    counted = [Row('traces', 1, 2, counted=True)], [Row('traces', 3, 2, counted=True)]
    assert against.merged([*ours, *counted[0]], [*before, *counted[1]]) == [
        ('call', '1 s', '1.100', '2.500'),
        ('traces', '2', '1', '3'),
    ]


@pytest.mark.slow
def test_a_process_measures_the_checkout():
    measured = against.measure(sys.executable, 'checkout', 8, 5, 'traces')
    expected = [dataclasses.asdict(row) for row in calls.traces_per_signature()]
    assert (measured['jax'], measured['rows']) == (jax.__version__, expected)


def test_without_the_environment_of_the_release():
    with pytest.raises(SystemExit, match=r'make bench ARGS="--against 0\.0\.0" makes it'):
        against.table('0.0.0', 1, '', 1)
