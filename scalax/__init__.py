"""scalax runs JAX code written for one device, unchanged, on any mesh of devices.

The user specifies *where* (a mesh), *what* (sharding rules for pytrees) and *when* (a compiled function, a
transfer, a batch). One function resolves the sharding of every leaf and records the reason.
docs/design.md lists the subpackages.

Importing scalax initializes no device and does not change global state of JAX.
"""

from scalax import errors, sharding, utils
from scalax._compile.microbatch import microbatch
from scalax._version import __version__

__all__ = ['__version__', 'errors', 'microbatch', 'sharding', 'utils']
