"""Assumptions about transformers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_scheduler,
    masking_utils,
)

from support.assumed import rests_on_it

IDS, OTHERS = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[9, 8, 7, 4, 5, 6]])
TEXTS = torch.tensor([[0, 1, 2, 0, 1, 2]])  # position_ids of two texts in a row


def tiny(**entries: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes, **entries))


def second_text_sees_first(model: nn.Module, **options: Any) -> bool:
    logits = [model(ids, position_ids=TEXTS, **options).logits[:, 3:] for ids in (IDS, OTHERS)]
    return not torch.equal(*logits)


@pytest.mark.parametrize("training", [True, False])
@rests_on_it(
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/plain/train.py",
    "src/lockstep/plain/losses.py",
    "src/lockstep/training/export_check.py",
    "packages/lockstep-trace/src/lockstep_trace/rules/modes.py",
    "src/lockstep/tasks/models/small_models.py",
)
def test_packed_texts_are_separate_without_cache_and_mask(training: bool) -> None:
    """Texts of a packed row do not attend to each other if position_ids restart, use_cache is False and no mask is
    passed. With the default use_cache, or with a mask of ones, they do."""
    model = tiny().train(training)
    assert not second_text_sees_first(model, use_cache=False)
    assert second_text_sees_first(model)
    assert second_text_sees_first(model, use_cache=False, attention_mask=torch.ones_like(IDS))
    model.config.use_cache = False
    assert not second_text_sees_first(model)


@rests_on_it("src/lockstep/tasks/models/masks.py")
def test_packed_texts_are_detected_by_position_jumps() -> None:
    """find_packed_sequence_indices numbers the texts of rows by jumps in the positions, and returns None if each row is
    one text."""
    found = masking_utils.find_packed_sequence_indices(TEXTS)
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 1, 1, 1]]


@rests_on_it("src/lockstep/tasks/models/model_configs.py", "src/lockstep/tasks/models/source_ties.py")
def test_shards_do_not_replace_a_single_file(tmp_path: Path) -> None:
    """save_pretrained in several files leaves an older model.safetensors, which from_pretrained then reads. Saving a
    single file over several removes them but leaves their index."""
    old, new = tiny(), tiny()
    old.save_pretrained(tmp_path)
    new.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "model.safetensors.index.json").is_file()
    weight = AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight
    assert torch.equal(weight, old.lm_head.weight)
    assert not torch.equal(weight, new.lm_head.weight)
    new.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("model*")) == [
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, new.lm_head.weight)


@rests_on_it(
    "src/lockstep/tasks/models/source_files.py", "src/lockstep/tasks/models/models.py", "src/lockstep/plain/train.py"
)
def test_weights_of_other_shapes_are_listed_and_reinitialized(tmp_path: Path) -> None:
    """from_pretrained with ignore_mismatched_sizes lists weights of another shape in `mismatched_keys`, as (name, shape
    in the file, shape in the model)."""
    tiny(tie_word_embeddings=False).save_pretrained(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path, intermediate_size=48)
    options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, **options)
    shapes = {name: (tuple(stored), tuple(built)) for name, stored, built in info["mismatched_keys"]}
    assert shapes["model.layers.0.mlp.up_proj.weight"] == ((32, 16), (48, 16))
    assert len(shapes) == 3


@rests_on_it("src/lockstep/tasks/models/source_ties.py")
def test_different_values_in_the_file_untie_the_head(tmp_path: Path) -> None:
    """from_pretrained leaves head and embedding untied, whatever the config specifies, if their values in the file
    differ."""
    model = tiny(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path, tie_word_embeddings=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert tiny(tie_word_embeddings=True).lm_head.weight.shape == (32, 16)


@rests_on_it("src/lockstep/plain/losses.py", "src/lockstep/tasks/language_modeling.py")
def test_a_causal_model_shifts_labels_itself() -> None:
    """A causal model's loss is the mean cross entropy of token t + 1 at position t, without labels of -100."""
    model, labels = tiny().eval(), IDS.clone()
    labels[0, 2] = -100
    output = model(IDS, labels=labels)
    each = nn.functional.cross_entropy(output.logits[0, :-1].float(), labels[0, 1:], ignore_index=-100)
    assert torch.allclose(output.loss, each, rtol=1e-6)


