"""A checkpoint in the Hub's format, fine-tuned by LoRA, and sampled on another mesh.

- `model.py`: the decoder, with adapters and a KV cache, in plain JAX. It does not depend on a mesh.
- `hub.py`: loads a checkpoint into shards, and writes adapters for other programs.
- `finetune.py`: the program.
"""
