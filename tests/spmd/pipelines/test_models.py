"""The models of benchmarks/unchanged as pipelines: the losses and updates of one device."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest

from benchmarks.unchanged import catalogue, diffusion, llama, optimizers
from benchmarks.unchanged.measure import training_step
from benchmarks.unchanged.values import SGD, example, largest_difference, weights
from scalax.errors import PipelineError
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, Pipeline, TreePathShardingRule
from scalax.sharding import PartitionSpec as P

LAYERS, STEPS = 4, 2
STACKS = TreePathShardingRule(('(^|/)(layers|encoder|decoder|blocks|adapters)/', P('stage')))
MESHES = {
    'four stages': {'stage': 4, 'fsdp': 2},
    'two stages, tensor parallel': {'stage': 2, 'fsdp': 2, 'tp': 2},
}
QUICKLY = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
# Two loops, per-example constants, and dropout; `make test-all` runs all models.
OFTEN = {('encoder-decoder', 'two stages, tensor parallel')}
# Models with layers in a Python loop, or without layers.
WITHOUT_STACKS = {
    *('flax.nnx modules', 'UNet with attention', 'ResNet with BatchNorm', 'recurrent cell'),
    *('recommender', 'graph network', 'graphs, mapped'),
}
# These models sort tokens of all examples, or loop over examples; if a balance loss follows, the error names
# it first. scalax cannot analyze kernels.
_UNEVEN = (
    'dot_general uses a batch-wide sum, but a microbatch only has a partial sum, at experts.py:137 route'
)
REFUSED = {
    **dict.fromkeys(('experts, sorted tokens', 'experts, sorted by row'), _UNEVEN),
    'flash attention, Pallas': (
        'pallas_call takes examples of the batch, and scalax does not know how it treats them, '
        'at flash.py:182 layer'
    ),
}


def with_layers(sizes):
    """Returns the sizes of a model, or of parts of it, with LAYERS layers."""
    changed = {}
    for field in dataclasses.fields(sizes):
        value = getattr(sizes, field.name)
        if field.name == 'layers':
            changed['layers'] = LAYERS
        elif dataclasses.is_dataclass(value):
            changed[field.name] = with_layers(value)
    return dataclasses.replace(sizes, **changed)


@contextlib.contextmanager
def deeper():
    """Returns a small model with as many layers as there are stages."""
    with contextlib.ExitStack() as stack:
        config = llama.ModelConfig
        for file in (llama, optimizers):
            deep = lambda **fields: config(**{**fields, 'layers': LAYERS})  # noqa: E731
            stack.enter_context(mock.patch.object(file, 'ModelConfig', deep))
        for file in catalogue.FILES:
            for table in vars(file).values():
                if isinstance(table, dict) and dataclasses.is_dataclass(table.get('small')):
                    stack.enter_context(mock.patch.dict(table, small=with_layers(table['small'])))
        yield


with deeper():
    MODELS = {model.name: model for model in catalogue.all_models('small')}


@pytest.fixture(autouse=True)
def small_angles():
    """Uses small positions: at 1,000 radians, rounding is 6e-5, and fused programs differ in the sine."""
    with mock.patch.object(diffusion, 'RADIANS', 1):
        yield


def staged(model, mesh, microbatches=4):
    """Returns a pipelined step of a model, and its arguments."""
    sizes = MESHES[mesh]
    helper = MeshShardingHelper([*sizes.values()], [*sizes])
    model = dataclasses.replace(model, optimizer=SGD, rows=2 * model.rows)
    fsdp = model.fsdp_rule or FSDPShardingRule('fsdp', min_fsdp_size=1)
    rule = (STACKS | P()) & (model.columns_and_rows if 'tp' in sizes else fsdp)
    step = training_step(model, model.loss)
    fun = helper.sjit(
        step,
        in_shardings=(rule, P(*[None] * model.batch_dim, 'fsdp'), P()),
        out_shardings=(rule, P()),
        batch_argnums=1,
        pipeline=Pipeline('stage', microbatches),
        compiler_options=QUICKLY,
    )
    params = weights(model)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(SGD.init, params))
    return fun, step, ((params, zeros), example(model), jax.random.key(2))


def marked(name, mesh):
    return pytest.param(name, mesh, marks=pytest.mark.medium if (name, mesh) in OFTEN else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name, mesh',
    [marked(name, mesh) for name in MODELS if name not in {*REFUSED, *WITHOUT_STACKS} for mesh in MESHES],
)
def test_steps_match_one_device(name, mesh):
    fun, step, (state, batch, key) = staged(MODELS[name], mesh)
    reference, expected_state = jax.jit(step, compiler_options=QUICKLY), state
    for i in range(STEPS):
        state, value = fun(state, batch, jax.random.fold_in(key, i))
        expected_state, expected_value = reference(expected_state, batch, jax.random.fold_in(key, i))
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((state, value)))
        assert largest_difference((state, value), (expected_state, expected_value)) < 1e-5


@pytest.mark.medium
@pytest.mark.parametrize('name', [*REFUSED])
def test_layers_that_mix_examples_are_rejected(name):
    fun, _, args = staged(MODELS[name], 'four stages')
    with pytest.raises(PipelineError) as caught:
        fun.trace(*args)
    assert REFUSED[name] in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['flax.nnx modules', 'recurrent cell', 'recommender'])
def test_models_without_stacked_layers_are_rejected(name):
    fun, _, args = staged(MODELS[name], 'four stages')
    with pytest.raises(PipelineError, match='no loop runs over layers'):
        fun.trace(*args)


def test_listed_models_exist():
    named = functools.reduce(set.union, [{name for name, _ in OFTEN}, REFUSED, WITHOUT_STACKS])
    assert named <= {*MODELS}
