"""Text as batches of bytes, the tokens. A batch is a function of (seed, step)."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import app

VALIDATION_FRACTION = 10  # the last tenth


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as bytes: a first part for training, and a last part for validation."""

    name: str
    train: np.ndarray  # [bytes] uint8
    validation: np.ndarray  # [bytes] uint8

    def __str__(self) -> str:
        return f'{self.name}, {len(self.train):,} bytes to train on and {len(self.validation):,} held out'

    def batch(
        self, size: int, sequence: int, seed: int, step: int, examples: slice | np.ndarray = slice(None)
    ) -> np.ndarray:
        """Returns [size, sequence + 1] int32: windows of training text, drawn by (seed, step).

        With `examples`, only these windows. Example i of step n is the same text in every process.
        """
        starts = np.random.default_rng((seed, step)).integers(len(self.train) - sequence, size=size)
        return windows(self.train, starts[examples], sequence + 1)

    def validation_batches(self, size: int, sequence: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yields the validation part once, as ([size, sequence + 1] int32, number of valid examples).

        The windows are adjacent, so each byte is predicted once, except after the last full window. The last
        batch is padded, so that all batches have the same shape.
        """
        starts = np.arange(0, len(self.validation) - sequence, sequence)
        for first in range(0, len(starts), size):
            valid = starts[first : first + size]
            yield windows(self.validation, np.resize(valid, size), sequence + 1), len(valid)

    def prompts(self, count: int, length: int) -> np.ndarray:
        """Returns [count, length] int32: windows of the validation part, evenly spaced."""
        starts = np.linspace(0, len(self.validation) - length, count).astype(int)
        return windows(self.validation, starts, length)


def load_corpus(paths: Sequence[str], sequence: int) -> Corpus:
    """Returns the concatenated text of `paths`, or Python's own documentation if there are no paths.

    Raises:
      app.UsageError: a file is missing, unreadable or empty, or the text is too short for sequences of
        `sequence` bytes.
    """
    if paths:
        name, text = ', '.join(paths), b'\n'.join(read_file(Path(path)) for path in paths)
    else:
        name, text = "Python's documentation (pydoc_data.topics)", documentation().encode()
    needed = VALIDATION_FRACTION * (sequence + 1)
    if len(text) < needed:
        raise app.UsageError(
            f'{name}: {len(text):,} bytes are too few for sequences of {sequence}. The last tenth '
            f'is the validation text and must hold one: give {needed:,} bytes of text or more, '
            'or a smaller --sequence_length.'
        )
    data = np.frombuffer(text, np.uint8)
    cut = len(data) - len(data) // VALIDATION_FRACTION
    return Corpus(name, data[:cut], data[cut:])


def documentation() -> str:
    """Returns the language reference that Python ships for `help('topic')`: 400 KB of English.

    Topics repeat long passages of other topics. Only the first occurrence of a paragraph is kept; otherwise
    it could be in the training text and in the validation text.
    """
    try:
        topics = importlib.import_module('pydoc_data.topics').topics
    except ImportError as error:
        raise app.UsageError(
            'This Python ships without its documentation (pydoc_data.topics): '
            'give a text of your own with --text.'
        ) from error
    paragraphs = '\n\n'.join(topics[name].strip('\n') for name in sorted(topics)).split('\n\n')
    return '\n\n'.join(dict.fromkeys(paragraphs))


def read_file(path: Path) -> bytes:
    """Returns the bytes of a text file, which must exist and not be empty."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise app.UsageError(f'--text {path}: cannot be read ({error.strerror}).') from error
    if not text.strip():
        raise app.UsageError(f'--text {path}: the file is empty.')
    return text


def windows(data: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Returns [len(starts), length] int32: the `length` bytes of `data` from each start."""
    return data[starts[:, None] + np.arange(length)].astype(np.int32)
