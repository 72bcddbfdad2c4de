"""Helpers that several test files share: checks for other processes, programs, oracles, the browser."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
