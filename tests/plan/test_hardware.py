"""The numbers of chips: each has its source, wrong and missing ones are named, users bring their own."""

import dataclasses
import math

import pytest

from scalax._plan.hardware import find_hardware
from scalax.errors import PlanError
from scalax.plan import HARDWARE, Hardware
from tests.support import ROOT

NUMBERS = [
    *('flops_per_second', 'hbm_bytes_per_second', 'hbm_bytes', 'ici_bytes_per_second', 'torus_axes'),
    *('ring_multiple', 'devices_per_chip', 'dcn_bytes_per_second', 'chips_per_host', 'hop_seconds'),
    'host_bytes_per_second',
]


@pytest.mark.parametrize('entry', HARDWARE.values(), ids=HARDWARE)
def test_every_number_has_a_source(entry):
    known = {name for name in NUMBERS if getattr(entry, name) is not None} | {
        'device_kinds',
        'ring_needs_all',
    }
    assert set(entry.sources) == known
    assert all(entry.sources.values())


# name -> what no source has
MISSING = {
    'v3': ['hbm_bytes', 'dcn_bytes_per_second', 'host_bytes_per_second'],
    'tpu7x': ['ring_multiple', 'host_bytes_per_second'],
}


@pytest.mark.parametrize('name', HARDWARE)
def test_what_is_not_known(name):
    missing = [field for field in NUMBERS if getattr(HARDWARE[name], field) is None]
    assert missing == MISSING.get(name, [])


@pytest.mark.parametrize(
    ('name', 'share'), [('v4', 6.25e9), ('v5p', 6.25e9), ('v5e', 3.125e9), ('v6e', 12.5e9)]
)
def test_bytes_between_slices(name, share):
    """https://jax-ml.github.io/scaling-book/tpus, "TPU Specs", below the tables: of one chip."""
    entry = HARDWARE[name]
    assert entry.dcn_bytes_per_second / entry.chips_per_host == share


@pytest.mark.parametrize(
    ('name', 'capacity'), [('v4', 32), ('v5p', 96), ('v5e', 16), ('v6e', 32), ('tpu7x', 192)]
)
def test_usable_memory_is_nearly_that_of_the_chip(name, capacity):
    entry = HARDWARE[name]
    assert 0.94 < entry.hbm_bytes * entry.devices_per_chip / (capacity * 2**30) < 1


def test_names_and_kinds():
    assert find_hardware(None, 'TPU v5').name == 'v5p'
    assert find_hardware(None, 'TPU v5 lite').name == 'v5e'
    assert find_hardware('v4', 'cpu').name == 'v4'
    mine = Hardware('mine')
    assert find_hardware(mine, 'cpu') is mine
    kinds = [kind for entry in HARDWARE.values() for kind in entry.device_kinds]
    assert len(kinds) == len(set(kinds))


def test_unknown_names():
    with pytest.raises(PlanError) as error:
        find_hardware('v5', 'cpu')
    assert str(error.value) == "there is no hardware 'v5' (did you mean 'v5p' or 'v5e'?)"
    with pytest.raises(PlanError) as error:
        find_hardware({'flops_per_second': 1e15}, 'cpu')
    assert str(error.value) == (
        "hardware is a scalax.plan.Hardware or the name of one, got {'flops_per_second': 1000000000000000.0}"
    )
    with pytest.raises(PlanError) as error:
        find_hardware(None, 'NVIDIA H200')
    assert str(error.value) == (
        "the numbers of 'NVIDIA H200' devices are not known: give hardware=..., a scalax.plan.Hardware of "
        "your own or one of 'v3', 'v4', 'v5e', 'v5p', 'v6e', 'tpu7x'"
    )


def test_missing_numbers_are_named():
    with pytest.raises(PlanError) as error:
        Hardware('mine').need('name', 'flops_per_second', 'hbm_bytes', 'torus_axes', for_='a roofline')
    assert str(error.value) == (
        "a roofline needs numbers that the hardware 'mine' does not have: flops_per_second, hbm_bytes, "
        'torus_axes. Add them: dataclasses.replace(hardware, flops_per_second=..., hbm_bytes=..., '
        'torus_axes=...)'
    )


def test_impossible_numbers_are_named():
    with pytest.raises(PlanError) as error:
        Hardware('mine', flops_per_second=0, hbm_bytes_per_second=math.inf, torus_axes=-1)
    assert str(error.value) == (
        "the hardware 'mine' is invalid: flops_per_second has to be more than 0, got 0; hbm_bytes_per_second "
        'has to be more than 0, got inf; torus_axes has to be at least 0, got -1'
    )
    assert Hardware('mine', torus_axes=0, ring_multiple=0, hop_seconds=0).torus_axes == 0


def test_numbers_that_are_none_are_named():
    with pytest.raises(PlanError) as error:
        Hardware('mine', flops_per_second='1e15', torus_axes=True, chips_per_host=2.5)
    assert str(error.value) == (
        "the hardware 'mine' is invalid: flops_per_second has to be a number, got '1e15'; "
        'torus_axes has to be a number, got True; chips_per_host has to be a whole number, got 2.5'
    )


def test_entries_are_values():
    changed = dataclasses.replace(HARDWARE['v5p'], ici_bytes_per_second=8e10)
    assert changed != HARDWARE['v5p']
    assert changed == dataclasses.replace(HARDWARE['v5p'], ici_bytes_per_second=8e10)
    assert hash(changed) == hash(dataclasses.replace(HARDWARE['v5p'], ici_bytes_per_second=8e10))


def test_the_table_of_the_documentation():
    lines = (ROOT / 'docs' / 'planning.md').read_text(encoding='utf-8').splitlines()
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line.startswith('|')]
    [names] = [row[1:-1] for row in rows if 'v5p' in row]
    assert names == list(HARDWARE)
    shown = {
        row[0].split('`')[1]: row[1:-1]
        for row in rows
        if row[0].startswith('`') and len(row) == len(names) + 2
    }
    assert set(shown) == {*NUMBERS, 'ring_needs_all'}
    for field, cells in shown.items():
        for entry, cell in zip(HARDWARE.values(), cells, strict=True):
            value = getattr(entry, field)
            if field == 'hbm_bytes' and value is not None:
                value = round(value / 2**30, 2)
            known = None if cell == '-' else cell == 'True' if field == 'ring_needs_all' else float(cell)
            assert known == value, (field, entry.name)
