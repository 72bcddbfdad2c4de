"""Leaf paths, trees with named leaves, and what a PartitionSpec may say. Pure: no devices, no meshes."""
