"""Multi-process programs: `initialize` connects the processes, and `should_stop` stops them at the same step.

`initialize` extends ``jax.distributed.initialize``: it also works with a single process, uses shorter
timeouts to detect lost processes, logs which processes are missing, and starts a watchdog that names stuck
processes.
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
"""The exit code of a program that saved and stopped after a SIGTERM (EX_TEMPFAIL of sysexits.h)."""

_ADDRESS = re.compile(r'[^/\s]+:\d+')  # a host and a port; with a URL, JAX would wait until the timeout
_FIRST, _REPEAT = 1.0, 15.0  # seconds before the first message about waiting, and between messages

_log = logging.getLogger('scalax.distributed')


# The variables in which launchers pass the index of a process and the number of processes. JAX reads them
# itself (and queries the metadata server of a TPU, or Kubernetes). This module uses them in messages, and to
# distinguish a single process from a process that JAX should have connected with others.
_LAUNCHERS = {
    'SLURM_PROCID': 'SLURM_NTASKS',
    'OMPI_COMM_WORLD_RANK': 'OMPI_COMM_WORLD_SIZE',
    'TPU_WORKER_ID': '',
    'JOB_COMPLETION_INDEX': '',
}


def _launcher() -> tuple[str, str] | None:
    """Returns the names of the two variables of the launcher that started this process, if any."""
    return next((pair for pair in _LAUNCHERS.items() if pair[0] in os.environ), None)


@dataclasses.dataclass(frozen=True)
class _ProcessSettings:
    """The coordinator address, number of processes and process index, from arguments or the environment.

    They are None if not set. JAX then detects them.
    """

    address: str | None
    count: int | None
    index: int | None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is set."""
        return self.address is None and self.count is None and self.index is None

    def __str__(self) -> str:
        """Describes which process waits at which address, for log messages."""
        index: object = self.index
        count: object = self.count
        if launcher := _launcher():
            index = os.environ[launcher[0]] if index is None else index
            count = os.environ.get(launcher[1]) if count is None else count
        process = 'this process' if index is None else f'process {index}'
        total = '' if count is None else f' of {count}'
        address = 'the address that JAX detects' if self.address is None else self.address
        return f'{process}{total}: waiting for the other processes at {address}'


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
    """Connects this process with the other processes, as `jax.distributed.initialize`.

    Call it at the start of a program. It does nothing for a single process (if no argument is set and JAX
    detects no cluster, or with ``num_processes=1``), and if it has been called before. While it waits for
    other processes, it logs warnings to the logger ``scalax.distributed``, which Python prints on stderr by
    default.

    Args:
        coordinator_address: ``'host:port'`` of process 0, with a free port on that host. The default is the
            environment variable ``JAX_COORDINATOR_ADDRESS``, or the address that JAX detects (SLURM, Open
            MPI, TPU, Kubernetes).
        num_processes: the number of processes. The default is ``JAX_NUM_PROCESSES``, or the number that JAX
            detects.
        process_id: the index of this process, from 0. The default is ``JAX_PROCESS_ID``, or the index that
            JAX detects.
        local_device_ids: the GPUs of this process, if several processes share a host.
        cluster_detection_method: passed to JAX, such as ``'mpi4py'``. ``'deactivate'`` disables the
            detection.
        initialization_timeout: the number of seconds to wait for the other processes. JAX then ends this
            process.
        heartbeat_timeout: the number of seconds after which a process without a sign of life counts as lost.
            JAX then ends all other processes. JAX's default is 100.
        shutdown_timeout: the number of seconds that a process waits for the others before it exits. JAX's
            default is 300.
        step_timeout: the number of seconds that a step may take, measured between calls of `should_stop` or
            `scalax.checkpoint.Checkpointer.save`. After that time, every process logs which process is
            stuck. The default is ten times the median of the last steps, but at least twice the longest step
            and 30 seconds. The first steps, which compile, may take 300 seconds. 0 disables the watchdog, for
            which process 0 opens a UDP port.
        secret: the text with which processes on several hosts sign the watchdog's messages. It has to be
            equal on all processes and hard to guess. The default is the environment variable
            ``SCALAX_RUN_TOKEN``. Without a secret, the watchdog starts at the first call of `should_stop`,
            with a secret that process 0 generates.

    Raises:
        ArgumentError: some of the first three arguments are missing, or contradict each other; JAX detects no
            cluster by *cluster_detection_method*; or the secret is too short.
        RuntimeError: JAX has been used before this call, or cannot connect.

    Example:
        >>> from scalax import distributed
        >>> distributed.initialize()  # does nothing in a single process
    """
    if jax.distributed.is_initialized():
        return
    settings = _process_settings(coordinator_address, num_processes, process_id)
    token = resolve_secret('initialize', secret)
    for name, seconds in (
        ('initialization_timeout', initialization_timeout),
        ('heartbeat_timeout', heartbeat_timeout),
        ('shutdown_timeout', shutdown_timeout),
        ('step_timeout', step_timeout or 1),
    ):
        _checked_integer(name, seconds, 1)
    if settings.count == 1:
        _select_gpus(local_device_ids)
        return
    method = None if cluster_detection_method == 'deactivate' else cluster_detection_method
    if settings.is_empty and local_device_ids is None:
        _warn_about_idle_gpus()
    may_be_single = settings.is_empty and method is None and local_device_ids is None and _launcher() is None

    def log_waiting(seconds: float) -> None:
        _log.warning('%s (%.0f of %g s)', settings, seconds, initialization_timeout)

    try:
        with call_periodically(log_waiting, _FIRST, _REPEAT):
            jax.distributed.initialize(
                settings.address,
                settings.count,
                settings.index,
                local_device_ids=local_device_ids,
                cluster_detection_method=cluster_detection_method,
                initialization_timeout=initialization_timeout,
                heartbeat_timeout_seconds=heartbeat_timeout,
                shutdown_timeout_seconds=shutdown_timeout,
            )
    except ValueError as error:
        if not error_texts.lacks_cluster(error):
            raise
        if not settings.is_empty:
            raise ArgumentError(_incomplete_settings(settings)) from None
        if method is not None:
            raise ArgumentError(_no_cluster(f'cluster_detection_method={method!r}')) from None
        if (launcher := _launcher()) and (count := os.environ.get(launcher[1]) or '1') != '1':
            raise ArgumentError(_no_cluster(f'{launcher[1]}={count}')) from None
        _select_gpus(local_device_ids)
    except KeyError as error:  # the detection method reads a variable that is not set
        if method is None:
            raise
        raise ArgumentError(_no_cluster(f'cluster_detection_method={method!r}')) from error
    except RuntimeError as error:
        # It is too late to connect, but this is a single process, which needs no connection. A TPU may be
        # part of a pod although no environment variable is set.
        if not may_be_single or not error_texts.is_late(error) or jax.default_backend() == 'tpu':
            raise
    exit_handler.settings.timeout = shutdown_timeout
    if step_timeout != 0 and jax.distributed.is_initialized():
        _start_or_defer_watchdog(settings, _WatchdogSettings(step_timeout, heartbeat_timeout, token))


