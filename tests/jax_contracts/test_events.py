"""Tests that `scalax/_jax/events` receives the monitoring events of JAX."""

import threading
from typing import Any

import jax
import numpy as np

from scalax._jax.events import compilations_of
from tests.support.contracts import contract


def test_compilations_are_reported_with_the_name_of_the_function() -> None:
    def of_this_test(x: Any) -> Any:
        return x + 1

    compiled = jax.jit(of_this_test)
    with contract('reports each compilation with the name of the function', 'to count them'):
        with compilations_of('of_this_test') as compile_seconds:
            compiled(np.ones(3))
            compiled(np.ones(3))
            compiled(np.ones(4))
            jax.jit(lambda x: x - 1)(np.ones(3))
            other = threading.Thread(target=compiled, args=(np.ones(5),))
            other.start()
            other.join(200)
        assert len(compile_seconds) == 2 and min(compile_seconds) >= 0
    compiled(np.ones(6))
    assert len(compile_seconds) == 2
