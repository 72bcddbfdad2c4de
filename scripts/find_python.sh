#!/bin/sh
# Prints the path of a Python interpreter that can make a virtual environment.
#
#   scripts/find_python.sh MINIMUM [MAXIMUM] [newest|oldest]
#   scripts/find_python.sh 3.11 3.14 oldest
#
# A name on PATH proves little: it may be a pyenv shim that refuses to run, a Python that is too old,
# or Debian's Python, which comes without ensurepip. So every candidate is run before it is believed.
# $PYTHON, where set, is the only candidate. Uses no command but the shell's own and the candidates.
set -u

minimum=${1:?usage: find_python.sh MINIMUM [MAXIMUM] [newest|oldest]}
shift
maximum=
case ${1-} in
  3.*) maximum=$1 && shift ;;
esac
preference=${1:-newest}
case $preference in
  newest) ideal=$maximum ;;
  oldest) ideal=$minimum ;;
  *) printf 'find_python.sh: the preference is newest or oldest, not %s\n' "$preference" >&2 && exit 2 ;;
esac
range="Python $minimum${maximum:+ to $maximum}"
[ -n "$maximum" ] || range="$range or later"

best=          # the interpreter to print
best_minor=    # and its minor version
seen='|'       # candidates tried, so that a folder that is on PATH twice is tried once
unfit=         # one line for each candidate that will not do

# Says what the interpreter is, or why it will not do. It has to be valid Python 2 too.
probe='
import sys
v = sys.version_info
if v < (3, 3):
    print("unfit it is Python %d.%d" % v[:2])
elif sys.implementation.name != "cpython":
    print("unfit it is %s, for which there is no JAX" % sys.implementation.name)
elif v.releaselevel in ("alpha", "beta"):
    print("unfit it is a pre-release, %s" % sys.version.split()[0])
else:
    try:
        import venv, ensurepip
        ensurepip.version()
        print("%d.%d %s" % (v[0], v[1], sys.executable or sys.argv[1]))
    except Exception:
        print("unfit it is Python %d.%d without venv or ensurepip" % v[:2])
'

# Sets minor and path, or reason where the candidate is unfit.
examine() {
  reason= minor= path=
  # A broken shim's own complaints would only confuse; its reason is given below.
  if ! answer=$("$1" -c "$probe" "$1" 2>/dev/null </dev/null); then
    reason='it does not run'
    return
  fi
  case $answer in
    'unfit '*) reason=${answer#unfit } ;;
    3.*)
      version=${answer%% *} path=${answer#* }
      minor=${version#3.}
      if [ "$minor" -lt "${minimum#3.}" ]; then
        reason="it is Python $version"
      elif [ -n "$maximum" ] && [ "$minor" -gt "${maximum#3.}" ]; then
        reason="it is Python $version, newer than the libraries support"
      fi ;;
    *) reason='it does not answer like a Python interpreter' ;;
  esac
}

consider() {
  [ -f "$1" ] && [ -x "$1" ] || return 0
  case $seen in *"|$1|"*) return 0 ;; esac
  seen="$seen$1|"
  examine "$1"
  if [ -n "$reason" ]; then
    unfit="$unfit
    $1: $reason"
  elif [ -z "$best" ] ||
    { [ "$preference" = newest ] && [ "$minor" -gt "$best_minor" ]; } ||
    { [ "$preference" = oldest ] && [ "$minor" -lt "$best_minor" ]; }; then
    best=$path best_minor=$minor
    # Nothing can beat the end of the range: do not run the other candidates.
    if [ "3.$minor" = "$ideal" ]; then finish; fi
  fi
}

consider_folder() {
  for name in python3 python3.15 python3.14 python3.13 python3.12 python3.11 python; do
    consider "$1/$name"
  done
}

finish() {
  printf '%s\n' "$best"
  exit 0
}

if [ -n "${PYTHON-}" ]; then
  examine "$PYTHON"
  if [ -n "$reason" ]; then
    printf 'PYTHON=%s will not do: %s.\n' "$PYTHON" "$reason" >&2
    printf 'Set PYTHON to %s that has venv and ensurepip, or unset it to have one found.\n' "$range" >&2
    exit 1
  fi
  best=$path
  finish
fi

# An empty entry of PATH means the current folder; what lies there is not meant to be found.
rest=${PATH-}:
while [ -n "$rest" ]; do
  folder=${rest%%:*}
  rest=${rest#*:}
  if [ -n "$folder" ]; then consider_folder "$folder"; fi
done

# Where version managers and installers put interpreters. A pattern without a match stays as it is
# and is no folder with a Python in it, so it needs no special case.
home=${HOME:-/nonexistent}
for folder in \
  "${PYENV_ROOT:-$home/.pyenv}"/versions/*/bin \
  "${XDG_DATA_HOME:-$home/.local/share}"/uv/python/*/bin \
  /usr/local/bin /opt/*/bin /Library/Frameworks/Python.framework/Versions/*/bin \
  "$home"/miniconda3/bin "$home"/miniforge3/bin "$home"/mambaforge/bin "$home"/anaconda3/bin \
  "$home"/miniconda3/envs/*/bin "$home"/miniforge3/envs/*/bin "$home"/mambaforge/envs/*/bin \
  "$home"/anaconda3/envs/*/bin; do
  consider_folder "$folder"
done

if [ -n "$best" ]; then finish; fi

{
  printf 'No fitting Python was found. Needed: %s, with venv and ensurepip.\n' "$range"
  printf '  Looked on PATH, in the folders of pyenv, uv and conda, in /opt/*/bin and /usr/local/bin.\n'
  if [ -n "$unfit" ]; then
    printf '  Tried:%s\n' "$unfit"
  else
    printf '  There was no Python at all in these places.\n'
  fi
  printf '  To get one:\n'
  printf '    Debian, Ubuntu: apt install python3 python3-venv\n'
  printf '    macOS:          brew install python@3.13\n'
  printf '    anywhere:       uv python install 3.13\n'
  printf '  or name one yourself: make PYTHON=/path/to/python3 ...\n'
} >&2
exit 1
