"""Complete programs that use scalax, to run, read and copy from.

- `python -m examples.llama.train`: a LLaMA-style decoder, whose sharding is chosen by a flag
- `python -m examples.digits`: data parallelism, the smallest complete example

From the root of the clone; `python examples/digits.py` does the same.
"""
