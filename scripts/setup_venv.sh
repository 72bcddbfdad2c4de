#!/bin/sh
# Makes a virtual environment where there is no working one, and installs into it.
#
#   scripts/setup_venv.sh FOLDER newest|oldest WHAT_TO_INSTALL...
#   scripts/setup_venv.sh .venv newest -e '.[examples]'
set -eu

venv=$1 preference=$2
shift 2

# An interrupted run, or an upgrade of the system's Python, leaves a folder that does not work.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  # The Pythons for which there are wheels of both the oldest and the newest JAX.
  python=$("$(dirname "$0")/find_python.sh" 3.11 3.14 "$preference")
  printf 'Making %s with %s\n' "$venv" "$python"
  "$python" -m venv --clear "$venv"
fi

printf 'Installing into %s (the first time takes a minute or two)\n' "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
"$venv/bin/python" -c 'import platform, sys
from importlib.metadata import version
print(f"{sys.argv[1]} is ready: Python {platform.python_version()}, JAX {version(sys.argv[2])}")' "$venv" jax
