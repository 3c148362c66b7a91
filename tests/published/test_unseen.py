"""Tables of sources that have no function of their own: what is published is taken, the rest assumed and listed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.published import PublishedRow, Setup, Unpriced, price_rows, setup_of
from meshwright.cost.published.machines import machines_of
from meshwright.spec.families import DecoderModel

COLUMNS = (
    *("source", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "global_batch"),
    *("micro_batch", "gpus", "gpu_type", "tp", "pp", "vp", "cp", "ep", "dp", "zero", "recompute", "precision"),
    *("tflops_per_gpu", "mfu", "tokens_per_s_per_gpu", "step_time_s", "peak_mem_gb", "notes"),
)


def row(**cells: str) -> PublishedRow:
    return PublishedRow(file="unseen", index=0, cells=dict.fromkeys(COLUMNS, "") | cells)


def setup(**cells: str) -> Setup:
    usual = {"model": "Llama 3 8B", "seq": "8192", "gpus": "8", "gpu_type": "H100-80GB", "recompute": "none"}
    return setup_of(row(**usual | cells))


def test_megatron_by_its_sizes() -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), Table 1: 1008 billion parameters, 163 TFLOP/s, 43% of the peak."""
    found = setup(
        source="arXiv 2104.04473 Table 1",
        model="GPT 1T",
        params_b="1008",
        layers="128",
        hidden="25600",
        heads="160",
        vocab="51200",
        seq="2048",
        global_batch="3072",
        micro_batch="1",
        gpus="3072",
        gpu_type="A100-80GB",
        tp="8",
        pp="64",
        recompute="full",
        precision="fp16",
        tflops_per_gpu="163",
        notes="Megatron-LM",
    )
    assert found.model(whole=True).parameters == pytest.approx(1008e9, rel=0.01)
    assert (found.strategy.dp, found.strategy.pp, found.strategy.schedule) == (6, 64, "1f1b")
    assert found.convention.stack == "fused"
    assert found.convention.attention == "math"  # it predates FlashAttention
    assert found.counting.formula == "megatron"


@pytest.mark.parametrize(
    ("notes", "stack", "name"),
    [
        ("FSDP + torch.compile", "compiled", "not described"),
        ("FSDP, eager", "eager", "not described"),
        ("NeMo 24.09", "fused", "Megatron Core"),
        ("torchtitan main", "compiled", "torchtitan 2025-06"),
        ("DeepSpeed ZeRO-2", "eager", "DeepSpeed"),
        ("DeepSpeed with Liger kernels", "fused", "DeepSpeed"),
    ],
)
def test_stacks_are_known_by_words(notes: str, stack: str, name: str) -> None:
    found = setup(notes=notes).convention
    assert (found.stack, found.name) == (stack, name)


@pytest.mark.parametrize(
    ("cells", "zero"),
    [
        ({"zero": "FSDP"}, 3),
        ({"zero": "ZeRO-2"}, 2),
        ({"zero": "1"}, 1),
        ({"zero": "DDP"}, 0),
        ({"notes": "fully sharded data parallel, FULL_SHARD"}, 3),
        ({"notes": "distributed optimizer"}, 1),
        ({"model": "GPT-2 medium", "seq": "1024"}, 0),  # by what fits
        ({"model": "Llama 3 70B", "gpus": "64"}, 3),
    ],
)
def test_zero_is_read_from_words_or_from_what_fits(cells: dict[str, str], zero: int) -> None:
    assert setup(**cells).strategy.zero == zero


@pytest.mark.parametrize(
    ("name", "device", "gib"),
    [
        ("H100-80GB", "H100-SXM-80GB", 79),
        ("8xH100 SXM5 80GB", "H100-SXM-80GB", 79),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB", 79),
        ("h100_80gb", "H100-SXM-80GB", 79),
        ("H100 PCIe", "H100-PCIe-80GB", 79),
        ("A100 40GB (p4d.24xlarge)", "A100-SXM-40GB", 39),
        ("A100-80GB 400Gbps", "A100-SXM-80GB", 79),
        ("A100", "A100-SXM-80GB", 79),
        ("DGX-GB200", "GB200-186GB", 184),
        ("DGX-B200", "B200-180GB", 178),
        ("AMD Instinct MI300X", "MI300X-192GB", 192),
        ("GeForce RTX 4090 24GB", "RTX4090-24GB", 23.5),
        ("Tesla V100-SXM2-32GB", "V100-SXM-32GB", 31.7),
    ],
)
def test_devices_have_many_names(name: str, device: str, gib: float) -> None:
    found = machines_of(row(gpu_type=name), 8).cluster.nodes[0].device
    assert found.name == device
    assert found.memory_bytes / 2**30 == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    ("name", "notes", "gb_per_s"),
    [
        ("A100-80GB", "4x100Gb RoCE", 6.25),
        ("A100-80GB 400Gbps", "", 6.25),
        ("A100-80GB NDm A100 v4 200Gbps/GPU", "", 25),
        ("H100-80GB", "3200 Gbps EFA", 50),
        ("H100-80GB", "32 node(s) x 8; GAS 1", 50),  # the catalogue's
        ("A100-80GB", "A100 80GB with 1600 Gbps node-node interconnect", 25),
    ],
)
def test_the_network_is_read_where_a_row_tells_it(name: str, notes: str, gb_per_s: float) -> None:
    found = machines_of(row(gpu_type=name, notes=notes), 32).cluster
    assert found.between is not None
    assert found.between.bytes_per_s == pytest.approx(gb_per_s * 1e9)
    assert (found.nodes[0].count, found.nodes[0].devices) == (4, 8)


