"""`model.compile`: one code for all layers that are alike and all lengths, made of the same examples on every rank."""

import os
from collections.abc import Callable
from functools import cache as once
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir

from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.data.job import Job, arithmetic_of
from lockstep.distributed.world import World
from lockstep.strategies.engines import blocks
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate
from lockstep.training.resolve import resolve_strategy
from support.harness import build, build_with_feed, digest, rank_0_of, run_on, tiny
from support.messages import raises
from support.strategy_runs import steps_of
from support.task_runs import make

COMPILE = "model.compile=true"
SEVERAL = ("ddp", "allreduce", "fsdp2", "hf_accelerate", "hf_trainer", "pipeline")


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled: into nothing but itself, which is soon done."""
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def code(*args: Any) -> Any:
            code.calls += 1  # type: ignore[attr-defined]
            return graph(*args)

        code.calls = 0  # type: ignore[attr-defined]
        found.append(code)
        return code

    monkeypatch.setattr(blocks, "BACKEND", backend)
    return found


def here(*overrides: str, **values: Any) -> dict[str, Any]:
    """Six steps in this process."""
    run = tiny("strategy.name=single", *overrides, **values)
    return steps_of(World(run), run)


@pytest.mark.slow
def test_no_code_for_each_length_and_none_for_each_layer(codes: list[Any]) -> None:
    """Padded micro-batches, such without padding, single examples: three codes, whatever comes after. Names of weights
    stay, and the steps are those that they were."""
    sizes = ("model.config.n_layer=2", "batch_size=9")  # micro-batches of one example and of two
    run = tiny("strategy.name=single", COMPILE, *sizes)
    world = World(run)
    task, strategy = build(run, world)
    assert len(codes) == 3
    before = sum(code.calls for code in codes)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    batches = [feed.make(step) for step in range(6)]
    assert len({m.inputs["input_ids"].shape for batch in batches for m in batch.micro_batches}) > 10
    for step, batch in enumerate(batches):
        strategy.train_step(batch, learning_rate(run.optim, step, 6))
    evaluate(world, task, strategy, task.splits["validation"])
    assert len(codes) == 3
    assert sum(code.calls for code in codes) == before + 6 * 8 * 2  # steps, micro-batches, layers
    assert strategy.export().keys() == strategy.model.state_dict().keys()  # type: ignore[union-attr]
    assert not [name for name in strategy.state_dict() if "_orig_mod" in name]
    assert not [name for name, _ in strategy.model.named_modules() if "_orig_mod" in name]
    found = digest(strategy.state_dict())
    strategy.close()
    assert found == here(*sizes)["digest"]


def test_code_is_made_before_training_and_used_in_it(codes: list[Any]) -> None:
    """What no code fits runs as it is."""
    layer = nn.Linear(4, 4)
    run = blocks.in_training(layer, layer.forward)
    run(torch.ones(2, 4))
    assert codes == []
    with blocks.making():
        run(torch.ones(2, 4))
    assert [code.calls for code in codes] == [1]
    run(torch.ones(7, 4))
    assert [code.calls for code in codes] == [2]
    run(torch.ones(3, 2, 4))
    assert [code.calls for code in codes] == [2]


def test_evaluation_runs_the_layers_as_they_are(codes: list[Any]) -> None:
    layer = nn.Linear(4, 4)
    run = blocks.in_training(layer, layer.forward)
    with blocks.making():
        layer.eval()
        run(torch.ones(2, 4))
        layer.train()
        with torch.no_grad():
            run(torch.ones(2, 4))
    assert codes == []


def test_a_run_takes_no_code_that_was_made_for_other_sizes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor itself would: the bits of a run would be those of whatever ran before it on this machine."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def folder(*overrides: str) -> Path:
        run = tiny("strategy.name=single", COMPILE, *overrides)
        task, strategy = build(
            run.model_copy(update={"model": run.model.model_copy(update={"compile": False})}), World(run)
        )
        with blocks.shared_cache(list(blocks.examples(strategy, task))):
            found = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        strategy.close()
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
        assert found.is_dir()
        return found

    assert folder() == folder("optim.learning_rate=1e-3")
    assert folder().is_relative_to(cache / "compiled")
    assert folder() != folder("data.max_length=12")
    before = cache_dir()  # sets the variable
    with blocks.shared_cache([]):
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(cache / "compiled")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == before
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "given")
    with blocks.shared_cache([]):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "given"


# Code for a precision takes a minute to make, once for all tests, and two more for layers that FSDP2 gathers, which
# have code of their own. `.ci/run` asks of bf16 alone, whose code is that of fp32 with `autocast` in it. There `ddp` is
# asked by the run that is resumed; `fsdp2` and a pipeline, which take a minute of the processor to compile, with layers
# that are compiled into themselves: what is theirs is how the compiler meets gathered weights, and that is there.
LATER = {"fp32": [pytest.mark.slow, pytest.mark.long], "bf16": [pytest.mark.slow]}
PRECISIONS = [pytest.param(precision, marks=marks) for precision, marks in LATER.items()]
LIMIT_S = 1500  # to compile takes minutes on a busy machine


@once  # several questions are asked of one job
def of(name: str, ranks: int, *overrides: str) -> dict[str, Any]:
    """Six steps on each of `ranks` processes; rank 0's."""
    run = tiny(f"strategy.name={name}", *overrides)
    return rank_0_of(ranks, steps_of, run, alike=("loss",), timeout_s=LIMIT_S)


