"""scalax runs JAX code written for one device, unchanged, on any mesh of devices.

The user says *where* (a mesh), *what* (sharding rules over any pytree) and *when* (a compiled function,
a transfer, a batch), each once. Everything follows from one function, which decides the sharding of
every leaf and records why. The layers, from the bottom; imports point down only::

    errors                    which errors there are, and what each means
    _paths, _spec             what a leaf is called; what a PartitionSpec may say
    interop                   names and boxes in the trees of other libraries
    rules                     WHAT: shapes and paths -> PartitionSpecs
    _mesh                     WHERE: dimensions and names -> a mesh
    _prefix, _resolve         the one place where rules meet a tree and a mesh
    _context, _axis_mapping   which helper, bindings and mapping of named axes are active
    _constrain, _unreduced    constraints and annotations; arrays that are parts of sums
    _sjit                     WHEN: compiled functions; the cache key is written down there
    _shard_map, _microbatch   functions of one device's block; batches in parts
    _processes, _agree        what processes tell one another, and whether they mean the same
    _transfer                 whole trees <-> a mesh
    _data, _local, _prefetch  host data <-> global arrays, loaded ahead (_rows, _schedule, _exchange: which
                              rows go where; _broadcast, _replicas: values of one process, equal values)
    distributed               joining processes, and stopping together
    explain, visualize        reports of one resolve; pictures of which device holds which block
    plan                      what a compiled step holds and sends
    _helper                   MeshShardingHelper: a thin front of all that
    axes                      named axes: one mapping, usable everywhere
    testing                   assertions for tests of sharded programs
    checkpoint                states of runs on the disk, restored for any mesh
    sharding, utils           what users import

Importing scalax touches no device and changes no global state of JAX.
"""

from scalax import errors, sharding, utils
from scalax._microbatch import microbatch
from scalax._version import __version__

__all__ = ['__version__', 'errors', 'microbatch', 'sharding', 'utils']
