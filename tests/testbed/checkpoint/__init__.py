"""Tiny random checkpoints with their tokenizer, made without any download.

The same arguments give the same bits on every machine and in every environment.
"""

from testbed.checkpoint.nemotron_h import make_nemotron_h
from testbed.checkpoint.qwen3 import make_qwen3, make_qwen3_moe

__all__ = ["make_nemotron_h", "make_qwen3", "make_qwen3_moe"]
