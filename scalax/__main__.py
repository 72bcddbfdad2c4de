"""`python -m scalax`: see `scalax.cli`."""

import os
import sys
import threading

from scalax.cli import main

_INTERRUPTED = 130  # what shells say of a program that Ctrl-C has ended


def _run() -> int:
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever reads has read enough, as `head` has: what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return _INTERRUPTED


if __name__ == '__main__':
    code = _run()
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        # A compiler that Ctrl-C has left behind, for which Python would wait.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
