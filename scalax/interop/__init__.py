"""Interoperability with flax and haliax: the dimension names in their trees, and values without boxes.

flax linen keeps an array with partitioning metadata in a box (``nn.Partitioned``,
``nn.LogicallyPartitioned``), flax nnx in a variable, haliax in a ``NamedArray``. All are pytree nodes
around one array, so leaf paths contain their key: ``params/Dense_0/kernel/value``. This module does not
import the libraries: a tree with such a node exists only if its library is imported already.
"""

from scalax.interop._boxes import DimensionNames, axis_names, unbox

__all__ = ['DimensionNames', 'axis_names', 'unbox']
