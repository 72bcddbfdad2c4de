"""Pipelines: scans over layers that run stage by stage over a mesh axis that shards the layers.

`find_pipelines` finds the scans in the jaxpr of a step before it is partitioned, `partition_pipeline`
partitions them, and `schedule` runs their ticks.

Why the jaxpr. A gradient is a scan too, so the forward and the backward pass are one case, and the model
does not mention stages. The saved residuals that one scan stacks for the other stay split into microbatches
between the two pipelines.

Which scans. `find_layer_scans` follows two marks from the arguments: the batch dimension, and layers that a
rule shards over the axis. A `scan` over stacks with the second mark becomes a pipeline. Marks are hints: the
result of a pipeline does not depend on them. Before that, `sink_constants` moves into the scan what JAX
computes ahead of it from smaller values, such as a mask as large as all attention scores.

Why the result is right. `_jaxpr/batch_dims` determines for each value whether a dimension is the batch,
whether the value is a sum over examples, or whether it is the same for all examples; it refuses a primitive
that mixes examples. The body of the scan is then partitioned with microbatches in place of stages: `Shard`
is the block of one microbatch, `Partial` a sum over microbatches, and a layer that would communicate along
this axis is an error.

Sums over all microbatches. A microbatch holds a partial sum, which layers can only accumulate. If a layer
uses the sum otherwise, `loop_fission` splits the scan in two: the first computes the sums of all layers, the
second takes them as a stack. That is right as long as no carry of the first scan depends on the second.

What runs. A `scan` over ticks. Idle ticks compute too, with real examples, since layers may turn zeros into
nan. Only sums need masks: any other write of an idle tick is overwritten later, or repeats the same value.
Sums of narrow floats are accumulated in float32.

Owners. Outside of a pipeline the batch is sharded over the axis of stages too, so each stage owns
microbatches. Owners send their microbatches before the first tick and receive them after the last one.
Sending each one in its tick would need a branch, and collectives in branches can deadlock on CPUs.
"""
