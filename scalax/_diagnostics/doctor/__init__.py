"""What is wrong with an installation, its devices or its processes, and what to do about each."""

from scalax._diagnostics.doctor.diagnosis import Diagnosis, diagnose

__all__ = ['Diagnosis', 'diagnose']
