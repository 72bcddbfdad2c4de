"""Transfer of host data to global arrays and back, over all processes of a mesh.

A batch becomes a global array in three steps. `make_local_batch` checks the local batch of this process;
`copy_to_devices` copies it to the devices of this process; the function that it returns does the collective
work. Prefetching does the first two steps in its thread, and the last in the consumer's `next`: if two
threads started collectives, they would start in different orders on different processes, and wait forever.

Agreement. Each process makes a statement about its call. Digests are gathered, and statements only if the
digests differ. Each process compares its statement with the most common one, so every process raises the
same error. Errors on one process alone (a loader that fails, data that end early) are exchanged in the same
step before they are raised.

Resharding of examples. If each process provides the examples of its own devices, in any order, nothing is
communicated. Otherwise its examples are sharded over its devices, and `jax.device_put` reshards them. It
cannot do that between meshes whose processes have different numbers of devices; there every process gathers
all examples.

Contexts. Collectives of host data run on the helper's mesh, whatever `jax.set_mesh` says. Contexts belong to
threads, so if a mesh is set, these collectives are called from another thread. The thread of a prefetching
loader gets JAX's state and the context variables of the thread that called `prefetch`.

Queues. With XLA's CPU client, a host that has queued 32 programs blocks inside the next launch, which some
devices have received and others have not: a deadlock. So calls that start collectives for each batch
regularly wait for the simulated devices of this process (`bound_queue`).

Exits. XLA connects processes by JAX's coordination service, and waits forever for a process that has left
it. So an exit handler (`exit_handler`), registered at import and therefore run before JAX's own, waits for
every array that is not computed yet, and for a program that each device runs after all others, because
`jax.live_arrays` lacks arrays that were dropped. The handler is active once a mesh of several processes was
used. It waits in a thread, because such a wait cannot be interrupted. It logs the processes that it waits
for, and ends the process after a timeout.
"""
