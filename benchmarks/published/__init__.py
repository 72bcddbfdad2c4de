"""Training steps on GPUs that others published, beside their plans."""
