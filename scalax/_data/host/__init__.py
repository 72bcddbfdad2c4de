"""Host data to global arrays and back, over all processes of a mesh.

Offers transfers of whole trees, batches, prefetching and broadcasts, and the agreement of processes before
each of them.
"""
