"""Leaves of trees without data."""

import jax


def leaf(*shape, dtype='float32'):
    return jax.ShapeDtypeStruct(shape, dtype)
