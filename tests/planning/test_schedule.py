"""The time of the compiler's schedule: asynchronous operations, waits, and the times of kernels."""

import dataclasses
import math
import re

import jax
import pytest

from scalax._core.render import blocks
from scalax._planning.compiler.compilation import CUBLAS_OPTIONS
from scalax._planning.program.hlo import parse
from scalax._planning.report.make_plan import nccl_collective_seconds
from scalax._planning.report.plan_page import plan_blocks
from scalax._planning.report.timeline import Timeline
from scalax._planning.time.schedule import _ACHIEVABLE, _SCATTERED_FACTOR, CUDNN_FACTORS, schedule_of
from scalax._planning.time.schedule import COST_MODEL_OPTION as OPTION
from scalax.plan import Plan
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import executable_reader, gpu_compiler
from tests.support.gpu_programs import NOT_MODELLED, PROGRAMS, recorded_plan
from tests.support.recorded import recorded

MODELLED = [name for name in PROGRAMS if name.split()[-1] not in NOT_MODELLED]
US = 1e-6
# Kernels reach 1e12 FLOPs and 1e9 bytes per second.
FLOPS_RATE, HBM_RATE, HOST_RATE = 1e12 / _ACHIEVABLE, 1e9 / _ACHIEVABLE, 1e8


def cost(**times):
    """Returns the metadata with which XLA annotates a kernel with its modeled times, in microseconds."""
    written = ','.join(
        f'{{"exec_time_us":{time},"compute_time_us":0,"name":"{name.replace("_", "-")}"}}'
        for name, time in times.items()
    )
    return f'backend_config={{"operation_queue_id":"0","reification_cost":[{written}]}}'


def of(text, collectives=()):
    """Returns the schedule of a program whose collectives take these microseconds."""
    links = {('main', name): (kind, time * US) for name, (kind, time) in dict(collectives).items()}
    module = parse(f'HloModule made, is_scheduled=true\n{text}', True)
    return schedule_of(module, FLOPS_RATE, HBM_RATE, HOST_RATE, links)


def rows(schedule):
    return {row.name: (row.count, pytest.approx(row.seconds / US)) for row in schedule.kernels}


FUSED = """
%fused (p: f32[250]) -> f32[250] {
  %p = f32[250] parameter(0)
  ROOT %n = f32[250] negate(%p)
}
"""
GATHER = 'replica_groups={{0,1}}, dimensions={0}'


def fusion(name, operand, time):
    return f'%{name} = f32[250] fusion(%{operand}), kind=kLoop, calls=%fused, {cost(sol=time)}'


OVERLAPPED = f"""
{FUSED}
ENTRY %main (x: f32[250]) -> f32[250] {{
  %x = f32[250] parameter(0)
  {fusion('first', 'x', 3)}
  %one = (f32[250], f32[500]) all-gather-start(%first), {GATHER}
  %two = (f32[250], f32[500]) all-gather-start(%x), {GATHER}
  {fusion('beside', 'x', 5)}
  %end = f32[500] all-gather-done(%one)
  %last = f32[500] all-gather-done(%two)
  ROOT {fusion('after', 'x', 2)}
}}
"""


@pytest.mark.parametrize(
    ('first_us', 'second_us', 'waits'),
    [(4, 1, 0), (4, 1.5, 0.5), (7, 1, 3), (7, 4, 6), (0, 9, 4)],
    ids=['beside', 'second', 'first', 'both', 'sequential'],
)
def test_collectives_overlap_kernels_but_not_each_other(first_us, second_us, waits):
    schedule = of(OVERLAPPED, {'one': ('all-gather', first_us), 'two': ('all-gather', second_us)})
    assert schedule.seconds == pytest.approx((10 + waits) * US)
    assert schedule.waiting == pytest.approx(waits * US)


def test_a_collective_that_is_not_asynchronous():
    text = OVERLAPPED.replace('(f32[250], f32[500]) all-gather-start(%x)', 'f32[500] all-gather(%x)')
    text = text.replace('  %last = f32[500] all-gather-done(%two)\n', '')
    schedule = of(text, {'one': ('all-gather', 4), 'two': ('all-gather', 6)})
    assert schedule.seconds == pytest.approx(20 * US)
    assert rows(schedule)['wait: all-gather'] == (1, 10)


