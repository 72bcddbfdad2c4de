"""cuDNN attention on local shards. The tests define primitives of the same names: cuDNN may be missing."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from scalax._jax.equations import all_equations, shape_of
from tests.spmd.test_partition import array
from tests.support.partitioned import FSDP, HSDP, TP, P, assert_equal, collectives, partitioned

pytestmark = pytest.mark.medium

BATCH, TIME, HEADS, WIDTH = 16, 6, 4, 8
NOTHING = jnp.zeros(0)
X = array(BATCH, TIME, HEADS, WIDTH)
FREE = {'layout': 0, 'dropout_rate': 0.0}


def attended(query, key, value, bias, lengths):
    scores = jnp.einsum('btnh,bsnh->bnts', query, key) / WIDTH**0.5
    if bias.size:
        scores += bias
    if lengths.size:
        scores = jnp.where(jnp.arange(key.shape[1]) < lengths[:, None, None, None], scores, -1e9)
    return jnp.einsum('bnts,bsnh->btnh', jax.nn.softmax(scores), value), jax.nn.logsumexp(scores, -1)


def forward(query, key, value, bias, _, lengths, *others, **params):
    return [*attended(query, key, value, bias, lengths)]


def backward(query, key, value, bias, _, lengths, *others, **params):
    def out(query, key, value, bias):
        return attended(query, key, value, bias, lengths)[0]

    gradients = jax.vjp(out, query, key, value, bias)[1](others[-1])
    return [*gradients] if bias.size else [*gradients[:3]]


def primitive(name, function, types):
    new_primitive = Primitive(name)
    new_primitive.multiple_results = True
    new_primitive.def_abstract_eval(lambda *operands, **params: types(*operands))
    mlir.register_lowering(new_primitive, mlir.lower_fun(function, multiple_results=True))
    return new_primitive


def forward_types(query, *others):
    batch, time, heads, _ = query.shape
    return [query, query.update(shape=(batch, heads, time))]


def backward_types(query, key, value, bias, *others):
    return [query, key, value, *[bias] * bool(bias.size)]


FORWARD = primitive('dot_product_attention_fwd_wrapper', forward, forward_types)
BACKWARD = primitive('dot_product_attention_bwd_wrapper', backward, backward_types)


def attention(*qkv, bias=NOTHING, lengths=NOTHING, offsets=NOTHING, **params):
    params = {**FREE, **params}
    others = lengths, lengths, offsets, offsets, NOTHING, NOTHING

    @jax.custom_vjp
    def attend(query, key, value, bias):
        return FORWARD.bind(query, key, value, bias, *others, **params)[0]

    def run(query, key, value, bias):
        out, rest = FORWARD.bind(query, key, value, bias, *others, **params)
        return out, (query, key, value, bias, rest, out)

    def gradients(saved, grad):
        *qkvb, rest, out = saved
        results = BACKWARD.bind(*qkvb, *others, rest, out, grad, **params)
        return [*results, jnp.zeros(0)][:4]

    attend.defvjp(run, gradients)
    return attend(*qkv, bias)


def projected(w, x):
    return [jnp.einsum('btnh,hk->btnk', x, w[name]) for name in 'qkv']


def scores(x):
    return jnp.einsum('btnh,bsnh->bnts', x, x)


WEIGHTS = {name: array(WIDTH, WIDTH) for name in 'qkv'}
BIAS = {'bias': array(1, HEADS, TIME, TIME)}
LENGTHS = jnp.arange(BATCH, dtype='int32') % TIME + 1
APART = {
    'plain': ({}, lambda w, x: attention(*projected(w, x))),
    'a bias for all': (BIAS, lambda w, x: attention(*projected(w, x), bias=w['bias'])),
    'a bias for each': (
        {},
        lambda w, x: attention(*projected(w, x), bias=jnp.einsum('btnh,bsnh->bnts', x, x)),
    ),
    'lengths': ({}, lambda w, x: attention(*projected(w, x), lengths=LENGTHS)),
}
TOGETHER = {
    'dropped': lambda w, x: attention(*projected(w, x), dropout_rate=0.1),
    'packed': lambda w, x: attention(*projected(w, x), offsets=jnp.zeros((BATCH, 3), 'int32')),
}


def with_gradient(fun):
    return jax.value_and_grad(lambda w, x: jnp.mean(jnp.sin(fun(w, x))))


def check(name, mesh, **options):
    more, fun = APART[name]
    weights = WEIGHTS | more
    step, run = partitioned(with_gradient(fun), weights, X, mesh, **options)
    assert_equal(run(), jax.jit(with_gradient(fun))(weights, X))
    return step


@pytest.mark.parametrize('name', APART)
def test_each_device_attends_in_its_own_examples(name):
    step = check(name, HSDP if name == 'a bias for all' else FSDP)
    assert not [row for row in step.collective_rows if row.what == 'examples']


@pytest.mark.parametrize('name', TOGETHER)
def test_dependent_examples_are_gathered(name):
    step, run = partitioned(TOGETHER[name], WEIGHTS, X)
    assert_equal(run(), jax.jit(TOGETHER[name])(WEIGHTS, X))
    gathered = collectives(step)['all_gather examples gathered for dot_product_attention_fwd_wrapper']
    assert gathered == 3


@pytest.mark.parametrize('name', ['plain', 'a bias for all'])
def test_another_axis_shards_the_heads(name):
    """Heads come from matmuls over tp."""

    def fun(w, x):
        qkv = [jnp.einsum('btnh,nhk->btnk', x, w[name]) for name in 'qkv']
        return attention(*qkv, **{equation: w[equation] for equation in w if equation == 'bias'})

    weights = {name: array(HEADS, WIDTH, WIDTH) for name in 'qkv'} | APART[name][0]
    specs = [P(None, 'tp') if equation == 'bias' else P('tp', 'fsdp') for equation in sorted(weights)]
    step, run = partitioned(with_gradient(fun), weights, X, TP, specs=specs)
    assert_equal(run(), jax.jit(with_gradient(fun))(weights, X))
    for equation in all_equations(step.jaxpr):
        if equation.primitive in (FORWARD, BACKWARD):
            assert [shape_of(atom) for atom in equation.invars[:3]] == [
                (BATCH // 4, TIME, HEADS // 2, WIDTH)
            ] * 3
