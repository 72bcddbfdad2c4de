"""Operations with their own partitioning. Each program prints its results.

python -m examples.ops.scalar_parameters
python -m examples.ops.scalar_or_array
python -m examples.ops.axis_index
python -m examples.ops.top_k
python -m examples.ops.top_p
python -m examples.ops.cross_entropy
python -m examples.ops.pallas_kernel
"""
