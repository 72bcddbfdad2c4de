"""Published models as flax and equinox modules, with the parameter names of public code.

Each file contains a family, and builds trees of shapes at full size, without allocating arrays. Layers are
unrolled, or stacked in the first dimension as for scan. Rotary embeddings are omitted: they have no
parameters.
"""
