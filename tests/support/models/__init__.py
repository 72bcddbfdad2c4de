"""Published models of flax and equinox modules, by the parameter names that public code gives them.

Each file is a family, and builds trees of shapes at full size: nothing is allocated. Layers are unrolled,
or stacked in the first dimension as for scan. Rotary embeddings are left out: they have no parameters.
"""
