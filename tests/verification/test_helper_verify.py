"""The full errors of `helper.verify` and of the assertion, and reports as JSON and as pages."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.errors import ArgumentError, MeshError, ScalaxError
from scalax.sharding import MeshShardingHelper
from scalax.testing import Difference, FirstDifference, VerificationReport, assert_equal_to_one_device

S = jax.ShapeDtypeStruct
X = S((32, 8), 'float32')


@pytest.fixture
def helper():
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def abstract_helper(*sizes):
    """Returns a helper for an abstract mesh, without devices."""
    names = ('data', 'fsdp', 'tp', 'sp')[: len(sizes)]
    return MeshShardingHelper.from_mesh(AbstractMesh(sizes, names, (AxisType.Auto,) * len(sizes)))


def double(x):
    return 2 * x


def jitted_elsewhere(kwargs=False):
    helper = abstract_helper(64, 8)
    if kwargs:
        return helper.verify(helper.sjit(double, in_shardings=P('data')), x=X)
    return helper.verify(jax.jit(double), X)


NOT_REDUCED = (
    'double has to be downscaled, because the devices of its mesh are not attached, or its arguments are '
    'large. This needs a function made by sjit with positional arguments, or a function that makes the step '
    'for any helper'
)


@pytest.mark.parametrize(
    ('verify', 'error', 'message'),
    [
        (lambda: jitted_elsewhere(), ArgumentError, NOT_REDUCED),
        (lambda: jitted_elsewhere(kwargs=True), ArgumentError, NOT_REDUCED),
        (
            lambda: abstract_helper(4, 4, 4, 4).verify(lambda helper: (helper.sjit(double), (X,))),
            MeshError,
            'a mesh with the axes of (data=4, fsdp=4, tp=4, sp=4) needs at least 16 devices, 2 along each of '
            'data, fsdp, tp, sp, but there are 8: simulate them with '
            "jax.config.update('jax_num_cpu_devices', 16) before JAX is used",
        ),
        (
            lambda: abstract_helper(64, 8).verify(lambda helper: None),
            ArgumentError,
            '<lambda> is called with a helper, because verify got no arguments for it: it has to return the '
            'step and the tuple of its arguments, got NoneType',
        ),
        (
            lambda: abstract_helper(64, 8).verify(lambda helper: (double, X)),
            ArgumentError,
            '<lambda> is called with a helper, because verify got no arguments for it: it has to return the '
            'step and the tuple of its arguments, got a tuple of function, ShapeDtypeStruct',
        ),
        (
            lambda: abstract_helper(64, 8).verify(lambda: (double, (X,))),
            ArgumentError,
            '<lambda> is called with a helper, because verify got no arguments for it, and it does not take '
            'them (too many positional arguments): pass the arguments of a step, or a function that makes '
            'the step for a helper',
        ),
        (
            lambda: abstract_helper(64, 8).verify(lambda helper: (double, (X,)), config=3),
            ArgumentError,
            '<lambda> is called with a helper and a configuration, because verify got no arguments for it, '
            'and it does not take them (too many positional arguments): pass the arguments of a step, or a '
            'function that makes the step for a helper',
        ),
        (
            lambda: assert_equal_to_one_device(double, X),
            ArgumentError,
            'assert_equal_to_one_device: give helper=..., because sjit did not make the function',
        ),
    ],
)
def test_errors_about_steps_that_cannot_be_verified(verify, error, message):
    with pytest.raises(ScalaxError) as caught:
        verify()
    assert (type(caught.value), str(caught.value)) == (error, message)


def test_a_step_that_cannot_be_traced_for_a_small_mesh():
    def make_step(helper):
        def step(x):
            assert helper.mesh.shape['data'] == 64, 'made for 64'
            return x.sum()

        return helper.sjit(step, in_shardings=P('data')), (S((128, 8), 'float32'),)

    with pytest.raises((ArgumentError, AssertionError)) as caught:
        abstract_helper(64, 8).verify(make_step)
    assert 'made for 64' in str(caught.value)


def test_step_that_refers_to_the_mesh_of_the_helper(helper):
    def local(x):
        return jax.shard_map(lambda x: x * 2, mesh=helper.mesh, in_specs=P('fsdp'), out_specs=P('fsdp'))(x)

    rows = NamedSharding(helper.mesh, P('fsdp'))
    with pytest.raises(ValueError, match='should match the mesh passed to shard_map') as caught:
        helper.verify(jax.jit(local, in_shardings=rows), X)
    assert caught.value.__notes__[-1] == (
        'This is local on one device, where all mesh axes have size 1.\nWhat to do: if its code holds a mesh '
        'of several devices, as jax.shard_map(..., mesh=mesh) does, call helper.verify(make_step), where '
        'make_step(helper) returns the step for any helper, and the tuple of its arguments.'
    )
    assert helper.verify(
        lambda small_helper: (small_helper.sjit(shard_mapped(small_helper), in_shardings=P('fsdp')), (X,))
    ).ok


def shard_mapped(helper):
    return lambda x: jax.shard_map(
        lambda x: x * 2, mesh=helper.mesh, in_specs=P('fsdp'), out_specs=P('fsdp')
    )(x)


def test_assertion_passes_for_an_abstract_mesh():
    def make_step(helper):
        return helper.sjit(lambda x: jnp.sin(x).sum(0), in_shardings=P('data')), (S((4096, 64), 'float32'),)

    assert_equal_to_one_device(make_step, helper=abstract_helper(64, 8), seeds=1)


@pytest.mark.medium
def test_assertion_error_contains_the_report(helper):
    step = helper.sjit(
        lambda x: jax.shard_map(jnp.sum, in_specs=P('fsdp'), out_specs=P(), check_vma=False)(x),
        in_shardings=P('fsdp'),
    )
    with pytest.raises(AssertionError) as caught:
        assert_equal_to_one_device(step, X, seeds=1, steps=1)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith('does not match one device: 1 of 1 result, 1 consecutive step, 1 seed')
    assert any(line.startswith('shard_map at test_helper_verify.py:') for line in lines)


# --- The result ------------------------------------------------------------------------------------------

DIFFERENCE = Difference('loss', 'float32[]', P(), math.inf, 1e-7, (), math.nan, 1.25)


def test_json_has_strings_for_nonfinite_and_complex_numbers():
    def refused(text):
        raise AssertionError(f'{text} is not JSON')

    first = FirstDifference('fft', 'train.py:3', Difference('', 'complex64[]', P(), 1.0, 0.0, (), 1 + 2j, 2j))
    report = VerificationReport(
        'step', {'fsdp': 8}, differences=(DIFFERENCE,), results=1, seeds=1, first_difference=first
    )
    plain = json.loads(json.dumps(report.to_dict()), parse_constant=refused)
    [difference] = plain['differences']
    assert (difference['error'], difference['actual'], difference['expected']) == ('inf', 'nan', 1.25)
    assert plain['first_difference']['difference']['actual'] == '(1+2j)' and plain['ok'] is False


@pytest.mark.parametrize(
    ('report', 'message'),
    [
        ({'seeds': 1}, '>equal<'),
        ({'seeds': 1, 'differences': (DIFFERENCE,)}, '>differs<'),
        ({'seeds': 1, 'nonfinite': ('loss',)}, '>not compared<'),
        ({'seeds': 0, 'interrupted': True}, '>not compared<'),
    ],
)
def test_the_verdict_of_a_page(report, message, tmp_path):
    page = tmp_path / 'page.html'
    VerificationReport('step', {'fsdp': 8}, results=1, **report).to_html(page)
    shown = [verdict for verdict in ('>equal<', '>differs<', '>not compared<') if verdict in page.read_text()]
    assert shown == [message]


def test_values_are_shown_with_the_digits_that_differ():
    near = Difference('loss', 'float32[]', P(), 1e-5, 1e-8, (), 1.80001, 1.80002)
    text = str(VerificationReport('step', {'fsdp': 8}, differences=(near,), results=1, seeds=1))
    assert '1.80001' in text and '1.80002' in text


@pytest.mark.parametrize(
    ('report', 'message'),
    [
        (
            {'nonfinite': ('loss',), 'nondeterministic': ('time',), 'seeds': 2},
            'matches one device in 1 of 3 results; the others were not compared: 0 '
            'consecutive steps, 2 seeds',
        ),
        (
            {'nonfinite': ('a', 'b', 'c'), 'seeds': 1},
            'was not compared: 0 consecutive steps, 1 seed',
        ),
        ({'interrupted': True}, 'was not compared: 0 consecutive steps, 0 seeds'),
    ],
)
def test_results_that_were_not_compared_are_not_reported_as_equal(report, message):
    report = VerificationReport('step', {'fsdp': 8}, results=3, **report)
    assert not report.ok and report.to_text(200).splitlines()[0] == f'step on fsdp=8 {message}'
