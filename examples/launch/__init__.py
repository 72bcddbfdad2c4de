"""Ways to start a program on several processes.

`local.py` starts them on this machine; `slurm.sbatch`, `tpu_pod.sh` and `jobset.yaml` are to be edited
and given to the scheduler they are named after; `present.py` is what a JobSet starts. docs/multihost.md
says how each finds its processes.
"""
