"""Joining the processes of a program, and stopping all of them at the same step.

`jax.distributed` joins processes. This module adds one call that also works on a single process, timeouts
short enough to notice a lost process, log messages about which processes are missing, and one question a step
that lets all processes stop together when one of them is told to end.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import operator
import os
import re
import secrets
import signal
import threading
from collections.abc import Sequence
from types import FrameType

import jax
from jax.experimental import multihost_utils

from scalax._core.channel.secret import COMMAND, SECRET_VARIABLE, names_loopback, resolve_secret
from scalax._core.channel.session import Session, new_nonce
from scalax._core.util.progress import call_periodically
from scalax._data.host import exit_handler, process_collectives
from scalax._diagnostics.watchdog.state import ENDING, record_step, recorded
from scalax._diagnostics.watchdog.watch import Watchdog, local_address
from scalax._jax import error_texts
from scalax.errors import ArgumentError

__all__ = ['PREEMPTED', 'initialize', 'should_stop']

PREEMPTED = 75
"""The exit code of a program that was told to end, and has saved (EX_TEMPFAIL of sysexits.h)."""

_ADDRESS = re.compile(r'[^/\s]+:\d+')  # of a host; for a URL, JAX would wait in vain
_FIRST, _REPEAT = 1.0, 15.0  # seconds before the first message about waiting, and between two

_log = logging.getLogger('scalax.distributed')


# The variables in which launchers give a process its index and the number of processes. JAX reads these
# itself (and asks the metadata server of a TPU, or Kubernetes). Here they are shown in messages, and tell a
# program that is alone from one that JAX should have joined with others.
_LAUNCHERS = {
    'SLURM_PROCID': 'SLURM_NTASKS',
    'OMPI_COMM_WORLD_RANK': 'OMPI_COMM_WORLD_SIZE',
    'TPU_WORKER_ID': '',
    'JOB_COMPLETION_INDEX': '',
}


def _launcher() -> tuple[str, str] | None:
    """The variables of the launcher that started this process, if they are set."""
    return next((pair for pair in _LAUNCHERS.items() if pair[0] in os.environ), None)


@dataclasses.dataclass(frozen=True)
class _Given:
    """The processes according to the arguments, or else the environment."""

    address: str | None
    count: int | None
    index: int | None

    @property
    def nothing(self) -> bool:
        return self.address is None and self.count is None and self.index is None

    def __str__(self) -> str:
        """Which process waits, and where, as far as is known before JAX looks."""
        index: object = self.index
        count: object = self.count
        if launcher := _launcher():
            index = os.environ[launcher[0]] if index is None else index
            count = os.environ.get(launcher[1]) if count is None else count
        who = 'this process' if index is None else f'process {index}'
        many = '' if count is None else f' of {count}'
        where = 'the address that JAX detects' if self.address is None else self.address
        return f'{who}{many}: waiting for the other processes at {where}'


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    cluster_detection_method: str | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 20,
    shutdown_timeout: int = 60,
    step_timeout: int | None = None,
    secret: str | None = None,
) -> None:
    """Joins this process with the others of the program: `jax.distributed.initialize`, with other defaults.

    Call it first in a program. On one process it does nothing: if nothing is given and JAX detects no
    cluster, for ``num_processes=1``, and when it has been called before. While it waits, it logs where it
    waits: warnings of the logger ``scalax.distributed``, which Python prints on stderr by default.

    Args:
        coordinator_address: ``'host:port'`` of process 0, a port that is free there. Default: the environment
            variable ``JAX_COORDINATOR_ADDRESS``, else what JAX detects (SLURM, Open MPI, TPU, Kubernetes).
        num_processes: how many there are. Default: ``JAX_NUM_PROCESSES``, else what JAX detects.
        process_id: which of them this is, from 0. Default: ``JAX_PROCESS_ID``, else what JAX detects.
        local_device_ids: the GPUs of this process, such as where several processes share a host.
        cluster_detection_method: for JAX, such as ``'mpi4py'``; ``'deactivate'``: it looks for no cluster.
        initialization_timeout: seconds to wait for the others. JAX ends the process when they are over.
        heartbeat_timeout: seconds after which a silent process counts as lost. JAX then ends all the others;
            its own default is 100.
        shutdown_timeout: seconds that a process waits at its end for the others to end; JAX's own default is
            300.
        step_timeout: seconds that a step may take, by the calls of `should_stop` or of
            `scalax.checkpoint.Checkpointer.save`; every process then logs which one is behind. Default: ten
            times the median of the last steps, twice the longest, and at least 30. The first steps, which
            compile, may take 300. 0: nothing is watched, and process 0 opens no UDP port for it.
        secret: what processes on several hosts sign their messages about steps with: text that nobody can
            guess, the same on all of them. Default: the environment variable ``SCALAX_RUN_TOKEN``. Without
            it, steps are watched from the first call of `should_stop` on, with a secret that process 0 makes.

    Raises:
        ArgumentError: some of the three values are missing, or they do not fit together; or JAX detects no
            cluster by *cluster_detection_method*; or the secret is too short.
        RuntimeError: JAX has been used before, so that it is too late; or it cannot join.

    Example:
        >>> from scalax import distributed
        >>> distributed.initialize()  # alone here: nothing happens
    """
    if jax.distributed.is_initialized():
        return
    given = _read(coordinator_address, num_processes, process_id)
    token = resolve_secret('initialize', secret)
    for name, seconds in (
        ('initialization_timeout', initialization_timeout),
        ('heartbeat_timeout', heartbeat_timeout),
        ('shutdown_timeout', shutdown_timeout),
        ('step_timeout', step_timeout or 1),
    ):
        _whole(name, seconds, 1)
    if given.count == 1:
        _choose(local_device_ids)
        return
    method = None if cluster_detection_method == 'deactivate' else cluster_detection_method
    if given.nothing and local_device_ids is None:
        _warn_of_idle_gpus()
    unknown = given.nothing and method is None and local_device_ids is None and _launcher() is None

    def say(seconds: float) -> None:
        _log.warning('%s (%.0f of %g s)', given, seconds, initialization_timeout)

    try:
        with call_periodically(say, _FIRST, _REPEAT):
            jax.distributed.initialize(
                given.address,
                given.count,
                given.index,
                local_device_ids=local_device_ids,
                cluster_detection_method=cluster_detection_method,
                initialization_timeout=initialization_timeout,
                heartbeat_timeout_seconds=heartbeat_timeout,
                shutdown_timeout_seconds=shutdown_timeout,
            )
    except ValueError as error:
        if not error_texts.lacks_cluster(error):
            raise
        if not given.nothing:
            raise ArgumentError(_half(given)) from None
        if method is not None:
            raise ArgumentError(_alone(f'cluster_detection_method={method!r}')) from None
        if (launcher := _launcher()) and (count := os.environ.get(launcher[1]) or '1') != '1':
            raise ArgumentError(_alone(f'{launcher[1]}={count}')) from None
        _choose(local_device_ids)
    except KeyError as error:  # a variable that the method reads, and nothing has set
        if method is None:
            raise
        raise ArgumentError(_alone(f'cluster_detection_method={method!r}')) from error
    except RuntimeError as error:
        # Too late to join, but there is nobody to join. A TPU may be part of a pod without any variable that
        # tells.
        if not unknown or not error_texts.is_late(error) or jax.default_backend() == 'tpu':
            raise
    exit_handler.settings.seconds = shutdown_timeout
    if step_timeout != 0 and jax.distributed.is_initialized():
        _watch_or_wait(given, _Unwatched(step_timeout, heartbeat_timeout, token))


@dataclasses.dataclass
class _Unwatched:
    """What is to be agreed on at the first call of `should_stop`.

    Attributes:
        timeout: of a step.
        heartbeat: of JAX.
        secret: of this process; empty if it has none.
        address: of process 0; empty if JAX has detected it, and tells nobody.
        runs: whether this process is watched already.
    """

    timeout: int | None
    heartbeat: float
    secret: bytes
    address: str = ''
    runs: bool = False


def _watch_or_wait(given: _Given, unwatched: _Unwatched) -> None:
    """Starts to watch if it is known where process 0 is, and with which secret; else the first step does.

    On several hosts the first step asks in any case: processes that differ in that would wait for each other.
    """
    if not (given.address and given.count and given.index is not None):
        _unwatched.append(unwatched)
        return
    alone = names_loopback(given.address.rpartition(':')[0])
    if alone or unwatched.secret:
        _watch(given.address, given.index, given.count, unwatched)
    elif given.index == 0:
        _log.warning(
            '%s is not set: processes that are stuck are named only from the first call of should_stop on, '
            'and `scalax doctor --run` gets no answer. Set it to one secret for all processes, such as %s '
            'makes',
            *(SECRET_VARIABLE, COMMAND),
        )
    if not alone:
        unwatched.address, unwatched.runs = given.address, bool(unwatched.secret)
        _unwatched.append(unwatched)


def _agree_and_watch(unwatched: _Unwatched) -> None:
    """Starts to watch at the first step, as process 0 says. Every process has to call it.

    If process 0 has no secret, it makes one for this run, which goes the way of the arrays: who can read that
    has everything. A secret of the user's is never sent: process 0 proves that it has it.
    """
    process, offer = jax.process_index(), {}
    if process == 0:
        address, nonce = unwatched.address or local_address(), new_nonce().hex()
        offer = {'address': address, 'nonce': nonce, 'proof': _proof(unwatched.secret, nonce)}
        offer['secret'] = '' if unwatched.secret else secrets.token_hex()
    with jax.transfer_guard('allow'):  # whatever the training loop allows itself
        text = process_collectives.broadcast_bytes(
            process_collectives.all_processes(), 0, json.dumps(offer).encode()
        )
    offer = json.loads(text)
    if offer['proof'] != _proof(unwatched.secret, offer['nonce']):
        _log.warning(
            '%s of process %d is not that of process 0, or one of the two has none: process %d will not be '
            'named if it is stuck. Set it to the same secret for all processes',
            *(SECRET_VARIABLE, process, process),
        )
    elif not unwatched.runs:
        unwatched.secret = unwatched.secret or bytes.fromhex(offer['secret'])
        _watch(offer['address'], process, jax.process_count(), unwatched, is_known=not offer['secret'])


def _proof(secret: bytes, nonce: str) -> str:
    """What shows that two processes have one secret, or that neither has one."""
    return Session(secret, bytes.fromhex(nonce), bytes.fromhex(nonce)).signature(b'the same secret', 0).hex()


def _watch(address: str, process: int, count: int, unwatched: _Unwatched, is_known: bool = True) -> None:
    """Starts the thread that names stuck processes."""
    timeout, heartbeat, secret = unwatched.timeout, unwatched.heartbeat, unwatched.secret
    try:
        watch = Watchdog(address, process, count, timeout, heartbeat, secret, is_known)
    except OSError as error:
        _log.warning('processes that are stuck will not be named: UDP at %s: %s', address, error)
        return
    if is_known:
        _log.info('`scalax doctor --run %s` shows what each process does', address)
    else:
        _log.info('where %s is set, `scalax doctor --run` shows what each process does', SECRET_VARIABLE)
    threading.Thread(target=watch.run, name='scalax-watch', daemon=True).start()
    exit_handler.settings.address = address
    atexit.register(setattr, recorded, 'exits', ENDING)


def should_stop(step: int) -> bool:
    """Whether the program should save and end after this step, because some process was sent SIGTERM.

    Schedulers send SIGTERM before they take a machine away. Call this once a step on every process, with the
    same numbers: it becomes true at the same step on all of them, a step or two later, and stays true. It
    costs two microseconds, and communicates nothing but for the first call, unless the address of process 0
    was given and is ``localhost``. End with the exit code `PREEMPTED` after saving, so that launchers can
    tell this from a failure.

    The steps are watched, too: see *step_timeout* of `initialize`.

    On one process, the first call catches SIGTERM (in the main thread, unless the program has a handler of
    its own); the second SIGTERM ends the program.

    Args:
        step: the number of the last step, ascending.

    Raises:
        ArgumentError: *step* is not an integer.
        RuntimeError: there are several processes, and JAX's ``jax_enable_preemption_service`` is off.

    Example:
        >>> from scalax import distributed
        >>> for step in range(1, 4):
        ...     if distributed.should_stop(step):  # no signal was sent
        ...         raise SystemExit(distributed.PREEMPTED)
    """
    try:
        step = operator.index(step)
    except TypeError:
        raise ArgumentError(f'should_stop: step is the number of the step, got {step!r}') from None
    record_step(step)
    if _unwatched:
        _agree_and_watch(_unwatched.pop())
    if _stop.is_set():
        return True
    if jax.distributed.is_initialized():
        if multihost_utils.reached_preemption_sync_point(step):
            _stop.set()
    elif (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _on_first)
    return _stop.is_set()


_stop = threading.Event()
_unwatched: list[_Unwatched] = []


def _on_first(signum: int, frame: FrameType | None) -> None:
    _stop.set()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the default needs no Python, so the second always works


def _read(address: str | None, count: int | None, index: int | None) -> _Given:
    """The arguments, or else the environment variables, checked."""
    given = _Given(
        address or os.environ.get('JAX_COORDINATOR_ADDRESS') or None,
        _number('num_processes', count, 'JAX_NUM_PROCESSES', 1),
        _number('process_id', index, 'JAX_PROCESS_ID', 0),
    )
    if given.count is not None and given.index is not None and given.index >= given.count:
        raise ArgumentError(
            f'process_id counts from 0 to num_processes - 1: got process_id={given.index} with '
            f'num_processes={given.count}'
        )
    if given.address is not None and not _ADDRESS.fullmatch(str(given.address)):
        raise ArgumentError(
            'coordinator_address is the host of process 0 and a port that is free there, as in '
            f"'10.0.0.1:1234', got {given.address!r}"
        )
    return given


def _number(name: str, value: object, variable: str, least: int) -> int | None:
    """An argument, or else an environment variable, as a number that is at least *least*."""
    where = name
    if value is None:
        text = os.environ.get(variable)
        if not text:
            return None
        where, value = variable, int(text) if text.removeprefix('-').isdecimal() else text
    return _whole(where, value, least)


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f'{name} is an integer, at least {least}, got {value!r}')
    return value


def _half(given: _Given) -> str:
    """What is wrong if some of the values were given and JAX detects no cluster."""
    return (
        f'initialize has coordinator_address={given.address!r}, num_processes={given.count!r} and '
        f'process_id={given.index!r}, and JAX detects no cluster that gives the rest.\n'
        'What to do: give all three, as arguments or as the environment variables JAX_COORDINATOR_ADDRESS, '
        'JAX_NUM_PROCESSES and JAX_PROCESS_ID; or none for a program of one process.'
    )


def _choose(local_device_ids: int | Sequence[int] | None) -> None:
    """Chooses the GPUs of a process that is alone, as JAX does where it joins several."""
    if local_device_ids is not None:
        ids = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
        for kind in ('cuda', 'rocm'):
            jax.config.update(f'jax_{kind}_visible_devices', ','.join(map(str, ids)))


def _warn_of_idle_gpus() -> None:
    """Warns if SLURM started one task on each node, which gets one GPU of several."""
    tasks, visible = os.environ.get('SLURM_STEP_TASKS_PER_NODE', ''), os.environ.get('CUDA_VISIBLE_DEVICES')
    count = visible.count(',') + 1 if visible else int(os.environ.get('SLURM_GPUS_ON_NODE') or 1)
    if count > 1 and re.fullmatch(r'1(\(x\d+\))?', tasks):
        _log.warning(
            'this process is the only task on its node, sees %d GPUs and uses one of them: use them all with '
            'initialize(local_device_ids=range(%d)), or start a task for each (srun --ntasks-per-node=%d)',
            *[count] * 3,
        )


def _alone(said: str) -> str:
    """What is wrong if something says that there are several processes, and JAX does not detect them."""
    return (
        f'{said}, and JAX detects no cluster: each of these processes would run alone.\n'
        'What to do: start the program with srun, or mpirun with mpi4py installed; or give '
        'coordinator_address, num_processes and process_id; or num_processes=1, if it is meant to be alone.'
    )
