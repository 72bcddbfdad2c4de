"""`scalax.plan.search`: which meshes are looked at, what becomes of each, and who wins."""

import dataclasses
import importlib.util
import io
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._search import mesh_search as module
from scalax._search.mesh_search import possible_meshes, progress
from scalax.errors import ArgumentError, MeshError, PlanError
from scalax.plan import Candidate, Search, search
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule
from tests.support import tpu_compiler

UP = TreePathShardingRule(('up', P('fsdp', 'tp')), ('down', P('tp', 'fsdp')))


def make_step(helper, rules=UP, width=1024, tokens=16384):
    """A gradient step of one block; its arguments."""

    def loss(params, x):
        return jnp.square(jnp.tanh(x @ params['up']) @ params['down']).astype('float32').mean()

    def step(params, x):
        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x))

    fun = helper.sjit(step, in_shardings=(rules, P('fsdp')), out_shardings=rules, donate_argnums=0)
    params = {
        'up': jax.ShapeDtypeStruct((width, 4 * width), 'bfloat16'),
        'down': jax.ShapeDtypeStruct((4 * width, width), 'bfloat16'),
    }
    return fun, (params, jax.ShapeDtypeStruct((tokens, width), 'bfloat16'))


# --- Which meshes there are ----------------------------------------------------------------------


@pytest.mark.parametrize('count', [1, 7, 8, 12, 64])
@pytest.mark.parametrize('names', ['a', 'ab', 'abc'])
def test_every_mesh_is_there_once(count, names):
    found = [tuple(sizes.values()) for sizes in possible_meshes(count, names)]
    every = {sizes for sizes in _grid(range(1, count + 1), len(names)) if _product(sizes) == count}
    assert len(found) == len(set(found))
    assert set(found) == every


def _grid(values, times):
    grids = [()]
    for _ in range(times):
        grids = [(*grid, value) for grid in grids for value in values]
    return grids


def _product(sizes):
    product = 1
    for size in sizes:
        product *= size
    return product


def test_constraints():
    assert [*possible_meshes(8, ['x', 'y'], {'y': 2})] == [{'x': 4, 'y': 2}]
    assert [*possible_meshes(8, ['x', 'y'], {'y': [2, 8], 'x': (1,)})] == [{'x': 1, 'y': 8}]
    assert [*possible_meshes(8, ['x', 'y'], lambda sizes: sizes['x'] > 4)] == [{'x': 8, 'y': 1}]
    with pytest.raises(ArgumentError) as raised:
        [*possible_meshes(8, ['fsdp', 'tp'], {'fdsp': 2})]
    assert str(raised.value) == "constraints name 'fdsp', which is no mesh axis (did you mean 'fsdp'?)"
    assert [*possible_meshes(8, ['x', 'y'], {'y': np.int64(2)})] == [{'x': 4, 'y': 2}]


@pytest.mark.parametrize('those', ['4', None, 2.0, ['2'], (size for size in (1, 2))])
def test_sizes_that_are_none(those):
    with pytest.raises(ArgumentError) as raised:
        [*possible_meshes(8, ['fsdp', 'tp'], {'tp': those})]
    assert str(raised.value) == (
        f"constraints of 'tp' are a size or several, such as [1, 2, 4], got {those!r}"
    )


@pytest.mark.parametrize('constraints', ['tp=4', ['tp'], 4])
def test_constraints_that_are_none(constraints):
    with pytest.raises(ArgumentError) as raised:
        [*possible_meshes(8, ['fsdp', 'tp'], constraints)]
    assert str(raised.value) == (
        "constraints are sizes by mesh axis, such as {'tp': [1, 2, 4]}, or a function of the sizes, "
        f'got {constraints!r}'
    )


@pytest.mark.parametrize(
    ('arguments', 'options', 'error', 'said'),
    [
        ((make_step, 'v5e:2x2', 'fsdp'), {}, MeshError, 'axis_names is a sequence of names, got the string '),
        ((make_step, 'v5e:2x2', ['a', 'a']), {}, MeshError, "axis names must differ, but ('a', 'a') repeats"),
        ((make_step, 'v5e:2x2', []), {}, ArgumentError, 'a search needs the names of mesh axes, such as '),
        ((None, 'v5e:2x2', ['a']), {}, ArgumentError, 'search takes a function first, which makes the step '),
        (
            (make_step, 'v5e:2x2', ['a'], UP),
            {},
            ArgumentError,
            'rules have names, each of which is tried on ',
        ),
        *(
            (
                (make_step, 'v5e:2x2', ['a']),
                {'full': full},
                ArgumentError,
                'full is how many meshes to compile',
            )
            for full in (-1, '2', True)
        ),
    ],
)
def test_arguments_of_another_kind(arguments, options, error, said):
    with pytest.raises(error) as raised:
        search(*arguments, **options)
    assert str(raised.value).startswith(said)


