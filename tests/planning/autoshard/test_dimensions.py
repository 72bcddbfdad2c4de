"""`scalax._planning.autoshard.dim_uses`: which dimensions of a step's arguments are equivalent."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from scalax._core.pytree.paths import path_string
from scalax._planning.autoshard.dim_uses import analyze_dim_uses


def named_dim_uses(function, weights, x):
    """Returns the classes of dimensions, layer dimensions, weights and expert dimensions, by names.

    A dimension's name is its weight's name and its index, as in ``'up.1'``.
    """
    names = [path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(weights)[0]]
    result = analyze_dim_uses(jax.make_jaxpr(function)(weights, x), {i: i for i, _ in enumerate(names)})

    def dim_name(dim):
        return f'{names[dim[0]]}.{dim[1]}'

    classes = {}
    for dim, number in result.classes.items():
        classes.setdefault(number, set()).add(dim_name(dim))
    return (
        [dims for dims in classes.values() if len(dims) > 1],
        set(map(dim_name, result.layer_dims)),
        {names[i] for i in result.weights},
        set(map(dim_name, result.expert_dims)),
    )


def array(*shape):
    return jnp.ones(shape, 'float32')


def test_columns_and_the_rows_that_they_meet():
    weights = {'up': array(4, 8), 'down': array(8, 4)}
    classes, *_ = named_dim_uses(lambda w, x: jax.nn.relu(x @ w['up']) @ w['down'], weights, array(2, 4))
    assert classes == [{'down.0', 'up.1'}]


def test_a_residual_connection_joins_dimension_classes():
    weights = {'up': array(4, 8), 'down': array(8, 4), 'last': array(4, 16), 'scale': array(4)}

    def model(w, x):
        x = x + jax.nn.relu((x * w['scale']) @ w['up']) @ w['down']
        return x @ w['last']

    classes, _, multiplied, _ = named_dim_uses(model, weights, array(2, 4))
    assert {'down.1', 'last.0', 'scale.0', 'up.0'} in classes and {'down.0', 'up.1'} in classes
    assert multiplied == {'up', 'down', 'last'}  # a scale is only multiplied elementwise


def test_heads_are_followed_through_reshapes_and_products():
    weights = {name: array(8, 8) for name in ('q', 'k', 'v', 'o')}

    def attention(w, x):
        q, k, v = ((x @ w[name]).reshape(2, 6, 4, 2) for name in 'qkv')
        mixed = jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', q, k)), v)
        return mixed.reshape(2, 6, 8) @ w['o']

    classes, *_ = named_dim_uses(attention, weights, array(2, 6, 8))
    assert {'q.1', 'k.1', 'v.1', 'o.0'} in classes


@pytest.mark.parametrize('how', ['scan', 'fori_loop'])
def test_a_stack_of_layers(how):
    weights = {'up': array(3, 4, 8), 'down': array(3, 8, 4)}

    def scanned(w, x):
        return jax.lax.scan(lambda x, w: (x + (x @ w['up']) @ w['down'], None), x, w)[0]

    def indexed(w, x):
        return jax.lax.fori_loop(0, 3, lambda i, x: x + (x @ w['up'][i]) @ w['down'][i], x)

    model = scanned if how == 'scan' else indexed
    classes, stacked, multiplied, _ = named_dim_uses(model, weights, array(2, 4))
    assert stacked == {'up.0', 'down.0'} and multiplied == {'up', 'down'}
    assert {'up.2', 'down.1'} in classes and {'up.1', 'down.2'} in classes


def test_gradients_and_an_optimizer():
    weights = {'w': array(4, 8), 'm': array(4, 8)}

    def step(state, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(state['w'])
        m = 0.9 * state['m'] + gradient
        return {'w': state['w'] - m, 'm': m}

    classes, _, multiplied, _ = named_dim_uses(step, weights, array(2, 4))
    assert {'w.0', 'm.0'} in classes and {'w.1', 'm.1'} in classes
    assert multiplied == {'w'}


def test_experts():
    *_, experts = named_dim_uses(
        lambda w, x: jnp.einsum('ecd,edh->ech', x, w['up']), {'up': array(3, 4, 8)}, array(3, 2, 4)
    )
    assert experts == {'up.0'}


def test_calls_branches_and_convolutions():
    weights = {'one': array(3, 3, 4, 8), 'two': array(3, 3, 8, 4)}

    def model(w, x):
        def convolve(x, kernel):
            return jax.lax.conv_general_dilated(
                x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
            )

        hidden = jax.jit(jax.checkpoint(convolve))(x, w['one'])
        hidden = jax.lax.cond(hidden[0, 0, 0, 0] > 0, jnp.tanh, jnp.sin, hidden)
        return convolve(hidden, w['two'])

    classes, _, multiplied, _ = named_dim_uses(model, weights, array(2, 4, 4, 4))
    assert classes == [{'one.3', 'two.2'}] and multiplied == {'one', 'two'}


def test_dimensions_are_not_followed_through_unknown_primitives():
    def model(w, x):
        out = jax.ShapeDtypeStruct((2, 8), 'float32')
        return jax.pure_callback(lambda y: y, out, x @ w['w']) @ w['v']

    classes, *_ = named_dim_uses(model, {'w': array(4, 8), 'v': array(8, 4)}, array(2, 4))
    assert classes == []


@pytest.mark.parametrize('name', ['dot_general', 'stack', 'scan', 'jit', 'add', 'device_put'])
def test_primitives_of_other_libraries_with_jax_names_are_unknown(name):
    other = Primitive(name)
    other.def_abstract_eval(lambda x, w: x)
    classes, *_ = named_dim_uses(lambda w, x: other.bind(x, w['w']), {'w': array(4, 8)}, array(2, 4))
    assert classes == []
