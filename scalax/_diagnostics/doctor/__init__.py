"""Doctor that finds faults of an installation, its devices and its processes, and advises what to do."""

from scalax._diagnostics.doctor.diagnosis import Diagnosis, diagnose

__all__ = ['Diagnosis', 'diagnose']
