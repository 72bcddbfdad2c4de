"""What it takes to compute and to send, for decisions between the two.

A program may be traced before its devices are known, so these are the numbers of one chip, of 400 Tflop/s
with links of 100 GB/s. It computes 4,000 operations in the time that it takes to send a byte; other chips,
2,000 to 25,000. Where both ways send over the same links, and compute the same, their bytes decide.
"""

SECONDS_PER_FLOP = 1 / 4e14
SECONDS_PER_BYTE = 1 / 1e11
