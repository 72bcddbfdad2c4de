"""Published training steps on GPUs, compared with their plans."""
