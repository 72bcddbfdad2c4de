"""`scalax.distributed` in real processes: `initialize`, `should_stop`, and messages about waiting."""

import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from examples.launch.ports import held_port
from scalax import distributed
from scalax.errors import ArgumentError
from tests.support.processes import started
from tests.support.snapshots import Snapshot

JOIN = """
import sys, time
from scalax import distributed
distributed.initialize({arguments})
distributed.initialize()  # a second call does nothing
import jax
print('joined', jax.process_index(), jax.process_count(), flush=True)
"""
LOOP = """
for step in range(1, 10**6):  # however long whoever waits for it takes
    if distributed.should_stop(step):
        assert distributed.should_stop(step + 1), 'it stays true'
        print('stops at', step, flush=True)
        sys.exit(distributed.PREEMPTED)
    print('did', step, flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


def join(arguments: str = '', then: str = '') -> list[str]:
    return ['-c', JOIN.format(arguments=arguments) + then]


def launcher_environments(port: int, count: int) -> list[dict[str, str]]:
    """Returns the environment variables that the launch files of the examples set."""
    address = f'localhost:{port}'
    return [
        {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': str(count), 'JAX_PROCESS_ID': str(index)}
        for index in range(count)
    ]


def waiting_messages(output: str) -> list[str]:
    """Returns the log messages about waiting, without the seconds, which depend on the machine."""
    lines = [line for line in output.splitlines() if 'waiting' in line]
    return [re.sub(r'\(\d+ of', '(N of', line) for line in lines]


@pytest.mark.medium
def test_a_single_process_does_nothing() -> None:
    code = JOIN.format(arguments='') + 'distributed.initialize(num_processes=1)\nprint(distributed.PREEMPTED)'
    with started(['-W', 'error', '-c', code]) as alone:
        assert alone.wait() == (0,)
        assert alone.output() == 'joined 0 1\n75\n'


@pytest.mark.medium
@pytest.mark.parametrize(
    ('arguments', 'chosen'),
    [('local_device_ids=1', '1'), ('num_processes=1, local_device_ids=range(2)', '0,1'), ('', 'all')],
)
def test_a_single_process_with_some_of_the_devices(arguments: str, chosen: str) -> None:
    code = JOIN.format(arguments=arguments) + "print(jax.config.values['jax_cuda_visible_devices'])"
    with started(['-W', 'error', '-c', code]) as alone:
        assert alone.wait() == (0,)
        assert alone.output() == f'joined 0 1\n{chosen}\n'


def test_a_single_process_is_never_too_late() -> None:
    distributed.initialize()  # the tests have used JAX long ago


@pytest.mark.parametrize(
    'options', [{'cluster_detection_method': 'mpi4py'}, {'local_device_ids': [0]}, {'process_id': 0}], ids=str
)
def test_late_initialization_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match='must be called before'):
        distributed.initialize(**options)
    distributed.initialize(cluster_detection_method='deactivate')  # requests nothing


def test_jax_may_fail_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError('no route to the coordinator')

    monkeypatch.setattr(distributed.jax.distributed, 'initialize', initialize)
    with pytest.raises(RuntimeError, match='no route'):
        distributed.initialize()


@pytest.mark.medium
def test_the_first_process_logs_that_it_waits(port: int) -> None:
    env = launcher_environments(port, 2)
    for early in range(2):
        with started(join(), env=env[early : early + 1]) as process:
            process.wait_for('waiting')
            with started(join(), env=[env[1 - early]]) as other:
                assert process.wait() + other.wait() == (0, 0), (process.output(), other.output())
                first = (
                    f'process {early} of 2: waiting for the other processes at localhost:{port} (N of 300 s)'
                )
                assert waiting_messages(process.output())[0] == first
                assert f'joined {early} 2' in process.output()
                assert f'joined {1 - early} 2' in other.output()


@pytest.mark.medium
def test_two_processes_under_slurm(port: int) -> None:
    """Two processes with the variables of `srun`, which JAX detects itself."""
    job = {'SLURM_JOB_ID': '7', 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2'}
    env = [{**job, 'SLURM_PROCID': i, 'SLURM_LOCALID': i, 'JAX_COORDINATOR_PORT': str(port)} for i in '01']
    with started(join(), env=env[1:]) as process:
        process.wait_for('waiting')
        with started(join(), env=env[:1]) as other:
            assert process.wait() + other.wait() == (0, 0), (process.output(), other.output())
            first = (
                'process 1 of 2: waiting for the other processes at the address that JAX detects (N of 300 s)'
            )
            assert waiting_messages(process.output())[0] == first
            assert 'joined 1 2' in process.output()


@pytest.mark.medium
def test_a_process_that_never_starts(port: int) -> None:
    """JAX ends the process, so the earlier messages are the only explanation."""
    quick = 'from scalax import distributed\ndistributed._FIRST = distributed._REPEAT = 0.1\n'
    program = ['-c', quick + JOIN.format(arguments='initialization_timeout=5')]
    with started(program, env=launcher_environments(port, 2)[:1]) as process:
        assert process.wait()[0] != 0
        text = f'process 0 of 2: waiting for the other processes at localhost:{port} (N of 5 s)'
        assert waiting_messages(process.output())[:2] == [text, text]
        assert 'joined' not in process.output()


WRONG: list[tuple[tuple, dict[str, str]]] = [
    (('10.0.0.1:1234', 4), {}),
    ((), {'JAX_PROCESS_ID': '2'}),
    (('10.0.0.1:1234', 2, 2), {}),
    (('10.0.0.1', 2, 0), {}),
    (('http://10.0.0.1:1234', 2, 0), {}),
    ((1234, 2, 0), {}),
    (('a:1', 2, 0, ('heartbeat_timeout', 0.5)), {}),
    ((None, None, None, ('shutdown_timeout', -1)), {}),
    (('a:1', '2', 0), {}),
    (('a:1',), {'JAX_PROCESS_ID': '-1'}),
    (('a:1',), {'JAX_NUM_PROCESSES': 'two'}),
    ((), {'SLURM_PROCID': '0', 'SLURM_NTASKS': '4'}),
    ((), {'SLURM_PROCID': '0', 'SLURM_NTASKS': '2x'}),
    ((None, None, None, ('cluster_detection_method', 'nobody')), {}),
    ((None, None, None, ('cluster_detection_method', 'slurm')), {}),
]

ASK = """
import os
from scalax import distributed
from scalax.errors import ArgumentError
for arguments, env in {cases!r}:
    os.environ.update(env)
    try:
        distributed.initialize(*arguments[:3], **dict(arguments[3:]))
    except ArgumentError as error:
        print(error, end='|\\n')
    for name in env:
        del os.environ[name]
