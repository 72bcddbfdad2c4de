"""What does libtpu do where no TPU is? Nothing that is heard, if it is told so before it is loaded."""

from __future__ import annotations

import glob
import os

NO_TPU_MACHINE = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_LOG_DIR': 'disabled',
    'TPU_STDERR_LOG_LEVEL': '3',
    'TPU_MIN_LOG_LEVEL': '3',
}
"""Without these it asks the network where it runs, takes a lock for itself, writes logs, and complains."""


def quiet_libtpu() -> None:
    """Keeps libtpu quiet on a machine without TPUs, by environment variables; those that are set stay.

    Where libtpu is installed JAX loads it when it is first asked for its devices, and it then prints what it
    lacks. A program that may run on such a machine calls this first. On a machine with TPUs it does nothing.
    """
    if not (glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*')):
        for name, value in NO_TPU_MACHINE.items():
            os.environ.setdefault(name, value)
