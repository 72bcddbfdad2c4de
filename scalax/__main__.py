"""`python -m scalax`: see `scalax.cli`."""

import sys

from scalax.cli import main

if __name__ == '__main__':
    sys.exit(main())
