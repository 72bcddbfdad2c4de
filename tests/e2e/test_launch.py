"""The launcher for one machine, with programs that do not use JAX, and the launch files for schedulers."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from examples.llama.mesh_choice import read_table
from scalax.distributed import PREEMPTED
from tests.support import ROOT
from tests.support.docs_blocks import read_blocks
from tests.support.processes import Running, started

LAUNCH = ROOT / 'examples' / 'launch'
PAGE = ROOT / 'docs' / 'multihost.md'
IDS = re.compile(r'^launcher: process (\d) has id (\d+)$', re.MULTILINE)

# Counts its starts in a file, and prints its process index. Programs write each message at once, because
# processes that share an output interleave the pieces of a print().
HEAD = """
import os, signal, sys, time
me, path = int(os.environ['JAX_PROCESS_ID']), os.environ['COUNT'] + os.environ['JAX_PROCESS_ID']
with open(path, 'a') as file:
    file.write('x')
start = os.path.getsize(path)
other = os.environ['COUNT'] + str(1 - me)
end = time.monotonic() + 500
# Who fails ends the others: not before they have counted this start too.
while not os.path.exists(other) or os.path.getsize(other) < start:
    assert time.monotonic() < end
    time.sleep(0.01)
assert os.environ['JAX_NUM_PROCESSES'] == '2'
assert os.environ['JAX_NUM_CPU_DEVICES'] == '3'
"""


def launch(code: str, *flags: str) -> list[str]:
    return ['-m', 'examples.launch.local', '--devices=3', *flags, '--', '-c', HEAD + code]


def starts(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.glob('count*'))]


def assert_all_gone(launcher: Running) -> None:
    for _, pid in IDS.findall(launcher.output()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.medium
@pytest.mark.parametrize(
    ('code', 'flags', 'expected', 'times'),
    [
        ('print(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[0])', [], 0, 1),
        ('time.sleep(600 * (me == 0 and start < 3)); sys.exit(start < 3)', [], 0, 3),
        ('sys.exit(5) if me else time.sleep(600)', ['--restarts=1'], 5, 2),
        ('os.kill(os.getpid(), 9) if me else time.sleep(600)', ['--restarts=0'], 128 + 9, 1),
        ('sys.exit(2)', [], 2, 1),
        (f'time.sleep(me); sys.exit({PREEMPTED})', [], PREEMPTED, 1),
    ],
    ids=['success', 'third time lucky', 'too often', 'killed', 'bad flags', 'preempted'],
)
def test_exit_codes_and_starts(code: str, flags: list, expected: int, times: int, tmp_path: Path) -> None:
    with started(launch(code, *flags), env=[{'COUNT': str(tmp_path / 'count')}]) as launcher:
        assert launcher.wait() == (expected,), launcher.output()
        assert starts(tmp_path) == [times, times]
        assert_all_gone(launcher)


@pytest.mark.medium
def test_each_start_has_a_port_of_its_own(tmp_path: Path) -> None:
    code = 'print("port " + os.environ["JAX_COORDINATOR_ADDRESS"], flush=True); sys.exit(start < 3)'
    with started(launch(code), env=[{'COUNT': str(tmp_path / 'count')}]) as launcher:
        launcher.wait()
        assert len(set(re.findall(r'port localhost:(\d+)', launcher.output()))) == 3


SAVES = f"""
def save(*_):
    print('saves %d' % me, flush=True)
    sys.exit({PREEMPTED})
