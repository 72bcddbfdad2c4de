"""Host data to global arrays and back, over all processes of a mesh.

A batch becomes a global array in three steps. *Read* checks the share of this process; *place* puts it on
the devices of this process; *finish* does the collective work. Prefetching does the first two in its thread
and the last in the consumer's `next`: collectives of two threads would start in different orders on
different processes, and wait forever.

Agreement. Each process makes a statement about its call. Digests are gathered, and statements only if the
digests differ. Each process compares its statement with the most common one, so every process raises the
same error. Errors on one process alone (a loader that fails, data that ends early) are exchanged in the same
step before they are raised.

Moves. If each process provides the examples of its own devices, in any order, nothing is communicated.
Otherwise its examples are distributed over its devices, and `jax.device_put` moves them on. It cannot do
that between meshes whose processes hold different numbers of devices; there every process gathers all
examples.

Contexts. Collectives of host data run on the helper's mesh, whatever `jax.set_mesh` says. Contexts belong to
threads, so if a mesh is set, these collectives are called from another thread. The thread of a prefetching
loader gets JAX's state and the context variables of the thread that called `prefetch`.

Queues. With XLA's CPU client, a host that has queued 32 programs blocks inside the next launch, which some
devices have and others do not: a deadlock. So calls that start collectives for each batch regularly wait for
the simulated devices of this process (`bound_queue`).

Exits. XLA connects processes by JAX's coordination service, and waits forever for a process that has left
it. So a handler at exit (`exit_handler`), registered at import and therefore run before JAX's own, waits for
every array that is not computed yet and for a program that each device runs after all others, because
`jax.live_arrays` lacks arrays that were dropped. The handler acts once a mesh of several processes was used.
It waits in a thread, because such a wait cannot be interrupted; it logs the processes that it waits for, and
ends the process when the time is up.
"""
