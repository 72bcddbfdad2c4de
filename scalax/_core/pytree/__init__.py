"""Trees and specs: shapes and names only, no devices.

Offers leaf paths, trees with named leaves, and what a PartitionSpec may say about an array.
"""