"""


@pytest.mark.medium
def test_invalid_settings_are_errors_before_waiting(snapshot: Snapshot) -> None:
    code = ASK.format(cases=WRONG)
    with started(['-c', code]) as process:
        assert process.wait() == (0,)
        message = process.output().split('|\n')
        assert len(message) == len(WRONG) + 1
        snapshot('\n'.join(message))


@pytest.mark.parametrize(
    ('tasks', 'gpus', 'option', 'count'),
    [
        ('1(x2)', {'SLURM_GPUS_ON_NODE': '4'}, None, 4),
        ('1', {'SLURM_GPUS_ON_NODE': '8', 'CUDA_VISIBLE_DEVICES': '0,3'}, None, 2),
        ('1', {'CUDA_VISIBLE_DEVICES': '0'}, None, 0),
        ('1', {}, None, 0),
        ('1', {'SLURM_GPUS_ON_NODE': '4'}, range(4), 0),
        ('2(x2)', {'SLURM_GPUS_ON_NODE': '4'}, None, 0),
        ('2,1', {'SLURM_GPUS_ON_NODE': '4'}, None, 0),
    ],
)
def test_one_task_on_a_node_of_several_gpus(
    tasks: str, gpus: dict[str, str], option: Any, count: int, monkeypatch: Any, caplog: Any
) -> None:
    for name in ('CUDA_VISIBLE_DEVICES', 'SLURM_GPUS_ON_NODE'):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**gpus, 'SLURM_PROCID': '0', 'SLURM_STEP_TASKS_PER_NODE': tasks}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr('jax.distributed.initialize', lambda *args, **options: None)
    distributed.initialize(local_device_ids=option)
    assert caplog.messages == [
        f'this process is the only task on its node, sees {count} GPUs and uses one of them: use them all '
        f'with initialize(local_device_ids=range({count})), or start a task for each (srun '
        f'--ntasks-per-node={count})'
    ] * bool(count)


@pytest.mark.medium
def test_a_launcher_may_start_one_process() -> None:
    env = {'SLURM_PROCID': '0', 'SLURM_NTASKS': '4'}
    code = 'from scalax import distributed; distributed.initialize(num_processes=1)'
    with started(['-c', code], env=[env]) as process:
        assert process.wait() == (0,)
        assert process.output() == ''


@pytest.mark.medium
def test_sigterm_stops_all_at_one_step(port: int) -> None:
    with started(join(then=LOOP), join(then=LOOP), env=launcher_environments(port, 2)) as two:
        for index in range(2):
            two.wait_for('did 3\n', index)
        two.processes[1].send_signal(signal.SIGTERM)
        assert two.wait() == (distributed.PREEMPTED, distributed.PREEMPTED)
        steps = [re.findall(r'stops at (\d+)', two.output(index)) for index in range(2)]
        assert steps[0] == steps[1] and len(steps[0]) == 1


@pytest.mark.medium
def test_sigterm_in_a_single_process() -> None:
    with started(join(then=LOOP)) as process:
        process.wait_for('did 3\n')
        process.processes[0].send_signal(signal.SIGTERM)
        assert process.wait() == (distributed.PREEMPTED,)
        assert 'stops at' in process.output()


@pytest.mark.medium
def test_a_second_sigterm_ends_the_process() -> None:
    with started(join(then=LOOP.replace('sys.exit', 'time.sleep(600)\n        print'))) as process:
        process.wait_for('did 1\n')
        process.processes[0].send_signal(signal.SIGTERM)
        process.wait_for('stops at')
        process.processes[0].send_signal(signal.SIGTERM)
        assert process.wait() == (-signal.SIGTERM,)


@pytest.mark.medium
def test_a_handler_of_the_program_is_kept() -> None:
    code = """
import os, signal
from scalax import distributed
signal.signal(signal.SIGTERM, lambda *_: print('mine', flush=True))
assert not distributed.should_stop(1)
os.kill(os.getpid(), signal.SIGTERM)
assert not distributed.should_stop(2)
"""
    with started(['-c', code]) as process:
        assert process.wait() == (0,), process.output()
        assert process.output() == 'mine\n'


@pytest.mark.parametrize('step', ['3', 1.5, None], ids=repr)
def test_invalid_step_numbers(step: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        distributed.should_stop(step)
    assert str(caught.value) == f'should_stop: step is the number of the step, got {step!r}'