def test_copies_of_one_direction_wait_for_each_other():
    """Each copies 1,000 bytes over a link of 100 MB/s.

    A copy within device memory, 2,000 bytes at 1 GB/s, does not overlap with kernels.
    """
    array, host = 'f32[250]{0}', 'f32[250]{0:S(5)}'
    moved = f"""
{FUSED}
ENTRY %main (x: {array}, h: {host}) -> {array} {{
  %x = {array} parameter(0)
  %h = {host} parameter(1)
  %one = ({host}, {array}, u32[]) copy-start(%x)
  %two = ({host}, {array}, u32[]) copy-start(%x)
  %back = ({array}, {host}, u32[]) copy-start(%h)
  %inside = ({array}, {array}, u32[]) copy-start(%x)
  {fusion('beside', 'x', 2)}
  %inside_is = {array} copy-done(%inside)
  %back_is = {array} copy-done(%back)
  %one_is = {host} copy-done(%one)
  %two_is = {host} copy-done(%two)
  ROOT {fusion('after', 'back_is', 3)}
}}
"""
    schedule = of(moved)
    assert schedule.seconds == pytest.approx((20 + 3) * US)
    # Waits for the copy from the host, then for the second copy to it; the first one overlapped.
    assert rows(schedule) == {
        'inside': (1, 1),  # the bytes that it reads, and writes
        'beside': (1, 2),
        'inside_is': (1, 1),
        'wait: copy': (2, 16),
        'after': (1, 3),
    }


@pytest.mark.parametrize(
    ('kind', 'costs', 'time'),
    [
        ('kLoop', {'': 4, 'sol': 5}, 5),
        ('kLoop', {'': 4, 'sol': 0.01}, 2),
        ('kCustom', {'': 4, 'sol': 5, 'indexing_cost_model': 6}, 5),
        ('kCustom', {'': 4, 'indexing_cost_model': 6, 'sol': 0.01}, 6),
        ('kCustom', {'': 4, 'sol': 0.01}, 2),
        ('kLoop', {}, 2),
        ('kLoop', {'': 4, 'sol': 32}, 2 * _ACHIEVABLE * _SCATTERED_FACTOR),
        ('kCustom', {'': 4, 'sol': 32}, 2 * _ACHIEVABLE * _SCATTERED_FACTOR),
    ],
)
def test_which_time_counts(kind, costs, time):
    """Without a modeled time, or if it is too short, the lower bound counts; at most a multiple of it.

    The lower bound is the time of two arrays of 1,000 bytes at 1 GB/s, or slightly more.
    """
    text = f"""
{FUSED}
ENTRY %main (x: f32[250]) -> f32[250] {{
  %x = f32[250] parameter(0)
  {fusion('first', 'x', 3)}
  ROOT %r = f32[250] fusion(%first), kind={kind}, calls=%fused, {cost(**costs)}
}}
"""
    assert rows(of(text)) == {'first': (1, 3), 'r': (1, time)}
    assert [row.bound for row in of(text).kernels] == pytest.approx([2 * US * _ACHIEVABLE] * 2)


@pytest.mark.parametrize(
    ('name', 'library'), [('attention h100', '__cudnn$fmha'), ('convolutions h100', '__cudnn$conv')]
)
def test_kernels_of_cudnn_take_several_times_the_least(name, library):
    kernels = [row for row in recorded_plan(name).schedule.kernels if row.name.startswith(library)]
    assert kernels
    for row in kernels:
        assert row.seconds == pytest.approx(CUDNN_FACTORS[library] * row.bound)