# -- compiled by inductor --------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.long
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bits_of_a_single_process(name: str, precision: str) -> None:
    """With dropout, of the compiler's own numbers."""
    one, two = (of(n, ranks, f"precision={precision}", COMPILE) for n, ranks in (("single", 1), (name, 2)))
    assert two["digest"] == one["digest"]
    assert two["loss"] == one["loss"]
    assert one["digest"] != of("single", 1, f"precision={precision}")["digest"]


def steps_in_themselves(world: World, run: Run) -> dict[str, Any]:
    """`steps_of`, of layers that torch.compile has taken apart and put together as they were."""
    blocks.BACKEND = "eager"
    counters.clear()
    return {**steps_of(world, run), "graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.processes
def test_stages_of_a_pipeline_are_compiled() -> None:
    """With the bits of one process that compiles nothing."""
    run, alone = tiny("strategy.name=pipeline", COMPILE), of("single", 1)
    first, last = run_on(2, steps_in_themselves, run, timeout_s=LIMIT_S)
    assert min(first["graphs"], last["graphs"]) > 0
    assert first["digest"] == alone["digest"]
    assert first["loss"] == last["loss"] == alone["loss"]


@pytest.mark.processes
@pytest.mark.parametrize("gather", ["step", "micro_batch"])
def test_layers_of_fsdp2_are_compiled_and_computed_again(gather: str) -> None:
    """With the bits of one process that compiles nothing. By inductor's code: the next one."""
    words = (COMPILE, "model.checkpoint_activations=true", f"strategy.options.gather={gather}")
    run, alone = tiny("strategy.name=fsdp2", *words), of("single", 1)
    first, second = run_on(2, steps_in_themselves, run, timeout_s=LIMIT_S)
    assert min(first["graphs"], second["graphs"]) > 0
    assert first["digest"] == alone["digest"]
    assert first["loss"] == second["loss"] == alone["loss"]


@pytest.mark.processes
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.long
@pytest.mark.parametrize("gather", ["alone", "step", "micro_batch"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_bits_where_activations_are_computed_again(gather: str, precision: str) -> None:
    words = (f"precision={precision}", COMPILE)
    again = (*words, "model.checkpoint_activations=true")
    alone = of("single", 1, *words)["digest"]
    if gather == "alone":
        assert of("single", 1, *again)["digest"] == alone
    else:
        assert of("fsdp2", 2, *again, f"strategy.options.gather={gather}")["digest"] == alone


CHUNKS = (
    "precision=bf16",
    "model.dtype=bfloat16",
    "task.loss_chunk=16",
)  # weights kept in bf16, logits a few at a time


@once
def of_chunks(folder: Path, name: str, ranks: int, *overrides: str) -> tuple[str, list[float]]:
    """Of a language model; rank 0's."""
    run = make(folder, "packed", f"strategy.name={name}", *CHUNKS, *overrides)
    found = run_on(ranks, steps_of, run, timeout_s=LIMIT_S)[0]
    return found["digest"], found["loss"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("ddp", 2, ()),
        ("allreduce", 3, ()),
        ("fsdp2", 2, ("strategy.options.gather=step",)),
        ("fsdp2", 3, ("strategy.options.gather=micro_batch",)),
    ],
)
def test_weights_in_bf16_and_a_loss_in_chunks(name: str, ranks: int, options: tuple[str, ...], packed: Path) -> None:
    one = of_chunks(packed, "single", 1, COMPILE)
    assert of_chunks(packed, name, ranks, COMPILE, *options) == one
    assert one != of_chunks(packed, "single", 1)


def several_alone() -> None:
    """In this process code is made for micro-batches of several examples, and single ones run without: to compile both
    takes half a minute more."""
    blocks.examples = partial(lambda made, *given: islice(made(*given), 1), blocks.examples)


def in_one_go(world: World, run: Run) -> str:
    several_alone()
    return str(steps_of(world, run)["digest"])


def stopped_and_gone_on_with(world: World, run: Run) -> tuple[str, dict[str, int]]:
    """Three steps, and three more by another model of the same run. Also what torch's cache did for them."""
    several_alone()
    _, strategy, feed = build_with_feed(run, world)
    for step in range(6):
        if step == 3:
            state = world.broadcast(strategy.state_dict())
            strategy.close()
            _, strategy = build(run, world)
            strategy.load_state_dict(state)
        strategy.train_step(feed.make(step), learning_rate(run.optim, step, 6))
    found = digest(strategy.state_dict())
    strategy.close()
    return found, dict(counters["aot_autograd"])


@pytest.mark.processes
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_has_the_same_bits(precision: str) -> None:
    words = (f"precision={precision}", COMPILE, "data.max_length=4")  # of one length: no code for padded micro-batches
    (before,) = run_on(1, in_one_go, tiny("strategy.name=single", *words), timeout_s=LIMIT_S)
    assert before != of("single", 1, *words[:1], *words[2:])["digest"]  # dropout is of the compiler's own numbers
    for found, cached in run_on(2, stopped_and_gone_on_with, tiny("strategy.name=ddp", *words), timeout_s=LIMIT_S):
        assert found == before
        assert cached["autograd_cache_hit"] >= 1  # what is made once is there, at the latest here
        assert "autograd_cache_bypass" not in cached


# -- refused ---------------------------------------------------------------------------------------------------------


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with raises("LS4046", "'no-such-compiler'") as caught:
        blocks.check(Job.of(tiny(COMPILE)), here=True)
    assert "\n" not in str(caught.value)
    blocks.check(Job.of(tiny(COMPILE)), here=False)  # the ranks look for themselves


@pytest.mark.parametrize("name", ["zero1", "zero3", "hf_accelerate"])
def test_deepspeed(name: str) -> None:
    options = {"deepspeed": {"zero_stage": 2}} if name == "hf_accelerate" else {}
    run = tiny(COMPILE, strategy={"name": name, "options": options})
    with raises("LS4142"):
        resolve_strategy(run, 1)


def test_a_layer_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        raise NotImplementedError("no kernel for this")

    monkeypatch.setattr(blocks, "BACKEND", backend)
    with raises("LS4048"):
        here(COMPILE)


def test_layers_that_cannot_be_traced_are_refused_before_processes_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longformer's attention asks how many tokens are global, which no graph can say. A rank would say so, too."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {"type": "longformer", "config": sizes | {"attention_window": 8}}
    with raises("LS4048", "model.compile: ") as caught:
        blocks.check(Job.of(tiny(COMPILE, model=model)), here=True)
    assert "\n" not in str(caught.value)
    blocks.check(Job.of(tiny(COMPILE, model=model)), here=False)  # the ranks look for themselves
    blocks.check(Job.of(tiny(model=model)), here=True)
    with raises("LS4048"):
        here(COMPILE, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_that_can_be_traced_are_not_refused(
    precision: str, cache: Path, codes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled for that, torch's random numbers stay, and the answer is kept."""
    state = torch.get_rng_state()
    run = tiny(COMPILE, f"precision={precision}", "model.config.n_layer=2")
    blocks.check(Job.of(run), here=True)
    assert codes == []
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(blocks, "in_training", None)
    blocks.check(Job.of(run), here=True)


@pytest.mark.slow
def test_embeddings_that_are_kept_in_one_piece_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's word embeddings, which are not shared with a classifier, give a gradient of rows, and no graph can say how
    many: transformers names their module beside the layers. The steps are those of layers that are traced alone."""
    model = {"type": "bert", "config": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}}
    monkeypatch.setattr(blocks, "BACKEND", "aot_eager")  # forward and backward are traced, and nothing is made of it
    traced = here(COMPILE, model=model)
    assert traced["norm"] == pytest.approx(here(model=model)["norm"], rel=1e-4)
    monkeypatch.setattr(blocks, "_looks_up_tokens", lambda block: False)
    with raises("LS4048"):
        here(COMPILE, model=model)


def test_it_is_a_part_of_what_a_checkpoint_agrees_on() -> None:
    assert arithmetic_of(tiny(COMPILE))["model.compile"] is True
    assert arithmetic_of(tiny("model.compile=false"))["model.compile"] is False
    assert "model.compile" not in arithmetic_of(tiny())  # decided later
