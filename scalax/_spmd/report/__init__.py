"""Report of the partitioner: collectives with their reasons, and redundant work."""
