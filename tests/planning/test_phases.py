"""Phases of a step (forward, backward, recomputed) in jaxprs and programs, and model FLOPs."""

import jax
import jax.numpy as jnp
import pytest

from examples import plan_llama
from scalax._planning.cost.collectives import collectives
from scalax._planning.cost.device_cost import device_cost_of
from scalax._planning.cost.flops import count_flops, count_model_flops
from scalax._planning.program.hlo import parse
from scalax._planning.program.phases import phase_of
from scalax.plan import Exactness, Flops, Plan
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.leaves import leaf

NAMES = {
    '': 'other',
    'jit(step)/dot_general': 'other',
    'jit(step)/jvp()/while/body/eval_jaxpr/dot_general': 'forward',
    'jit(step)/jvp(jit(loss))/dot_general': 'forward',
    'jit(step)/vmap(jvp())/dot_general': 'forward',
    'jit(step)/jvp()/transpose': 'forward',  # an array is transposed
    'jit(step)/transpose(jvp())/while/body/checkpoint/dot_general': 'backward',
    'jit(step)/vmap(transpose(jvp()))/dot_general': 'backward',
    'jit(step)/jvp(transpose(jvp()))/dot_general': 'backward',
    'jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/dot_general': 'recomputed',
    'jit(my_jvp)/dot_general': 'other',
    'jit(jvp)/jit(transpose)/dot_general': 'other',
}


@pytest.mark.parametrize(('name', 'part'), NAMES.items())
def test_names(name, part):
    assert phase_of(name) == part


HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
ONE = 2 * 4**3  # FLOPs of a matmul of 4 x 4 matrices


def loss(w, x, wrap=lambda fun: fun):
    """Two matmuls; the gradient of each has one matmul for the weights and one for the input."""
    return wrap(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(w, x).sum()


def checkpointed(w, x):
    return loss(w, x, jax.checkpoint)


def in_jit(w, x):
    return loss(w, x, jax.jit)


def in_parts(w, x):
    """Returns the gradients of three batches."""

    def part(total, x):
        return total + jax.grad(checkpointed)(w, x), None

    return jax.lax.scan(part, w, jnp.stack([x] * 3))[0]


def in_shard_map(w, x):
    """A matmul on each of four shards of 16 rows, with the FLOPs of four matrices."""
    rows = jnp.concatenate([x] * 4)
    on_parts = HELPER.shard_map(
        lambda w, x: jnp.tanh(x @ w), (P(), P('fsdp')), P('fsdp'), axis_names={'fsdp'}, check_vma=False
    )
    return on_parts(w, rows).sum()


@jax.custom_vjp
def tanh_product(w, x):
    return jnp.tanh(x @ w)


tanh_product.defvjp(
    lambda w, x: (tanh_product(w, x), (w, x)),
    lambda kept, g: (kept[1].T @ (g * tanh_product(*kept)), g @ kept[0].T),  # computes the matmul again
)


def orthogonal(w, x):
    """An optimizer that multiplies matrices."""
    gradient = jax.grad(loss)(w, x)
    return w - gradient @ gradient.T @ gradient


def with_a_teacher(w, x):
    target = jax.lax.stop_gradient(x @ x)
    return jax.grad(lambda w: ((x @ w - target) ** 2).sum())(w)


# name -> (function of two matrices, matmuls of each phase, matmuls that the model needs)
STEPS = {
    'no gradient': (loss, {'other': 2}, 2),
    'a gradient': (jax.grad(loss), {'forward': 2, 'backward': 3}, 5),
    'of both': (jax.grad(loss, (0, 1)), {'forward': 2, 'backward': 4}, 6),
    'a value, too': (jax.value_and_grad(loss), {'forward': 2, 'backward': 3}, 5),
    'by vjp': (lambda w, x: jax.vjp(loss, w, x)[1](1.0), {'forward': 2, 'backward': 4}, 6),
    'with checkpoint': (
        jax.value_and_grad(checkpointed),
        {'forward': 2, 'backward': 3, 'recomputed': 2},
        5,
    ),
    # The value is unused, so the forward pass does not run before the backward pass.
    'the gradient alone, with checkpoint': (jax.grad(checkpointed), {'backward': 3, 'recomputed': 2}, 5),
    'in jit': (jax.grad(in_jit), {'forward': 2, 'backward': 3}, 5),
    'in parts': (in_parts, {'backward': 9, 'recomputed': 6}, 15),
    'in shard_map': (jax.grad(in_shard_map, (0, 1)), {'forward': 4, 'backward': 8}, 12),
    'a gradient by hand': (
        jax.value_and_grad(lambda w, x: tanh_product(w, x).sum(), (0, 1)),
        {'forward': 1, 'backward': 3},
        4,
    ),
    'an optimizer with matmuls': (orthogonal, {'forward': 2, 'backward': 3, 'other': 2}, 5),
    'a teacher': (with_a_teacher, {'forward': 1, 'backward': 1, 'other': 1}, 2),
}


@pytest.mark.parametrize(('fun', 'products', 'needed'), STEPS.values(), ids=STEPS)
def test_phases_of_a_step(fun, products, needed):
    traced = jax.jit(fun).trace(leaf(4, 4), leaf(4, 4))
    step_flops = count_flops(traced.jaxpr)
    assert {part: count / ONE for part, count in step_flops.by_phase.items()} == products
    assert step_flops.count == sum(step_flops.by_phase.values())
    assert count_model_flops(traced.jaxpr) == needed * ONE


@pytest.mark.medium
@pytest.mark.parametrize('name', ['a gradient', 'in parts', 'a teacher'])
def test_compiled_programs_have_the_same_phases(name):
    fun, products, _ = STEPS[name]
    by_phase = device_cost_of(parse(jax.jit(fun).lower(leaf(4, 4), leaf(4, 4)).compile().as_text())).by_phase
    assert {part: count / ONE for part, count in by_phase.items()} == products


def unknown(w, x):
    return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: jnp.tanh(x @ w), x)


