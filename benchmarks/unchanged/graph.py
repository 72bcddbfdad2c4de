"""A graph network: messages along edges, summed at nodes; the graphs of a batch are concatenated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.unchanged.blocks import Draw, layer_norm
from benchmarks.unchanged.model import Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation

Gather = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int
    hidden: int
    steps: int
    nodes: int
    edges: int
    features: int
    dtype: str


SIZES = {
    'small': Sizes(16, 32, 2, 4, 8, 8, 'float32'),
    'large': Sizes(1024, 4096, 16, 512, 2048, 16, 'bfloat16'),
}
RULE = TreePathShardingRule(
    ('nodes_in|edges_in', P(None, 'fsdp')),
    ('out', P('fsdp', None)),
    ('up', P(None, 'fsdp', 'tp')),
    ('down', P(None, 'tp', 'fsdp')),
    ('norm', P()),
)
HAND = {'rows': P('batch', None), 'hidden': P('batch', 'tp')}


def init(key: jax.Array, s: Sizes) -> Tree:
    draw = Draw(key, s.dtype)

    def layers(inputs: int) -> Tree:
        return {
            'up': draw.normal(s.steps, inputs, s.hidden),
            'down': draw.normal(s.steps, s.hidden, s.width),
            'norm': draw.norm(s.steps, s.width),
        }

    return {
        'nodes_in': draw.normal(s.features, s.width),
        'edges_in': draw.normal(s.features, s.width),
        'steps': {'edges': layers(3 * s.width), 'nodes': layers(2 * s.width)},
        'out': draw.normal(s.width, s.features),
    }


def mlp(x: jax.Array, w: Tree) -> jax.Array:
    """Maps (rows, inputs) to (rows, D)."""
    hidden = with_sharding_annotation(jax.nn.silu(x @ w['up']), 'hidden')
    return layer_norm(with_sharding_annotation(hidden @ w['down'], 'rows'), w['norm'])


def at(values: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the nodes at the ends of edges."""
    return values[indices]


def summed(values: jax.Array, indices: jax.Array, count: int) -> jax.Array:
    """Sums over the edges of each node."""
    return jax.ops.segment_sum(values, indices, count)


def loss(params: Tree, batch: Tree, s: Sizes, at: Any = at, summed: Any = summed) -> jax.Array:
    senders, receivers = batch['senders'], batch['receivers']
    nodes = with_sharding_annotation(batch['nodes'].astype(s.dtype) @ params['nodes_in'], 'rows')
    edges = with_sharding_annotation(batch['edges'].astype(s.dtype) @ params['edges_in'], 'rows')

    def step(state: tuple[jax.Array, jax.Array], w: Tree) -> tuple[tuple[jax.Array, jax.Array], None]:
        nodes, edges = state
        ends = [with_sharding_annotation(at(nodes, indices), 'rows') for indices in (senders, receivers)]
        edges = with_sharding_annotation(edges + mlp(jnp.concatenate([edges, *ends], -1), w['edges']), 'rows')
        heard = with_sharding_annotation(summed(edges, receivers, nodes.shape[0]), 'rows')
        nodes = nodes + mlp(jnp.concatenate([nodes, heard], -1), w['nodes'])
        return (with_sharding_annotation(nodes, 'rows'), edges), None

    (nodes, _), _ = jax.lax.scan(jax.checkpoint(step), (nodes, edges), params['steps'])
    predictions = with_sharding_annotation(nodes @ params['out'], 'rows').astype('float32')
    errors = jnp.mean(jnp.square(predictions - batch['targets']), -1)
    return jnp.sum(errors * batch['real']) / jnp.sum(batch['real'])


def mapped_loss(params: Tree, batch: Tree, s: Sizes) -> jax.Array:
    """Looks up and sums nodes per graph, in a `jax.vmap` over graphs of one size."""

    def by_graph(values: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        graphs = len(batch['nodes']) // s.nodes
        node_indices = indices.reshape(graphs, -1) - s.nodes * jnp.arange(graphs)[:, None]
        return values.reshape(graphs, -1, s.width), node_indices

    def at_own(values: jax.Array, indices: jax.Array) -> jax.Array:
        return jax.vmap(at)(*by_graph(values, indices)).reshape(-1, s.width)

    def sum_own(values: jax.Array, indices: jax.Array, count: int) -> jax.Array:
        sum_of_graph = jax.vmap(lambda values, indices: summed(values, indices, s.nodes))
        return sum_of_graph(*by_graph(values, indices)).reshape(count, s.width)

    return loss(params, batch, s, at_own, sum_own)


def hand_loss(params: Tree, batch: Tree, s: Sizes, axes: tuple[str, ...]) -> jax.Array:
    """Each device gathers and sums over its local nodes, since no edge connects rows of two devices."""

    def on_device(fun: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        rows = P(axes)
        return jax.shard_map(fun, in_specs=(rows, rows), out_specs=rows, axis_names=set(axes))

    def at_own(values: jax.Array, indices: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(axes) * values.shape[0]
        return at(values, indices - first)

    def sum_own(values: jax.Array, indices: jax.Array, count: int) -> jax.Array:
        def local(values: jax.Array, indices: jax.Array) -> jax.Array:
            share = count // jax.lax.axis_size(axes)
            return summed(values, indices - jax.lax.axis_index(axes) * share, share)

        return on_device(local)(values, indices)

    return loss(params, batch, s, on_device(at_own), sum_own)


def models(size: Size) -> list[Model]:
    """Returns a graph network."""
    s = SIZES[size]

    def batch(rows: int) -> dict[str, Any]:
        nodes, edges = rows * s.nodes, rows * s.edges
        return {
            'nodes': jax.ShapeDtypeStruct((nodes, s.features), 'float32'),
            'real': jax.ShapeDtypeStruct((nodes,), 'float32'),
            'targets': jax.ShapeDtypeStruct((nodes, s.features), 'float32'),
            'edges': jax.ShapeDtypeStruct((edges, s.features), 'float32'),
            'senders': jax.ShapeDtypeStruct((edges,), 'int32'),
            'receivers': jax.ShapeDtypeStruct((edges,), 'int32'),
        }

    def example(rows: int) -> Tree:
        """Returns a batch. The last node of each graph is padding, and so are its edges."""
        rng = np.random.default_rng(1)
        nodes, edges = rows * s.nodes, rows * s.edges
        first = np.repeat(np.arange(rows) * s.nodes, s.edges)
        return {
            'nodes': rng.normal(size=(nodes, s.features)).astype('float32'),
            'real': (np.arange(nodes) % s.nodes < s.nodes - 1).astype('float32'),
            'targets': rng.normal(size=(nodes, s.features)).astype('float32'),
            'edges': rng.normal(size=(edges, s.features)).astype('float32'),
            'senders': (first + rng.integers(0, s.nodes, edges)).astype('int32'),
            'receivers': (first + rng.integers(0, s.nodes, edges)).astype('int32'),
        }

    network = Model(
        'graph network',
        init=lambda key: init(key, s),
        batch=batch,
        loss=lambda params, batch, key: loss(params, batch, s),
        columns_and_rows=RULE,
        hand=HAND,
        hand_loss=lambda params, batch, key, axes: hand_loss(params, batch, s, axes),
        rows=2,
        example=example,
    )
    mapped = dataclasses.replace(
        network, name='graphs, mapped', loss=lambda params, batch, key: mapped_loss(params, batch, s)
    )
    return [network, mapped]
