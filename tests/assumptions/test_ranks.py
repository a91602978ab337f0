"""Assumptions about torch's collectives and engines, seen by three processes over gloo."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from support.assumed import rests_on_it
from support.assumed_ranks import OCTETS, RANKS, bits, facts

pytestmark = pytest.mark.processes


@rests_on_it("src/lockstep/strategies/exact/exchange.py", "src/lockstep/strategies/strategy.py")
def test_all_reduce_gives_every_rank_the_same_bits() -> None:
    """all_reduce gives every rank the same bits, at odd sizes too."""
    first, *others = facts()["sum_at_odd_sizes"]
    assert all(each == first for each in others)


@rests_on_it("src/lockstep/distributed/world.py", "src/lockstep/strategies/engines/zero_sums.py")
def test_integers_are_summed_exactly() -> None:
    """all_reduce of integers is exact beyond 2**53; summing one rank's bits with zeros returns these bits."""
    assert facts()["sum_of_integers"] == [[3 * 2**53 + 3, -3]] * RANKS
    assert facts()["sum_of_one_and_zeros"] == [bits(OCTETS)] * RANKS


@rests_on_it("src/lockstep/distributed/world.py")
def test_maximum_of_integers_is_exact() -> None:
    """all_reduce of integers with MAX is exact beyond 2**53."""
    assert facts()["greatest_integer"] == [2**53 + 2] * RANKS


@rests_on_it("src/lockstep/distributed/world.py")
def test_gloo_ignores_strides() -> None:
    """gloo's all_reduce of a strided view adds values that are adjacent in memory, not those of the view. lockstep
    passes only contiguous tensors."""
    assert facts()["sum_of_a_column"] == [[0.0, 9.0, 6.0, 9.0]] * RANKS


@rests_on_it("src/lockstep/distributed/world.py", "src/lockstep/strategies/exact/gradient_sum.py")
def test_a_gather_keeps_bits_and_order() -> None:
    """all_gather returns each rank's bits, including NaN and -0.0, in rank order."""
    assert [seen[1] for seen in facts()["gathered_bits"]] == [bits(OCTETS)] * RANKS


@rests_on_it(
    "src/lockstep/distributed/world.py", "src/lockstep/strategies/fsdp2.py", "src/lockstep/checkpoint/shard_files.py"
)
def test_a_broadcast_keeps_bits() -> None:
    """broadcast gives every rank the source's bits, in float32 and bfloat16."""
    first, *others = facts()["broadcast_bits"]
    assert first[0] == bits(OCTETS)
    assert all(each == first for each in others)


@rests_on_it("src/lockstep/strategies/exact/exchange.py")
def test_pieces_of_all_to_all_are_in_the_order_of_ranks() -> None:
    """all_to_all_single with unequal pieces concatenates them in the order of the sending ranks."""
    for rank, seen in enumerate(facts()["uneven_all_to_all"]):
        expected = [100.0 * of + rank * (of + 1) + i for of in range(RANKS) for i in range(of + 1)]
        assert seen == expected


@rests_on_it("src/lockstep/strategies/exact/reduce_schedule.py", "src/lockstep/strategies/engines/pipelining.py")
def test_messages_of_two_ranks_arrive_in_order() -> None:
    """Untagged messages from one rank to another arrive in the order of batch_isend_irecv."""
    for rank, seen in enumerate(facts()["messages_in_order"]):
        of = 10.0 * ((rank - 1) % RANKS)
        assert seen == [of + 3] * 3 + [of + 1] + [of + 2] * 2


@rests_on_it("src/lockstep/distributed/world.py")
def test_objects_are_gathered_in_the_order_of_ranks() -> None:
    """all_gather_object returns equal Python values in rank order, including None and large integers."""
    assert facts()["gathered_objects"] == [[{"rank": r, "none": None, "whole": 2**70} for r in range(RANKS)]] * RANKS


@rests_on_it("src/lockstep/strategies/engines/fsdp.py")
def test_each_rank_has_its_piece_of_a_reduce_scatter() -> None:
    """reduce_scatter_tensor gives rank r the r-th equal piece of the sum."""
    assert facts()["reduce_scattered"] == [[0.0, 3.0], [6.0, 9.0], [12.0, 15.0]]


@rests_on_it(
    "src/lockstep/distributed/sharded.py",
    "src/lockstep/strategies/fsdp2.py",
    "src/lockstep/strategies/sharded_optimizer.py",
)
def test_fsdp_shards_rows_as_chunk_does() -> None:
    """fully_shard gives each rank ceil(rows / ranks) rows, the last ranks fewer; full_tensor restores the bits."""
    assert facts()["rows_of_uneven_shards"] == [[2, True], [2, True], [1, True]]