# --- Searches, with the real compiler ------------------------------------------------------------


@pytest.fixture(scope='module')
def found():
    return search(make_step, 'v5e:2x4', ['fsdp', 'tp'], full=1)


@tpu_compiler.needed
def test_all_meshes_are_planned_and_the_best_in_full(found):
    assert {tuple(candidate.mesh.values()) for candidate in found.candidates} == {
        *((8, 1), (4, 2), (2, 4), (1, 8))
    }
    assert [candidate.plan.quick for candidate in found.candidates] == [False, True, True, True]
    assert found.best is found.candidates[0].plan
    assert (found.interrupted, found.fits, found.candidates[0].lost) == (False, True, '')
    bounds = [candidate.plan.roofline().step_seconds.bound for candidate in found.candidates]
    assert bounds == pytest.approx(sorted(bounds), rel=0.05)
    # Both axes at work: neither gathers of whole weights nor sums of all tokens take long.
    assert found.best.mesh == {'fsdp': 2, 'tp': 4}
    assert dict(found.candidates[-1].mesh) == {'fsdp': 1, 'tp': 8}
    assert found.candidates[-1].lost.endswith('% slower, bound by ici:tp')


@tpu_compiler.needed
def test_the_table(found):
    lines = found.to_text(120).splitlines()
    assert lines[0] == '4 meshes on v5e:2x4, 4 of them planned'
    assert lines[2].split() == ['mesh', 'at', 'least', 'memory', 'outcome']
    assert lines[4].startswith('1  fsdp=2, tp=4  ') and lines[4].endswith('  best (in full)')
    assert len(lines) == 8
    assert '<td style="text-align:left">fsdp=2, tp=4</td>' in found._repr_html_()
    first = found.to_dict()['candidates'][0]
    assert (first['mesh'], first['lost'], first['plan']) == ({'fsdp': 2, 'tp': 4}, '', found.best.to_dict())


@tpu_compiler.needed
def test_what_does_not_fit_or_divide_has_lost():
    def too_large(helper):
        return make_step(helper, width=65536, tokens=1024)

    lost = search(too_large, 'v5e:2x2', ['fsdp', 'tp'], constraints={'tp': [1, 4]})
    assert not lost.fits and [candidate.plan.fits for candidate in lost.candidates] == [False, False]
    for candidate in lost.candidates:
        assert candidate.lost.startswith('does not fit: ') and candidate.lost.endswith(' GiB of 15.8 GiB')
    with pytest.raises(PlanError) as raised:
        _ = lost.best
    reasons = ''.join(f'\n- {candidate.name}: {candidate.lost}' for candidate in lost.candidates)
    assert str(raised.value) == f'no mesh was found on v5e:2x2 that the step fits on{reasons}'

    def odd(helper):
        return make_step(helper, tokens=2 * 3)

    partly = search(odd, 'v5e:2x2', ['fsdp', 'tp'], full=0)
    by_mesh = {tuple(candidate.mesh.values()): candidate for candidate in partly.candidates}
    assert by_mesh[4, 1].plan is None
    assert by_mesh[4, 1].lost == ('x: bfloat16[6, 1024]: dimension 0 of size 6 does not divide by 4 (fsdp=4)')
    assert by_mesh[2, 2].plan and by_mesh[1, 4].plan


@tpu_compiler.needed
def test_sets_of_rules():
    sets = {'both': UP, 'replicated': P()}
    found = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], sets, constraints={'tp': 2}, full=0)
    assert {candidate.name for candidate in found.candidates} == {
        *('fsdp=2, tp=2; both', 'fsdp=2, tp=2; replicated')
    }
    held = {candidate.rules: candidate.plan.memory.arguments for candidate in found.candidates}
    assert held['replicated'] > held['both']
    [only] = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], {}, constraints={'tp': 2}, full=0).candidates
    assert (only.name, only.lost) == ('fsdp=2, tp=2', '')


