"""Write a tiny random Qwen3-MoE checkpoint: `python -m testbed.checkpoint DIR`."""

import argparse
from pathlib import Path

from testbed.checkpoint import make_qwen3_moe


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random Qwen3-MoE checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    directory = make_qwen3_moe(arguments.directory, seed=arguments.seed, layers=arguments.layers)
    size = (directory / "model.safetensors").stat().st_size
    print(f"{directory}: {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
