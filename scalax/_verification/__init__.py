"""Verification of a step: the same step on a mesh and on one device, compared.

Both sides run the user's own function. On the mesh the step runs as it is. On one device its jaxpr is traced
for a mesh of the same axes with one device each, so that `psum`, `axis_index` and bare specs mean something,
and it is evaluated equation by equation, without its shardings. No code of scalax that could be wrong on a
mesh is part of that side.

There is no constant tolerance. An abstract interpreter follows which values can be rounded at all; the
others must be equal. A difference larger than several times the sampled rounding errors counts only if it
persists when arguments are moved by one unit in the last place in other ways. docs/verify.md has the
details.
"""
