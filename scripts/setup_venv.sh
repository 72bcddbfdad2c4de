#!/bin/sh
# Makes a virtual environment where there is no working one, and installs into it.
#
#   scripts/setup_venv.sh FOLDER newest|oldest WHAT_TO_INSTALL...
#   scripts/setup_venv.sh .venv newest -e '.[examples]'
#
# The Makefile keeps track of what is installed; this script only does the work.
set -eu

venv=$1 preference=$2
shift 2
here=$(dirname "$0")

# The Pythons for which there are wheels of both the oldest and the newest JAX.
minimum=3.11
maximum=3.14

# An interrupted run, or an upgrade of the system's Python, leaves a folder that does not work.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  case ${venv##*/} in
    .venv*) rm -rf "$venv" ;;
    *) printf 'setup_venv.sh: will not replace %s: its name does not begin with .venv\n' "$venv" >&2 && exit 2 ;;
  esac
  python=$("$here/find_python.sh" "$minimum" "$maximum" "$preference")
  printf 'Making %s with %s\n' "$venv" "$python"
  "$python" -m venv "$venv"
fi

printf 'Installing into %s (the first time takes a minute or two)\n' "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
"$venv/bin/python" - "$venv" <<'PY'
import importlib.metadata
import platform
import sys

jax = importlib.metadata.version('jax')
print(f'{sys.argv[1]} is ready: Python {platform.python_version()}, JAX {jax}')
PY
