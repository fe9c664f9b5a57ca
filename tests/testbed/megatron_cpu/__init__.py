"""Megatron Bridge 0.3.1 with megatron-core 0.16.1 on a machine without a GPU, for demo and tests only.

Importing this package makes `megatron.bridge` importable and usable on the CPU, with gloo process groups:

- `imports`: Transformer Engine, which the Bridge imports without a guard, is a stand-in during that import;
- `patches`: places that ask for CUDA get the CPU, and two defects of these versions are worked around;
- `layers`: layers in plain torch under Transformer Engine's class and parameter names, so that the Bridge's
  own mappings apply and a model has the parameters of a production one;
- `hybrid`: the same for models with Mamba layers, as far as their parameters go;
- `padding`: vocabularies that Megatron pads;
- `model`: build a model from a Hugging Face checkpoint with all that, in any layout of ranks, and train it.

It must be imported before `megatron.bridge`, and changes torch for the whole process.
"""

from testbed.megatron_cpu import imports, patches

imports.import_megatron()
patches.apply()
