"""One small language model in five libraries, each trained by the same lines of scalax (`training.py`)."""
