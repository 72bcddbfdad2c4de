"""Progress lines and log messages, and when there are none."""

import contextlib
import io
import logging
import re
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scalax._core.util import progress as waiting
from scalax._core.util.progress import progress
from scalax.checkpoint import Checkpointer, load_safetensors
from scalax.sharding import MeshShardingHelper

LOG = logging.getLogger('scalax.waiting_test')


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Shortens all intervals."""
    monkeypatch.setattr(waiting, '_DELAY', 0.01)
    monkeypatch.setattr(waiting, '_LINE_INTERVAL', 0.01)
    monkeypatch.setattr(waiting, '_LOG_INTERVAL', 0.01)
    monkeypatch.setattr(waiting, '_TESTED', 'SET_BY_A_TEST')
    monkeypatch.delenv(waiting.SWITCH, raising=False)


@pytest.fixture
def terminal(monkeypatch):
    file = Terminal()
    # pytest replaces sys.stderr between this fixture and the test.
    monkeypatch.setattr(waiting, 'sys', types.SimpleNamespace(stderr=file, modules=sys.modules))
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.setenv('COLUMNS', '80')
    return file


def until(condition):
    deadline = time.monotonic() + 200  # on a busy machine
    while not condition():
        assert time.monotonic() < deadline, 'there was no message'
        time.sleep(0.002)


def on_screen(text):
    """Returns the last line of a terminal that received *text*."""
    line = ''
    for part in text.split('\r'):
        line = part + line[len(part) :]
    return line.rstrip()


def without_seconds(text):
    """The text with another number of seconds, which is 0 unless the machine is busy."""
    return re.sub(r'\d+ s$', 'N s', text)


def shows(terminal, text):
    return without_seconds(on_screen(terminal.getvalue())) == text


def waiting_threads():
    return [thread for thread in threading.enumerate() if thread.name == 'scalax-waiting']


def test_a_line_on_a_terminal(terminal):
    with progress('compiling step', LOG) as update:
        until(lambda: shows(terminal, 'compiling step ... N s'))
        update('3 of 12: fsdp=8')
        until(lambda: shows(terminal, 'compiling step 3 of 12: fsdp=8 ... N s'))
        update('')
        until(lambda: shows(terminal, 'compiling step ... N s'))
    assert on_screen(terminal.getvalue()) == ''
    assert not waiting_threads()


def test_the_line_fits_into_the_terminal(terminal, monkeypatch):
    monkeypatch.setenv('COLUMNS', '40')
    with progress('compiling ' + 60 * 'x', LOG):
        until(lambda: on_screen(terminal.getvalue()) == 'compiling ' + 29 * 'x')


def test_the_line_disappears_after_an_error(terminal, caplog):
    caplog.set_level(logging.INFO, 'scalax')
    with pytest.raises(KeyboardInterrupt), progress('compiling step', LOG):
        until(terminal.getvalue)
        raise KeyboardInterrupt
    assert on_screen(terminal.getvalue()) == ''
    assert not waiting_threads() and not caplog.messages


@pytest.mark.parametrize('where', ['pipe', 'dumb', 'pytest', 'off', 'process 1'])
def test_no_line_and_no_thread_without_a_terminal(where, terminal, monkeypatch):
    if where == 'pipe':
        monkeypatch.setattr(terminal, 'isatty', lambda: False)
    elif where == 'dumb':
        monkeypatch.setenv('TERM', 'dumb')
    elif where == 'pytest':
        monkeypatch.setattr(waiting, '_TESTED', 'PYTEST_CURRENT_TEST')
    elif where == 'off':
        monkeypatch.setenv(waiting.SWITCH, '0')
    else:
        monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
        monkeypatch.setattr(jax, 'process_index', lambda: 1)
    with progress('compiling step', LOG):
        assert not waiting_threads()
        time.sleep(0.05)
    assert terminal.getvalue() == ''


def test_the_switch_shows_the_line_anywhere(terminal, monkeypatch):
    monkeypatch.setattr(terminal, 'isatty', lambda: False)
    monkeypatch.setenv(waiting.SWITCH, '1')
    with progress('compiling step', LOG):
        until(terminal.getvalue)


def test_notebooks_show_the_line(terminal, monkeypatch):
    monkeypatch.setattr(terminal, 'isatty', lambda: False)
    shell = types.SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, 'IPython', types.SimpleNamespace(get_ipython=lambda: shell))
    with progress('compiling step', LOG):
        until(terminal.getvalue)


def test_messages_where_there_is_no_line(caplog):
    caplog.set_level(logging.INFO, 'scalax')
    updated = 'loading weights 3 of 16 GiB ... N s'
    with progress('loading weights', LOG) as update:
        update('3 of 16 GiB')
        until(lambda: [*map(without_seconds, caplog.messages)].count(updated) > 1)
    texts = [*map(without_seconds, caplog.messages)]
    before = texts.index(updated)  # a busy machine may take longer to update than until the first message
    assert set(texts[:before]) <= {'loading weights ... N s'} and set(texts[before:]) == {updated}
    assert {record.name for record in caplog.records} == {LOG.name}


def test_quick_work_is_not_reported(terminal, monkeypatch, caplog):
    monkeypatch.setattr(waiting, '_DELAY', 60.0)
    caplog.set_level(logging.INFO, 'scalax')
    for switch in '10':
        monkeypatch.setenv(waiting.SWITCH, switch)
        with progress('compiling step', LOG):
            pass
    assert terminal.getvalue() == '' and not caplog.messages


def test_only_the_outer_block_reports(terminal):
    with progress('planning', LOG), progress('compiling step', LOG) as update:
        update('2 of 3')
        until(terminal.getvalue)
        assert len(waiting_threads()) == 1
    assert 'compiling' not in terminal.getvalue()
    with progress('compiling step', LOG):
        until(lambda: 'compiling' in terminal.getvalue())


def test_only_the_first_call_reports_compilation(terminal):
    def step(x):
        until(lambda: shows(terminal, 'compiling step ... N s'))
        return x + 1

    compiled = MeshShardingHelper([-1], ['fsdp']).sjit(step)
    compiled(np.ones(8))
    output = terminal.getvalue()
    assert on_screen(output) == ''
    compiled(np.ones(8))
    assert terminal.getvalue() == output and not waiting_threads()


def test_slow_operations_report_progress(terminal, monkeypatch, tmp_path):
    pytest.importorskip('orbax.checkpoint')
    save_file = pytest.importorskip('safetensors.numpy').save_file
    helper, texts = MeshShardingHelper([-1], ['fsdp']), []

    @contextlib.contextmanager
    def first_and_last(function, delay, interval):
        function(0)
        yield
        function(1)

    monkeypatch.setattr(waiting, 'call_periodically', first_and_last)
    monkeypatch.setattr(waiting._Line, 'write', lambda self, text: texts.append(text))
    state = helper.shard({'w': np.ones((8, 4), np.float32)}, P('fsdp'))
    with Checkpointer(tmp_path / 'run') as checkpointer:
        checkpointer.save(7, state)
        checkpointer.restore(helper, P('fsdp'), state)
    saving = ['saving step 7 ... 0 s', 'saving step 7 ... 1 s', '']
    restoring = 'restoring step 7 ...'
    assert texts == [*saving, f'{restoring} 0 s', f'{restoring} 1 s', '']
    texts.clear()
    save_file({'a': np.ones(8, np.float32), 'b': np.ones(8, np.float32)}, tmp_path / 'x.safetensors')
    load_safetensors(helper, tmp_path / 'x.safetensors', P('fsdp'))
    assert texts == ['loading safetensors, 64 B ... 0 s', 'loading safetensors, 64 B ... 1 s', '']
    texts.clear()
    helper.plan(jax.jit(lambda x: x + 1), state['w'])
    assert texts == ['planning <lambda> ... 0 s', 'planning <lambda> ... 1 s', '']
