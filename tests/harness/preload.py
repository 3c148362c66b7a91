"""What the fork server imports once, so that no rank imports it again. Importing is all that happens here."""

import contextlib
import gc
import importlib

for name in (
    "torch",
    "torch._dynamo",  # fully_shard imports it at its first call
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "pytest",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "meshwright.models",
    "meshwright.runtime",
    "meshwright.train.batches",
    "tests.harness.cases",
    "tests.harness.divided",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

# Ranks never look through what was made here: forked pages stay shared and collections stay short.
gc.collect()
gc.freeze()
