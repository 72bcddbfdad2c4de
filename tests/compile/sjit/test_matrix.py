"""sjit for combinations of: call form x statics x form of shardings x mesh x context x transformation.

All combinations would be thousands of programs. The cases are a covering array of strength three: for any
three factors, every combination of their values occurs in a case. So bugs with up to three causes are found.
"""

from __future__ import annotations

import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from scalax.sharding import (
    MeshShardingHelper,
    TreePathShardingRule,
    with_sharding_annotation,
)
from scalax.sharding import PartitionSpec as P
from scalax.testing import assert_no_recompile

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
W = {'w': np.eye(8, dtype=np.float32) + X / 8, 'b': np.ones(8, np.float32)}
ROWS = P('data')


def by_hand(x, params, power):
    return jnp.tanh(x @ params['w'] + params['b']) ** power


# --- The columns ----------------------------------------------------------------------------------

CALLS = {
    'by position': lambda f, x, params: f(x, params, 2),
    'by name': lambda f, x, params: f(power=2, params=params, x=x),
    'mixed': lambda f, x, params: f(x, power=2, params=params),
    'with a default': lambda f, x, params: f(x, params),
    'method': lambda f, x, params: f(x, params, power=2),
    'extra keywords': lambda f, x, params: f(x, params, power=2, bias=np.float32(0)),
}
STATICS = {
    'none': {},
    'by name': {'static_argnames': 'power'},
    'by position': {'static_argnums': 2},
    'from the end': {'static_argnums': -1},
}
RULE = TreePathShardingRule(('w$', P(None, 'model')), ('.*', P()))
FORMS = {
    'none': None,
    'one rule': TreePathShardingRule(('w$', P(None, 'model')), ('b$', P()), ('', ROWS)),
    'by position': (ROWS, RULE),
    'by name': {'x': ROWS, 'params': RULE},
    'a tree of rules': {'x': ROWS, 'params': {'w': P(None, 'model'), 'b': P()}},
}
MESHES = {
    'auto': MeshShardingHelper([4, 2], ['data', 'model']),
    'explicit': MeshShardingHelper([4, 2], ['data', 'model'], axis_types=EXPLICIT),
    'mixed': MeshShardingHelper([4, 2], ['data', 'model'], axis_types=(EXPLICIT, AUTO)),
}
CONTEXTS = {
    'none': lambda helper, act: act(),
    'set_mesh': lambda helper, act: within(jax.set_mesh(helper.mesh), act),
    'thread': lambda helper, act: in_thread(act),
}


def within(manager: contextlib.AbstractContextManager, act):
    with manager:
        return act()


def in_thread(act):
    box = []
    thread = threading.Thread(target=lambda: box.append(act()), daemon=True)
    thread.start()
    thread.join(timeout=300)
    return box[0]


def scanned(f):
    return lambda x, params: jax.lax.scan(lambda x, _: (f(x, params), None), x, length=3)[0]


def graded(f):
    return jax.grad(lambda x, params: f(x, params).sum(), argnums=1)


def mapped(f):
    return lambda x, params: jax.vmap(lambda x: f(x, params))(jnp.stack([x, x + 1]))


# Under jax.jit, because JAX rejects some of these outside it: eager gradients over Explicit axes need
# set_mesh, under which eager operations return arrays that are committed to the mesh.
TRANSFORMS = {
    'called': lambda helper, f: f,
    'in jit': lambda helper, f: jax.jit(lambda x, params: 2 * f(x, params)),
    'in sjit': lambda helper, f: helper.sjit(lambda x, params: 2 * f(x, params), in_shardings=(ROWS, P())),
    'in scan': lambda helper, f: jax.jit(scanned(f)),
    'grad': lambda helper, f: jax.jit(graded(f)),
    'checkpoint': lambda helper, f: jax.jit(graded(jax.checkpoint(f))),
    'vmap': lambda helper, f: jax.jit(mapped(f)),
}
TABLE = (CALLS, STATICS, FORMS, MESHES, CONTEXTS, TRANSFORMS)


def covering_array(factors, strength=3):
    """Returns cases in which all combinations of the values of *strength* factors occur, found greedily."""
    indices = range(len(factors))
    missing = {
        (subset, values)
        for subset in itertools.combinations(indices, strength)
        for values in itertools.product(*[sorted(factors[i]) for i in subset])
    }
    cases = []
    while missing:
        subset, values = min(missing)
        case = dict(zip(subset, values, strict=True))
        for i in indices:
            if i not in case:
                case[i] = max(
                    sorted(factors[i]), key=lambda value, i=i: gain({**case, i: value}, missing, strength)
                )
        missing -= combinations_in(case, strength)
        cases.append(tuple(case[i] for i in indices))
    return cases


def combinations_in(case, strength):
    return {
        (subset, tuple(case[i] for i in subset)) for subset in itertools.combinations(sorted(case), strength)
    }


def gain(case, missing, strength):
    return len(combinations_in(case, strength) & missing)


CASES = covering_array(TABLE)


def test_the_cases_cover_the_table():
    for subset in itertools.combinations(range(len(TABLE)), 3):
        seen = {tuple(case[i] for i in subset) for case in CASES}
        assert seen == set(itertools.product(*[TABLE[i] for i in subset]))


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('case', CASES, ids=', '.join)
def test_matrix(case):
    columns = zip(TABLE, case, strict=True)
    call, static, form, helper, context, transform = (column[name] for column, name in columns)
    traced = []

    class Model:
        def method(self, x, params, power=2):
            traced.append(power)
            hidden = with_sharding_annotation(x @ params['w'] + params['b'], 'hidden')
            return jnp.tanh(hidden) ** power

    def function(x, params, power=2, **more):
        return Model().method(x, params, power)

    fun = Model().method if case[0] == 'method' else function
    options = {'in_shardings': form, **static}
    if case[0] == 'extra keywords' and isinstance(form, dict):
        options['in_shardings'] = {**form, 'bias': P()}
    if not static and case[0] != 'with a default' and isinstance(form, tuple):
        options['in_shardings'] = (*form, None)  # an entry for power
    f = helper.sjit(fun, **options, out_shardings=ROWS, annotation_shardings={'hidden': ROWS})
    act = transform(helper, lambda x, params: call(f, x, params))
    expected = transform(helper, lambda x, params: by_hand(x, params, 2))(X, W)

    def run():
        return act(X, W)

    result = context(helper, run)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for actual, desired in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        np.testing.assert_allclose(actual, desired, rtol=2e-5, atol=1e-5)
    if case[5] == 'called':
        assert result.sharding.is_equivalent_to(helper.match_sharding_rule(ROWS, X), 2)
        with assert_no_recompile(f):
            again = context(helper, run)
        assert again.sharding == result.sharding
    assert len(traced) == 1
