"""Tests of published GPU training steps: their sizes, and plans, which take less time than published."""

import math

import pytest

from benchmarks.published import steps, table
from benchmarks.published.decoder import Decoder
from benchmarks.published.steps import PUBLISHED, WINNERS
from benchmarks.published.table import Judged
from tests.support import ROOT, gpu_compiler


def on_the_page() -> dict[str, list[str]]:
    """Returns the cells of the rows of table.md, by the name of the step."""
    page = (ROOT / 'benchmarks' / 'published' / 'table.md').read_text(encoding='utf-8')
    rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in page.splitlines() if '|' in line]
    return {row[0]: row[1:] for row in rows if row and row[0] in PUBLISHED}


@pytest.mark.parametrize(
    ('model', 'parameters', 'within'),
    [
        # KempnerForge's "Parameters", LLM Foundry's "NumParams" (which has positions too), marin's "total".
        (steps.LLAMA3_8B, 8.03e9, 1e-3),
        (steps.LLAMA3_13B, 14.84e9, 1e-3),
        (steps.LLAMA3_70B, 70.55e9, 1e-3),
        (steps.MPT_7B, 6_658_859_008, 2e-3),
        (steps.MPT_13B, 12_853_954_560, 2e-3),
        (steps.MPT_30B, 29_975_214_080, 2e-3),
        (steps.MPT_70B, 64_862_437_376, 2e-3),
        (steps.GRUG_360B, 359.6e9, 2e-3),
    ],
)
def test_models_have_the_published_parameters(model: Decoder, parameters: float, within: float) -> None:
    assert model.parameters == pytest.approx(parameters, rel=within)


def test_the_page_has_a_row_for_each_published_step() -> None:
    """The rows have the order of `PUBLISHED` and its seconds, which exceed the lower bound of the plan."""
    rows = on_the_page()
    assert list(rows) == list(PUBLISHED)
    for name, step in PUBLISHED.items():
        assert float(rows[name][2]) == pytest.approx(step.seconds, rel=0.006)
        assert float(rows[name][0]) < step.seconds


def test_the_documentation_has_some_of_the_rows() -> None:
    page = (ROOT / 'docs' / 'estimates.md').read_text(encoding='utf-8').splitlines()
    table = (ROOT / 'benchmarks' / 'published' / 'table.md').read_text(encoding='utf-8').splitlines()
    rows = [line for line in page if line.split(' | ')[0].strip('| ') in PUBLISHED]
    assert len(rows) >= 10 and {*rows} <= {*table}


def test_compared_steps_run_on_the_same_gpus() -> None:
    for names in WINNERS:
        fast, slow = (PUBLISHED[name] for name in names)
        assert (fast.model, fast.topology, fast.devices) == (slow.model, slow.topology, slow.devices)
        assert fast.seconds / fast.tokens < slow.seconds / slow.tokens


def test_lines() -> None:
    """Ratios are of tokens per second; without times of the compiler there is no schedule."""
    names = WINNERS[1]
    assert [PUBLISHED[name].tokens for name in names] == [131_072, 32_768]
    judged = {
        names[0]: Judged(PUBLISHED[names[0]], 2.0, 2.5, 3.0),
        names[1]: Judged(PUBLISHED[names[1]], 0.5, 0.85, None),
    }
    lines = list(table.lines(judged))
    assert lines[2:4] == [
        f'| {names[0]} | 2.00 | 3.00 | 3.36 | 2.50 |',
        f'| {names[1]} | 0.500 | - | 1.30 | 0.850 |',
    ]
    assert lines[4] == '\nmedian error of 1 schedules: 11%'
    assert lines[7:] == ['| KempnerForge, Llama 3 7B, 4 H200 | FSDP | TP 4 | 1.55 | 1.20 | - |']


def planned(name: str) -> Judged:
    """Compares a step with its plan: the page has its bound, and bound < schedule < published seconds."""
    judged = Judged.of(PUBLISHED[name])
    assert judged.bound == pytest.approx(float(on_the_page()[name][0]), rel=0.01)
    assert judged.bound < judged.step.seconds
    if judged.scheduled is not None:
        assert judged.bound < judged.scheduled < judged.step.seconds
    return judged


@pytest.mark.slow
@gpu_compiler.needed
def test_a_published_step_takes_longer_than_its_schedule() -> None:
    judged = planned('KempnerForge, Llama 3 7B, 4 H200, FSDP x TP 2')
    assert judged.scheduled is not None
    assert judged.bound < judged.estimate < math.inf


@gpu_compiler.needed
@pytest.mark.slow
def test_published_steps_take_longer_than_their_schedules_and_winners_are_planned() -> None:
    """At least 9 of 10 pairs of layouts are planned in the order in which they were measured."""
    judged = {name: planned(name) for name in PUBLISHED}
    pairs = [(judged[fast], judged[slow]) for fast, slow in WINNERS]
    right = [fast.objective / fast.step.tokens < slow.objective / slow.step.tokens for fast, slow in pairs]
    assert sum(right) >= 0.9 * len(right)
