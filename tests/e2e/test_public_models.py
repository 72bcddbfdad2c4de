"""Models of other projects that examples train unchanged: their losses equal those of one device."""

import importlib

import numpy as np
import pytest

# The example, and the package of its model. equimo needs Python 3.12.
MODELS = [('mamba_nnx', 'mamba2_jax'), ('vit_equinox', 'equimo')]


@pytest.mark.medium
@pytest.mark.parametrize(('example', 'package'), MODELS)
def test_losses_match_one_device(
    example: str, package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package, reason=f'{package} is not installed')
    program = importlib.import_module(f'examples.{example}')
    monkeypatch.setattr(program, 'LAYERS', 1)
    expected = program.main(steps=3, devices=1)
    capsys.readouterr()
    losses = program.main(steps=3, devices=8)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        "train_step on fsdp=8 is partitioned along fsdp; its batch is 'batch'. In a step, each device:"
    )
    assert '- keeps its examples: no operation mixes examples' in printed
    assert printed[-1].startswith(f'loss {losses[0]:.2f} -> {losses[-1]:.2f}, accuracy on held-out digits ')
