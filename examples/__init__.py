"""Complete programs built on scalax: run them, read them, copy from them.

- `python -m examples.llama.train`: a LLaMA-style decoder, sharded as a flag says
- `python -m examples.digits`: data parallelism, the smallest complete example

From the root of the clone; `python examples/digits.py` does the same.
"""
