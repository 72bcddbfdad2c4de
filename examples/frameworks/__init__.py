"""One small language model in five libraries, all trained by the same code (`training.py`)."""