signal.signal(signal.SIGTERM, save)
print('ready %d' % me, flush=True)
time.sleep(600)
"""


@pytest.mark.medium
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_processes_and_nothing_restarts(number: signal.Signals, tmp_path: Path) -> None:
    with started(launch(SAVES), env=[{'COUNT': str(tmp_path / 'count')}]) as launcher:
        for index in range(2):
            launcher.wait_for(f'ready {index}')
        launcher.processes[0].send_signal(number)
        assert launcher.wait() == (PREEMPTED,)
        assert 'saves 0' in launcher.output() and 'saves 1' in launcher.output()
        assert starts(tmp_path) == [1, 1]
        assert_all_gone(launcher)


def test_a_signal_that_ends_programs_that_do_not_catch_it(tmp_path: Path) -> None:
    code = 'print(f"ready {me}", flush=True)\ntime.sleep(600)'
    with started(launch(code), env=[{'COUNT': str(tmp_path / 'count')}]) as launcher:
        for index in range(2):
            launcher.wait_for(f'ready {index}')
        launcher.processes[0].terminate()
        assert launcher.wait() == (128 + signal.SIGTERM,)
        assert starts(tmp_path) == [1, 1]
        assert_all_gone(launcher)


def test_who_does_not_end_is_ended(tmp_path: Path) -> None:
    code = 'signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(f"ready {me}", flush=True)\ntime.sleep(600)'
    with started(launch(code, '--grace=1'), env=[{'COUNT': str(tmp_path / 'count')}]) as launcher:
        for index in range(2):
            launcher.wait_for(f'ready {index}')
        launcher.processes[0].terminate()
        assert launcher.wait() == (130,)  # the program would sleep longer than this waits
        assert 'launcher: still running after the request to end: killed' in launcher.output()
        assert_all_gone(launcher)


def test_a_second_interrupt_exits_at_once(tmp_path: Path) -> None:
    code = (
        'signal.signal(signal.SIGTERM, lambda *_: print(f"asked {me}", flush=True))\n'
        'print(f"ready {me}", flush=True)\ntime.sleep(600)'
    )
    with started(launch(code, '--grace=600'), env=[{'COUNT': str(tmp_path / 'count')}]) as launcher:
        for text in ('ready', 'asked'):
            for index in range(2):
                launcher.wait_for(f'{text} {index}')
            launcher.processes[0].send_signal(signal.SIGINT)
        assert launcher.wait() == (130,)
        assert_all_gone(launcher)


def test_lines_of_the_launcher_are_written_at_once() -> None:
    """Otherwise the processes, which write to the same stream, would write into its lines."""
    code = (
        'import os, sys\nfrom examples.launch import local\n'
        'class Stream:\n'
        '    def write(self, text): os.write(1, repr(text).encode())\n'
        '    def flush(self): pass\n'
        "sys.stderr = Stream()\nlocal.say('it runs')"
    )
    with started(['-c', code]) as program:
        assert program.wait() == (0,), program.output()
        assert program.output() == repr('launcher: it runs\n')


def test_a_program_is_needed() -> None:
    with started(['-m', 'examples.launch.local', '--devices=3']) as launcher:
        assert launcher.wait() == (2,)
        text = 'error: no program given. Write it after --, as in -- -m examples.llama.train\n'
        assert launcher.output() == text


# --- Some processes are lost, and the others continue --------------------------------------------

# Each of three processes prints how many processes there are and how long ago one was lost. All have printed
# it before anything happens. Each line is one write: otherwise the lines of three processes mix.
OF_THREE = """
import os, signal, sys, time
me, count = (int(os.environ[name]) for name in ('JAX_PROCESS_ID', 'JAX_NUM_PROCESSES'))
folder = os.environ['SAID']
port = os.environ['JAX_COORDINATOR_ADDRESS'].rpartition(':')[2]
os.write(1, f'{me} of {count}, port {port}\\n'.encode())
if 'LOST_AT' in os.environ:
    os.write(1, b'lost %.1f s ago\\n' % (time.time() - float(os.environ['LOST_AT'])))
open(os.path.join(folder, f'{count}.{me}'), 'w').close()
end = time.monotonic() + 500
while sum(name.startswith(f'{count}.') for name in os.listdir(folder)) < count:
    assert time.monotonic() < end
    time.sleep(0.01)
