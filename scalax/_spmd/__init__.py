"""Partitioning of a step along the mesh axes of its batch.

A step is data parallel along the axes that shard its batch. The package edits the step's jaxpr, after
differentiation and with its optimizer, to the program of one device, and runs that in one ``jax.shard_map``
that is manual over these axes. Each value has a placement along each axis (`placement`): `Shard`, `Replicate`
or `Partial`. One table says which placements each primitive takes and gives (`op_rules`). `partition` applies
the table equation by equation and writes the collectives in between (`collectives`):

- State, such as a weight under FSDP, is gathered where it meets examples.
- A sum over examples stays `Partial` through what is linear, and is reduced to the layout in which the state
  is stored (`wanted`) before it grows, is used twice, or meets something nonlinear.
- A replicated value is computed as it is, and each device takes its part where it meets examples (`parts`).
- The loss and the gradients that a forward pass leaves for later are computed before the first loop of the
  backward pass (`finished`).
- What mixes examples and has no rule gathers its operands, and is reported with its line (`report`).
"""