def test_racks_are_one_domain_of_links() -> None:
    found = machines_of(row(gpu_type="DGX-GB300"), 256).cluster.nodes[0]
    assert (found.count, found.devices) == (4, 64)


@pytest.mark.parametrize(
    ("cells", "layers", "hidden"),
    [
        ({"model": "LLAMA3_70B"}, 80, 8192),
        ({"model": "Llama2 7b"}, 32, 4096),
        ({"model": "meta-llama/Llama-2-13b-hf"}, 40, 5120),
        ({"model": "OPT-175B"}, 96, 12288),
        ({"model": "GPT OSS 120B"}, 36, 2880),
        ({"model": "Kimi_K2"}, 61, 7168),
        ({"model": "ours", "layers": "24", "hidden": "2048"}, 24, 2048),
        ({"model": "ours", "params_b": "13"}, 32, 5120),
        ({"model": "Falcon-180B"}, 104, 12288),
    ],
)
def test_models_are_known_by_name_or_sizes(cells: dict[str, str], layers: int, hidden: int) -> None:
    found = setup(**cells | {"seq": "1024"}).described
    assert isinstance(found, DecoderModel)
    if "params_b" in cells or cells["model"] == "Falcon-180B":
        assert found.hidden == pytest.approx(hidden, rel=0.2)
        assert len(found.layers) == pytest.approx(layers, rel=0.5)
    else:
        assert (len(found.layers), found.hidden) == (layers, hidden)


def test_sizes_that_contradict_a_known_name_win() -> None:
    found = setup(model="Llama 3 8B", layers="16", hidden="2048", heads="16", kv_heads="8", ffn="8192", vocab="32000")
    assert isinstance(found.described, DecoderModel)
    assert len(found.described.layers) == 16


def test_what_is_assumed_is_listed() -> None:
    found = setup(model="ours", layers="24", hidden="2048", tp="2", gpus="64")
    text = "; ".join(found.assumed)
    for words in ("a vocabulary of", "heads", "microbatches of", "global batch", "zero=1", "kernels", "a network of"):
        assert words in text


def test_a_run_without_published_recompute_is_taken_to_have_fitted() -> None:
    """Llama 7B with microbatches of 4096 x 4 tokens on 40 GB keeps 100 GiB of activations without recompute."""
    found = setup(model="Llama 2 7B", seq="4096", micro_batch="4", gpu_type="A100-40GB", zero="3", recompute="")
    assert found.strategy.recompute == "full"
    assert any(words.startswith("recompute=full") for words in found.assumed)


@pytest.mark.parametrize("notes", ["LoRA finetune", "QLoRA", "PEFT adapters"])
def test_adapters_are_not_described(notes: str) -> None:
    with pytest.raises(Unpriced, match="adapters"):
        setup(notes=notes)


_SIZES = ("layers", "hidden", "heads", "dp", "tp", "pp", "cp", "vp")
_NUMBERS = ("", "-", "0", "1", "2", "3", "7", "8", "64", "4096", "1e9", "nan", "-4", "2.5", "45%")
_NAMES = ("Llama 3 8B", "GPT 13B", "Mixtral 8x7B", "H100", "A100-40GB", "V100 16GB")
_TEXTS = ("yes", "none", "full", "FSDP", "ZeRO-3 offload", "fp8", "OOM")
WORDS = st.sampled_from((*_NUMBERS, *_NAMES, *_TEXTS))


@given(st.fixed_dictionaries({name: WORDS for name in COLUMNS if name != "source"}), st.booleans())
@settings(deadline=None, max_examples=100)
def test_no_cell_brings_it_down(cells: dict[str, str], plausible: bool) -> None:
    """Whatever stands in a row: a prediction, or a reason why there is none."""
    if plausible:
        cells |= {
            "model": "GPT-2",
            "gpus": "8",
            "gpu_type": "H100",
            "seq": "1024",
            "layers": "",
            "hidden": "",
            "dp": "",
        }
    (found,) = price_rows([row(**cells)])
    if found.has_time and found.time is None:
        assert found.no_time
    if found.has_memory and found.memory is None:
        assert found.no_memory
    if found.time is not None:
        assert found.time.predicted_s > 0
        assert sum(found.time.terms.values()) == pytest.approx(found.time.predicted_s, rel=1e-6)
