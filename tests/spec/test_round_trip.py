"""Nouns through TOML and through the text form, and back: nothing is lost, whatever the values."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from meshwright.errors import ConfigError
from meshwright.spec import Cluster, DecoderShape, Job, OptimizerSpec, Plan, Strategy, parse_strategy
from meshwright.spec.files import dump_toml, from_table, read_noun, to_table, write_text
from meshwright.spec.job_file import JobFile
from tests.spec.legal import clusters, job_files, jobs, plans, shapes, strategies

# The first draw imports hypothesis' tables, which takes long on a busy machine.
LENIENT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def through_toml(noun: Any) -> Any:
    table = tomllib.loads(dump_toml(to_table(noun)))
    return from_table(type(noun), table, "")


@LENIENT
@given(strategies())
def test_a_strategy_is_the_same_after_toml(strategy: Strategy) -> None:
    assert through_toml(strategy) == strategy


@LENIENT
@given(strategies())
def test_a_strategy_is_the_same_after_its_text_form(strategy: Strategy) -> None:
    assert parse_strategy(str(strategy)) == strategy


@LENIENT
@given(jobs())
def test_a_job_is_the_same_after_toml(job: Job) -> None:
    assert through_toml(job) == job


@LENIENT
@given(shapes())
def test_a_decoder_is_the_same_after_toml(shape: DecoderShape) -> None:
    assert through_toml(shape) == shape


@LENIENT
@given(clusters())
def test_a_cluster_is_the_same_after_toml(cluster: Cluster) -> None:
    assert through_toml(cluster) == cluster


@LENIENT
@given(plans())
def test_a_plan_is_the_same_after_toml(plan: Plan) -> None:
    assert through_toml(plan) == plan


@LENIENT
@given(job_files())
def test_a_job_file_is_the_same_after_toml(job_file: JobFile) -> None:
    assert through_toml(job_file) == job_file


def test_a_noun_read_from_a_file_is_written_with_all_its_fields(tmp_path: Path) -> None:
    write_text(tmp_path / "job.toml", "format = 1\n[job]\nglobal_batch = 4\n")
    read = read_noun(JobFile, tmp_path / "job.toml")
    table = to_table(read)
    assert table["job"]["sequence"] == 256
    assert table["model"]["rms_norm_eps"] == 1e-5
    assert table["train"]["steps"] == read.train.steps
    assert "cluster" not in table


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: Strategy(dp="2"), "dp='2' is not a whole number"),
        (lambda: Strategy(zero=True), "zero=True is not a whole number"),
        (lambda: Strategy(microbatch=1.0), "microbatch=1.0 is not a whole number"),
        (lambda: Strategy(sequence_parallel=1), "sequence_parallel=1 is not true or false"),
        (lambda: Job(global_batch="8"), "job.global_batch='8' is not a whole number"),
        (lambda: Job(clip_norm="1"), "job.clip_norm='1' is not a number"),
        (lambda: OptimizerSpec(learning_rate=None), "optimizer.learning_rate=None is not a number"),
    ],
)
def test_nouns_built_in_python_check_types_too(build: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert told in str(error.value)
