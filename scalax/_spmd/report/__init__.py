"""What the partitioner tells: collectives with their reasons, and redundant work."""
