"""`python -m scalax`: see `scalax.cli`."""

import os
import sys
import threading

from scalax.cli import main

_INTERRUPTED = 130  # the exit code in shells of a program that Ctrl-C has ended


def _run() -> int:
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe: the rest of the output is dropped.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return _INTERRUPTED


if __name__ == '__main__':
    code = _run()
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        # Ctrl-C left a compiler running. Python would wait for its thread.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