@dataclasses.dataclass
class _WatchdogSettings:
    """The settings of the watchdog, on which processes may have to agree at the first call of `should_stop`.

    Attributes:
        timeout: the timeout of a step.
        heartbeat: JAX's heartbeat timeout.
        secret: the secret of this process, or empty without one.
        address: the address of process 0, or empty if JAX has detected it, which does not reveal it.
        is_running: whether the watchdog of this process has started.
    """

    timeout: int | None
    heartbeat: float
    secret: bytes
    address: str = ''
    is_running: bool = False


def _start_or_defer_watchdog(processes: _ProcessSettings, watchdog: _WatchdogSettings) -> None:
    """Starts the watchdog, or defers it to the first step if process 0's address or the secret is unknown.

    On several hosts the processes communicate at the first step in any case, because otherwise processes that
    differ in their settings would deadlock.
    """
    if not (processes.address and processes.count and processes.index is not None):
        _deferred_watchdogs.append(watchdog)
        return
    is_single_host = names_loopback(processes.address.rpartition(':')[0])
    if is_single_host or watchdog.secret:
        _start_watchdog(processes.address, processes.index, processes.count, watchdog)
    elif processes.index == 0:
        _log.warning(
            '%s is not set: processes that are stuck are named only from the first call of should_stop on, '
            'and `scalax doctor --run` gets no answer. Set it to one secret for all processes, such as %s '
            'makes',
            *(SECRET_VARIABLE, COMMAND),
        )
    if not is_single_host:
        watchdog.address, watchdog.is_running = processes.address, bool(watchdog.secret)
        _deferred_watchdogs.append(watchdog)


