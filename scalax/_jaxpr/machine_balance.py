"""The cost of computing and of sending, for decisions between the two.

A program may be traced before its devices are known, so these are the figures of one chip, with 400 Tflop/s
and links of 100 GB/s. It computes 4,000 operations in the time that it takes to send a byte; other chips
compute 2,000 to 25,000. If both alternatives compute the same and send over the same links, only their bytes
matter.
"""

SECONDS_PER_FLOP = 1 / 4e14
SECONDS_PER_BYTE = 1 / 1e11
