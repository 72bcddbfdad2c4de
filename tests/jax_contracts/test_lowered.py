"""Tests that `scalax/_jax/lowered` reads the text of lowered programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._jax import lowered as of
from tests.support.contracts import contract


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y "quoted"'))


def like(mesh: Mesh, spec: P, shape: tuple[int, ...] = (8, 4), dtype: Any = 'float32', **memory: str) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec, **memory))


def test_arguments_have_names_specs_and_types(mesh: Mesh) -> None:
    def fun(tree: Any, flags: Any, unused: Any) -> Any:
        return tree['w'] * tree['c'].real, flags

    spec = P(('x', 'y "quoted"'))
    tree = {'w': like(mesh, spec), 'c': like(mesh, P(), (4,), 'complex64')}
    program = jax.jit(fun).lower(tree, like(mesh, P(None, 'x'), dtype=bool), like(mesh, P()))
    with contract('writes names, shardings and types of arguments into lowered programs', 'to plan them'):
        assert of.arguments_of(program) == [
            ("tree['c']", P(None), 4 * 64),
            ("tree['w']", P(('x', 'y "quoted"'), None), 32 * 32),
            ('flags', P(None, 'x'), 32 * 8),
        ]


def test_results_have_the_requested_specs(mesh: Mesh) -> None:
    shardings = NamedSharding(mesh, P('x')), None
    program = jax.jit(lambda x: (x, jnp.sum(x)), out_shardings=shardings).lower(like(mesh, P('x')))
    with contract('writes the shardings of results into lowered programs', 'to plan them'):
        assert of.results_of(program) == [('', P('x', None), 32 * 32), ('', None, 32)]


def test_the_text_of_a_program_has_no_line_numbers(mesh: Mesh) -> None:
    def text(source: str, name: str = 'step') -> str:
        space: dict[str, Any] = {'jax': jax}
        exec(compile(source.replace('NAME', name), f'{name}{len(source)}.py', 'exec'), space)
        return of.text_of(jax.jit(space['fun']).lower(np.ones(3)))

    source = "def fun(x):\n    with jax.named_scope('NAME'):\n        return x * 2"
    with contract('marks with #loc what says where code is', 'to recognize equal programs'):
        assert text(source) == text(f'\n\n\n{source}')
        assert text(source) != text(source, 'other')
        assert 'step' in text(source)


def test_arguments_in_host_memory_need_no_device_memory(mesh: Mesh) -> None:
    x = like(mesh, P('x'), memory_kind='pinned_host')
    program = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device) + 1).lower(x)
    with contract('writes the memory of arguments into lowered programs', 'to count that of devices'):
        assert of.arguments_of(program) == [('x', P('x', None), 0)]


@pytest.mark.parametrize(
    ('text', 'spec'),
    [
        ('{sdy.sharding = #sdy.sharding<@mesh, [{}, {"tp"}, {"a", "b"}]>}', P(None, 'tp', ('a', 'b'))),
        ('{sdy.sharding = #sdy.sharding<@mesh, []>, tf.aliasing_output = 0 : i32}', P()),
        ('{sdy.sharding = #sdy.sharding<@mesh, [{"a"}], replicated={"b"}>}', P('a')),
        ('{sdy.sharding = #sdy.sharding<@mesh, [{"a", ?}]>}', None),
        ('{sdy.sharding = #sdy.sharding<@mesh, [{?}]>}', None),
        ('{jax.result_info = "result[1]"}', None),
    ],
)
def test_written_specs(text: str, spec: P | None) -> None:
    assert of.written_spec(text) == spec
