"""The results of a run: a loss curve, a sample, the sharding of its state, and figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Results:
    """The results of a run. Losses are in nats per byte, times in seconds."""

    strategy: str
    mesh: dict[str, int]
    devices: str
    text: str
    parameters: int
    steps: int
    steps_asked: int
    interrupted: bool
    train_losses: Sequence[float]
    validation_loss_untrained: float
    validation_loss: float
    tokens_per_second: float
    seconds: float

    def summary(self) -> str:
        """Returns the results in one line."""
        ended = 'Interrupted' if self.interrupted else 'Done'
        return (
            f'{ended} after {self.steps} of {self.steps_asked} steps: '
            f'validation loss {self.validation_loss_untrained:.3f} -> {self.validation_loss:.3f} '
            f'nats per byte, {self.seconds:.0f} s.'
        )


def write_report(output: Path, results: Results, sample: str, sharding: str) -> None:
    """Writes loss.png, sample.txt, sharding.txt and numbers.json into the folder `output`."""
    draw_losses(output / 'loss.png', results)
    (output / 'sample.txt').write_text(sample, encoding='utf-8')
    (output / 'sharding.txt').write_text(sharding + '\n', encoding='utf-8')
    (output / 'numbers.json').write_text(json.dumps(dataclasses.asdict(results), indent=2) + '\n')


def draw_losses(path: Path, results: Results) -> None:
    """Draws the training loss over the steps, and the validation loss before and after."""
    # Imported here, because it takes about as long as importing JAX.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout='constrained')
    axes = figure.subplots()
    losses = np.asarray(results.train_losses)
    steps = np.arange(1, len(losses) + 1)
    if len(losses):
        axes.plot(steps, losses, color='tab:blue', alpha=0.25, linewidth=1, label='training, each step')
        axes.plot(steps, smooth(losses), color='tab:blue', linewidth=2, label='training, smoothed')
    axes.plot(
        [0, len(losses)],
        [results.validation_loss_untrained, results.validation_loss],
        color='tab:orange',
        linestyle='none',
        marker='o',
        markersize=8,
        clip_on=False,
        zorder=3,
        label='validation, before and after',
    )
    axes.annotate(
        f'{results.validation_loss:.2f}',
        (len(losses), results.validation_loss),
        xytext=(-10, 12),
        textcoords='offset points',
        ha='right',
        color='tab:orange',
        fontweight='bold',
    )
    axes.set_xlim(0, max(len(losses), 1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel('step')
    axes.set_ylabel('loss (nats per byte)')
    mesh = ' x '.join(f'{name}={size}' for name, size in results.mesh.items())
    axes.set_title(
        f'{results.parameters:,} parameters on {results.devices}, {results.strategy} ({mesh})',
        fontsize=11,
    )
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def smooth(values: np.ndarray, radius: int = 10) -> np.ndarray:
    """Returns the moving average of the values within `radius` on both sides."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    indices = np.arange(len(values))
    starts = np.maximum(indices - radius, 0)
    ends = np.minimum(indices + radius + 1, len(values))
    return (total[ends] - total[starts]) / (ends - starts)


def format_sample(prompts: np.ndarray, written: np.ndarray, shown: int = 2) -> str:
    """Returns the first samples as text.

    Args:
      prompts: [B, S] bytes of validation text.
      written: [B, length] bytes that the model generated after each prompt.
      shown: the number of samples to show.
    """
    parts = []
    for prompt, continuation in zip(prompts[:shown], written[:shown], strict=True):
        parts.append(f'--- given ---\n{decode(prompt)}\n--- the model goes on ---\n{decode(continuation)}\n')
    return '\n'.join(parts)


def decode(tokens: np.ndarray) -> str:
    """Returns the text of `tokens`, with replacement characters for invalid UTF-8."""
    text = tokens.astype(np.uint8).tobytes().decode('utf-8', errors='replace')
    return ''.join(letter if letter.isprintable() or letter == '\n' else '\ufffd' for letter in text)