@rests_on_it("src/lockstep/strategies/engines/fsdp.py", "src/lockstep/strategies/fsdp2.py")
def test_fsdp_averages_and_adds_at_the_next_sync() -> None:
    """FSDP2 averages gradients over ranks, or sums them with a divisor of 1 and forced sums. Without sync it keeps them
    out of .grad and adds them at the next sync. Under bfloat16 they have the weights' dtype."""
    for averaged, summed, accumulated, kind in facts()["fsdp_gradient"]:
        assert averaged == [2.0] * RANKS
        assert summed == [6.0] * RANKS
        assert accumulated == [4.0] * RANKS
        assert kind == "torch.float32"


@rests_on_it("src/lockstep/strategies/engines/fsdp.py")
def test_private_state_of_a_sharded_block() -> None:
    """fully_shard sets `_is_fsdp_managed_module` on a module and its submodules. A block's state has
    `_fsdp_param_groups` (or one `_fsdp_param_group`). Each of their `fsdp_params` has the module's sharded weight as
    `sharded_param`, after the first all-gather the complete weight as `_unsharded_param`, and its name as `_param_fqn`.
    A hook registered later runs while the block is gathered. The group's `post_backward` is looked up at each call;
    before it runs, gradients are in .grad of complete weights, afterwards only in .grad of shards."""
    whole, sharded = [[True, False]] * 2, [[False, True]] * 2
    names = ["0.weight", "0.bias"]
    for seen in facts()["parts_of_fsdp"]:
        assert seen == [[True] * 3, [True] * 2, [False] * 2, [True] * 2, whole, sharded, names]


@rests_on_it("src/lockstep/strategies/exact/reduce_schedule.py", "src/lockstep/strategies/exact/tensor_leaves.py")
def test_ranks_within_a_group() -> None:
    """group_peer of P2POp is a rank within the group. new_group sorts the group's ranks, and get_process_group_ranks
    lists them. all_gather_into_tensor, from torch 2.13 on all_gather_single, concatenates the ranks' tensors in rank
    order."""
    for rank, (seen, every) in enumerate(facts()["messages_in_a_group"]):
        assert seen == ([] if rank == 1 else [3.0 - rank, [0, 2]])
        assert every == [float(r) for r in range(RANKS) for _ in range(2)]


@rests_on_it("src/lockstep/strategies/engines/fsdp.py", "src/lockstep/strategies/fsdp2.py")
def test_custom_reduce_scatter_of_fsdp() -> None:
    """FSDP2 calls the object passed to set_custom_reduce_scatter with an output of shard size and an input whose r-th
    slot is for rank r. The output then is the gradient. FSDP2's hook before forward is the first in
    `_forward_pre_hooks`, an OrderedDict, whatever was registered earlier."""
    for rank, (calls, gradient, first, kind) in enumerate(facts()["own_reduce_scatter"]):
        assert calls == [[1, [rank + 1.0, 2 * (rank + 1.0), 3 * (rank + 1.0)], RANKS, False]]
        assert gradient == [5.0, 6.0, 7.0]
        assert first.endswith("_pre_forward")
        assert kind == "OrderedDict"


@rests_on_it("src/lockstep/strategies/engines/fsdp.py")
def test_fsdp_misses_tensors_in_unknown_containers() -> None:
    """FSDP2 finds an output's tensors in lists and mappings, and in torch 2.13 (not 2.11) in dataclasses. For an object
    of another class it leaves the gradient unreduced, without an error."""
    for seen in facts()["output_that_hides_tensors"]:
        assert (seen[:2], seen[3]) == ([True, True], False)
        assert seen[2] or Version(torch.__version__) < Version("2.13")


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/engines.py")
def test_shard_information_of_a_flat_parameter() -> None:
    """FSDP1's `_handle.flat_param` has `_fqns`, `_shapes` and `_shard_param_infos`: for each weight, the start of this
    rank's part in the weight and in the shard, and its length. `_params` is None, or with use_orig_params the weights'
    parts."""
    shapes = [["0.weight", [5, 2], True], ["0.bias", [5], True], ["1.weight", [3, 5], True]]
    for flat, originals in facts()["parts_of_flat_parameters"]:
        assert flat == [True, True, shapes]
        assert originals == [True, False, shapes]


@rests_on_it("src/lockstep/strategies/engines/hooked_ddp.py", "src/lockstep/strategies/ddp.py")
def test_ddp_averaging_and_communication_hooks() -> None:
    """DDP broadcasts rank 0's weights and averages gradients. no_sync keeps a rank's local gradient, to which the next
    sync adds. DDP does not divide the result of a communication hook. With gradient_as_bucket_view, .grad is a view of
    the bucket. A hook's bucket has the model's weights and, in the same order, their complete gradients as views of its
    buffer."""
    for rank, seen in enumerate(facts()["ddp_gradient"]):
        same, averaged, alone, accumulated, hooked, in_bucket, own = seen
        assert same
        assert own == [True] * 3
        assert (averaged, alone, accumulated, hooked) == (2.0, rank + 1.0, 4.0, 6.0)
        assert in_bucket


