"""What lockstep assumes about DeepSpeed, seen by one process."""

from __future__ import annotations

import pytest

from support.assumed import rests_on_it
from support.assumed_deepspeed import facts

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.processes


@rests_on_it("src/lockstep/strategies/engines/zero_partition.py", "src/lockstep/strategies/engines/zero_config.py")
def test_the_state_of_the_process_has_its_names() -> None:
    """DeepSpeed's process-wide state has the names that lockstep resets, and is empty in a new process; a switch
    disables the operator that DeepSpeed would compile."""
    assert facts()["state of the process"]
    assert facts()["operators"]


@rests_on_it("src/lockstep/strategies/engines/zero_steps.py", "src/lockstep/strategies/engines/zero_agreement.py")
def test_weights_without_a_gradient_are_updated() -> None:
    """DeepSpeed gives zeros to weights without a gradient, so that AdamW decays them."""
    assert facts()["moved"] == [True, True, True]
    assert facts()["skipped"] == 0


@rests_on_it(
    "src/lockstep/strategies/engines/zero_steps.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/deepspeed_engine.py",
)
def test_weights_of_stage_1_lie_one_after_another() -> None:
    """At stage 1 `round_robin_bit16_offsets` holds the weights' offsets in a flat tensor of `partition_size` numbers
    per rank; `_hp_mapping` holds this rank's slice of each weight, and its gradient before step()."""
    seen = facts()
    assert seen["stage"] == 1
    assert seen["places"] == [[at, 0, size, at, 0, size] for at, size in ((0, 6), (6, 6), (12, 4))]
    assert seen["part"] == 16
    assert seen["gradient kept"]
    assert seen["boundary"]


@rests_on_it("src/lockstep/lab/import_config/loops.py", "src/lockstep/strategies/engines/zero_config.py")
def test_accumulation_is_divided_by_its_steps() -> None:
    """engine.backward divides each loss by gradient_accumulation_steps: four equal micro-batches give the gradient of
    one, complete only at the accumulation boundary."""
    once, four = facts()["sums"]
    assert four == pytest.approx(once, rel=1e-5)


@rests_on_it("src/lockstep/strategies/engines/zero_steps.py")
def test_an_engine_can_be_kept_from_gradients() -> None:
    """With inside_no_sync_ctxt and _coalesce_grad_reduction, backward leaves gradients in .grad as autograd does."""
    assert facts()["left in .grad"] == [True, True, False]


@rests_on_it(
    "src/lockstep/strategies/engines/zero_steps.py",
    "src/lockstep/strategies/engines/zero_graph.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/deepspeed_engine.py",
)
def test_weights_of_stage_3_are_parts() -> None:
    """At stage 3 a weight is empty, knows its full shape and the size of a rank's shard, and is whole after all_gather;
    its module has the functions around its backward, and its parameters are in DeepSpeed's own mapping; a rank reads
    its shard and the shard's gradient without communication."""
    seen = facts()["3"]
    assert seen["empty"] == [0, 0, 0]
    assert seen["whole"] == [[6, [3, 2], 6], [6, [2, 3], 6], [4, [2, 2], 4]]
    assert seen["status"] == ["NOT_AVAILABLE"] * 3
    assert seen["functions"] == [[True, True]] * 3
    assert seen["registry"]
    assert seen["mapping"] == "ZeROOrderedDict"
    assert seen["groups"] == [[[3, 2], [2, 3], [2, 2]]]
    assert seen["local"] == seen["gradient"] == [6, 6, 4]
    assert seen["gathered"] == ["AVAILABLE", [3, 2]]


@rests_on_it("src/lockstep/strategies/engines/zero_state.py")
def test_the_state_of_stage_1_is_linked_when_it_is_asked_for() -> None:
    """At stages 1 and 2 `single_partition_of_fp32_groups` holds the tensors that the optimizer updates. safe_get and
    safe_set of states read and write the tensors of the last link, which the first step has made; with
    `_hp_optimizer_states_linked` False, `_lazy_init_hp_params_optimizer_state` links those that are in the optimizer's
    state now. `update_lp_params` writes the weights into the model, which safe_set_full_fp32_param does not."""
    seen = facts()["1"]
    assert seen["flat"] == [True, 16, "torch.float32"]
    assert seen["linked"] == [True, False, True, True]
    assert seen["written"] == [False, True, True, True]