def _start_deferred_watchdog(watchdog: _WatchdogSettings) -> None:
    """Starts the watchdog at the first step, with the address of process 0. Every process has to call it.

    If process 0 has no secret, it generates one for this run and broadcasts it like arrays: whoever can read
    the arrays has all data of the run anyway. The user's secret is never sent. Process 0 sends a proof that
    it has the secret.
    """
    process, offer = jax.process_index(), {}
    if process == 0:
        address, nonce = watchdog.address or local_address(), new_nonce().hex()
        offer = {'address': address, 'nonce': nonce, 'proof': _proof(watchdog.secret, nonce)}
        offer['secret'] = '' if watchdog.secret else secrets.token_hex()
    with jax.transfer_guard('allow'):  # the training loop may be under a stricter guard
        text = process_collectives.broadcast_bytes(
            process_collectives.all_processes(), 0, json.dumps(offer).encode()
        )
    offer = json.loads(text)
    if offer['proof'] != _proof(watchdog.secret, offer['nonce']):
        _log.warning(
            '%s of process %d is not that of process 0, or one of the two has none: process %d will not be '
            'named if it is stuck. Set it to the same secret for all processes',
            *(SECRET_VARIABLE, process, process),
        )
    elif not watchdog.is_running:
        watchdog.secret = watchdog.secret or bytes.fromhex(offer['secret'])
        is_user_secret = not offer['secret']
        _start_watchdog(offer['address'], process, jax.process_count(), watchdog, is_user_secret)


def _proof(secret: bytes, nonce: str) -> str:
    """Returns a signature that is equal for processes with the same secret, and for processes without one."""
    return Session(secret, bytes.fromhex(nonce), bytes.fromhex(nonce)).signature(b'the same secret', 0).hex()


def _start_watchdog(
    address: str, process: int, count: int, settings: _WatchdogSettings, is_user_secret: bool = True
) -> None:
    """Starts the thread that names stuck processes."""
    timeout, heartbeat, secret = settings.timeout, settings.heartbeat, settings.secret
    try:
        watchdog = Watchdog(address, process, count, timeout, heartbeat, secret, is_user_secret)
    except OSError as error:
        _log.warning('processes that are stuck will not be named: UDP at %s: %s', address, error)
        return
    if is_user_secret:
        _log.info('`scalax doctor --run %s` shows what each process does', address)
    else:
        _log.info('where %s is set, `scalax doctor --run` shows what each process does', SECRET_VARIABLE)
    threading.Thread(target=watchdog.run, name='scalax-watch', daemon=True).start()
    exit_handler.settings.address = address
    atexit.register(setattr, recorded, 'exits', ENDING)