"""


def shrinking(code: str, *flags: str) -> list[str]:
    head = ['-m', 'examples.launch.local', '--processes=3', '--on_loss=shrink', *flags]
    return [*head, '--', '-c', OF_THREE + code]


@pytest.mark.medium
@pytest.mark.parametrize(
    ('code', 'flags', 'expected', 'log'),
    [
        (
            'os.kill(os.getpid(), 9) if me == 1 and count == 3 else time.sleep(600 * (count == 3))',
            [],
            0,
            ['a process ended with SIGKILL; lost: process 1; 3 more starts on 2 processes'],
        ),
        (  # the others notice before the launcher, each in its own way
            'if count < 3: sys.exit()\n'
            'if me == 2: os.kill(os.getpid(), 9)\n'
            'time.sleep(0.3)\n'
            'sys.exit(1) if me else os.abort()',
            [],
            0,
            ['; lost: process 2; 3 more starts on 2 processes'],
        ),
        (  # one is silent
            'if count < 3: sys.exit()\nos.kill(os.getpid(), signal.SIGSTOP) if me == 0 else os.abort()',
            [],
            0,
            ['a process ended with SIGABRT; lost: process 0; 3 more starts on 2 processes'],
        ),
        pytest.param(  # one of two is silent; the other may have failed, but would have ended this one too
            'if count == 1: sys.exit()\n'
            'if me: os.kill(os.getpid(), 9 if count == 3 and me == 2 else signal.SIGSTOP)\n'
            'time.sleep(600) if count == 3 else os.abort()',
            [],
            0,
            [
                'a process ended with SIGKILL; lost: process 2; 3 more starts on 2 processes',
                'a process ended with SIGABRT; lost: process 1; 2 more starts on 1 process',
            ],
            marks=pytest.mark.slow,
        ),
        (  # an error loses no process; neither does an abort while all others live
            'os.abort() if me == 0 else time.sleep(600)',
            ['--restarts=1'],
            128 + signal.SIGABRT,
            [f'a process ended with SIGABRT; {left} more starts on 3 processes' for left in (1, 0)],
        ),
        (
            'if me == count - 1: os.kill(os.getpid(), 9)\ntime.sleep(600)',
            [],
            128 + 9,
            [
                'a process ended with SIGKILL; lost: process 2; 3 more starts on 2 processes',
                'a process ended with SIGKILL; lost: process 1; 2 more starts on 1 process',
                'a process ended with SIGKILL; lost: process 0; 1 more starts on 0 processes',
            ],
        ),
        ('sys.exit(5 * (me == 1))', ['--restarts=0'], 5, ['exit code 5; 0 more starts on 3 processes']),
    ],
    ids=[
        'killed',
        'killed, and the others fail',
        'silent',
        'one of two silent',
        'an error',
        'all, one by one',
        'too often',
    ],
)
def test_a_lost_process_does_not_come_back(
    code: str, flags: list, expected: int, log: list[str], tmp_path: Path
) -> None:
    with started(shrinking(code, *flags), env=[{'SAID': str(tmp_path)}]) as launcher:
        assert launcher.wait() == (expected,), launcher.output()
        output = launcher.output()
        lines = [line for line in output.splitlines() if line.startswith('launcher: a process ended')]
        assert len(lines) == len(log) and all(
            line.endswith(text) for line, text in zip(lines, log, strict=True)
        )
        ports = set(re.findall(r'port (\d+)', output))
        assert len(ports) == len(log) + (expected == 0)
        # Every start after a loss gets its time.
        assert len(re.findall(r'^lost \d+\.\d s ago$', output, re.MULTILINE)) >= 2 * (len(ports) > 1)
        assert_all_gone(launcher)


# --- Absent schedulers ----------------------------------------------------------------------------


def of_page(language: str, containing: str) -> str:
    """Returns the code block of the page that readers copy."""
    blocks = read_blocks(PAGE.read_text(encoding='utf-8'))
    [text] = [block.text for block in blocks if block.language == language and containing in block.text]
    return text


def script_of(name: str) -> str:
    """Returns a launch file, or the code block of the page that contains *name*."""
    path = LAUNCH / name
    return path.read_text(encoding='utf-8') if path.exists() else of_page('bash', name)


@pytest.mark.parametrize('name', ['slurm.sbatch', 'tpu_pod.sh', 'srun', 'gcloud'])
def test_scripts_are_valid(name: str) -> None:
    subprocess.run(['bash', '-n'], input=script_of(name), text=True, check=True, timeout=500)


@pytest.mark.parametrize('name', ['slurm.sbatch', 'srun'])
def test_slurm_starts_a_task_for_each_gpu_which_sees_all(name: str) -> None:
    options = dict(re.findall(r'^#SBATCH --([\w-]+)=(\S+)', script_of(name), re.MULTILINE))
    assert int(options['ntasks-per-node']) == int(options['gpus-per-node']) > 1  # JAX gives each task one
    assert not {'gpus-per-task', 'gpu-bind'} & set(options)
    assert options['signal'].startswith('TERM@')  # to the tasks, which save: B: would be to the script alone


def fake(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >> "$CALLS"\n{code}\n')
    path.chmod(0o755)


def run_script(script: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs a script with stand-ins for commands, and returns the calls of commands that change state, too."""
    for name in ('scontrol', 'sleep', 'squeue', 'sinfo'):
        if not (folder / name).exists():
            fake(folder, name, '')
    path, log = folder / 'script', folder / 'calls'
    path.write_text(script_of(script))
    env = {**os.environ, 'PATH': f'{folder}:{os.environ["PATH"]}', 'CALLS': str(log), 'SLURM_JOB_ID': '7'}
    env |= {'SLURM_SUBMIT_DIR': str(ROOT), 'SLURM_NTASKS_PER_NODE': '8', 'HOME': str(folder)}
    env.pop('SCALAX_RUN_TOKEN', None)
    done = subprocess.run(['bash', path], env=env, capture_output=True, text=True, timeout=500)
    queries = ('squeue', 'sinfo', 'sleep')
    return done, [line for line in log.read_text().splitlines() if not line.startswith(queries)]


