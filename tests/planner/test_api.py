"""`meshwright.plan`: the same planner from Python, for a model in any of its forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright
from meshwright import Job, plan
from meshwright.errors import ConfigError, InfeasiblePlan
from meshwright.models import Decoder
from meshwright.planner import make_plan
from meshwright.spec import DecoderShape
from meshwright.spec.catalogue import known_model
from meshwright.spec.clusters import parse_cluster
from meshwright.train.model import decoder_config
from tests.planner.machines import EVEN, cluster
from tests.planner.test_command import CONFIG

TWO = parse_cluster("2xA100-80GB")


def test_a_name_a_cluster_in_text_and_two_numbers_are_enough() -> None:
    made = plan("gpt2", "2xA100-80GB", global_batch=8, sequence=512)
    assert made.model.name == known_model("gpt2").name
    assert made.model.decoder is None
    assert made.job.compute_dtype == "bfloat16"
    assert made.strategy == make_plan(known_model("gpt2"), TWO, made.job).strategy
    assert made.changes


def test_a_config_is_read_as_a_file_a_folder_or_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plans = [
        plan(model, TWO, global_batch=4, sequence=256).cost
        for model in (CONFIG, tmp_path, str(tmp_path / "config.json"), tmp_path / "config.json")
    ]
    assert all(cost == plans[0] for cost in plans)


def test_the_built_in_decoder_by_its_keys() -> None:
    keys = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    made = plan(keys, cluster(2, 2**30), pins="zero=3", executable=True)
    assert made.decoder == DecoderShape(**keys)
    assert made.strategy.zero == 3
    assert made.executable
    assert plan(DecoderShape(**keys), cluster(2, 2**30), pins="zero=3", executable=True) == made


def test_a_module_is_traced() -> None:
    """The same model as a module and by its shape has the same parameters, and the same plan or one as fast."""
    module = Decoder(decoder_config(EVEN))
    job = Job(global_batch=4, sequence=64)
    machines = cluster(2, 2**30)
    traced = plan(module, machines, job=job, pins="tp=1 pp=1 cp=1")
    known = plan(EVEN, machines, job=job, pins="tp=1 pp=1 cp=1")
    assert traced.model.parameters == known.model.parameters
    assert traced.model.name == "Decoder"
    assert traced.cost.step_s == pytest.approx(known.cost.step_s, rel=0.1)
    assert not any(parameter.grad is not None for parameter in module.parameters())


def test_a_module_of_another_kind_is_traced_on_its_inputs() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
    made = plan(
        module,
        cluster(2, 2**30),
        global_batch=8,
        sequence=16,
        inputs=torch.zeros(2, 16, 16),
        loss=lambda outputs, targets: (((outputs - targets) ** 2).sum(), outputs.numel()),
        targets=torch.zeros(2, 16, 16),
    )
    assert made.model.parameters == 3 * (16 * 16 + 16)
    assert made.strategy.tp == 1


def test_planning_by_name_imports_no_torch() -> None:
    code = (
        "import sys, meshwright; meshwright.plan('gpt2', '2xA100-80GB', global_batch=4, sequence=512, most=1);"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_what_cannot_be_planned_is_refused() -> None:
    for model in (3, object()):
        with pytest.raises(ConfigError, match="cannot plan a"):
            plan(model, TWO)
    with pytest.raises(ConfigError, match="objective=speed is not known"):
        plan("gpt2", TWO, objective="speed")
    with pytest.raises(ConfigError, match="global_batch=4 and a job with global_batch=8"):
        plan("gpt2", TWO, global_batch=4, job=Job(global_batch=8))
    with pytest.raises(ConfigError, match=r"unknown key model\.hiden_size"):
        plan({"hiden_size": 8}, TWO)
    with pytest.raises(InfeasiblePlan, match="nothing fits"):
        plan("gpt2-xl", "1xV100-16GB", pins="zero=0 offload.optimizer=device offload.activations=device", sequence=1024)
    assert "plan" in meshwright.__all__
