"""The catalogue: faults of XLA's partitioner, of scalax's own pass and of users, and steps that are right."""

from tests.verify import partitioner_faults, pass_faults, sound_steps, user_faults  # noqa: F401 - they add theirs
from tests.verify.fault import FAULTS, SOUND, Fault

__all__ = ['FAULTS', 'SOUND', 'Fault']
