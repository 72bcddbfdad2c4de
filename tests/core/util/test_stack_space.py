"""Functions with more stack space behave as before."""

import inspect
import sys
import traceback

import pytest

from scalax._core.util.stack_space import with_stack_space


def fails(depth):
    return 1 / 0 if not depth else fails(depth - 1)


def sums(a, *rest, scale=1, **more):
    """Its docstring."""
    return scale * (a + sum(rest) + sum(more.values()))


def test_it_is_the_function_with_a_larger_frame():
    before = sums.__code__
    assert with_stack_space(sums) is sums
    assert sums.__code__.co_stacksize > before.co_stacksize
    assert sums.__code__.replace(co_stacksize=before.co_stacksize) == before
    assert str(inspect.signature(sums)) == '(a, *rest, scale=1, **more)'
    assert sums(1, 2, scale=3, x=4) == 21


def test_calls_inside_go_as_deep_as_python_lets_them():
    def count(depth):
        return 0 if not depth else 1 + count(depth - 1)

    roomy = with_stack_space(lambda depth: count(depth))
    assert roomy(sys.getrecursionlimit() // 2) == sys.getrecursionlimit() // 2
    with pytest.raises(RecursionError):
        roomy(2 * sys.getrecursionlimit())


def test_tracebacks_keep_their_lines():
    roomy = with_stack_space(lambda: fails(3))
    with pytest.raises(ZeroDivisionError) as caught:
        roomy()
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    inside = 'return 1 / 0 if not depth else fails(depth - 1)'
    assert lines[1:] == ['roomy = with_stack_space(lambda: fails(3))', *[inside] * 4]