# name -> (function, FLOPs that the model needs)
WITHOUT = {
    'nothing': (lambda w, x: w + x, None),
    'a loop of unknown length': (unknown, None),
    'branches': (lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x), ONE),
}


@pytest.mark.parametrize(('fun', 'needed'), WITHOUT.values(), ids=WITHOUT)
def test_unknown_model_flops(fun, needed):
    assert count_model_flops(jax.jit(fun).trace(leaf(4, 4), leaf(4, 4)).jaxpr) == needed


def test_scopes():
    flops = Flops(6, by_phase={'other': 1, 'forward': 2, 'recomputed': 3})
    assert flops.within('backward').by_phase == {'backward': 3, 'recomputed': 3}
    assert (flops + flops).by_phase == flops.times(2).by_phase == {'other': 2, 'forward': 4, 'recomputed': 6}


def test_plans_have_them():
    step = HELPER.sjit(jax.grad(checkpointed), in_shardings=(P('fsdp'), P('fsdp')))
    plan = HELPER.plan(step, leaf(64, 64), leaf(64, 64))
    assert plan.model_flops == 5 * 2 * 64**3
    assert plan.with_model_flops(7).model_flops == 7
    assert plan.device_cost.by_phase['recomputed'] > 0
    assert Plan.load(plan.to_json()) == plan
    assert plan.roofline('v5p', torus={'fsdp': 4, 'tp': 2}).mfu > 0


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('case', plan_llama.CASES, ids=lambda case: case.name)
def test_the_model_of_the_llama_steps(case):
    """As PaLM counts: a causal mask does not halve attention. https://arxiv.org/abs/2204.02311"""
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    step, arguments = plan_llama.make_step(helper, case.model)
    jaxpr = step.trace(*arguments).jaxpr
    by_hand = plan_llama.model_flops(case.model, arguments[0].params, 8)
    masked = 8 * plan_llama.SEQUENCE * 6 * case.model.layers * plan_llama.SEQUENCE * case.model.width
    by_phase = count_flops(jaxpr).by_phase
    assert count_model_flops(jaxpr) == by_phase['forward'] + by_phase['backward']
    assert count_model_flops(jaxpr) == pytest.approx(by_hand + masked, rel=0.01)
    assert by_phase['backward'] == 2 * by_phase['forward']


@pytest.mark.medium
def test_phase_of_collectives_that_move_loop_state():
    """The partitioner gathers each layer's activations in the forward pass; the gather has no name."""

    def loss(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    specs = P(None, 'fsdp', 'tp'), P('fsdp')
    arguments = leaf(4, 64, 64), leaf(128, 64)
    training = HELPER.plan(
        HELPER.sjit(jax.grad(loss), in_shardings=specs, out_shardings=specs[0]), *arguments
    )
    assert {row.phase for row in training.collectives} == {'forward', 'backward'}
    assert {
        row.phase for row in training.collectives if row.kind == 'all-gather' and row.axes == ('tp',)
    } == {
        'forward',
        'backward',
    }
    inference = HELPER.plan(HELPER.sjit(loss, in_shardings=specs), *arguments)
    assert {row.phase for row in inference.collectives} == {'other'}


def test_a_loop_in_a_call_has_the_phase_of_the_call():
    """Names inside a call are relative to the call's, and moves of loop state have no name."""
    text = """HloModule m, num_partitions=2

%body (b: f32[4]) -> f32[4] {
  %b = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} collective-permute(%b), source_target_pairs={{0,1},{1,0}}
}

%test (t: f32[4]) -> pred[] {
  %t = f32[4]{0} parameter(0)
  ROOT %any = pred[] custom-call(%t), custom_call_target="Any"
}

%layers (l: f32[4]) -> f32[4] {
  %l = f32[4]{0} parameter(0)
  ROOT %w = f32[4]{0} while(%l), condition=%test, body=%body, metadata={op_name="while"}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %c = f32[4]{0} call(%a), to_apply=%layers, metadata={op_name="jit(f)/jvp()/jit(layers)"}
}
"""
    [row] = collectives(parse(text), {'x': 2})
    assert (row.phase, row.exactness) == ('forward', Exactness.AT_LEAST)