def test_a_library_in_a_fusion_has_the_time():
    """XLA models matmuls, but not fusions that write their results into a slice of an array."""
    product = 'custom-call(%p, %p), custom_call_target="__cublas$lt$matmul"'
    numbers = '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
    inside = cost(sol=7).replace('{"operation', f'{{{numbers},"operation')
    text = f"""
%fused (p: f32[10,10]) -> f32[10,10] {{
  %p = f32[10,10] parameter(0)
  ROOT %n = f32[10,10] {product}, {inside}
}}

ENTRY %main (x: f32[10,10]) -> f32[10,10] {{
  %x = f32[10,10] parameter(0)
  ROOT %r = f32[10,10] fusion(%x), kind=kCustom, calls=%fused, {cost(sol=0.01, none=500)}
}}
"""
    [row] = of(text).kernels
    assert (row.name, row.seconds) == ('r', pytest.approx(7 * US))
    assert row.bound == pytest.approx(0.8 * US * _ACHIEVABLE)  # 800 bytes; 2,000 FLOPs take 0.002


@pytest.mark.medium
@pytest.mark.parametrize(
    ('types', 'time'),
    [
        (('bf16', 'bf16', 'bf16'), 640),
        (('f32', 'f32', 'f32'), 640),
        (('f8e4m3fn', 'f8e5m2', 'bf16'), 640),
        (('bf16', 'bf16', 'f32'), 10),
        (('f8e4m3fn', 'f8e4m3fn', 'f32'), 10),
        (('f16', 'f16', 'f16'), 80),
        (('c64', 'c64', 'c64'), 2.4),
    ],
)
@pytest.mark.parametrize('by', ['cublas', 'triton'])
def test_matmuls_of_unmeasured_dtypes(types, time, by):
    """XLA scales sizes with the bytes of the result: 2, 4 or 8 times along each of three dimensions.

    They take at least the lower bound: here the time to move 2,400 bytes of complex numbers.
    """
    lhs, rhs, result = (f'{dtype}[10,10]' for dtype in types)
    numbers = '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
    config = cost(sol=640).replace('{"operation', f'{{{numbers},"operation')
    product = {
        'cublas': f'custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", {config}',
        'triton': f'fusion(%x, %y), kind=kCustom, calls=%product, {cost(sol=640)}',
    }[by]
    text = f"""
%product (p: {lhs}, q: {rhs}) -> {result} {{
  %p = {lhs} parameter(0)
  %q = {rhs} parameter(1)
  ROOT %r = {result} dot(%p, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (x: {lhs}, y: {rhs}) -> {result} {{
  %x = {lhs} parameter(0)
  %y = {rhs} parameter(1)
  ROOT %z = {result} {product}
}}
"""
    [row] = of(text).kernels
    assert row.seconds == pytest.approx(time * US)


@gpu_compiler.needed
def test_modeled_times_of_unmeasured_dtypes():
    """XLA's times are too long, and the schedule divides them; a failure means that XLA has changed them."""
    helper = MeshShardingHelper.from_topology('h100:1', [1], ['x'])
    seconds = {}
    for result in ('bfloat16', 'float32'):

        def product(x, result=result):
            return jax.lax.dot(x, x, preferred_element_type=result)

        step = helper.sjit(product, in_shardings=P(), out_shardings=P())
        lowered = step.lower(jax.ShapeDtypeStruct((4096, 4096), 'bfloat16'))
        text = lowered.compile(compiler_options={**CUBLAS_OPTIONS, OPTION: True}).as_text()
        [seconds[result]] = map(float, re.findall(r'"exec_time_us":"?([\d.e+-]+)', text))
    assert seconds['float32'] == pytest.approx(4**3 * seconds['bfloat16'], rel=1e-3)