def should_stop(step: int) -> bool:
    """Returns whether the program should save and stop after this step, because a process got SIGTERM.

    Schedulers send SIGTERM before they take a machine away. Call this function once per step on every
    process, with the same step numbers. It becomes true at the same step on all processes, a step or two
    after the signal, and stays true. After saving, exit with the code `PREEMPTED`, by which launchers can
    tell a preemption from a failure.

    A call takes two microseconds. Only the first call communicates, unless *coordinator_address* of
    `initialize` is on ``localhost``. The calls also measure the steps for the watchdog: see *step_timeout* of
    `initialize`.

    In a single process, the first call installs a handler for SIGTERM (in the main thread, unless the program
    has a handler). The second SIGTERM ends the program.

    Args:
        step: the number of the last step. It has to increase.

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
    if _deferred_watchdogs:
        _start_deferred_watchdog(_deferred_watchdogs.pop())
    if _stop.is_set():
        return True
    if jax.distributed.is_initialized():
        if multihost_utils.reached_preemption_sync_point(step):
            _stop.set()
    elif (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _on_first_sigterm)
    return _stop.is_set()


_stop = threading.Event()
_deferred_watchdogs: list[_WatchdogSettings] = []


def _on_first_sigterm(signum: int, frame: FrameType | None) -> None:
    _stop.set()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the default handler works even if Python code is stuck


def _process_settings(address: str | None, count: int | None, index: int | None) -> _ProcessSettings:
    """Returns the settings from the arguments or the environment variables, after checking them."""
    settings = _ProcessSettings(
        address or os.environ.get('JAX_COORDINATOR_ADDRESS') or None,
        _integer_setting('num_processes', count, 'JAX_NUM_PROCESSES', 1),
        _integer_setting('process_id', index, 'JAX_PROCESS_ID', 0),
    )
    if settings.count is not None and settings.index is not None and settings.index >= settings.count:
        raise ArgumentError(
            f'process_id counts from 0 to num_processes - 1: got process_id={settings.index} with '
            f'num_processes={settings.count}'
        )
    if settings.address is not None and not _ADDRESS.fullmatch(str(settings.address)):
        raise ArgumentError(
            'coordinator_address is the host of process 0 and a port that is free there, as in '
            f"'10.0.0.1:1234', got {settings.address!r}"
        )
    return settings


def _integer_setting(name: str, value: object, variable: str, least: int) -> int | None:
    """Returns an argument, or an environment variable, as an integer that is at least *least*."""
    if value is not None:
        return _checked_integer(name, value, least)
    text = os.environ.get(variable)
    if not text:
        return None
    value = int(text) if text.removeprefix('-').isdecimal() else text
    return _checked_integer(variable, value, least)


def _checked_integer(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f'{name} is an integer, at least {least}, got {value!r}')
    return value


def _incomplete_settings(settings: _ProcessSettings) -> str:
    """Returns the message for the case that only some settings are set and JAX detects no cluster."""
    return (
        f'initialize has coordinator_address={settings.address!r}, num_processes={settings.count!r} and '
        f'process_id={settings.index!r}, and JAX detects no cluster that gives the rest.\n'
        'What to do: give all three, as arguments or as the environment variables JAX_COORDINATOR_ADDRESS, '
        'JAX_NUM_PROCESSES and JAX_PROCESS_ID; or none for a program of one process.'
    )


def _select_gpus(local_device_ids: int | Sequence[int] | None) -> None:
    """Selects the GPUs of a single process, as JAX does when it connects several processes."""
    if local_device_ids is not None:
        ids = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
        for kind in ('cuda', 'rocm'):
            jax.config.update(f'jax_{kind}_visible_devices', ','.join(map(str, ids)))


def _warn_about_idle_gpus() -> None:
    """Warns if SLURM started one task per node with several GPUs, of which the task would use one."""
    tasks, visible = os.environ.get('SLURM_STEP_TASKS_PER_NODE', ''), os.environ.get('CUDA_VISIBLE_DEVICES')
    count = visible.count(',') + 1 if visible else int(os.environ.get('SLURM_GPUS_ON_NODE') or 1)
    if count > 1 and re.fullmatch(r'1(\(x\d+\))?', tasks):
        _log.warning(
            'this process is the only task on its node, sees %d GPUs and uses one of them: use them all with '
            'initialize(local_device_ids=range(%d)), or start a task for each (srun --ntasks-per-node=%d)',
            *[count] * 3,
        )


def _no_cluster(setting: str) -> str:
    """Returns the message about a setting that implies several processes if JAX detects no cluster."""
    return (
        f'{setting}, and JAX detects no cluster: each of these processes would run alone.\n'
        'What to do: start the program with srun, or mpirun with mpi4py installed; or give '
        'coordinator_address, num_processes and process_id; or num_processes=1, if it is meant to be alone.'
    )
