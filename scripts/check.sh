#!/bin/sh
# Runs the checks one after the other, shows each as it runs, and fails at the end if one has failed.
#
#   scripts/check.sh PYTHON STEP...             steps: format, lint, types, docstrings, tests
#   PYTEST_ARGS='-m "not slow"' scripts/check.sh .venv/bin/python format lint types tests
set -u
python=$1
shift
failed=
trap 'printf "\nInterrupted.\n"; exit 130' INT TERM

run() {
  name=$1
  shift
  printf '\n==> %s: %s\n' "$name" "$*"
  "$@" || failed="$failed $name"
}

for step in "$@"; do
  case $step in
    format) run format "$python" -m ruff format --check . ;;
    lint) run lint "$python" -m ruff check . ;;
    types) run types "$python" -m mypy scalax benchmarks tests/typed ;;
    docstrings) run docstrings "$python" -m pytest --numprocesses=auto --doctest-modules scalax ;;
    tests) eval "run tests $python -m pytest --numprocesses=auto --dist=worksteal ${PYTEST_ARGS-}" ;;
    *) printf 'check.sh knows no step %s\n' "$step" >&2 && exit 2 ;;
  esac
done

if [ -n "$failed" ]; then
  printf '\nFAILED:%s\n' "$failed"
  exit 1
fi
printf '\nAll checks passed: %s.\n' "$*"