LOOP = f"""
{FUSED}
%body (s: (s32[], f32[250])) -> (s32[], f32[250]) {{
  %s = (s32[], f32[250]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[250] get-tuple-element(%s), index=1
  {fusion('inside', 'y', 3)}
  ROOT %t = (s32[], f32[250]) tuple(%next, %inside)
}}

%test (s: (s32[], f32[250])) -> pred[] {{
  %s = (s32[], f32[250]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(10)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}}

%long (x: f32[250]) -> f32[250] {{
  %x = f32[250] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[250]) tuple(%zero, %x)
  %rounds = (s32[], f32[250]) while(%start), condition=%test, body=%body
  %y = f32[250] get-tuple-element(%rounds), index=1
  {fusion('once', 'y', 4)}
  ROOT {fusion('more', 'once', 5)}
}}

%short (x: f32[250]) -> f32[250] {{
  %x = f32[250] parameter(0)
  ROOT {fusion('never', 'x', 6)}
}}

ENTRY %main (x: f32[250], b: pred[]) -> f32[250] {{
  %x = f32[250] parameter(0)
  %b = pred[] parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[250]) tuple(%zero, %x)
  %loop = (s32[], f32[250]) while(%start), condition=%test, body=%body
  %y = f32[250] get-tuple-element(%loop), index=1
  ROOT %z = f32[250] conditional(%b, %y, %y), true_computation=%short, false_computation=%long
}}
"""


def test_loops_and_branches():
    """The longest branch counts; it contains a loop, and runs after the loop outside it."""
    all_rows = rows(of(LOOP))
    kernels = {name: row for name, row in all_rows.items() if name not in ('next', 'c')}  # of scalars
    assert kernels == {'inside': (20, 60), 'once': (1, 4), 'more': (1, 5)}
    assert of(LOOP).seconds == pytest.approx(sum(row.seconds for row in of(LOOP).kernels))
    assert [row.bound for row in of(LOOP).kernels if row.name == 'once'] == pytest.approx(
        [2 * US * _ACHIEVABLE]
    )


def lane(spans, name):
    """Returns the spans of a lane: name, start and end in microseconds."""
    return [
        (span.name, pytest.approx(span.start / US), pytest.approx((span.start + span.seconds) / US))
        for span in spans
        if span.lane == name
    ]


def test_spans_of_a_schedule():
    spans = of(OVERLAPPED, {'one': ('all-gather', 7), 'two': ('all-gather', 4)}).spans
    assert lane(spans, 'link') == [('all-gather', 3, 10), ('all-gather', 10, 14)]
    waits = [('wait: all-gather', 8, 10), ('wait: all-gather', 10, 14)]
    assert lane(spans, 'device') == [('first', 0, 3), ('beside', 3, 8), *waits, ('after', 14, 16)]


def test_a_loop_contains_one_iteration():
    loop, condition, branch = of(LOOP).spans
    assert [(span.name, span.times) for span in (loop, condition)] == [('loop', 10), ('loop', 11)]
    assert [span.name for span in loop.inside if span.name != 'next'] == ['inside']
    assert loop.inside[-1].start + loop.inside[-1].seconds <= loop.seconds / 10 * (1 + 1e-9)
    names = [(span.name, span.times) for span in branch.inside]
    assert names == [('rounds', 10), ('rounds', 11), ('once', 1), ('more', 1)]
    assert branch.start == pytest.approx(condition.start + condition.seconds)


@pytest.mark.medium
@pytest.mark.parametrize('name', MODELLED)
def test_the_device_does_one_thing_after_another(name):
    def check(spans, seconds):
        now = 0.0
        for span in spans:
            if span.lane == 'device':
                assert span.start == pytest.approx(now, abs=1e-12)
                now = span.start + span.seconds
                if span.inside:
                    check(span.inside, span.seconds / span.times)
        assert now == pytest.approx(seconds)

    schedule = recorded_plan(name).schedule
    check(schedule.spans, schedule.seconds)


@pytest.mark.medium
def test_a_page_draws_the_timeline(browser, tmp_path):
    plan = recorded_plan('decoder h100')
    page = blocks.page('', [Timeline(plan.schedule.spans, plan.schedule.seconds)])
    (tmp_path / 'page.html').write_text(page, encoding='utf-8')
    browser.open(tmp_path / 'page.html')
    assert browser.complaints() == [] and browser.overflow() == 0
    first = 'const [first] = document.querySelectorAll(".timeline"); '
    drawn = browser.run(first + 'return [...first.querySelectorAll("i")].map((bar) => bar.title)')
    longest = max(plan.schedule.spans, key=lambda span: span.seconds)
    assert any(longest.name in words for words in drawn)
    ends = browser.run(
        first + 'return [...first.querySelectorAll("i")].map((bar) => bar.getBoundingClientRect().right)'
    )
    assert max(ends) <= 1280
    zoom = 'const zoom = document.querySelector("[type=range]"); zoom.value = 8; '
    zoom += 'zoom.dispatchEvent(new Event("input")); return first.scrollWidth / first.clientWidth'
    assert browser.run(first + zoom) == pytest.approx(8, rel=0.01)
    assert browser.overflow() == 0


