"""A suite that stays green is the defect: each injected fault must turn a named equivalence check red.

Red means that the check names a tensor that differs. A crash proves nothing, and neither does a fault whose check is
red without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest

from tests.equivalence import (
    test_dropout,
    test_own_data,
    test_pipeline_reports,
    test_strategies,
    test_structures,
    test_tensor_dropout,
    test_tensor_parallel,
    test_user_reports,
)
from tests.equivalence.lattice import short_list
from tests.harness.cases import Case
from tests.harness.ranks import RankError, prepared
from tests.mutation import pipeline_faults, tensor_faults  # noqa: F401  # they enter themselves
from tests.mutation.faults import FAULTS
from tests.runtime import test_loss_scale, test_uneven

ANY_TENSOR = r"step \d (gradient|update) \S+\.(weight|bias): error"


@dataclass(frozen=True)
class Mutation:
    """A fault, the check that must catch it (a test of the equivalence suite with its arguments), and what it shows."""

    fault: str
    test: Callable[..., Any]
    arguments: tuple[tuple[str, Any], ...]
    shows: str = ANY_TENSOR
    #: A second check of a fault: run by `make test-all`.
    late: bool = False

    def __str__(self) -> str:
        return f"{self.fault}-{self.test.__name__}"

    def check(self) -> None:
        self.test(**dict(self.arguments))


@cache
def control(test: Callable[..., Any], arguments: tuple[tuple[str, Any], ...]) -> bool:
    """Run a check without a fault; once, however many faults it must catch. A red one raises, and is not remembered."""
    test(**dict(arguments))
    return True


def caught(
    fault: str, test: Callable[..., Any], shows: str = ANY_TENSOR, *, late: bool = False, **arguments: Any
) -> Mutation:
    return Mutation(fault, test, tuple(arguments.items()), shows, late)


def listed(**wanted: Any) -> Case:
    """The first case of the short list with these options: the list is what `make test` runs."""
    matching = [case for case in short_list() if all(getattr(case, name) == value for name, value in wanted.items())]
    assert matching, f"no case with {wanted} in the short list"
    return min(matching, key=lambda case: case.world)


D1 = test_user_reports.test_D1_unequal_microbatches_weigh_by_their_tokens
D2 = test_user_reports.test_D2_ranks_with_few_tokens_weigh_little
D13 = test_user_reports.test_D13_clipping_happens_once_over_all_microbatches
D26 = test_user_reports.test_D26_64_bf16_microbatches_are_summed_in_float32
D28 = test_user_reports.test_D28_the_scheduler_steps_once_for_each_optimizer_step
E6 = test_user_reports.test_E6_a_parameter_that_nothing_uses_is_named_and_left_alone
BRANCHES = test_user_reports.test_E6_ranks_may_take_different_branches
OVERFLOW = test_loss_scale.test_an_overflow_on_one_rank_skips_on_all_and_halves_the_scale
UNEVEN = test_uneven.test_steps_over_unequal_numbers_of_batches_and_rows
NORMS = test_structures.test_batch_norms_over_the_rows_of_all_ranks
PADDED = test_own_data.test_ranks_may_pad_to_their_own_longest
TIED = test_user_reports.test_a_tied_weight_has_one_gradient
PAIRS = test_strategies.test_pairs_of_options
MASKS = test_dropout.test_masks_do_not_depend_on_the_layout
DIVIDED = test_tensor_parallel.test_pairs_of_options
TENSOR_MASKS = test_tensor_dropout.test_D24_masks_are_equal_where_activations_are_and_different_where_they_are_divided
STAGES = test_pipeline_reports.test_D1_D4_unequal_microbatches_weigh_by_their_tokens
STAGE_GATHERS = test_pipeline_reports.test_D2_ranks_with_few_tokens_weigh_little
STAGE_NORM = test_pipeline_reports.test_D10_the_norm_is_over_all_stages
TIED_STAGES = test_pipeline_reports.test_D5_D6_D9_a_tied_weight_of_two_stages_has_one_gradient
FOLDED_TIE = test_pipeline_reports.test_D9_a_tied_weight_of_two_stages_on_one_rank_is_one
EMBEDDING = r"model\.embed_tokens\.weight: error"
HEADS = Case(world=2, tp=2, clip=0.1)
SEQUENCES = Case(world=2, tp=2, sequence_parallel=True)
COPIED_HEADS = Case(world=4, tp=4, model="decoder-16")
PICKED_HEADS = Case(world=3, tp=3)
BIASES = Case(world=2, tp=2, model="gpt2-12")
HYBRID = listed(world=4, shard=2, dtype="float64", clip=0.1, optimizer="sgd")

MUTATIONS = [
    caught("mean_of_means", D1, zero=0, late=True),
    caught("mean_of_means", D1, zero=3),
    caught("padding_counts", D2, world=2, zero=3),
    caught("local_weight", D2, world=2, zero=3),
    caught("tied_weight_not_reduced", TIED, r"step 1 gradient model\.embed_tokens\.weight: error", zero=0),
    caught("unit_not_reduced", D2, r"step 1 gradient model\.layers\.4\.mlp\.down_proj\.weight: error", world=3, zero=2),
    caught("divided_by_ranks_again", D2, world=3, zero=1),
    caught("clipped_twice", D13, r"step 1 update \S+weight: error", zero=0),
    caught("clipped_twice", D13, r"step 1 update \S+weight: error", zero=3, late=True),
    caught("clipped_per_microbatch", D13, r"step 1 gradient \S+weight: error", zero=2),
    caught("norm_of_local_shard", D13, r"step 1 update \S+weight: error", zero=3),
    caught("replicas_counted_twice", PAIRS, r"step 1 update \S+: error", case=HYBRID),
    caught("replicas_not_summed", PAIRS, case=HYBRID),
    caught("stale_gather", D1, r"step 2 gradient \S+weight: error", zero=1, late=True),
    caught("stale_gather", D1, r"step 2 gradient \S+weight: error", zero=3),
    caught("only_the_last_microbatch", D1, r"step 1 gradient \S+weight: error", zero=2),
    caught("scheduler_steps_for_every_rank", D28, r"step 2 update \S+weight: error", zero=1),
    caught("recompute_draws_again", MASKS, case=test_dropout.LAYOUTS[4]),
    caught("masks_by_rank", MASKS, case=test_dropout.LAYOUTS[0]),
    caught("accumulated_in_bf16", D26, r"layers\.\d\.weight", zero=0, world=2, shard=0),
    caught("reduced_too_early", D1, r"step 1 gradient model\.layers\.\d\.\S+weight: error", zero=0),
    caught("everybody_takes_the_first_rows", D1, zero=2),
    caught("gradients_not_zeroed", D1, r"step 2 gradient \S+weight: error", zero=2),
    caught("unused_decays", E6, r"step 1 gradient forgotten\.weight: error", zero=2, world=2),
    caught(
        "own_use_alone",
        BRANCHES,
        "a rank has no gradient where others have one",
        zero=2,
        world=2,
        shard=0,
        accumulation=1,
    ),
    caught("tied_weight_reduced_twice", TIED, r"step 1 gradient model\.embed_tokens\.weight: error", zero=0),
    caught("overflow_stays_local", OVERFLOW, r"assert \[.*\] == \[", zero=3),
    caught("absent_rows_weigh", UNEVEN, r"weight \S+: error", zero=2, world=3),
    caught("statistics_of_own_rows", NORMS, r"(blocks|head)\.\S+", world=2, zero=0, momentum=0.1),
    caught("statistics_gradient_stays_local", NORMS, r"(blocks|head)\.\S+", world=3, zero=3, momentum=0.1),
    caught("attention_crosses_documents", PADDED, r"error of \S+\.weight", zero=0, dp=2),
    caught("weights_by_rank", D1, r"step 0 initial model\.\S+weight: error", zero=0),
    caught("shares_not_summed", DIVIDED, r"gradient model\.\S*norm\.weight: error", case=SEQUENCES),
    caught("shares_not_summed", DIVIDED, r"gradient \S+\.[kv]_proj\.weight: error", case=COPIED_HEADS, late=True),
    caught("partial_results_not_summed", DIVIDED, case=HEADS),
    caught("input_gradients_not_summed", DIVIDED, case=HEADS),
    caught("replicated_counted_twice", DIVIDED, r"step 1 update \S+weight: error", case=HEADS),
    caught("padding_not_masked", DIVIDED, case=HEADS),
    caught("wrong_head_for_a_query", DIVIDED, case=PICKED_HEADS),
    caught("bias_added_by_every_rank", DIVIDED, case=BIASES),
    caught("tokens_in_other_order", DIVIDED, case=SEQUENCES),
    caught("same_mask_on_divided_activations", TENSOR_MASKS, "divided", name="own"),
    caught("microbatch_dropped", STAGES, r"step 1 gradient \S+weight: error", schedule="1f1b"),
    caught("microbatch_dropped", STAGES, r"step 1 gradient \S+weight: error", schedule="zb-h1"),
    caught("divided_by_microbatches_again", STAGES, r"step 1 gradient \S+weight: error", schedule="1f1b"),
    caught("tied_stages_not_summed", TIED_STAGES, rf"step 1 gradient {EMBEDDING}", zero=0),
    caught("tied_stages_not_summed", TIED_STAGES, rf"step 1 gradient {EMBEDDING}", zero=3),
    caught("tied_stages_counted_twice", TIED_STAGES, r"step 1 update \S+weight: error", zero=1),
    caught("norm_of_one_stage", STAGE_NORM, r"step 1 update \S+weight: error", tied=False),
    caught("stale_gather", STAGE_GATHERS, r"step 2 gradient \S+weight: error", zero=3, gather="unit"),
    caught("stale_gather", STAGE_GATHERS, r"step 2 gradient \S+weight: error", zero=3, gather="step"),
    caught("second_copy_stays_old", FOLDED_TIE, r"step 2 gradient \S+weight: error", schedule="zb-v"),
]


@pytest.mark.parametrize(
    "mutation", [pytest.param(m, id=str(m), marks=pytest.mark.slow if m.late else ()) for m in MUTATIONS]
)
def test_a_fault_turns_its_check_red(mutation: Mutation) -> None:
    assert control(mutation.test, mutation.arguments)
    with prepared(FAULTS[mutation.fault]), pytest.raises(AssertionError) as red:
        mutation.check()
    text = str(red.value)
    assert not isinstance(red.value, RankError), f"a crash, not a mismatch:\n{text}"
    assert re.search(mutation.shows, text), f"no tensor is named as expected:\n{text}"


def test_every_fault_has_a_check() -> None:
    assert {mutation.fault for mutation in MUTATIONS if not mutation.late} == set(FAULTS)
    assert len(FAULTS) >= 12


def test_a_fault_must_replace_something() -> None:
    from tests.mutation.faults import replace

    with pytest.raises(AttributeError):
        replace(test_strategies, "no_such_function", partial)
