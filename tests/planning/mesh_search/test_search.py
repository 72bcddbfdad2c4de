"""`scalax.plan.search`: the meshes that it tries, their outcomes, and the best one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from scalax._planning.mesh_search import search as module
from scalax._planning.mesh_search.meshes import possible_meshes
from scalax._planning.mesh_search.objective import reason_of_failure
from scalax.errors import ArgumentError, MeshError, PlanError, ShardingError
from scalax.plan import Candidate, SearchResult, search
from scalax.sharding import PartitionSpec as P
from scalax.sharding import Pipeline, TreePathShardingRule
from tests.support import tpu_compiler

UP = TreePathShardingRule(('up', P('fsdp', 'tp')), ('down', P('tp', 'fsdp')))


def make_step(helper, rules=UP, width=1024, tokens=16384):
    """Returns a gradient step of one block, and its arguments."""

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
    result = [tuple(sizes.values()) for sizes in possible_meshes(count, names)]
    every = {sizes for sizes in _grid(range(1, count + 1), len(names)) if _product(sizes) == count}
    assert len(result) == len(set(result))
    assert set(result) == every


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
    assert str(raised.value) == "constraints: 'fdsp' is not a mesh axis (did you mean 'fsdp'?)"
    assert [*possible_meshes(8, ['x', 'y'], {'y': np.int64(2)})] == [{'x': 4, 'y': 2}]


@pytest.mark.parametrize('those', ['4', None, 2.0, ['2'], (size for size in (1, 2))])
def test_invalid_sizes(those):
    with pytest.raises(ArgumentError) as raised:
        [*possible_meshes(8, ['fsdp', 'tp'], {'tp': those})]
    assert str(raised.value) == (
        f"constraints of 'tp' have to be a size or several, such as [1, 2, 4], got {those!r}"
    )


@pytest.mark.parametrize('constraints', ['tp=4', ['tp'], 4])
def test_invalid_constraints(constraints):
    with pytest.raises(ArgumentError) as raised:
        [*possible_meshes(8, ['fsdp', 'tp'], constraints)]
    assert str(raised.value) == (
        "constraints are given by mesh axis, such as {'tp': [1, 2, 4]}, or as a function of the sizes, "
        f'got {constraints!r}'
    )


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ((make_step, 'v5e:2x2', 'fsdp'), MeshError, 'axis_names is a sequence of names, such as '),
        ((make_step, 'v5e:2x2', ['a', 'a']), MeshError, "axis names must differ, but ('a', 'a') repeats"),
        ((make_step, 'v5e:2x2', []), ArgumentError, 'a search needs the names of mesh axes, such as '),
        ((None, 'v5e:2x2', ['a']), ArgumentError, 'search takes a function first, which makes the step '),
    ],
)
def test_arguments_of_another_kind(arguments, error, message):
    with pytest.raises(error) as raised:
        search(*arguments)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ('function', 'options', 'called', 'why'),
    [
        (lambda params, x: None, {}, '<lambda>(helper)', "(params, x): missing a required argument: 'x'"),
        (lambda: None, {}, '<lambda>(helper)', '(): too many positional arguments'),
        (
            lambda helper: None,
            {'pipelines': Pipeline('a', num_microbatches=8)},
            '<lambda>(helper, pipeline=...)',
            "(helper): got an unexpected keyword argument 'pipeline'",
        ),
    ],
)
def test_a_function_with_other_parameters(function, options, called, why):
    with pytest.raises(ArgumentError) as raised:
        search(function, 'v5e:2x2', ['a'], **options)
    assert str(raised.value) == (
        f'search calls {called}, which has the parameters {why}\n'
        'What to do: give it a function that takes these, compiles the step with the helper, and returns the '
        'step and its arguments. For a step of one device, use autoshard(step, arguments).'
    )


# --- Searches, with the real compiler ------------------------------------------------------------


@pytest.fixture(scope='module')
def result():
    return search(lambda helper: make_step(helper, tokens=10240), 'v5e:2x4', ['fsdp', 'tp'], full=1)


@pytest.mark.slow
@tpu_compiler.newest
def test_all_meshes_are_planned_and_the_best_in_full(result):
    assert {tuple(candidate.mesh.values()) for candidate in result.candidates} == {
        *((8, 1), (4, 2), (2, 4), (1, 8))
    }
    assert [candidate.plan.quick for candidate in result.candidates] == [False, True, True, True]
    assert result.best is result.candidates[0].plan
    assert (result.interrupted, result.fits, result.candidates[0].reason) == (False, True, '')
    means = [sum(candidate.plan.roofline().step_seconds) / 2 for candidate in result.candidates]
    assert means[0] == min(means) and means[1:] == sorted(means[1:])
    # With both axes, neither the gathers of full weights nor the sums over all tokens take long.
    assert result.best.mesh == {'fsdp': 2, 'tp': 4}
    assert all(candidate.reason.endswith('% slower') for candidate in result.candidates[1:])
    [alone] = [candidate for candidate in result.candidates if candidate.mesh['tp'] == 8]
    assert alone.plan.roofline().bottleneck == 'ici:tp'


@pytest.mark.medium
@tpu_compiler.newest
def test_the_table(result):
    lines = result.to_text(120).splitlines()
    assert lines[0] == '4 meshes on v5e:2x4: 4 planned quickly, 1 in full'
    assert lines[2].split() == ['rank', 'mesh', 'seconds', 'at', 'least', 'bound', 'by', 'memory', 'outcome']
    assert lines[4].startswith('   1  fsdp=2, tp=4  ') and lines[4].endswith('  best (in full)')
    assert lines[8:] == ['Ranked by quick plans. search(..., full=3) compiles the best three in full.']
    assert 'fsdp=2, tp=4' in result._repr_html_()
    first = result.to_dict()['candidates'][0]
    assert (first['mesh'], first['reason'], first['plan']) == (
        {'fsdp': 2, 'tp': 4},
        '',
        result.best.to_dict(),
    )


@pytest.mark.medium
@tpu_compiler.needed
def test_candidates_that_do_not_fit_or_divide_are_not_chosen():
    def too_large(helper):
        return make_step(helper, width=32768, tokens=65536)

    lost = search(too_large, 'v5e:2x2', ['fsdp', 'tp'], constraints={'tp': [1, 4]})
    assert not lost.fits and [candidate.plan.fits for candidate in lost.candidates] == [False, False]
    for candidate in lost.candidates:
        assert candidate.reason.startswith('does not fit: ') and candidate.reason.endswith(' GiB of 15.8 GiB')
    with pytest.raises(PlanError) as raised:
        _ = lost.best
    reasons = ''.join(f'\n- {candidate.name}: {candidate.reason}' for candidate in lost.candidates)
    assert str(raised.value) == f'the step fits on no mesh of v5e:2x2:{reasons}'

    def odd(helper):
        return make_step(helper, tokens=2 * 3)

    partly = search(odd, 'v5e:2x2', ['fsdp', 'tp'], full=0)
    by_mesh = {tuple(candidate.mesh.values()): candidate for candidate in partly.candidates}
    assert by_mesh[4, 1].plan is None
    assert by_mesh[4, 1].reason == (
        'x: bfloat16[6, 1024]: dimension 0 of size 6 is not divisible by 4 (fsdp=4)'
    )
    assert by_mesh[2, 2].plan and by_mesh[1, 4].plan


def test_an_indivisible_dimension_rules_a_candidate_out():
    mesh = jax.make_mesh((8,), ('fsdp',), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match='divide') as caught:
        jax.jit(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, P('fsdp')))).lower(np.ones(9))
    assert reason_of_failure(caught.value, 'fsdp=8').startswith('ValueError: Sharding spec')
    with pytest.raises(KeyError, match='other') as raised:
        reason_of_failure(KeyError('other'), 'fsdp=8')
    assert raised.value.__notes__ == ['This was raised by the candidate fsdp=8.']


@pytest.mark.medium
@tpu_compiler.needed
def test_failures_and_interruptions(monkeypatch):
    plan = module.plan_lowered

    def failing(step, *, quick):
        if step.mesh.devices.shape == (4, 1):
            refusal = 'INTERNAL: the compiler fell over\nThis is why\nand more'
            raise PlanError(refusal) from jax.errors.JaxRuntimeError(refusal)
        if step.mesh.devices.shape == (2, 2):
            raise ValueError('axis 0 of size 3 is not divisible by 2')
        return plan(step, quick=quick)

    monkeypatch.setattr(module, 'plan_lowered', failing)
    result = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], full=0)
    assert [(candidate.name, candidate.reason) for candidate in result.candidates] == [
        ('fsdp=1, tp=4', ''),
        ('fsdp=4, tp=1', 'INTERNAL: the compiler fell over This is why'),
        ('fsdp=2, tp=2', 'ValueError: axis 0 of size 3 is not divisible by 2'),
    ]

    def stopping(step, *, quick):
        if step.mesh.devices.shape == stopped_at:
            raise KeyboardInterrupt
        return plan(step, quick=quick)

    monkeypatch.setattr(module, 'plan_lowered', stopping)
    stopped_at = 1, 4
    stopped = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], full=2)
    assert [candidate.name for candidate in stopped.candidates] == ['fsdp=4, tp=1', 'fsdp=2, tp=2']
    assert stopped.interrupted and stopped.best.quick
    assert str(stopped).startswith('2 meshes on v5e:2x2: 2 planned quickly; stopped early, 1 not reached\n')
    stopped_at = 4, 1
    nothing = search(make_step, 'v5e:2x2', ['fsdp', 'tp'])
    assert (nothing.candidates, nothing.num_untried) == ((), 3)
    with pytest.raises(PlanError, match=r'^the search on v5e:2x2 was stopped before any mesh was planned$'):
        _ = nothing.best


@pytest.mark.medium
@tpu_compiler.needed
def test_a_search_continues_from_a_file(tmp_path, monkeypatch):
    file, plan, planned = tmp_path / 'trials.jsonl', module.plan_lowered, []
    stop_at = 2

    def counted(step, *, quick):
        if len(planned) == stop_at:
            raise KeyboardInterrupt
        planned.append((step.mesh.devices.shape, quick))
        return plan(step, quick=quick)

    monkeypatch.setattr(module, 'plan_lowered', counted)
    options = {'file': file, 'full': 1}
    stopped = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], **options)
    assert stopped.interrupted and len(stopped.candidates) == 2 == len(file.read_text().splitlines())
    with file.open('a') as out:  # as if it was killed while writing
        out.write(file.read_text()[:1000])
    stop_at = None
    result = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], **options)
    assert planned == [((4, 1), True), ((2, 2), True), ((1, 4), True), ((4, 1), False)]
    assert (result.num_quick_plans, result.num_full_plans, result.num_cached_plans) == (1, 1, 2)
    assert str(result).startswith('3 meshes on v5e:2x2: 1 planned quickly, 1 in full, 2 read from the file\n')
    again = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], **options)
    assert (len(planned), again.num_cached_plans) == (4, 4) and again.candidates == result.candidates
    # The file has no plans of another step, or with other compiler options.
    only = {'constraints': {'tp': 1}, 'full': 0, 'file': file}
    search(lambda helper: make_step(helper, tokens=8192), 'v5e:2x2', ['fsdp', 'tp'], **only)
    assert len(planned) == 5
    monkeypatch.setenv('LIBTPU_INIT_ARGS', '--xla_tpu_something=true')
    search(make_step, 'v5e:2x2', ['fsdp', 'tp'], **only)
    assert len(planned) == 6


@pytest.mark.medium
@tpu_compiler.needed
def test_damaged_plans_are_made_again(tmp_path):
    file = tmp_path / 'trials.jsonl'
    options = {'constraints': {'tp': 2}, 'full': 0, 'file': file}
    first = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], **options)
    file.write_text(file.read_text().replace('"peak"', '"beak"'))
    again = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], **options)
    assert (again.num_cached_plans, again.num_quick_plans) == (0, 1) and again.best == first.best


@tpu_compiler.needed
@pytest.mark.parametrize('mistake', [PlanError('a form that is not known'), KeyError('a mistake')])
def test_other_errors_are_no_outcomes(monkeypatch, mistake):
    """Otherwise every mesh would appear to be rejected."""

    def failing(step, *, quick):
        raise mistake

    monkeypatch.setattr(module, 'plan_lowered', failing)
    with pytest.raises(type(mistake)) as raised:
        search(make_step, 'v5e:2x2', ['fsdp', 'tp'])
    assert raised.value is mistake and 'failing' in {entry.name for entry in raised.traceback}
    assert mistake.__notes__ == ['This was raised by the candidate fsdp=4, tp=1.']

    def unmatched(helper):
        return make_step(helper, TreePathShardingRule(('no such path', P())))

    with pytest.raises(ShardingError, match='no regex of the rule matches') as raised:
        search(unmatched, 'v5e:2x2', ['fsdp', 'tp'])
    assert raised.value.__notes__ == ['This was raised by the candidate fsdp=4, tp=1.']


def _with_memory(monkeypatch, **shares):
    """Plans with these fractions of the limit: 'quick', 'full'. Returns the requested plans in order."""
    plan, planned = module.plan_lowered, []

    def near(step, *, quick):
        planned.append((*step.mesh.devices.shape, quick))
        base_plan = plan(step, quick=True)
        share = shares['quick' if quick else 'full']
        memory = dataclasses.replace(
            base_plan.memory, arguments=round(share * base_plan.memory.limit), outputs=0, temporaries=0
        )
        refusal = '' if quick or share < 1 else 'RESOURCE_EXHAUSTED'
        return dataclasses.replace(base_plan, quick=quick, refusal=refusal, memory=memory)

    monkeypatch.setattr(module, 'plan_lowered', near)
    return planned


@pytest.mark.medium
@pytest.mark.sampled(4)
@tpu_compiler.needed
@pytest.mark.parametrize('full', [None, 1])
@pytest.mark.parametrize('quick', [0.95, 1.05])
def test_near_the_limit_a_full_plan_decides(monkeypatch, quick, full):
    """A quick plan is not accurate enough to decide whether a step near the limit fits."""
    planned = _with_memory(monkeypatch, quick=quick, full=0.9)
    result = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], constraints={'tp': 2}, full=full)
    assert planned == [(2, 2, True), (2, 2, False)]
    assert result.fits and not result.best.quick
    assert (result.num_quick_plans, result.num_full_plans) == (1, 1)


@pytest.mark.medium
@tpu_compiler.needed
def test_far_from_the_limit_a_quick_plan_decides(monkeypatch):
    planned = _with_memory(monkeypatch, quick=0.9, full=0.9)
    result = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], constraints={'tp': 2})
    assert planned == [(2, 2, True)] and result.fits and result.best.quick
    planned = _with_memory(monkeypatch, quick=1.2, full=1.2)
    result = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], constraints={'tp': 2})
    assert [quick for *_, quick in planned] == [True] and not result.fits


@pytest.mark.slow
@tpu_compiler.needed
@pytest.mark.parametrize(('full', 'num_full_plans'), [(None, 1), (1, 1), (2, 2)])
def test_at_most_the_requested_number_of_full_plans_is_made(monkeypatch, full, num_full_plans):
    planned = _with_memory(monkeypatch, quick=1.05, full=0.9)
    result = search(make_step, 'v5e:2x2', ['fsdp', 'tp'], full=full)
    assert [quick for *_, quick in planned] == [True] * 3 + [False] * num_full_plans
    assert result.fits and result.num_full_plans == num_full_plans


@pytest.mark.medium
@tpu_compiler.needed
def test_full_plans_are_made_until_one_fits(monkeypatch):
    planned = _with_memory(monkeypatch, quick=0.95, full=1.05)
    result = search(make_step, 'v5e:2x2', ['fsdp', 'tp'])
    assert [quick for *_, quick in planned] == [True] * 3 + [False] * 3
    assert not result.fits and all(candidate.reason for candidate in result.candidates)
    assert [candidate.plan.refusal for candidate in result.candidates] == ['RESOURCE_EXHAUSTED'] * 3


# --- What is not compiled ------------------------------------------------------------------------


@tpu_compiler.needed
def test_steps_that_cannot_fit_are_not_compiled(monkeypatch):
    planned = _with_memory(monkeypatch, quick=0.5)

    def large(helper):
        rules = UP if helper.mesh.shape['tp'] > 1 else P()
        return make_step(helper, rules, width=65536, tokens=1024)

    result = search(large, 'v5e:4x4', ['fsdp', 'tp'], constraints={'tp': [1, 4]})
    assert planned == [(4, 4, True)] and (result.num_quick_plans, result.fits) == (1, True)
    best, lost = result.candidates
    assert (best.name, best.ruled_out, best.argument_bytes) == ('fsdp=4, tp=4', False, 4 * 2**30 + 2**25)
    assert (lost.plan, lost.ruled_out, lost.argument_bytes) == (None, True, 64 * 2**30 + 2**23)
    assert lost.reason == 'cannot fit: its arguments alone take 64.0 GiB of 15.8 GiB'
    assert result.to_text(120).splitlines()[0] == (
        '2 meshes on v5e:4x4: 1 planned quickly, 1 ruled out before compiling'
    )
    assert '>64.0 GiB' in result.to_text(160) and lost.reason in result.to_text(160)


@tpu_compiler.needed
def test_a_step_that_reads_few_of_its_arguments_is_planned():
    """It reads one row of a replicated table: reading all of it would take longer than the best mesh."""

    def look_up(helper):
        rules = P(None, 'tp') if helper.mesh.shape['tp'] > 1 else P()
        table, row = jax.ShapeDtypeStruct((65536, 8192), 'bfloat16'), jax.ShapeDtypeStruct((), 'int32')
        fun = helper.sjit(lambda t, i: jnp.tanh(t[i]), in_shardings=(rules, P()), out_shardings=P())
        return fun, (table, row)

    result = search(look_up, 'v5e:2x4', ['dp', 'tp'], constraints={'tp': [1, 8]})
    assert result.num_quick_plans == 2 and not any(candidate.ruled_out for candidate in result.candidates)
    names = [candidate.name for candidate in result.candidates]
    assert names == ['dp=8, tp=1', 'dp=1, tp=8']  # nothing is gathered


@tpu_compiler.needed
def test_bounds_are_bounds(result):
    for candidate in result.candidates:
        assert 0 < candidate.argument_bytes <= candidate.plan.memory.arguments


# --- What it takes -------------------------------------------------------------------------------


@tpu_compiler.needed
@pytest.mark.parametrize(
    ('options', 'error', 'message'),
    [
        (
            {'num_slices': 2},
            ArgumentError,
            '2 slices need dcn_axis=..., the mesh axis across slices',
        ),
        (
            {'dcn_axis': 'dta'},
            ArgumentError,
            "dcn_axis='dta' is not a mesh axis (known: 'fsdp', 'tp')",
        ),
        (
            {'constraints': {'tp': 3}},
            ArgumentError,
            'no mesh over fsdp, tp with 4 devices satisfies the constraints',
        ),
    ],
)
def test_invalid_arguments(options, error, message):
    with pytest.raises(error) as raised:
        search(make_step, 'v5e:2x2', ['fsdp', 'tp'], **options)
    assert str(raised.value) == message


@tpu_compiler.needed
def test_an_unknown_topology():
    with pytest.raises(MeshError) as raised:
        search(make_step, 'v5e:2x5', ['fsdp', 'tp'])
    assert "does not support the topology 'v5e:2x5'" in str(raised.value)
    assert "did you mean 'v5e:2x4'" in str(raised.value)


@tpu_compiler.needed
def test_slices():
    result = search(
        make_step,
        'v5e:2x2',
        ['fsdp', 'tp'],
        num_slices=2,
        dcn_axis='fsdp',
        constraints={'tp': [1, 8]},
        full=0,
    )
    by_mesh = {tuple(candidate.mesh.values()): candidate for candidate in result.candidates}
    assert any(name.startswith('dcn:fsdp') for name in by_mesh[8, 1].plan.roofline().parts)
    # One axis of eight has no room for two slices along the other.
    assert by_mesh[1, 8].plan is None and '2 slices' in by_mesh[1, 8].reason


# --- The value -----------------------------------------------------------------------------------


def test_a_search_without_results():
    nothing = SearchResult((Candidate({'x': 4}, reason='no'),), 'v5e:2x2')
    assert not nothing.fits
    assert not SearchResult((), 'v5e:2x2').fits
    assert str(nothing).splitlines()[-1].split() == ['1', 'x=4', 'no']


@pytest.mark.medium
def test_devices_that_are_here():
    result = search(
        lambda helper: make_step(helper, width=48, tokens=48),
        jax.devices()[:6],
        ['fsdp', 'tp'],
        constraints={'tp': [1, 2]},
    )
    assert result.head == '2 meshes on 6 x cpu: 2 planned'
    meshes = [(candidate.plan.mesh['fsdp'], candidate.plan.mesh['tp']) for candidate in result.candidates]
    assert sorted(meshes) == [(3, 2), (6, 1)]
    assert result.best.devices == 6
