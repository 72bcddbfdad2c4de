"""`helper.verify` finds and names faults of XLA, scalax and users, and does not report sound steps."""

import warnings

import jax
import pytest

from scalax.errors import PartitioningWarning, PipelineWarning
from tests.verification.faults import FAULTS, SOUND

# Some faults and sound steps of each kind; `make test-all` runs all of them.
QUICKLY = (
    'counts_of_all_elements_but_the_last',
    'gradient_of_a_depthwise_convolution',
    'row_written_out_of_bounds',
    'donated_buffer_read_later',
    'dropout_keys_by_device',
    'weight_decay_on_the_first_device_only',
    'missing_psum',
    'custom_gradient_without_a_psum',
    'callback_on_local_examples',
    'convolution_gradient_summed_twice',
    'kernel_that_sums_over_its_grid',
    'gathered_weight_of_another_layer',
    'gradient_without_a_reduction',
    'examples_sorted_locally',
    'random_bits_of_the_first_examples',
    'routing_by_top_k_in_bfloat16',
    'clipping_at_a_bound_equal_to_the_norm',
    'softmax_of_fully_masked_rows',
    'nan_infinity_and_signed_zero',
)


def named(table):
    return [pytest.param(name, marks=[] if name in QUICKLY else pytest.mark.slow) for name in table]


def verified(fault):
    with fault.seeded(), warnings.catch_warnings():
        warnings.simplefilter('ignore', PipelineWarning)
        # A step that is not partitioned does not run a seeded fault.
        warnings.simplefilter('error', PartitioningWarning)
        return fault.helper().verify(fault.make)


@pytest.mark.medium
@pytest.mark.sampled(2)
@pytest.mark.parametrize('name', named(FAULTS))
def test_faults_are_found_and_named(name):
    fault = FAULTS[name]
    if fault.raises:
        with pytest.raises(RuntimeError, match=fault.raises):
            verified(fault)
        return
    report = verified(fault)
    assert report.ok != fault.shows, str(report)
    if fault.shows:
        assert max(difference.seeds for difference in report.differences) == report.seeds
        # XLA may compile another program, without the fault, if intermediate values are results: then an
        # ablation that removes the difference is named.
        gone = [ablation.change for ablation in report.ablations if ablation.still_differs is False]
        assert report.first_difference or gone or any(word in str(report) for word in fault.expects), str(
            report
        )


@pytest.mark.slow
@pytest.mark.parametrize('name', named(SOUND))
def test_sound_steps(name):
    report = verified(SOUND[name])
    assert report.ok, str(report)


def test_quick_names_exist():
    assert set(QUICKLY) <= {*FAULTS, *SOUND}


def test_the_installed_xla_has_at_least_five_faults():
    assert len([fault for fault in FAULTS.values() if fault.kind == 'partitioner' and fault.shows]) >= 5


@pytest.mark.slow
@pytest.mark.parametrize('name', ['convolution_gradient_summed_twice', 'indices_of_the_first_examples'])
def test_seeded_fault_ends_with_its_context(name):
    fault = FAULTS[name]
    assert not verified(fault).ok
    jax.clear_caches()
    assert fault.helper().verify(fault.make).ok


# Faults with one first wrong operation. The others are inside a loop, or in code that a rewrite made.
ENGINE = [
    name
    for name, fault in FAULTS.items()
    if fault.make.__module__ == 'tests.verification.engine_faults' and fault.expects
]


@pytest.mark.slow
@pytest.mark.parametrize('name', ENGINE)
def test_the_first_difference_is_the_operation_with_the_wrong_rule(name):
    fault = FAULTS[name]
    report = verified(fault)
    assert report.first_difference is not None and fault.expects[0] == report.first_difference.primitive, str(
        report
    )
    assert 'engine_faults.py' in report.first_difference.line


@pytest.mark.medium
@pytest.mark.parametrize('name', ['examples_sorted_locally'])
def test_partitioned_steps_match_without_a_fault(name):
    report = FAULTS[name].helper().verify(FAULTS[name].make)
    assert report.ok, str(report)
