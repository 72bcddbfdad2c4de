"""Reports in a terminal with colours: the same columns as the text table, at widths of 80 and 140."""

import importlib.util
import io

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from scalax.explain import ReportRow, ShardingReport
from scalax.sharding import MeshShardingHelper, TreePathShardingRule
from tests.support.leaves import leaf

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def report():
    layers = [{'attention': {'query': {'kernel': leaf(64, 256)}}, 'norm': leaf(64)} for _ in range(12)]
    tree = {'embed': leaf(512, 64), 'layers': layers, 'step': jax.ShapeDtypeStruct((), jnp.int32)}
    rules = TreePathShardingRule(('query', P('fsdp', 'tp')), ('embed', P('tp')), ('norm', P()), ('head', P()))
    return HELPER.explain(tree, rules)


def printed(report, width, **options):
    out = io.StringIO()
    Console(width=width, file=out, **options).print(report)
    return '\n'.join(line.rstrip() for line in out.getvalue().splitlines())


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self):
        return True


def test_80_columns(snapshot):
    snapshot(printed(report(), 80))


def test_140_columns(snapshot):
    snapshot(printed(report(), 140))


def test_no_line_is_longer_than_the_console():
    for width in range(60, 200, 7):
        assert max(map(len, printed(report(), width).splitlines())) <= width


@pytest.mark.parametrize('width', [60, 80, 100])
def test_without_colours_or_bars_it_is_the_text(width):
    out = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
    Console(width=width, file=out).print(report())
    out.flush()
    lines = out.buffer.getvalue().decode().splitlines()
    assert lines == report().to_text(width).splitlines()


def test_a_console_of_ascii_gets_no_bars():
    out = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
    Console(width=140, file=out).print(report())
    out.flush()
    text = out.buffer.getvalue().decode()
    assert (
        'layers/{0..11}/norm                    12 x float32[64]      replicated            3.0 KiB  regex'
        in text
    )


def test_colours():
    out = printed(report(), 140, force_terminal=True, color_system='standard', _environ={})
    assert "P(\x1b[36m'fsdp'\x1b[0m, \x1b[35m'tp'\x1b[0m)" in out
    assert '\x1b[33mreplicated' in out
    assert '\x1b[2mlayers/{0..11}\x1b[0m/norm' in out


def test_markup_in_paths_is_text():
    row = ReportRow('[red]a[/red]\x1b[31m', (8,), 'int8', P(), '[bold]rule', '', 8, 8)
    text = printed(ShardingReport((row,), {'x': 2}), 140)
    assert r'[red]a[/red]\x1b[31m  int8[8]  replicated' in text
    assert text.splitlines()[2].endswith('[bold]rule')


@pytest.fixture
def terminal(monkeypatch):
    for name in ('NO_COLOR', 'FORCE_COLOR', 'TTY_COMPATIBLE', 'TTY_INTERACTIVE', 'COLORTERM'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('TERM', 'xterm-256color')
    monkeypatch.setenv('COLUMNS', '140')
    monkeypatch.setenv('LINES', '40')
    return Terminal()


def test_print_uses_colours_on_a_terminal(terminal):
    report().print(terminal)
    assert '\x1b[33mreplicated' in terminal.getvalue()
    assert '━━━' in terminal.getvalue()


def test_print_is_plain_elsewhere(terminal, capsys):
    out = io.StringIO()
    report().print(out)
    report().print()
    assert out.getvalue() == capsys.readouterr().out == f'{report()}\n'


def test_print_does_without_rich(terminal, monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    report().print(terminal)
    assert terminal.getvalue() == f'{report()}\n'


def test_nothing_to_report():
    assert '0 arrays' in printed(ShardingReport((), {}), 80)
