"""Partitioning of a step along the mesh axes of its batch.

A step is data parallel along the mesh axes that shard its batch. This package edits the jaxpr of the step,
after differentiation and with the optimizer, into the program of one device, and runs that program in one
``jax.shard_map`` that is manual along these axes.

- `step` is the entry point for `sjit`: it places arguments and results, and runs the partitioned jaxpr.
- `rewrites` changes algorithms that must change before they can run on local shards, one file each.
- `partition` visits the equations of a jaxpr once and writes the equations of one device. `conversions`
  converts values between placements. `editor`, `context`, `values` and `uses` hold the state of the pass.
- `placements`: along each batch axis a value is `Shard(dim)`, `Replicate` or `Partial`, the terms of
  PyTorch's DTensor. One table (`op_rules`) says which placements each primitive accepts and returns.
- `batch` finds the batch dimension, and the part of a replicated value that belongs to a device.
- `operations` handles sorts, tables, kernels, callbacks and others that have their own way to run locally.
- `loops` handles calls, loops and branches, and loops over examples and microbatches. `pipelines` finds and
  runs the scans over layers that a mesh axis shards.
- `report` gives the reason of each collective, and lists work that devices repeat.

Why a jaxpr is edited. Evaluating it again would cost as much as tracing it, and lose the source lines. An
edited jaxpr keeps each equation with its line, name stack and parameters, and gets new variables of local
shapes. A jaxpr that is called several times is partitioned once for each combination of placements.

Decisions:

- `Shard` knows whether it is a block of examples or of state (weights, moments, and values computed from
  them alone). State is gathered where it meets examples. Examples are gathered only where no rule keeps them
  apart. Where bytes decide which of the two moves, one function compares them.
- A sum over examples stays `Partial` through linear operations. It is reduced to the layout in which the
  state is stored (`placements.reduction_layouts`) before it grows, is used twice, or meets a nonlinear
  operation. It may grow, or be used twice, if its terms come together again in a smaller sum
  (`placements.reduction_costs`).
- A replicated value is computed once per device, and each device takes its part where it meets examples.
- An operation without a rule that mixes examples gathers its operands, and the report names its line.

Order. XLA schedules the collectives, and three barriers keep it from holding more than one layer. The second
gather of a weight is behind a barrier, because XLA would merge it with the first. So are the gradients of a
layer, which XLA for GPUs would reduce one iteration later, and the first loop of the backward pass, because
XLA would otherwise compute the loss after it and hold the logits until then. The loss and the gradients that
no loop of the backward pass uses are reduced before the first of these loops.

Other mesh axes stay Auto inside. A collective on a value that they shard is a nested `shard_map` over them,
because XLA would first gather the value along them. If they come first in a dimension, as in
``P(('tp', 'fsdp'))``, the shards over batch axes are parts of theirs (`Shard.outer_axes`).

Mistakes. An unsupported step raises `CannotPartition`. After that, or after any other exception in this
package, the step runs as `jax.jit` runs it, with a `PartitioningWarning` that names the line.

Report. Each collective has an index in the name stack of its equation. `explain_propagation` and plans look
its reason up by this index, so they never guess.
"""
