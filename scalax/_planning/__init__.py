"""Plans, and the searches that compare plans.

`compiler` lowers and compiles a step, `program` parses the output of the compiler, `cost` counts FLOPs,
bytes, memory and collectives, `hardware` and `time` turn the counts into seconds, and `report` is the plan.
Two searches, `mesh_search` and `autoshard`, compare plans. Users import from `scalax.plan`.

A plan is read from the compiler's output, never guessed. There is one reader of HLO text (`program/hlo`),
and notation that it does not know is a `PlanError`: an unknown notation must not count as no communication.

One compilation gives everything. XLA writes its programs and tables to a folder (`xla_dump_to`, an option of
this compilation alone). The sources, and the reasons for them:

- The collectives that run: the program after all optimizations, which merge collectives and change their
  kind.
- The reason of a collective: the partitioner's program. Optimizations drop and merge metadata; in the
  partitioner's program each collective is next to the operation that needs it.
- FLOPs and HBM bytes of a device: the program after all optimizations, because equal matmuls are merged,
  others are recomputed, and some arrays never leave the chip.
- FLOPs of the step and of the model: the jaxpr, which is the function as written and the only place where
  kernels are known.
- Memory, and the arrays at its peak: the compiler's tables. The compiler's own list of the peak omits the
  bodies of loops.
- Whether the step fits: the compiler for TPUs, which refuses a program that is too large. On GPUs, the
  memory size, because that compiler refuses none.
- Plans for simulated devices: the partitioner's program, and for memory the executable. What XLA:CPU
  rewrites says nothing about other hardware.
- Where examples are gathered: the partitioning report, because the compiled program has no notion of
  examples.

The two programs are joined collective by collective (`cost/spmd_provenance`). A collective that was split
counts once. A row that has no counterpart in the partitioner's program has the cause *added by the
compiler*. The TPU compiler writes a complete plan even for a program that it rejects.

Trip counts that XLA does not record are computed from the integers that the loop condition depends on. The
phase of an operation is read from its name: `jvp` is forward, `transpose` backward, `rematted_computation`
recomputed. Instructions that the partitioner added take the names of their users and operands.
"""