@rests_on_it(
    "src/lockstep/strategies/engines/hooked_ddp.py", "packages/lockstep-trace/src/lockstep_trace/tracer/placement.py"
)
def test_ignored_weights_and_hooks_of_ddp() -> None:
    """DDP does not average gradients of weights passed to `_set_params_and_buffers_to_ignore_for_model` before
    construction, and lists them in `parameters_to_ignore`. `_comm_hooks` is empty until a hook is registered.
    `process_group` and `bucket_bytes_cap` are the values in use."""
    for rank, seen in enumerate(facts()["parts_of_ddp"]):
        assert seen == [["b.weight"], RANKS, 3 << 20, [0, 1], [2.0, rank + 1.0]]


@rests_on_it("src/lockstep/checkpoint/shard_files.py")
def test_a_checkpoint_takes_unsharded_values_of_any_rank() -> None:
    """torch.distributed.checkpoint saves an unsharded value from any one rank, so it must be equal on all ranks."""
    assert len(set(facts()["checkpoint_of_unequal_values"][0])) > 1


@rests_on_it("src/lockstep/checkpoint/shard_files.py")
def test_shards_are_read_whole_by_one_process() -> None:
    """Shards saved by three ranks load into one full tensor."""
    assert facts()["checkpoint_of_shards"] == [True] * RANKS


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/rules/data.py")
def test_a_distributed_sampler_repeats_the_first_rows() -> None:
    """DistributedSampler gives rank r every n-th row starting at r, and repeats the first rows to complete the last
    round. The order stays the same until set_epoch."""
    plain = [seen[0] for seen in facts()["sampled_rows"]]
    assert plain == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    for _, first, again, _ in facts()["sampled_rows"]:
        assert first == again
    assert [seen[1] for seen in facts()["sampled_rows"]] != [seen[3] for seen in facts()["sampled_rows"]]


@rests_on_it("src/lockstep/training/recovery/recovery.py", "src/lockstep/distributed/world.py")
def test_a_group_is_formed_again_in_one_process() -> None:
    """The same processes can form a new group after destroy_process_group."""
    assert facts()["formed_again"] == [3.0] * RANKS


@rests_on_it("src/lockstep/distributed/hang_watchdog.py", "src/lockstep/training/recovery/recovery.py")
def test_gloo_raises_for_a_lost_rank() -> None:
    """A collective with a rank that has exited raises RuntimeError with "gloo" and one of the messages by which
    lockstep recognizes a lost peer."""
    lost = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Socket closed",
        "Connection refused",
    )
    for message in facts()["rank_lost"][:-1]:
        assert any(each in message for each in lost), message
        assert "gloo" in message


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py", "src/lockstep/lab/import_config/loops.py")
def test_clipping_sharded_gradients() -> None:
    """clip_grad_norm_ of FSDP2's gradients returns a DTensor and clips all shards by the norm over all ranks. float()
    of it is that norm; formatting it raises TypeError."""
    for kind, norm, whole, clipped, said in facts()["norm_of_shards"]:
        assert kind
        assert norm == pytest.approx(whole)
        assert clipped == pytest.approx(1e-3, rel=1e-2)
        assert said == "TypeError"
    assert len({seen[1] for seen in facts()["norm_of_shards"]}) == 1


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/rules/data.py", "src/lockstep/lab/import_config/loading.py")
def test_gather_for_metrics_keeps_repeated_rows_of_a_stream() -> None:
    """Accelerate's gather_for_metrics drops the rows that pad the last batches of a map-style data set. For a stream
    with dispatch_batches=False it returns them, so that metrics count them twice."""
    for seen in facts()["gathered_for_metrics"]:
        if seen is None:
            pytest.skip("needs accelerate and datasets")
        assert sorted(seen["data set"]) == list(range(10))
        assert {*seen["stream"]} == {*range(10)}
        assert len(seen["stream"]) == 12


@rests_on_it(
    "src/lockstep/strategies/engines/hooked_ddp.py",
    "src/lockstep/strategies/ddp.py",
    "src/lockstep/strategies/hf_accelerate.py",
    "src/lockstep/strategies/hf_trainer.py",
)
def test_static_graph_needs_a_first_backward_with_sync() -> None:
    """DDP with static_graph raises RuntimeError if its first backward is in no_sync. After one backward of zeros
    outside no_sync, gradients of later steps are accumulated and averaged as without static_graph."""
    mean = sum(1.0 + rank for rank in range(3)) / 3
    assert facts()["static_graph"] == [["RuntimeError", [2 * mean] * 2, [2 * mean] * 2]] * 3


@rests_on_it("src/lockstep/distributed/membership.py")
def test_closed_connections_of_gloo() -> None:
    """A gloo group's `send` raises RuntimeError at once if its rank has left. After this process has shut down the
    sockets of its connections (not the listener, whose shutdown would end the process), a send to another rank raises
    RuntimeError or nothing, and a thread that waits in `recv` for that rank ends with RuntimeError."""
    for to_the_lost, waiting, after in facts()["sends"][:-1]:
        assert (to_the_lost, waiting) == ("RuntimeError", "RuntimeError")
        assert after in ("RuntimeError", "")