def test_a_compiler_that_writes_no_times():
    assert of(FUSED.replace('%fused', 'ENTRY %main')) is None
    assert recorded_plan('fsdp a100').schedule is recorded_plan('fsdp_tp gb200').schedule is None


@pytest.mark.medium
@pytest.mark.parametrize('name', MODELLED)
def test_kernels_take_their_modeled_time(name, monkeypatch):
    """As a second reader sums it, on a device with almost free FLOPs and bytes."""
    monkeypatch.setattr('scalax._planning.time.schedule._SCATTERED_FACTOR', math.inf)
    recording = recorded(name)
    schedule = schedule_of(parse(recording.optimized, True), 1e30, 1e30, 1e30, {})
    second = executable_reader.read(recording.executable, recording.mesh, recording.slices)
    assert schedule.seconds == pytest.approx(second.modelled * US, rel=1e-6)


@pytest.mark.parametrize('name', MODELLED)
def test_kernels_take_at_least_their_lower_bound(name):
    kernels = [row for row in recorded_plan(name).schedule.kernels if not row.name.startswith('wait')]
    assert all(row.seconds >= row.bound * (1 - 1e-9) for row in kernels)


@pytest.mark.medium
@pytest.mark.parametrize('name', MODELLED)
def test_a_step_takes_its_kernels_and_its_waits(name):
    """A step takes at least the time of each stream, and waits at most for all collectives and copies."""
    plan = recorded_plan(name)
    schedule, roofline = plan.schedule, plan.roofline()
    times = zip(
        plan.collectives, nccl_collective_seconds(plan, roofline.hardware, plan.collectives), strict=True
    )
    links = sum(row.count * seconds for row, seconds in times)
    beside = sum(row.seconds for row in schedule.kernels if row.name == 'wait: copy')
    assert schedule.seconds == pytest.approx(sum(row.seconds for row in schedule.kernels))
    assert schedule.waiting <= (links + beside) * (1 + 1e-9)
    units = links, roofline.to_host, roofline.from_host, schedule.seconds - schedule.waiting
    assert max(units) <= schedule.seconds * (1 + 1e-9)
    assert roofline.step_seconds.overlapped <= schedule.seconds * (1 + 1e-9)


def test_the_page_shows_the_kernels_where_the_schedule_is_far_from_the_bound():
    plan = recorded_plan('decoder h100')
    least = plan.roofline().step_seconds.overlapped
    for times, shown in ((1.21, True), (1.19, False), (0.79, True), (0.81, False)):
        schedule = dataclasses.replace(plan.schedule, seconds=times * least)
        other = dataclasses.replace(plan, schedule=schedule)
        for text in (str(other), blocks.html(plan_blocks(other, 'A plan'))):
            assert 'the compiler' in text
            assert ('times the bound: the kernels that differ most' in text) is shown


def test_phases_have_a_schedule_column(snapshot):
    plan = recorded_plan('fsdp h100')
    seconds_by_phase = {row.phase: 0.0 for row in plan.schedule.kernels}
    for row in plan.schedule.kernels:
        seconds_by_phase[row.phase] += row.seconds
    assert sum(seconds_by_phase.values()) == pytest.approx(plan.schedule.seconds)
    text = plan.to_text(120)
    snapshot(text[text.index("by the compiler's schedule") : text.index('function  ')])


def test_json_keeps_it():
    plan = recorded_plan('decoder h100')
    assert Plan.load(plan.to_json()).schedule == plan.schedule