@rests_on_it("src/lockstep/strategies/engines/zero_state.py")
def test_the_state_of_stage_3_is_written_into_the_parts() -> None:
    """At stage 3 `fp32_partitioned_groups_flat` holds this rank's parts of each group, which safe_set_local_fp32_param
    writes. `_partition_all_parameters` frees every whole weight, `_reassign_or_swap_out_partitioned_parameters` copies
    a group's parts into the model, and the next all_gather brings them. `persistent_parameters` has the small
    weights."""
    seen = facts()["3"]
    assert seen["flat"] == [[16, "torch.float32"]]
    assert seen["first"]
    assert seen["all in parts"] == ["NOT_AVAILABLE"] * 3
    assert seen["then"] == [True, []]
    assert seen["kept whole"] == [[2, 2]]


@rests_on_it("src/lockstep/strategies/engines/zero_config.py")
def test_an_unknown_key_of_the_top_is_read_in_silence() -> None:
    """DeepSpeedConfig ignores an unknown top-level key, and raises pydantic's errors for an unknown key in a section
    and for a wrong type; lockstep therefore checks which keys were read."""
    assert facts()["config"] == ["read", "extra_forbidden", "enum"]


@rests_on_it(
    "src/lockstep/strategies/engines/zero_agreement.py", "src/lockstep/lab/import_config/deepspeed_schedules.py"
)
def test_warmup_is_logarithmic_unless_told_otherwise() -> None:
    """WarmupLR rises with the logarithm of the step by default: after 10 of 100 steps it is at half."""
    assert facts()["warmup"] == pytest.approx(0.5, abs=1e-6)


@rests_on_it(
    "src/lockstep/strategies/engines/zero.py",
    "src/lockstep/strategies/engines/zero_steps.py",
    "src/lockstep/strategies/engines/zero_config.py",
    "src/lockstep/lab/import_config/loops.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/deepspeed_engine.py",
)
def test_an_engine_says_its_norm_and_takes_a_boundary() -> None:
    """get_global_grad_norm after step() is the norm over all weights, and safe_get_full_grad before it gives whole
    gradients, of the zeros of unused weights too; set_gradient_accumulation_boundary decides
    is_gradient_accumulation_boundary; a config without gradient_clipping clips at 1.0 (0.19.8). DS_ACCELERATOR decides
    the device's name; the error about another order of weights begins with "tracing error"."""
    norm, expected = facts()["norm"]
    assert norm == pytest.approx(expected, rel=1e-5)
    assert facts()["whole gradients"] == [[3, 2], [2, 3], [2, 2]]
    assert facts()["boundary that is set"] == [False, True, 1.0]
    assert facts()["device"] == "cpu"
    assert facts()["words"] == [True, True]


@rests_on_it(
    "src/lockstep/strategies/engines/zero_state.py",
    "src/lockstep/strategies/engines/zero_graph.py",
    "packages/lockstep-plan/src/lockstep_plan/simulated.py",
)
def test_weights_of_stage_3_are_whole_within_a_context() -> None:
    """Within GatheredParameters a weight of stage 3 is whole, what rank modifier_rank writes there stays, and with
    enabled=False nothing happens; safe_set_local_optimizer_state writes into the optimizer's flat state; ds_tensor is
    this rank's part, ds_process_group its group. The functions around a module's backward have setup_context and
    backward."""
    seen = facts()["3"]
    assert seen["gathered within"] == [[2, 3], True, 0]
    assert seen["state"]
    assert seen["parts"] == [6, True, True]
    assert seen["calls"] == [True] * 4


@rests_on_it(
    "src/lockstep/strategies/engines/zero_partition.py", "src/lockstep/strategies/engines/accelerated_sharding.py"
)
def test_a_group_and_a_config_that_are_given_are_used() -> None:
    """init_distributed forms no group if the process has one, and uses that. Accelerate's DeepSpeedPlugin with
    hf_ds_config has the config's values, and its zero_stage is the config's; it adds only steps_per_print, infinite."""
    assert facts()["joined"] == [True, True, [3, 2], 2, True]
