"""What lockstep assumes about torch's collectives and engines, seen by three processes over gloo."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from support.assumed import rests_on_it
from support.assumed_ranks import OCTETS, RANKS, bits, facts

pytestmark = pytest.mark.processes


@rests_on_it("src/lockstep/strategies/exact/exchange.py", "src/lockstep/strategies/strategy.py")
def test_all_ranks_have_the_bits_of_a_sum() -> None:
    """all_reduce gives every rank the same bits, at odd sizes too."""
    first, *others = facts()["sum_at_odd_sizes"]
    assert all(each == first for each in others)


@rests_on_it("src/lockstep/distributed/world.py", "src/lockstep/strategies/engines/zero_sums.py")
def test_integers_are_summed_exactly() -> None:
    """all_reduce of integers is exact beyond 2**53; summing one rank's bits with zeros returns these bits."""
    assert facts()["sum_of_integers"] == [[3 * 2**53 + 3, -3]] * RANKS
    assert facts()["sum_of_one_and_zeros"] == [bits(OCTETS)] * RANKS


@rests_on_it("src/lockstep/distributed/world.py")
def test_the_greatest_integer_is_exact() -> None:
    """all_reduce of integers with MAX is exact beyond 2**53."""
    assert facts()["greatest_integer"] == [2**53 + 2] * RANKS


@rests_on_it("src/lockstep/distributed/world.py")
def test_gloo_adds_memory_as_it_lies() -> None:
    """gloo's all_reduce of a strided view adds numbers that are adjacent in memory, not those of the view; lockstep
    passes only contiguous tensors."""
    assert facts()["sum_of_a_column"] == [[0.0, 9.0, 6.0, 9.0]] * RANKS


@rests_on_it("src/lockstep/distributed/world.py", "src/lockstep/strategies/exact/rows.py")
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
    """FSDP2 averages gradients over ranks, or adds them with a divisor of 1 and forced sums; without sync it keeps them
    out of .grad and adds them at the next sync; under bfloat16 they have the weights' dtype."""
    for averaged, summed, accumulated, kind in facts()["fsdp_gradient"]:
        assert averaged == [2.0] * RANKS
        assert summed == [6.0] * RANKS
        assert accumulated == [4.0] * RANKS
        assert kind == "torch.float32"


@rests_on_it("src/lockstep/strategies/engines/fsdp.py")
def test_a_sharded_block_has_a_group_of_its_weights() -> None:
    """fully_shard marks a module and those below by `_is_fsdp_managed_module`. A block's state has `_fsdp_param_groups`
    (or one `_fsdp_param_group`), whose `fsdp_params` have the module's own weight as `sharded_param`, from the first
    gather on the whole one as `_unsharded_param`, and its name as `_param_fqn`. A hook registered later runs when the
    block is gathered. The group's `post_backward` is looked up at each call: before it, gradients are in .grad of whole
    weights, and after it in .grad of shards only."""
    whole, sharded = [[True, False]] * 2, [[False, True]] * 2
    names = ["0.weight", "0.bias"]
    for seen in facts()["parts_of_fsdp"]:
        assert seen == [[True] * 3, [True] * 2, [False] * 2, [True] * 2, whole, sharded, names]


@rests_on_it("src/lockstep/strategies/exact/reduce_schedule.py", "src/lockstep/strategies/exact/tensor_leaves.py")
def test_a_peer_of_a_group_has_its_rank_there() -> None:
    """group_peer of P2POp is a rank of the group, whose ranks new_group sorts, as get_process_group_ranks lists them;
    all_gather_into_tensor, from torch 2.13 on all_gather_single, puts the ranks' tensors below one another in their
    order."""
    for rank, (seen, every) in enumerate(facts()["messages_in_a_group"]):
        assert seen == ([] if rank == 1 else [3.0 - rank, [0, 2]])
        assert every == [float(r) for r in range(RANKS) for _ in range(2)]


@rests_on_it("src/lockstep/strategies/engines/fsdp.py", "src/lockstep/strategies/fsdp2.py")
def test_fsdp_reduces_by_the_object_that_it_is_given() -> None:
    """FSDP2 calls the object of set_custom_reduce_scatter with an output of a shard's size and an input in which rank
    r's slot is the r-th, and takes what it leaves in the output as the gradient; its hook before forward is the first
    in `_forward_pre_hooks`, an OrderedDict, whatever was registered before."""
    for rank, (calls, gradient, first, kind) in enumerate(facts()["own_reduce_scatter"]):
        assert calls == [[1, [rank + 1.0, 2 * (rank + 1.0), 3 * (rank + 1.0)], RANKS, False]]
        assert gradient == [5.0, 6.0, 7.0]
        assert first.endswith("_pre_forward")
        assert kind == "OrderedDict"