class Plain(nn.Module):
    """A model with its own loss, the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        guess = self.weight * x
        return {"guess": guess} if labels is None else {"loss": (guess - labels).square().mean()}


class Swallowing(Plain):
    """A model whose forward accepts and ignores any keyword."""

    def forward(self, x: Tensor, labels: Tensor | None = None, **ignored: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


def one_step(model: nn.Module, folder: Path, **options: Any) -> float:
    """Return how far Trainer's SGD moves the weight in a step of two micro-batches."""
    rows = [{"x": torch.tensor(float(i)), "labels": torch.tensor(1.0)} for i in range(4)]
    quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    rate = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, **quiet, **sizes, **rate)
    Trainer(model, arguments, train_dataset=rows, **options).train()  # type: ignore[arg-type]
    return 2.0 - model.weight.item()  # type: ignore[union-attr, operator]


@rests_on_it("src/lockstep/strategies/hf_trainer.py")
def test_keywords_that_a_forward_swallows_double_the_gradient(tmp_path: Path) -> None:
    """Trainer does not divide by the number of micro-batches if forward accepts any keyword, as if it used
    num_items_in_batch. With compute_loss_func it divides nothing, calls the model without labels, and passes that
    divisor."""
    plain, swallowed = one_step(Plain(), tmp_path), one_step(Swallowing(), tmp_path)
    assert swallowed == pytest.approx(2 * plain)
    seen: list[float] = []

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        seen.append(float(num_items_in_batch))
        total: Tensor = (outputs["guess"] - labels).square().sum()
        return total / num_items_in_batch

    assert one_step(Plain(), tmp_path, compute_loss_func=loss) == pytest.approx(plain)
    assert seen == [4, 4]


@rests_on_it("src/lockstep/strategies/hf_trainer.py")
def test_training_step_takes_the_divisor() -> None:
    """Trainer.training_step takes num_items_in_batch."""
    assert "num_items_in_batch" in inspect.signature(Trainer.training_step).parameters


@rests_on_it("src/lockstep/lab/import_config/loss_means.py", "src/lockstep/strategies/hf_trainer.py")
def test_trainer_counts_labels_from_the_second_on(tmp_path: Path) -> None:
    """Trainer's divisor for a causal model leaves out the first label of each row, which is no target, if the model
    names its loss type. For a GPT-2, which names none, the divisor includes it."""
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    batches = [{"input_ids": IDS, "labels": IDS}, {"input_ids": IDS, "labels": torch.tensor([[1, 2, -100, 3, 4, 5]])}]
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2))
    for model, first in ((tiny(), 0), (gpt2, 1)):
        _, count = Trainer(model, arguments).get_batch_samples(iter(batches), 2, torch.device("cpu"))
        assert int(count) == 5 + 4 + 2 * first  # type: ignore[arg-type]


@rests_on_it("src/lockstep/tasks/models/models.py", "src/lockstep/plain/train.py")
def test_loading_info_lists_missing_weights(tmp_path: Path) -> None:
    """`from_pretrained` lists weights that no file holds in `missing_keys`, and loads the others."""
    base = tiny().model
    base.save_pretrained(tmp_path)
    model, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"lm_head.weight"}
    assert torch.equal(model.model.embed_tokens.weight, base.embed_tokens.weight)


