"""scalax runs JAX code written for one device, unchanged, on any mesh of devices.

The user says *where* (a mesh), *what* (sharding rules over any pytree) and *when* (a compiled function,
a transfer, a batch), each once. Everything follows from one function, which decides the sharding of
every leaf and records why. docs/design.md lists its subpackages, in their order.

Importing scalax touches no device and changes no global state of JAX.
"""

from scalax import errors, sharding, utils
from scalax._compile.microbatch import microbatch
from scalax._version import __version__

__all__ = ['__version__', 'errors', 'microbatch', 'sharding', 'utils']