@rests_on_it("src/lockstep/strategies/engines/fsdp.py")
def test_fsdp_finds_no_tensors_in_objects_of_other_classes() -> None:
    """FSDP2 finds the tensors of an output in lists and mappings, in torch 2.13 in dataclasses too (2.11 does not); for
    an object of another class it leaves the gradient unreduced, and raises nothing."""
    for seen in facts()["output_that_hides_tensors"]:
        assert (seen[:2], seen[3]) == ([True, True], False)
        assert seen[2] or Version(torch.__version__) < Version("2.13")


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/fsdp1.py")
def test_a_flat_parameter_knows_which_slices_a_rank_has() -> None:
    """FSDP1's `_handle.flat_param` has `_fqns`, `_shapes` and `_shard_param_infos`: where a rank's part of each weight
    begins in the weight and in the shard, and how long it is; `_params` is None, or with use_orig_params the parts."""
    shapes = [["0.weight", [5, 2], True], ["0.bias", [5], True], ["1.weight", [3, 5], True]]
    for flat, originals in facts()["parts_of_flat_parameters"]:
        assert flat == [True, True, shapes]
        assert originals == [True, False, shapes]


@rests_on_it("src/lockstep/strategies/engines/hooked_ddp.py", "src/lockstep/strategies/ddp.py")
def test_ddp_averages_and_a_hook_does_not() -> None:
    """DDP broadcasts rank 0's weights and averages gradients; no_sync keeps a rank's own gradient, to which the next
    sync adds; the result of a communication hook is not divided, and with gradient_as_bucket_view .grad is a view of
    the bucket. A hook's bucket has the very weights of the model, and in the same order their gradients, complete, as
    views of its buffer."""
    for rank, seen in enumerate(facts()["ddp_gradient"]):
        same, averaged, alone, accumulated, hooked, in_bucket, own = seen
        assert same
        assert own == [True] * 3
        assert (averaged, alone, accumulated, hooked) == (2.0, rank + 1.0, 4.0, 6.0)
        assert in_bucket


@rests_on_it(
    "src/lockstep/strategies/engines/hooked_ddp.py", "packages/lockstep-trace/src/lockstep_trace/tracer/placement.py"
)
def test_ddp_knows_its_hooks_and_what_it_ignores() -> None:
    """DDP averages no gradient of weights that `_set_params_and_buffers_to_ignore_for_model` has named before, and
    lists them in `parameters_to_ignore`; `_comm_hooks` is empty until a hook is registered; `process_group` and
    `bucket_bytes_cap` are those that DDP uses."""
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
    """DistributedSampler gives rank r every n-th row starting at r and fills up with the first rows; the order stays
    the same until set_epoch."""
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
def test_a_lost_rank_is_told_of_by_gloo() -> None:
    """A collective with a rank that has exited raises RuntimeError with one of the messages that lockstep knows as a
    lost peer, and with "gloo"."""
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
def test_the_norm_of_shards_is_a_number_of_all_ranks() -> None:
    """clip_grad_norm_ of FSDP2's gradients returns a DTensor: float() of it is the norm over all ranks, and all shards
    are clipped by it; formatting it raises TypeError."""
    for kind, norm, whole, clipped, said in facts()["norm_of_shards"]:
        assert kind
        assert norm == pytest.approx(whole)
        assert clipped == pytest.approx(1e-3, rel=1e-2)
        assert said == "TypeError"
    assert len({seen[1] for seen in facts()["norm_of_shards"]}) == 1


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/rules/data.py", "src/lockstep/lab/import_config/loading.py")
def test_repeated_rows_of_a_stream_are_gathered() -> None:
    """Accelerate's gather_for_metrics drops the rows that fill up the last batches of a data set, but returns those of
    a stream with dispatch_batches=False, so that metrics count them twice."""
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
def test_a_static_graph_needs_a_first_backward_with_messages() -> None:
    """DDP with static_graph raises RuntimeError if its first backward is in no_sync; after one of zeros outside,
    gradients of later steps are added up and averaged as without it."""
    mean = sum(1.0 + rank for rank in range(3)) / 3
    assert facts()["static_graph"] == [["RuntimeError", [2 * mean] * 2, [2 * mean] * 2]] * 3


@rests_on_it("src/lockstep/distributed/membership.py")
def test_a_send_over_a_closed_connection_raises_and_wakes_who_waits() -> None:
    """A group's `send` of gloo raises RuntimeError at once if its rank has left. After this process has shut down the
    sockets of the connections (a shut listener would end it), a send to another rank raises that or nothing, and a
    thread that waits in `recv` for that rank ends with RuntimeError."""
    for to_the_lost, waiting, after in facts()["sends"][:-1]:
        assert (to_the_lost, waiting) == ("RuntimeError", "RuntimeError")
        assert after in ("RuntimeError", "")
