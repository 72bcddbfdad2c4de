"""Runs work in many threads at the same time; each of them has to end."""

import threading
import time
from collections.abc import Callable
from typing import Any

COUNT = 16
LONGEST_S = 200


def in_threads(work: Callable[[int], Any], count: int = COUNT) -> list[Any]:
    """Returns the results of `work(0)`, `work(1)`, ... in separate threads that start together.

    Raises the error of the first thread that failed, or AssertionError if one does not end.
    """
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait(LONGEST_S)
            results[number] = work(number)
        except BaseException as error:
            errors[number] = error

    running = [
        threading.Thread(target=run, args=(number,), name=f'worker-{number}', daemon=True)
        for number in range(count)
    ]
    for thread in running:
        thread.start()
    end = time.monotonic() + LONGEST_S
    for thread in running:
        thread.join(max(end - time.monotonic(), 0))
    left = [thread.name for thread in running if thread.is_alive()]
    assert not left, f'these threads never end: {left}'
    for _, error in sorted(errors.items()):
        raise error
    return [results[number] for number in range(count)]
