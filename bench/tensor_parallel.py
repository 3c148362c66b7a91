"""Tensor parallelism beside others: step time and memory of the engine, of plain PyTorch, Transformers and DeepSpeed.

`python bench/tensor_parallel.py [--deepspeed PYTHON]`: as `side_by_side.py` has it. DeepSpeed needs an environment that
has it (0.19) beside PyTorch and Transformers.
"""

from __future__ import annotations

import argparse
from typing import Any

from side_by_side import Case, add_arguments, compare

USUAL: dict[str, Any] = {
    "model": "decoder",
    "dp": 1,
    "tp": 2,
    "sequence_parallel": False,
    "loss": "divided",
    "zero": 0,
}
PLAIN = ("torch",)
CASES = [
    Case("tp=2", 2, PLAIN, USUAL),
    Case("tp=2, logits gathered", 2, PLAIN, USUAL | {"loss": "gathered"}),
    Case("tp=2 sequence_parallel", 2, PLAIN, USUAL | {"sequence_parallel": True}),
    Case("tp=2, Llama", 2, ("torch", "transformers", "deepspeed"), USUAL | {"model": "llama"}),
    Case("tp=4", 4, PLAIN, USUAL | {"tp": 4}),
    Case("tp=2 dp=2 zero=0", 4, PLAIN, USUAL | {"dp": 2}),
    Case("tp=2 dp=2 zero=3", 4, PLAIN, USUAL | {"dp": 2, "zero": 3}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    compare(CASES, "tensor_parallel_peers", parser.parse_args())


if __name__ == "__main__":
    main()
