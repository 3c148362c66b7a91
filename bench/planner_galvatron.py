"""Hetu-Galvatron's search engine on profiles that `bench/planner.py` wrote; runs in the environment it is installed in.

`planner_galvatron.py FOLDER LAYERS HIDDEN SEQUENCE GLOBAL_BATCH GIB`, on one node of 8 devices. Written for 2.4.0,
whose search needs neither a GPU nor the libraries for GPUs that it imports: those that are missing stay empty. The last
line of output is what it found.
"""

import argparse
import importlib.abc
import importlib.machinery
import sys
import time
import types
from unittest.mock import MagicMock

MISSING = (
    "apex",
    "amp_C",
    "dropout_layer_norm",
    "flash_attn",
    "fused_dense_lib",
    "fused_layer_norm_cuda",
    "rotary_emb",
    "transformer_engine",
    "xentropy_cuda_lib",
)


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for libraries that are imported and never used."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        known = name.split(".")[0] in MISSING
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: types.ModuleType = MagicMock(name=spec.name)
        module.__path__ = []
        module.__spec__, module.__name__ = spec, spec.name
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to do."""


def main(folder: str, layers: int, hidden: int, sequence: int, batch: int, gib: int) -> None:
    sys.meta_path.insert(0, _Empty())
    import torch

    torch.cuda.device_count = lambda: 8
    from galvatron.core import (  # type: ignore[import-not-found]  # it is installed in another environment
        GalvatronSearchEngine,
        initialize_galvatron,
    )

    def model_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        given = {"--hidden_size": hidden, "--num_hidden_layers": layers, "--seq_length": sequence}
        for name, value in given.items():
            parser.add_argument(name, type=int, default=value)
        return parser

    places = ("memory_profiling", "time_profiling", "allreduce_bandwidth_config", "p2p_bandwidth_config", "sp_time")
    options = {f"--{name}_path": folder for name in (*places, "overlap_coe", "output_config")}
    options |= {"--num_nodes": "1", "--num_gpus_per_node": "8", "--memory_constraint": str(gib)}
    options |= {"--settle_bsz": str(batch), "--mixed_precision": "bf16", "--log_dir": f"{folder}/logs"}
    sys.argv = [sys.argv[0], *(word for pair in options.items() for word in pair)]
    asked = initialize_galvatron(model_args, mode="search")
    engine = GalvatronSearchEngine(asked)
    shape = [{"hidden_size": hidden, "layer_num": layers, "seq_len": sequence}]
    engine.set_search_engine_info(folder, shape, "model")
    engine.set_model_type("gpt")
    begun = time.perf_counter()
    engine.initialize_search_engine()
    throughput = engine.parallelism_optimization()
    print(f"search alone {time.perf_counter() - begun:.1f} s, predicts {throughput:.1f} samples/s")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
