"""Partitioning of a step along the mesh axes of its batch.

A step is data parallel along the axes that shard its batch. The package edits the step's jaxpr, after
differentiation and with its optimizer, to the program of one device, and runs that in one ``jax.shard_map``
that is manual over these axes:

- `step`: what `sjit` calls. It places arguments and results, and runs the partitioned jaxpr.
- `rewrites`: algorithms that have to change before they run on blocks, one file each.
- `partition`: goes through the equations of a jaxpr once and writes those of a device. `conversions` converts
  values between placements: it uses gathers again, sends values in the dtypes of `options`, and lists each
  collective. `editor`, `context`, `values` and `uses` hold what is known meanwhile.
- `placements`: each value has a placement along each axis: `Shard`, `Replicate` or `Partial`. One table says
  which placements each primitive takes and gives (`op_rules`).
- `batch`: where the batch begins, and what a device takes of values that are replicated.
- `operations`: sorts, tables, kernels, callbacks and others that have a way of their own to run on blocks.
- `loops`: calls, loops and branches, and loops over examples and microbatches. `pipelines` runs the loops
  over layers that `find_pipelines` finds.
- `report`: the reasons of collectives, and work that devices do redundantly.

What decides:

- State, such as a weight under FSDP, is gathered where it meets examples.
- A sum over examples stays `Partial` through what is linear, and is reduced to the layout in which the state
  is stored (`placements.reduction_layouts`) before it grows, is used twice, or meets something nonlinear.
- A replicated value is computed as it is, and each device takes its part where it meets examples.
- The loss and gradients that no loop of the backward pass takes are reduced before the first of these loops.
- What mixes examples and has no rule gathers its operands, and is reported with its line.
"""
