"""The catalogue: faults of XLA's partitioner, of scalax and of users, and sound steps."""

from tests.verification import (  # noqa: F401 - they add theirs
    engine_faults,
    partitioner_faults,
    sound_steps,
    stage_faults,
    user_faults,
    workaround_faults,
)
from tests.verification.fault import FAULTS, SOUND, Fault

__all__ = ['FAULTS', 'SOUND', 'Fault']
