#!/bin/sh
# Prints the newest, or the oldest, Python of a range that can make a virtual environment.
#
#   scripts/find_python.sh 3.11 3.14 newest
#
# A name on PATH proves little: it may be a pyenv shim that refuses to run, or Debian's Python without
# ensurepip. So every candidate is run. $PYTHON, where set, is the only candidate.
set -eu
minimum=$1 maximum=$2 preference=$3

# Where version managers and installers put interpreters, besides PATH.
elsewhere="${PYENV_ROOT:-${HOME-}/.pyenv}/versions/*/bin
  ${XDG_DATA_HOME:-${HOME-}/.local/share}/uv/python/*/bin
  ${HOME-}/*conda*/bin ${HOME-}/*forge*/bin /usr/local/bin /opt/*/bin
  /Library/Frameworks/Python.framework/Versions/*/bin"

# Answers 'fit 3.13 /usr/bin/python3' or 'unfit /usr/bin/python3: reason'.
probe='
import sys
name, *limits = sys.argv[1:]
release = sys.version_info[:2]
low, high = [tuple(map(int, limit.split("."))) for limit in limits]
reason = None
if sys.implementation.name != "cpython":
    reason = "it is " + sys.implementation.name + ", for which there is no JAX"
elif not low <= release <= high or sys.version_info.releaselevel in ("alpha", "beta"):
    reason = "it is Python " + sys.version.split()[0]
else:
    try:
        import ensurepip, venv
        ensurepip.version()
    except Exception:
        reason = "it has no venv or no ensurepip"
print("unfit %s: %s" % (name, reason) if reason else "fit %d.%d %s" % (release + (sys.executable or name,)))
'

candidates() {
  if [ -n "${PYTHON-}" ]; then
    command -v "$PYTHON" || printf '%s\n' "$PYTHON"
    return
  fi
  # The patterns are meant to be expanded; a pattern without a match is no folder.
  { printf '%s\n' "$PATH" | tr ':' '\n' && for folder in $elsewhere; do printf '%s\n' "$folder"; done; } |
    while read -r folder; do
      for python in "$folder"/python3 "$folder"/python3.1[0-9] "$folder"/python; do
        if [ -n "$folder" ] && [ -f "$python" ] && [ -x "$python" ]; then printf '%s\n' "$python"; fi
      done
    done
}

answers=$(candidates | while read -r python; do
  "$python" -c "$probe" "$python" "$minimum" "$maximum" 2>/dev/null </dev/null ||
    printf 'unfit %s: it does not run\n' "$python"
done)
case $preference in
  newest) order=-k1.3nr ;;
  *) order=-k1.3n ;;
esac
# The first of several with the same version is the one that PATH finds first.
best=$(printf '%s\n' "$answers" | sed -n 's/^fit //p' | sort -s "$order" | sed -n '1s/^[^ ]* //p')
if [ -n "$best" ]; then
  printf '%s\n' "$best"
  exit
fi

{
  printf 'No fitting Python was found. Needed: Python %s to %s, with venv and ensurepip.\n' "$minimum" "$maximum"
  [ -n "${PYTHON-}" ] || printf '  Looked on PATH and in the folders of pyenv, uv, conda and python.org.\n'
  printf '%s\n' "$answers" | sed -n 's/^unfit /  /p'
  printf '  To get one:\n'
  printf '    Debian, Ubuntu: apt install python3 python3-venv\n'
  printf '    macOS:          brew install python@3.13\n'
  printf '    anywhere:       uv python install 3.13\n'
  printf '  or name one yourself: make PYTHON=/path/to/python3 ...\n'
} >&2
exit 1
