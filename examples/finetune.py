"""Fine-tune a Hugging Face model on a `datasets` data set. `torchrun --nproc-per-node=2 examples/finetune.py [FOLDER]`.

FOLDER is what `save_pretrained` wrote, or a download of a model; without it a small model begins from random values.
"""

import os
import sys

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from meshwright import Batches, Engine, Job, ModelLoss, Padding, Strategy

FOLDER = sys.argv[1] if len(sys.argv) > 1 else None
TINY = LlamaConfig(
    vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, pad_token_id=0
)


def questions() -> Dataset:
    """Sums in words of bytes; only the answer is learned."""
    texts = [(f"{a} plus {b} is", f" {a + b}.") for a in range(12) for b in range(12)]
    rows = [{"input_ids": list((q + a).encode()), "prompt_length": len(q)} for q, a in texts]
    return Dataset.from_list(rows)


def main() -> None:
    config = AutoConfig.from_pretrained(FOLDER) if FOLDER else TINY
    job = Job(global_batch=16, clip_norm=1.0)
    strategy = Strategy(dp=int(os.environ.get("WORLD_SIZE", "1")), zero=3, microbatch=4)
    engine = Engine(
        lambda: AutoModelForCausalLM.from_config(config),  # each rank reads its own slices of the weights
        ModelLoss(),
        lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        job,
        strategy,
        batch_scope="local",
        weights=FOLDER,
    )
    for report in engine.steps(Batches(questions(), job, strategy, collate=Padding(), epochs=3)):
        if engine.rank == 0 and report.step % 13 == 1:
            print(f"step {report.step} loss {report.loss:.3f} of {report.weight:.0f} labels")
    with engine.inference() as model:
        prompt = torch.tensor([list(b"3 plus 4 is")])
        answer = model.generate(prompt, max_new_tokens=4, do_sample=False)
    if engine.rank == 0:
        print(bytes(answer[0].clamp(max=255).tolist()).decode(errors="replace"))
    engine.export("finetuned")  # AutoModelForCausalLM.from_pretrained("finetuned")


if __name__ == "__main__":
    main()
