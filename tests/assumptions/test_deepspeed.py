"""Assumptions about DeepSpeed, seen by one process."""

from __future__ import annotations

import pytest

from support.assumed import rests_on_it
from support.assumed_deepspeed import facts
from support.marks import needs

needs("deepspeed")
pytestmark = pytest.mark.processes


@rests_on_it("src/lockstep/strategies/engines/zero_partition.py", "src/lockstep/strategies/engines/zero_config.py")
def test_process_wide_state_of_deepspeed() -> None:
    """DeepSpeed's process-wide state has the names that lockstep resets, and is empty in a new process. A switch
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
    "packages/lockstep-trace/src/lockstep_trace/tracer/engines.py",
)
def test_flat_layout_of_weights_at_stage_1() -> None:
    """At stage 1 `round_robin_bit16_offsets` holds the weights' offsets in a flat tensor of `partition_size` elements
    per rank. `_hp_mapping` holds this rank's slice of each weight and, before step(), its gradient."""
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
def test_an_engine_can_leave_gradients_to_autograd() -> None:
    """With inside_no_sync_ctxt and _coalesce_grad_reduction, backward leaves gradients in .grad as autograd does."""
    assert facts()["left in .grad"] == [True, True, False]


@rests_on_it(
    "src/lockstep/strategies/engines/zero_steps.py",
    "src/lockstep/strategies/engines/zero_graph.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/engines.py",
)
def test_weights_are_partitioned_at_stage_3() -> None:
    """At stage 3 a weight is empty, has its full shape and this rank's shard size as attributes, and is complete after
    all_gather. Its module has DeepSpeed's functions around backward, and its parameters are in DeepSpeed's own mapping
    class. A rank reads its shard and the shard's gradient without communication."""
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
def test_optimizer_state_at_stages_1_and_2_is_linked_lazily() -> None:
    """At stages 1 and 2 `single_partition_of_fp32_groups` holds the tensors that the optimizer updates. safe_get and
    safe_set of optimizer states access the tensors linked at the first step. With `_hp_optimizer_states_linked` False,
    `_lazy_init_hp_params_optimizer_state` links the optimizer's current state tensors. `update_lp_params` writes the
    weights into the model; safe_set_full_fp32_param does not."""
    seen = facts()["1"]
    assert seen["flat"] == [True, 16, "torch.float32"]
    assert seen["linked"] == [True, False, True, True]
    assert seen["written"] == [False, True, True, True]


@rests_on_it("src/lockstep/strategies/engines/zero_state.py")
def test_writing_weights_at_stage_3() -> None:
    """At stage 3 `fp32_partitioned_groups_flat` holds this rank's shards of each group; safe_set_local_fp32_param
    writes them. `_partition_all_parameters` frees every gathered weight, `_reassign_or_swap_out_partitioned_parameters`
    copies a group's shards into the model, and the next all_gather returns them. `persistent_parameters` lists the
    small weights."""
    seen = facts()["3"]
    assert seen["flat"] == [[16, "torch.float32"]]
    assert seen["first"]
    assert seen["all in parts"] == ["NOT_AVAILABLE"] * 3
    assert seen["then"] == [True, []]
    assert seen["kept whole"] == [[2, 2]]


@rests_on_it("src/lockstep/strategies/engines/zero_config.py")
def test_unknown_top_level_keys_are_ignored() -> None:
    """DeepSpeedConfig ignores an unknown top-level key, and raises pydantic's errors for an unknown key in a section
    and for a wrong type. lockstep therefore checks which keys were read."""
    assert facts()["config"] == ["read", "extra_forbidden", "enum"]


@rests_on_it(
    "src/lockstep/strategies/engines/zero_agreement.py", "src/lockstep/lab/import_config/deepspeed_schedules.py"
)
def test_warmup_is_logarithmic_by_default() -> None:
    """WarmupLR rises with the logarithm of the step by default: after 10 of 100 steps the rate is at half."""
    assert facts()["warmup"] == pytest.approx(0.5, abs=1e-6)


@rests_on_it(
    "src/lockstep/strategies/engines/zero.py",
    "src/lockstep/strategies/engines/zero_steps.py",
    "src/lockstep/strategies/engines/zero_config.py",
    "src/lockstep/lab/import_config/loops.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/engines.py",
)
def test_gradient_norm_accumulation_boundary_and_default_clipping() -> None:
    """get_global_grad_norm after step() is the norm over all weights. safe_get_full_grad before step() gives complete
    gradients, zeros for unused weights. set_gradient_accumulation_boundary sets the value of
    is_gradient_accumulation_boundary. A config without gradient_clipping clips at 1.0 (0.19.8). DS_ACCELERATOR
    determines the device name. The error about a different order of weights begins with "tracing error"."""
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
def test_gathered_parameters_at_stage_3() -> None:
    """Within GatheredParameters a weight of stage 3 is complete, and writes of rank modifier_rank are kept; with
    enabled=False nothing happens. safe_set_local_optimizer_state writes into the optimizer's flat state. ds_tensor is
    this rank's shard, ds_process_group its group. The functions around a module's backward have setup_context and
    backward."""
    seen = facts()["3"]
    assert seen["gathered within"] == [[2, 3], True, 0]
    assert seen["state"]
    assert seen["parts"] == [6, True, True]
    assert seen["calls"] == [True] * 4


@rests_on_it(
    "src/lockstep/strategies/engines/zero_partition.py", "src/lockstep/strategies/engines/accelerated_sharding.py"
)
def test_existing_groups_and_configs_are_used() -> None:
    """init_distributed uses the process group that exists and forms no other. Accelerate's DeepSpeedPlugin with
    hf_ds_config keeps the config's values, zero_stage included; it adds only steps_per_print, infinite."""
    assert facts()["joined"] == [True, True, [3, 2], 2, True]
