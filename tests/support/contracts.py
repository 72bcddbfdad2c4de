"""Helpers for tests of undocumented JAX behaviour: their failures explain which behaviour changed."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import jax

from scalax._jax.equations import all_equations


@contextlib.contextmanager
def contract(does: str, purpose: str, *, library: str = 'jax') -> Iterator[None]:
    """Fails with "jax ... no longer *does*, on which scalax relies *purpose*" if its body fails or raises."""
    try:
        yield
    except Exception as error:
        version = importlib.metadata.version(library)
        raise AssertionError(
            f'{library} {version} no longer {does}, on which scalax relies {purpose} '
            f'({type(error).__name__}: {error})'
        ) from error


def equation_in(name: str, fun: Callable[..., Any], *args: Any) -> Any:
    """Returns the first equation of a primitive in the jaxpr of a function."""
    equations = list(all_equations(jax.make_jaxpr(fun)(*args)))
    matches = [equation for equation in equations if equation.primitive.name == name]
    assert matches, f'no {name!r} in {[equation.primitive.name for equation in equations]}'
    return matches[0]