@tpu_compiler.needed
def test_failures_and_interruptions(monkeypatch):
    calls = []
    plan = module.make_plan

    def failing(helper, fun, args, kwargs, *, quick):
        calls.append((tuple(helper.axis_dims), quick))
        if helper.axis_dims == (4, 1):
            raise PlanError('INTERNAL: the compiler fell over\nThis is why\nand more')
        if helper.axis_dims == (2, 2):
            raise ZeroDivisionError('of the user')
        return plan(helper, fun, args, kwargs, quick=quick)

    monkeypatch.setattr(module, 'make_plan', failing)
    found = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], full=0)
    assert [(candidate.name, candidate.lost) for candidate in found.candidates] == [
        ('fsdp=1, tp=4', ''),
        ('fsdp=4, tp=1', 'INTERNAL: the compiler fell over This is why'),
        ('fsdp=2, tp=2', 'ZeroDivisionError: of the user'),
    ]

    def stopping(helper, *arguments, **options):
        if helper.axis_dims == (1, 4):
            raise KeyboardInterrupt
        return plan(helper, *arguments, **options)

    monkeypatch.setattr(module, 'make_plan', stopping)
    stopped = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], full=2)
    assert [candidate.name for candidate in stopped.candidates] == ['fsdp=2, tp=2', 'fsdp=4, tp=1']
    assert stopped.interrupted and stopped.best.quick
    assert str(stopped).startswith('2 meshes on v5e:2x2, 2 of them planned; stopped before its end\n')


@tpu_compiler.needed
def test_a_near_miss_is_compiled_in_full(monkeypatch):
    """A quick plan is not quite right: it may not say of what is near to the limit that it does not fit."""
    plan = module.make_plan
    asked = []

    def near(helper, fun, args, kwargs, *, quick):
        asked.append(quick)
        made = plan(helper, fun, args, kwargs, quick=True)
        peak = 1.05 * made.memory.limit if quick else 0.9 * made.memory.limit
        return dataclasses.replace(
            made, quick=quick, memory=dataclasses.replace(made.memory, peak=round(peak))
        )

    monkeypatch.setattr(module, 'make_plan', near)
    found = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], constraints={'tp': 2}, full=1)
    assert asked == [True, False]
    assert found.fits and not found.best.quick


@tpu_compiler.needed
@pytest.mark.parametrize(
    ('options', 'error', 'said'),
    [
        (
            {'num_slices': 2},
            ArgumentError,
            '2 slices need dcn_axis=..., the mesh axis that runs from slice to slice',
        ),
        (
            {'dcn_axis': 'dta'},
            ArgumentError,
            "dcn_axis='dta' is no mesh axis (known: 'fsdp', 'tp')",
        ),
        (
            {'constraints': {'tp': 3}},
            ArgumentError,
            'no mesh over fsdp, tp with 4 devices satisfies the constraints',
        ),
    ],
)
def test_what_cannot_be_asked(options, error, said):
    with pytest.raises(error) as raised:
        search(make_step, 'v5e:2x2', ['fsdp', 'tp'], **options)
    assert str(raised.value) == said


@tpu_compiler.needed
def test_an_unknown_topology():
    with pytest.raises(MeshError) as raised:
        search(make_step, 'v5e:2x5', ['fsdp', 'tp'])
    assert "describes no topology 'v5e:2x5'" in str(raised.value)
    assert "did you mean 'v5e:2x4'" in str(raised.value)


@tpu_compiler.needed
def test_slices():
    found = search(
        make_step,
        'v5e:2x2',
        ['fsdp', 'tp'],
        num_slices=2,
        dcn_axis='fsdp',
        constraints={'tp': [1, 8]},
        full=0,
    )
    by_mesh = {tuple(candidate.mesh.values()): candidate for candidate in found.candidates}
    assert any(name.startswith('dcn:fsdp') for name in by_mesh[8, 1].plan.roofline().parts)
    # One axis of eight has no room for two slices along the other.
    assert by_mesh[1, 8].plan is None and '2 slices' in by_mesh[1, 8].lost


# --- The value, and the bar ----------------------------------------------------------------------


def test_nothing_found():
    nothing = Search((Candidate({'x': 4}, lost='no'),), 'v5e:2x2')
    assert not nothing.fits
    assert not Search((), 'v5e:2x2').fits
    assert str(nothing).splitlines()[-1].split() == ['1', 'x=4', 'no']


@pytest.mark.parametrize('bar', [True, False])
def test_progress(bar, monkeypatch, caplog):
    find = importlib.util.find_spec
    if not bar:
        monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'rich' else find(name))
    said = io.StringIO()
    monkeypatch.setattr(sys, 'stderr', said)
    caplog.set_level(logging.INFO, 'scalax.search')
    with progress(2, shown=None) as advance:
        advance('fsdp=4')
    assert (said.getvalue(), caplog.messages) == ('', [])  # nobody looks
    monkeypatch.setenv('FORCE_COLOR', '1')  # rich asks the terminal, which there is none of
    with progress(2, shown=True) as advance:
        advance('fsdp=4')
        advance('fsdp=2')
    if bar:
        assert 'fsdp=2' in said.getvalue()
    else:
        assert caplog.messages == ['planning fsdp=4', 'planning fsdp=2']