@rests_on_it(
    "src/lockstep/lab/import_config/trainer.py", "packages/lockstep-trace/src/lockstep_trace/tracer/layouts.py"
)
def test_schedules_begin_with_warmup() -> None:
    """get_scheduler("linear") has the rate 0 in the first warmup step, the full rate after warmup, and 0 after the last
    step. It is a LambdaLR of a partial with num_training_steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=4)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == [0, 0.5, 1, 0.5, 0]
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    assert schedule.lr_lambdas[0].keywords["num_training_steps"] == 4  # type: ignore[attr-defined]


@rests_on_it(
    "src/lockstep/strategies/engines/layers.py",
    "src/lockstep/tasks/models/storage_dtype.py",
    "src/lockstep/tasks/models/source_files.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/layouts.py",
)
def test_classes_of_models_declare_layers_ties_and_weights() -> None:
    """Model classes name their layers' classes in `_no_split_modules`, modules kept in float32 in
    `_keep_in_fp32_modules`, weights that files may lack or have in `_keys_to_ignore_on_load_...`, and tied weights in
    `_tied_weights_keys`."""
    from transformers import BartForConditionalGeneration, T5ForConditionalGeneration

    kinds: Any = (GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration, BartForConditionalGeneration)
    layers = [{"GPT2Block"}, {"LlamaDecoderLayer"}, {"T5Block"}, {"BartEncoderLayer", "BartDecoderLayer"}]
    assert [set(kind._no_split_modules) for kind in kinds] == layers
    assert all("lm_head.weight" in kind._tied_weights_keys for kind in kinds)
    assert set(T5ForConditionalGeneration._keep_in_fp32_modules or ()) == {"wo"}
    assert "final_logits_bias" in (BartForConditionalGeneration._keys_to_ignore_on_load_missing or ())
    assert "encoder.version" in (BartForConditionalGeneration._keys_to_ignore_on_load_unexpected or ())


@rests_on_it("src/lockstep/tasks/models/masks.py")
def test_functions_that_create_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """masking_utils' create_causal_mask calls `_preprocess_mask_arguments`, which calls `find_packed_sequence_indices`;
    each is looked up at the call."""
    calls: list[str] = []
    for name in ("_preprocess_mask_arguments", "find_packed_sequence_indices"):
        original = getattr(masking_utils, name)

        def noted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(masking_utils, name, noted)
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, attn_implementation="sdpa")
    positions = torch.tensor([[0, 1, 0, 1]])
    mask = masking_utils.create_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(1, 4, 8),
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    assert calls == ["_preprocess_mask_arguments", "find_packed_sequence_indices"]
    assert mask[0, 0].tolist() == [[i >= j and i // 2 == j // 2 for j in range(4)] for i in range(4)]


@rests_on_it(
    "src/lockstep/data/conversations.py",
    "src/lockstep/data/tokenizer.py",
    "src/lockstep/tasks/answer_pairs.py",
    "src/lockstep/tasks/language_modeling.py",
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/tasks/preference.py",
    "src/lockstep/tasks/text_task.py",
)
def test_marked_spans_count_characters_of_the_rendered_text() -> None:
    """render_jinja_template returns each conversation's text and, with return_assistant_tokens_mask, the spans inside
    generation blocks as (first character, one after the last)."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'a' %}{% generation %}{{ m.content }}!"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    turns = [
        {"role": role, "content": text} for role, text in (("u", "é\U0001f600"), ("a", "xy"), ("u", "z"), ("a", "é"))
    ]
    (text,), (spans,) = render_jinja_template(
        conversations=[turns], chat_template=template, return_assistant_tokens_mask=True, tools=None
    )
    assert text == "<u>é\U0001f600<a>xy!<u>z<a>é!"
    assert [text[begin:end] for begin, end in spans] == ["xy!", "é!"]


@rests_on_it("src/lockstep/training/plain_sides.py")
def test_families_with_a_tokenizer_of_their_own_are_listed() -> None:
    """tokenization_auto's TOKENIZER_MAPPING_NAMES has the class name of a family's tokenizer, or None.
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS has the families whose folders are read by that class, whatever class
    tokenizer_config.json names."""
    from transformers.models.auto import tokenization_auto

    names, wrong = (
        tokenization_auto.TOKENIZER_MAPPING_NAMES,
        tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    )
    assert names.get("bert") == "BertTokenizer"
    assert names.get("no such family") is None
    assert all(isinstance(family, str) for family in wrong)
    assert "bert" not in wrong
