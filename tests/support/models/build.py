"""Builds the tree of shapes of a module, with its layers unrolled or stacked."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

DTYPE = jnp.bfloat16


def linen(module, *inputs):
    """Returns the parameters of a linen module; inputs are (shape, dtype) pairs."""
    structs = [jax.ShapeDtypeStruct(*shape_and_dtype) for shape_and_dtype in inputs]
    return jax.eval_shape(module.init, jax.random.key(0), *structs)['params']


def nnx_state(make):
    """Returns the parameters of the nnx module that `make` builds."""
    return nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param)


def equinox(make):
    """Returns the arrays of the equinox module that `make` builds from a key."""
    module = eqx.filter_eval_shape(make, jax.random.key(0))
    return eqx.filter(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))


class Unrolled(nn.Module):
    """Layers named by their indices, as in Hugging Face's collections of layers."""

    layer: type[nn.Module]
    config: object
    count: int

    @nn.compact
    def __call__(self, x, *context):
        for number in range(self.count):
            x, _ = self.layer(self.config, name=str(number))(x, *context)
        return x


def linen_layers(layer, config, count, stacked, name, x, *context, numbered='{name}/{number}'):
    """Runs layers, inside a compact method, on x and the inputs that they share (`context`)."""
    if stacked:
        axes = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}, 'in_axes': nn.broadcast}
        return nn.scan(layer, length=count, **axes)(config, name=name)(x, *context)[0]
    if numbered == '{name}/{number}':
        return Unrolled(layer, config, count, name=name)(x, *context)
    for number in range(count):
        x, _ = layer(config, name=numbered.format(name=name, number=number))(x, *context)
    return x


def nnx_layers(make, count, stacked, rngs):
    if not stacked:
        return nnx.List([make(rngs) for _ in range(count)])
    return nnx.split_rngs(splits=count)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)


def equinox_layers(make, count, stacked, key):
    keys = jax.random.split(key, count)
    return eqx.filter_vmap(make)(keys) if stacked else [make(layer_key) for layer_key in keys]


def dense(features, name, bias=False):
    return nn.Dense(features, use_bias=bias, param_dtype=DTYPE, name=name)


def split_heads(heads, head_dim, name):
    """Returns kernels (in, heads, head_dim), as in MaxText and T5X."""
    return nn.DenseGeneral((heads, head_dim), use_bias=False, param_dtype=DTYPE, name=name)


def merge_heads(features, name):
    """Returns kernels (heads, head_dim, out)."""
    return nn.DenseGeneral(features, axis=(-2, -1), use_bias=False, param_dtype=DTYPE, name=name)


class RMSNorm(nn.Module):
    """A norm whose vector has the library's name: nn.RMSNorm's is `scale`, Hugging Face's `weight`."""

    key: str = 'scale'

    @nn.compact
    def __call__(self, x):
        vector = self.param(self.key, nn.initializers.ones, x.shape[-1:], DTYPE)
        return vector * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
