"""Launchers for programs with several processes.

`local.py` starts processes on this machine. `slurm.sbatch`, `tpu_pod.sh` and `jobset.yaml` are templates for
the schedulers that they are named after. `present.py` is the program that a JobSet starts. docs/multihost.md
describes how each of them connects its processes.
"""
