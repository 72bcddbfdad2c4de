"""What each process of a running program does, asked from outside."""

from __future__ import annotations

from scalax._watch.state import State
from scalax._watch.watch import LONGEST, packed, socket_of, unpacked


def ask(address: str) -> tuple[list[State], str]:
    """Asks process 0 for the state of each process that it has heard of, and which is behind.

    Raises:
        OSError: nobody answers.
        ValueError: it is another program, or its SCALAX_RUN_TOKEN is another.
    """
    states, text, number, count = list[State](), '', 0, 1
    with socket_of(address) as way:
        way.settimeout(5)
        while number < count:
            way.send(packed(number, '', None))
            count, text, state = unpacked(way.recv(LONGEST))
            states += [state] if state else []
            number += 1
    return states, text