def test_slurm_goes_on_on_the_nodes_that_it_still_has(tmp_path: Path) -> None:
    fake(tmp_path, 'squeue', 'echo "n[1-4]"')
    # Each node once for each of its partitions; the third does not respond any more.
    fake(
        tmp_path, 'sinfo', 'echo "n1 n1 n2 n4 n3" | tr " " "\\n" | head -n $((5 - $(grep -c ^srun "$CALLS")))'
    )
    fake(tmp_path, 'srun', 'echo "LOST_AT=$LOST_AT" >> "$CALLS"; exit $((2 - $(grep -c ^srun "$CALLS")))')
    (tmp_path / 'calls').touch()
    done, commands = run_script('slurm.sbatch', tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == 'start 1 of 10, on 4 nodes, ended with exit code 1\n'
    first, undisturbed, second, lost = commands
    assert ' --nodes=4 --ntasks=32 --nodelist=n1,n2,n3,n4 python -m examples.llama.train ' in first
    assert ' --nodes=3 --ntasks=24 --nodelist=n1,n2,n4 python -m examples.llama.train ' in second
    assert undisturbed == 'LOST_AT='
    assert re.fullmatch(r'LOST_AT=\d{10}', lost)
    calls = (tmp_path / 'calls').read_text()
    assert calls.count('squeue --noheader --jobs=7 --format=%N\n') == 2
    assert calls.count('sinfo --noheader --Node --responding --nodes=n[1-4] --format=%N\n') == 2
    assert calls.count('sleep 60\n') == 1


def test_slurm_gives_all_tasks_and_starts_one_secret(tmp_path: Path) -> None:
    code = 'echo "token $SCALAX_RUN_TOKEN" >> "$CALLS"; exit $((2 - $(grep -c ^srun "$CALLS")))'
    fake(tmp_path, 'srun', code)
    tokens = []
    for _ in range(2):  # two jobs of one run
        (tmp_path / 'calls').write_text('')
        done, commands = run_script('slurm.sbatch', tmp_path)
        assert done.returncode == 0, done.stderr
        tokens += [line for line in commands if line.startswith('token')]
    assert len(tokens) == 4 and len({*tokens}) == 1
    assert re.fullmatch('token [0-9a-f]{64}', tokens[0])
    [file] = tmp_path.rglob('run_token')
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(tokens[0].split()[1] in line for line in commands if line.startswith('srun'))


def test_a_tpu_pod_gets_its_secret_as_a_file(tmp_path: Path) -> None:
    """The stand-in for gcloud copies the file and runs the command locally."""
    fake(
        tmp_path,
        'gcloud',
        'cd "$HOME"\n'
        'if [ "$4" = scp ]; then stat -c %a "$5" >> "$CALLS"; cp "$5" "${6#*:}"; exit; fi\n'
        'for last; do [[ $last == --command=* ]] && command=${last#--command=}; done\n'
        'mkdir -p scalax; python() { echo "token $SCALAX_RUN_TOKEN" >> "$CALLS"; }; eval "$command"',
    )
    done, commands = run_script('tpu_pod.sh', tmp_path)
    assert done.returncode == 0, done.stderr
    copied, mode, started, token = commands
    assert copied.startswith('gcloud compute tpus tpu-vm scp ') and mode == '600'
    assert re.fullmatch('token [0-9a-f]{64}', token)
    assert token.split()[1] not in copied + started
    assert not Path(copied.split()[5]).exists()


def test_the_meshes_and_the_batch_of_slurm_suit_each_number_of_nodes() -> None:
    text = script_of('slurm.sbatch')
    [batch] = re.findall(r'^BATCH=(\d+)', text, re.MULTILINE)
    [meshes] = re.findall(r"^MESHES='(.*?)'", text, re.MULTILINE)
    assert list(read_table(meshes)) == [32, 24, 16, 8]
    for count, mesh in read_table(meshes).items():
        assert mesh == f'fsdp={count}' and int(batch) % count == 0


SCP = 'gcloud compute tpus tpu-vm scp '


@pytest.mark.medium
@pytest.mark.parametrize(
    ('script', 'starter', 'codes', 'expected', 'calls'),
    [
        ('slurm.sbatch', 'srun', [0], 0, ['srun']),
        ('slurm.sbatch', 'srun', [137, 1, 0], 0, ['srun', 'srun', 'srun']),
        ('slurm.sbatch', 'srun', [137, PREEMPTED], 0, ['srun', 'srun', 'scontrol requeue 7']),
        ('slurm.sbatch', 'srun', [2], 2, ['srun']),
        ('slurm.sbatch', 'srun', [1] * 10, 1, ['srun'] * 10),
        ('tpu_pod.sh', 'gcloud', [0, 255, 0], 0, [SCP, 'gcloud', 'gcloud']),
        ('tpu_pod.sh', 'gcloud', [0, PREEMPTED], PREEMPTED, [SCP, 'gcloud']),
        ('tpu_pod.sh', 'gcloud', [1], 1, [SCP]),
        ('srun', 'srun', [0], 0, ['srun --kill-on-bad-exit=0 --wait=30 python train.py']),
        ('srun', 'srun', [PREEMPTED], 0, ['srun', 'scontrol requeue 7']),
        ('srun', 'srun', [1], 1, ['srun']),
    ],
)
def test_scripts_restart_failed_runs(
    script: str, starter: str, codes: list[int], expected: int, calls: list[str], tmp_path: Path
) -> None:
    """The stand-ins for the schedulers' commands exit with these codes in turn."""
    fake(
        tmp_path,
        starter,
        f'codes=({" ".join(map(str, codes))}); n=$(grep -c {starter} "$CALLS"); exit ${{codes[n-1]}}',
    )
    done, commands = run_script(script, tmp_path)
    assert done.returncode == expected, done.stderr
    assert len(commands) == len(calls)
    for line, expected_line in zip(commands, calls, strict=True):
        assert line.startswith(expected_line), line
    assert all(
        re.search(r'examples\.llama\.train|train\.py', line)
        for line in commands
        if line.startswith(starter) and not line.startswith(SCP)
    )


def test_the_jobset_of_the_page_numbers_its_processes() -> None:
    spec, job, pods, container = jobset(of_page('yaml', 'JobSet'))
    env = {entry['name']: entry for entry in container['env']}
    assert list(env) == ['JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID', 'SCALAX_RUN_TOKEN']
    assert env['SCALAX_RUN_TOKEN']['valueFrom'] == {'secretKeyRef': {'name': 'train', 'key': 'token'}}
    assert pods['completions'] == int(env['JAX_NUM_PROCESSES']['value'])
    name = spec['metadata']['name']
    host, _, port = env['JAX_COORDINATOR_ADDRESS']['value'].rpartition(':')
    assert host == f'{name}-{job["name"]}-0-0.{name}' and port.isdecimal()  # as JAX's own detection names it
    assert 'job-completion-index' in env['JAX_PROCESS_ID']['valueFrom']['fieldRef']['fieldPath']


def jobset(text: str) -> tuple[dict, dict, dict, dict]:
    """Returns a JobSet, its job, the job's spec and the container, after checking the common fields."""
    spec = yaml.safe_load(text)
    [job] = spec['spec']['replicatedJobs']
    pods = job['template']['spec']
    [container] = pods['template']['spec']['containers']
    assert pods['parallelism'] == pods['completions']
    assert pods['completionMode'] == 'Indexed' and pods['backoffLimit'] == 0
    return spec, job, pods, container


def test_the_jobset_starts_the_pods_that_are_there() -> None:
    spec, job, pods, container = jobset((LAUNCH / 'jobset.yaml').read_text())
    [rule] = pods['podFailurePolicy']['rules']
    codes = {'containerName': container['name'], 'operator': 'In', 'values': [PREEMPTED]}
    assert rule['onExitCodes'] == codes
    assert container['command'] == ['python', '-m', 'examples.launch.present']
    args = dict(arg.removeprefix('--').split('=', 1) for arg in container['args'] if '=' in arg)
    assert int(args['pods']) == pods['completions']
    name = spec['metadata']['name']
    assert args['address'].startswith(f'{name}-{job["name"]}-0-{{}}.{name}:')
    # All pods of a start have one folder, which no other start has.
    *labeled, token = container['env']
    assert token['name'] == 'SCALAX_RUN_TOKEN'
    assert token['valueFrom'] == {'secretKeyRef': {'name': 'llama-run', 'key': 'token', 'optional': True}}
    labels = {entry['name']: entry['valueFrom']['fieldRef']['fieldPath'] for entry in labeled}
    assert labels == {
        'JOBSET': "metadata.labels['jobset.sigs.k8s.io/jobset-uid']",
        'ATTEMPT': "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
    }
    assert args['folder'].endswith('$(JOBSET)-$(ATTEMPT)')
    assert int(args['batch_size']) % 32 == int(args['batch_size']) % 24 == 0
    assert list(read_table(args['mesh'])) == [32, 24, 16, 8]


PRESENT = """
import os
print(*[os.environ['JAX_' + name] for name in ('PROCESS_ID', 'NUM_PROCESSES', 'COORDINATOR_ADDRESS')])
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ('pods', 'wait', 'first', 'late'),
    [
        (3, 500, [0, 1, 2], []),  # all of them, so no process waits
        (4, 0, [1, 3], [0]),  # the first is pending, and comes later
        (2, 0, [1], [0]),
    ],
)
def test_pods_that_are_there_start_without_the_others(
    pods: int, wait: int, first: list[int], late: list[int], tmp_path: Path
) -> None:
    folder = tmp_path / 'start'
    folder.mkdir()
    if not wait:  # they are there at the same time, however slow the machine is
        for index in first:
            (folder / str(index)).touch()
    flags = [f'--folder={folder}', f'--pods={pods}', f'--wait={wait}', '--address=host-{}:1']
    command = ['-m', 'examples.launch.present', *flags, '--', '-c', PRESENT]
    env = [{'JOB_COMPLETION_INDEX': str(index)} for index in first]
    with started(*[command] * len(first), env=env) as running:
        assert running.wait() == (0,) * len(first), running.output()
        for process, index in enumerate(first):
            message = f'{process} {len(first)} host-{first[0]}:1'
            assert running.output(process) == f'pod {index} is process {process} of {len(first)}\n{message}\n'
    for index in late:
        with started(command, env=[{'JOB_COMPLETION_INDEX': str(index)}]) as run:
            assert run.wait() == (PREEMPTED,)
            assert run.output() == f'pod {index} is late: the run has begun on {first}\n'


def test_every_launch_file_starts_the_example_with_flags_that_it_has() -> None:
    flags = set(re.findall(r"DEFINE_\w+\(\s*'(\w+)'", (ROOT / 'examples/llama/options.py').read_text()))
    for name in ('slurm.sbatch', 'tpu_pod.sh', 'jobset.yaml'):
        text = (LAUNCH / name).read_text()
        text = text.partition('examples.llama.train')[2].partition('  env:')[0]
        used = re.findall(r'--(\w+)=', text.partition('done')[0])
        assert {'checkpoints', 'output'} <= set(used) <= flags | {'zone', 'worker', 'command'}, name
