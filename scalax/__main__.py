"""`python -m scalax`, and the script `scalax`: see `scalax.cli`."""

import os
import sys
import threading

from scalax.cli import ExitCode, main_process


def run() -> None:
    """Runs the command line of this process, and ends it."""
    code = _code()
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        # Ctrl-C left a compiler running. Python would wait for its thread.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _code() -> int:
    try:
        code = main_process()
        if sys.stdout is not None:  # it is closed (>&-)
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe: the rest of the output is dropped.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return ExitCode.INTERRUPTED


if __name__ == '__main__':
    run()
