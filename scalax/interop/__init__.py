"""Trees of flax and haliax: the names that they give to dimensions, and values without their boxes.

flax linen keeps an array with partitioning metadata in a box (``nn.Partitioned``,
``nn.LogicallyPartitioned``), flax nnx in a variable, haliax in a ``NamedArray``. All are pytree nodes
around one array, so leaf paths keep their key: ``params/Dense_0/kernel/value``. None of the libraries is
imported here: a tree can hold such a node only where its library is imported already.
"""

from scalax.interop._boxes import DimensionNames, axis_names, unbox

__all__ = ['DimensionNames', 'axis_names', 'unbox']
