"""Checks of the settings, before any work.

Each message names the setting, the reason why it is invalid, and what to change.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
from absl import app

from examples.llama.model import ACTIVATIONS
from examples.llama.options import Options
from examples.llama.strategies import STRATEGIES, Strategy
from scalax.errors import MeshError
from scalax.sharding import MeshShardingHelper, Pipeline

# Dimension of an activation -> the flag that sets it.
FLAGS = {
    'batch': '--batch_size',
    'sequence': '--sequence_length',
    'width': '--width',
    'heads': '--heads',
    'kv_heads': '--kv_heads',
    'hidden': '--width',
}


def make_helper(strategy: Strategy, mesh: str | None, devices: Sequence[jax.Device]) -> MeshShardingHelper:
    """Returns a helper for a mesh of the devices.

    Args:
      strategy: the strategy, with the names of the axes, and the default mesh. The default shrinks if there
        are too few devices; a mesh of the user never does.
      mesh: as in 'fsdp=-1,tp=2', in any order. Axes that are left out have size 1, except for stages, whose
        number is part of the strategy.
      devices: the devices, which are all used.

    Raises:
      app.UsageError: `mesh` is invalid or does not fit the devices.
    """
    count = len(devices)
    stages = {name: size for name, size in strategy.mesh.items() if name == 'stage'}  # from --stages
    if mesh is None:
        per_stage = count // stages.get('stage', 1)
        axes = {
            name: size if size == -1 else math.gcd(size, per_stage) for name, size in strategy.mesh.items()
        }
        axes |= stages
    else:
        axes = dict.fromkeys(strategy.mesh, 1) | stages | parse_mesh(mesh, strategy)
    try:
        return MeshShardingHelper(list(axes.values()), list(axes), devices=devices)
    except MeshError as error:  # its message suggests sizes that fit
        raise app.UsageError(f'--mesh {mesh}, --devices {count}: {error}') from error


def parse_mesh(mesh: str, strategy: Strategy) -> dict[str, int]:
    """Parses axis sizes such as 'fsdp=-1,tp=2'."""
    axes: dict[str, int] = {}
    for entry in mesh.split(','):
        name, equals, size = (part.strip() for part in entry.partition('='))
        if not equals or not size.removeprefix('-').isdecimal():
            example = ','.join(f'{axis}={count}' for axis, count in strategy.mesh.items())
            raise app.UsageError(f'--mesh {mesh}: "{entry}" is not of the form axis=devices, as in {example}')
        if name not in strategy.mesh:
            names = ', '.join(strategy.mesh)
            raise app.UsageError(
                f'--mesh {mesh}: strategy {strategy.name} has no mesh axis "{name}", only: {names}.'
                + suggest(name, strategy)
            )
        if name in axes:
            raise app.UsageError(f'--mesh {mesh}: axis "{name}" is given twice.')
        axes[name] = int(size)
    return axes


def suggest(axis: str, strategy: Strategy) -> str:
    """Returns a suggestion for an unknown mesh axis, or an empty text."""
    if near := difflib.get_close_matches(axis, strategy.mesh, n=1):
        return f' Did you mean "{near[0]}"?'
    if others := [other.name for other in STRATEGIES.values() if axis in other.mesh]:
        return f' Strategies with that axis: {", ".join(others)}.'
    return ''


def check_settings(options: Options, strategy: Strategy, axes: Mapping[str, int]) -> None:
    """Raises an `app.UsageError` with all problems of the settings."""
    problems = [*model_problems(options), *sharding_problems(options, strategy, axes)]
    if problems:
        raise app.UsageError('\n  '.join(['these settings do not go together:', *dict.fromkeys(problems)]))


def model_problems(options: Options) -> Iterator[str]:
    """Yields problems of the model that do not depend on the mesh."""
    model = options.model
    if model.width % model.heads:
        yield f'--width {model.width} is not a multiple of --heads {model.heads}'
    elif model.head_size % 2:
        yield (
            f'--width {model.width} over --heads {model.heads} gives heads of {model.head_size}; '
            'rotary embeddings need an even number'
        )
    if model.heads % model.kv_heads:
        yield f'--heads {model.heads} is not a multiple of --kv_heads {model.kv_heads}'
    if model.dropout >= 1:
        yield f'--dropout {model.dropout} leaves nothing: give less than 1'


def sharding_problems(options: Options, strategy: Strategy, axes: Mapping[str, int]) -> Iterator[str]:
    """Yields the dimensions of activations that are not divisible by their mesh axes."""
    model = options.model
    sizes = {
        'batch': options.batch_size,
        'sequence': options.sequence_length,
        'width': model.width,
        'heads': model.heads,
        'kv_heads': model.kv_heads,
        'head_size': model.head_size,
        'hidden': model.hidden,
        'vocabulary': model.vocabulary,
    }
    for dimension, mesh_axes in sharded_dimensions(strategy):
        parts = math.prod(axes[axis] for axis in mesh_axes)
        if sizes[dimension] % parts:
            flag = FLAGS.get(dimension, dimension)
            yield (
                f'{flag} {sizes[dimension]} cannot be sharded over {parts} devices '
                f'({", ".join(mesh_axes)}): make it a multiple of {parts}, or change --mesh or --devices'
            )
    if strategy.pipeline is not None:
        yield from stage_problems(options, strategy, strategy.pipeline, axes)


def stage_problems(
    options: Options, strategy: Strategy, pipeline: Pipeline, axes: Mapping[str, int]
) -> Iterator[str]:
    """Yields the problems of a pipeline: layers or a batch that are not divisible."""
    count, layers, microbatches = axes[pipeline.axis], options.model.layers, pipeline.num_microbatches
    if layers % count:
        yield f'--layers {layers} cannot be divided into {count} stages: make it a multiple of {count}'
    examples = microbatches * math.prod(axes[axis] for axis in strategy.data_axes if axis != pipeline.axis)
    if options.batch_size % examples:
        yield (
            f'--batch_size {options.batch_size} cannot be divided into {microbatches} microbatches, each '
            f'sharded over the devices of a stage: make it a multiple of {examples}, or change --microbatches'
        )


def sharded_dimensions(strategy: Strategy) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields dimensions of activations, and the mesh axes over which a strategy shards each of them."""
    yield 'batch', strategy.data_axes
    others = tuple(axis for axis in strategy.mesh if axis not in strategy.data_axes)
    for dimension in ('heads', 'kv_heads', 'hidden', 'vocabulary'):
        yield dimension, others
    for name, spec in strategy.activations.items():
        for dimension, entry in zip(ACTIVATIONS[name], spec, strict=False):
            yield dimension, (entry,) if isinstance(entry, str) else entry or ()
