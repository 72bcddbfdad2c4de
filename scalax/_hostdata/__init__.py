"""Host data to global arrays and back, over all processes: transfers, batches, prefetching, and the
agreement of processes before each.
"""
