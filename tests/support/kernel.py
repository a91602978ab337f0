"""Tests with processes that are fast and informative enough for every run: `make test` runs them besides all tests
without processes. `.ci/run` runs every test.

In: the collected tests. Out: the mark `kernel` on the tests below; a missing one is an error.
"""

import pytest

EXACT = "strategies/test_strategies.py::test_exact_means_the_bits_of_single"
KERNEL = {
    # each reproducible strategy at 2 processes, those that reduce by themselves at 3 as well, and bf16
    *(f"{EXACT}[{name}-{ranks}-fp32]" for name in ("allreduce", "ddp", "fsdp2") for ranks in (2, 3)),
    *(f"{EXACT}[{name}-2-fp32]" for name in ("hf_accelerate", "hf_trainer")),
    f"{EXACT}[single-1-fp32]",
    f"{EXACT}[pipeline-2-fp32]",
    f"{EXACT}[ddp-2-bf16]",
    f"{EXACT}[fsdp2-2-bf16]",
    f"{EXACT}[zero1-2-fp32]",
    f"{EXACT}[zero3-2-fp32]",
    "strategies/test_strategies.py::test_the_engine_s_own_reduction_is_equal_to_rounding[zero3-2]",
    # controls: these must differ
    "strategies/test_strategies.py::test_the_control_an_ordinary_all_reduce_has_other_bits",
    "strategies/test_strategies.py::test_the_control_a_mean_of_means_is_seen_in_the_norm",
    "strategies/test_strategies.py::test_the_control_bf16_has_other_bits",
    # regressions of the promise
    "strategies/test_strategies.py::test_more_micro_batches_than_examples_give_padding_micro_batches",
    "strategies/test_strategies.py::test_row_sparse_gradients_have_the_bits_of_dense_ones",
    "strategies/test_unused.py::test_weights_used_by_some_micro_batches_keep_the_bits[odd-fsdp2-3]",
    "strategies/test_unused.py::test_weights_that_no_micro_batch_uses_do_not_change",
    "tasks/test_own_code.py::test_own_random_numbers_and_statistics_are_the_same_at_any_number[ddp-2]",
    # a checkpoint under another strategy, with its control
    "checkpoint/test_checkpoint_pairs.py::test_a_checkpoint_of_ddp_under_fsdp2",
    "checkpoint/test_checkpoint_pairs.py::test_the_control_one_step_less_has_other_bits",
    # a bug that `verify` detects, and none without a bug
    "proof/test_verify.py::test_a_mistake_is_named[true-MeanOfMeans-said0]",
    "proof/test_verify.py::test_correct_jobs_pass[2-overrides1]",
    # the command: its files, stop and resume, kill and restart
    "jobs/test_command.py::test_the_files_of_a_run",
    "jobs/test_command.py::test_the_metrics_of_a_run",
    "jobs/test_command.py::test_a_requested_stop_has_status_75_and_the_same_command_resumes[2-1]",
    "jobs/test_command.py::test_a_killed_rank_is_named_and_the_job_restarts_automatically",
}
FILES = {name.partition("::")[0] for name in KERNEL}


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests. Errors: `pytest.UsageError` for a missing one."""
    wanted = {name: name.partition("::")[0] for name in KERNEL}
    files = set()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        files.add(name.partition("::")[0])
        if wanted.pop(name, None) is not None:
            item.add_marker(pytest.mark.kernel)
    if gone := sorted(name for name, file in wanted.items() if file in files):
        raise pytest.UsageError(f"tests/support/kernel.py names tests that are not there: {', '.join(gone)}")
