"""Models from transformers: pretrained, or from a config; and back to a folder. The tasks share this.

In: the `model` section, a tokenizer and label names. Out: a model on the CPU, the same bits in every process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.utils import logging

from lockstep.config.run import Run, RunError
from lockstep.data import tokenizer as tokenizers
from lockstep.data.hub import downloading, reading_weights
from lockstep.distributed.randomness import seed_libraries
from lockstep.tasks.models import (
    adapters,
    config_checks,
    head_padding,
    heads,
    padding,
    quantized,
    source_shapes,
    source_ties,
    storage_dtype,
    token_rows,
)
from lockstep.tasks.models.model_configs import (
    check_one_save,
    entry,
    load_config,
    local_or_id,
    texts,
    with_architectures,
)

# Families whose positions start after the padding id, so that fewer tokens fit than positions exist.
_OFFSET_POSITIONS = {
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "longformer", "mpnet")
}


def check(
    run: Run, head: str = "classification", tokens: int | None = None, key: str = "data.max_length", **entries: Any
) -> None:
    """Refuse, before any process starts, a model that cannot be built, or that has no place for so many `tokens`
    (default: `data.max_length`), which `key` sets. `entries` of the config are set first. Errors: `RunError`."""
    from transformers.models.auto import modeling_auto

    adapters.check(run)
    config = load_config(run)
    model_head = heads.of(head)
    if config.model_type not in getattr(modeling_auto, model_head.families) and not run.model.trust_remote_code:
        raise RunError(
            "LS3140",
            f"model: transformers has no {model_head.called} for the type {config.model_type!r}; "
            "choose another model.type",
        )
    if run.model.config or run.model.adapter:
        for name, value in entries.items():
            setattr(config, name, value)
        _check_buildable(run, config, head)
    if not model_head.reads_texts:
        return
    for part in texts(config):
        if "sliding_attention" in (entry(part, "layer_types") or ()) and vars(part).get("sliding_window", 0) is None:
            switch = "use_sliding_window: true and " if entry(part, "use_sliding_window") is False else ""
            raise RunError(
                "LS3141",
                f"model.config.layer_types: sliding_attention needs a window, and this {part.model_type} has "
                f"none; set model.config.{switch}sliding_window, or use full_attention",
            )
        fits = positions_of(part)
        if fits is not None and (tokens or run.data.max_length) > fits:
            raise RunError(
                "LS3142",
                f"{key}: {tokens or run.data.max_length} tokens, but the model has positions for {fits} only; "
                f"lower it to {fits}",
            )
    check_block_sparse(config, tokens or run.data.max_length, key)
    _check_loading(run, config, head)
    source_shapes.check(run, config, head)
    config_checks.check(run, head)
    padding.unsupported_reason(run, head)  # tried here once, and known to all processes
    config_checks.notes(run, head)


def positions_of(config: Any) -> int | None:
    """The most tokens that a model has positions for; None: as many as there are. Some families count from behind
    padding, whose number may not be known yet."""
    positions = entry(config, "max_position_embeddings")
    if positions is None or positions <= 0:
        return None
    return int(positions) - ((config.pad_token_id or 0) + 1 if config.model_type in _OFFSET_POSITIONS else 0)


def with_length_that_fits(run: Run, key: str) -> tuple[Run, list[str]]:
    """The run with the default of a `key` that says how many tokens a text has, lowered to the model's positions, and
    a note if it was. One that a person wrote stays, and is refused by `check`."""
    if run.wrote(key):
        return run, []
    with suppress(RunError):  # of a model that cannot be read: `check` says so
        name, _, inner = key.partition(".")
        section = getattr(run, name)
        length = getattr(section, inner)
        fits = min(
            (fits for part in texts(load_config(run)) if (fits := positions_of(part)) is not None), default=length
        )
        if 2 <= fits < length:
            note = f"{key} is {fits}, because the model has positions for {fits} tokens; its default is {length}"
            return run.model_copy(update={name: section.model_copy(update={inner: fits})}), [note]
    return run, []


# Heads and families whose embedding `from_pretrained` of transformers 5.23 gives zeros for the padding token, whatever
# the file holds. Where it is the output's weight as well, training changes that row: of all heads and families these.
ZEROED = {("causal", "youtu"), ("masked", "funnel")}


def _check_loading(run: Run, config: Any, head: str) -> None:
    """Refuse a model that nobody could load as it was trained. Errors: `RunError`."""
    if (head, config.model_type) in ZEROED and entry(config, "tie_word_embeddings") and not run.model.adapter:
        raise RunError(
            "LS3151",
            f"model: transformers sets the padding token's row to zero when it loads a {config.model_type}, and "
            "training changes that row where input and output share it, so that the export would compute something "
            "else than what was trained; set model.config.tie_word_embeddings=false for a model from scratch, or take "
            "another family",
        )


# Families that transformers' own code cannot compute under autocast where weights are float32 -> why.
_NO_AUTOCAST = {
    "xmod": "its adapters ask for numbers of the weights' dtype",
    "deberta": "its attention fills masked scores with the least number of float32, which is out of range there",
}


def check_arithmetic(run: Run, head: str) -> None:
    """Refuse a family of `_NO_AUTOCAST` under autocast, and one that portable arithmetic cannot compute. Errors:
    `RunError`."""
    family = load_config(run).model_type
    why = _NO_AUTOCAST.get(family)
    if why and run.precision != "fp32" and not run.model.trained_in_bfloat16:
        raise RunError(
            "LS3143",
            f"precision: transformers cannot compute a {family} model in {run.precision} with float32 "
            f"weights: {why}; set precision: fp32, or precision: bf16 and model.dtype: bfloat16",
        )
    if run.strategy.exact == "portable":
        config_checks.check_portable(run, head)


def _check_buildable(run: Run, config: Any, head: str) -> None:
    """Build the model without memory, so that sizes that do not fit each other are told now."""
    import transformers

    try:
        with torch.device("meta"):
            model = getattr(transformers, heads.of(head).auto).from_config(with_architectures(config))
            if run.model.adapter:
                adapters.wrap(run, model, head)
    except (ValueError, RuntimeError, AssertionError, TypeError, LookupError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())
        if "meta" in reason:  # a model that cannot be built without memory says nothing of its sizes
            return
        raise RunError(
            "LS3144", f"model.config: transformers cannot build this {config.model_type}: {reason}"
        ) from error


def sequence_classifier(
    run: Run, tokenizer: Any, labels: list[str], empty: bool = False, problem: str | None = None
) -> nn.Module:
    """A classifier; weights that the source does not have (the head) are drawn from the seed. `empty`: on the meta
    device. `problem`: what transformers calls what it learns (`problem_type`)."""
    problem_type = {} if problem is None else {"problem_type": problem}
    return build(run, "classification", tokenizer, empty, **named(labels), **problem_type)


def named(labels: list[str]) -> dict[str, Any]:
    """The entries of a config that say what its classes are called."""
    names = dict(enumerate(labels))
    return {"num_labels": len(labels), "id2label": names, "label2id": {name: code for code, name in names.items()}}


def build(run: Run, head: str, tokenizer: Any, empty: bool = False, **entries: Any) -> nn.Module:
    """A model of the Auto class that `head` names; weights that the source does not have are drawn from the seed.

    `tokenizer`: None for a model that reads no texts. `entries` of the config are set by the task. `empty`: on the meta
    device, without memory.
    """
    import transformers

    from lockstep.tasks.models import masks, unpadded  # with transformers' models

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    auto = getattr(transformers, heads.of(head).auto)
    config = with_architectures(load_config(run))
    if tokenizer is not None:
        _prepare(config, tokenizer, run.model.source is not None)
    laid = padding.unsupported_reason(run, head) is None
    options: dict[str, Any] = {"attn_implementation": run.model.attention} if run.model.attention else {}
    options |= {"attn_implementation": unpadded.NAME} if laid else {}
    options |= storage_dtype.loaded_in(run)
    seed_libraries(run.seed)
    if run.model.type is not None and tokenizer is not None:
        for part in texts(config):
            part.vocab_size = tokenizers.embeddings_of(run, tokenizer)
            if entry(part, "decoder_vocab_size") is not None:  # of a Marian, whose decoder may be a model by itself
                part.decoder_vocab_size = part.vocab_size
            for name in ("bos_token_id", "eos_token_id"):
                with suppress(StrictDataclassError):  # a family that cannot be without one keeps its own
                    setattr(part, name, getattr(tokenizer, name))
        for part in texts(config)[1:]:
            if config.is_encoder_decoder and part.bos_token_id is None:  # T5Gemma's decoder starts from it
                part.bos_token_id = tokenizer.pad_token_id
        if config.is_encoder_decoder and config.eos_token_id is None:  # BART's classifier reads at the text's end
            config.eos_token_id = tokenizer.sep_token_id
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:  # T5's, from scratch
        config.decoder_start_token_id = config.pad_token_id
    for name, value in entries.items():
        setattr(config, name, value)
    if run.model.type is not None or empty:
        with torch.device("meta" if empty else "cpu"):
            model = auto.from_config(config, trust_remote_code=run.model.trust_remote_code, **options)
        source_ties.apply(run, model)
    else:
        model = _pretrained(run, head, auto, config, options)
    settle_block_sparse(model)
    if run.model.adapter:
        with torch.device("meta" if empty else "cpu"):
            model = adapters.wrap(run, model, head)
    seeds_from_torch(model)
    if laid:
        unpadded.install(model)
    masks.prepare(model)
    model = storage_dtype.cast_weights(run, model)
    head_padding.install(model)
    return model


def _pretrained(run: Run, head: str, auto: Any, config: Any, options: Mapping[str, Any]) -> Any:
    """The model that `from_pretrained` of an Auto class loads. Errors: `RunError`."""
    with downloading(local_or_id(run), "model"), reading_weights(str(run.model.source)):
        model, info = auto.from_pretrained(
            local_or_id(run),
            config=config,
            revision=run.model.revision,
            trust_remote_code=run.model.trust_remote_code,
            ignore_mismatched_sizes=True,  # a head for other labels is drawn anew
            output_loading_info=True,
            **options,
        )
    differing = {name: (tuple(stored), tuple(built)) for name, stored, built in info["mismatched_keys"]}
    source_shapes.refuse(run, model, head, differing)
    source_ties.check(run, model, auto)
    freeze_as_from_config(model, auto)
    return model


def _prepare(config: Any, tokenizer: Any, pretrained: bool) -> None:
    """Set the padding token, and switch off what training does not use. Errors: `RunError` for a padding token that the
    model has no embedding for."""
    for part in texts(config):
        if pretrained:
            token_rows.check_padding(entry(part, "vocab_size"), tokenizer)
        part.pad_token_id = tokenizer.pad_token_id
        if hasattr(part, "use_cache"):  # a cache costs memory and may change bits; `save` switches it on again
            part.use_cache = False
        if entry(part, config_checks.ROUTER_LOGITS):  # their loss is refused or nothing; and it cannot write with them
            setattr(part, config_checks.ROUTER_LOGITS, False)


def freeze_as_from_config(model: Any, auto: Any) -> None:
    """Freeze what a model of the same config would have frozen: `from_pretrained` lets go of it (the computed positions
    of Marian, which are in no export, would be decayed)."""
    if not type(model).__module__.startswith("transformers."):  # code from the Hub may need memory to be built
        return
    with torch.device("meta"):
        fresh = auto.from_config(model.config)
    trained = {name: parameter.requires_grad for name, parameter in fresh.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        if not trained.get(name, True):
            parameter.requires_grad_(False)


def seeds_from_torch(model: nn.Module) -> None:
    """Reformer seeds torch's generator anew in every layer, from the operating system, so that its backward can draw
    the same dropout again. Here those seeds are drawn from torch's generator, which is seeded for every micro-batch."""

    def draw(layer: Any, name: str) -> None:
        seed = int(torch.randint(2**62, ()))
        setattr(layer, name, seed)
        torch.manual_seed(seed)

    for layer in model.modules():
        if type(layer).__name__ == "ReformerLayer":
            for name in ("attention_seed", "feed_forward_seed"):
                setattr(layer, f"_init_{name}", partial(draw, layer, name))


def save(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    tokenizer: Any,
    folder: Path,
    run: Run | None = None,
    template: str | None = None,
) -> None:
    """Write config, weights and tokenizer so that transformers' `from_pretrained` loads them; of a `run` with an
    adapter, as it says there. `template`: the chat template that the model was trained by, in place of the
    tokenizer's."""
    plain = {name: tensor.cpu() for name, tensor in weights.items()}
    model.load_state_dict(plain)
    for part in texts(model.config):
        if getattr(part, "use_cache", None) is False:
            part.use_cache = True  # off in training only
    with _no_import_of_deepspeed():
        if run is not None and run.model.adapter:
            adapters.save(run, model, folder, str(load_config(run).dtype).removeprefix("torch."))
        else:
            model.save_pretrained(folder)  # type: ignore[operator]
    if tokenizer is None:
        return
    if template is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template
    tokenizers.save(tokenizer, folder)


@contextmanager
def _no_import_of_deepspeed() -> Iterator[None]:
    """While transformers saves a model: Accelerate imports DeepSpeed, where it is installed, to see whether that wraps
    the model. Its import takes 1 to 2 s, and what is not imported wraps nothing."""
    other = sys.modules.get("accelerate.utils.other")
    if "deepspeed" in sys.modules or not hasattr(other, "is_deepspeed_available"):
        yield
    else:
        with mock.patch.object(other, "is_deepspeed_available", return_value=False):
            yield


def exported(head: str, folder: Path, run: Run) -> tuple[Any, Any]:
    """An exported model, ready to be asked, and its tokenizer. Errors: `RunError`."""
    model = exported_model(head, folder, run)
    with _loading(folder):
        tokenizer = tokenizers.load(str(folder), run.model.trust_remote_code)
    token_rows.guard(model, tokenizer)
    return model, tokenizer


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Errors: `RunError` in place of whatever libraries raise of files of an export that cannot be loaded."""
    try:
        yield
    except (RunError, MemoryError):
        raise
    except Exception as error:
        raise RunError(
            "LS3430",
            f"{folder}: the model cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:200]}. "
            "Restore its files, or write it again (of a run: remove the export and run lockstep train again)",
        ) from error


def exported_model(head: str, folder: Path, run: Run) -> Any:
    """An exported model, in float32 and in evaluation mode. Errors: `RunError`."""
    with _loading(folder):
        return _exported_model(head, folder, run)


def _exported_model(head: str, folder: Path, run: Run) -> Any:
    """`exported_model`, with errors of the libraries."""
    import transformers

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    check_one_save(folder, "the export")
    options: dict[str, Any] = {"trust_remote_code": run.model.trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    adapter = adapters.is_adapter(folder)
    source = local_or_id(run) if adapter else folder
    auto = getattr(transformers, heads.of(head).auto)
    if adapter:
        options |= storage_dtype.loaded_in(run)  # the frozen weights that it was trained beside
    model = auto.from_pretrained(source, config=config, ignore_mismatched_sizes=adapter, **options)
    if adapter:
        from peft import PeftModel

        with adapters.no_rename_warning():
            model = PeftModel.from_pretrained(model, folder, is_trainable=run.model.quantization is not None)
    model = model.float().eval()
    if adapter and run.model.quantization is not None:
        quantized.pack(run, model)  # trained weights are those with a gradient
    return model


# -- BigBird's attention ---------------------------------------------------------------------------------------------

# transformers changes it from `block_sparse` to `original_full` when it meets a short text: within a forward, for good,
# and with draws for weights of new layers that are not used. Dropout then depends on what a process has read before.
_BLOCK_SPARSE = ("big_bird", "bigbird_pegasus")


def check_block_sparse(config: Any, tokens: int, key: str) -> None:
    """Refuse a model that some texts of up to `tokens` would change and others not. `key` sets `tokens`. Errors:
    `RunError`."""
    if config.model_type not in _BLOCK_SPARSE or config.attention_type != "block_sparse":
        return
    shortest = (5 + 2 * config.num_random_blocks) * config.block_size
    if tokens > shortest:
        raise RunError(
            "LS3080",
            f"model.config.attention_type: a {config.model_type} changes from block_sparse to original_full, "
            f"for good, at the first batch of texts of at most {shortest} tokens, so a process's results "
            f"would depend on the batches before; set model.config.attention_type to original_full, or {key} "
            f"to {shortest} or less",
        )


def settle_block_sparse(model: nn.Module) -> None:
    """Change the attention now, in place, as `check_block_sparse` has allowed texts that change it only."""
    if getattr(getattr(model, "config", None), "model_type", None) not in _BLOCK_SPARSE:
        return
    with torch.random.fork_rng(devices=[]):
        for module in model.modules():
            if callable(switch := getattr(module, "set_attention_type", None)):
                switch("original_full")  # which does nothing the second time


# -- special tokens by which a family knows its place in a text ------------------------------------------------------

# Encoders with decoders whose classifiers read at the last end token, and want as many of them in all texts of a batch.
_CLASSIFIED_AT_END = ("bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "t5", "umt5")
_SEPARATORS = 3  # of Longformer: one behind the question, one before the text, one behind it


def check_tokenizer(run: Run, head: str, tokenizer: Any) -> None:
    """Refuse a tokenizer whose special tokens the model would read otherwise. Errors: `RunError`."""
    if head == heads.CLASSIFICATION:
        _check_end(run, tokenizer)
    if head == heads.QUESTION_ANSWERING:
        _check_separators(run, tokenizer)


def _check_end(run: Run, tokenizer: Any) -> None:
    config = load_config(run)
    if config.model_type not in _CLASSIFIED_AT_END:
        return
    end = config.eos_token_id
    if run.model.type is not None:  # then the tokenizer decides, as `build` has it
        end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is not None and end == tokenizer.pad_token_id:
        raise RunError(
            "LS3190",
            f"tokenizer: a {config.model_type} classifies at the end token, and this tokenizer pads with its "
            f"end token {tokenizer.pad_token!r}, so padding would be read as the end of a text; add a "
            "separate padding token, set tokenizer.train, or use an encoder such as bert",
        )


def _check_separators(run: Run, tokenizer: Any) -> None:
    config = load_config(run)
    if config.model_type != "longformer":
        return
    around = tokenizer("", "")["input_ids"].count(config.sep_token_id)
    if around != _SEPARATORS:
        raise RunError(
            "LS3191",
            f"tokenizer: a longformer finds the question by {_SEPARATORS} tokens with the id "
            f"{config.sep_token_id} (model.config.sep_token_id) in each example, but this tokenizer writes "
            f"{around} around a question and its text; use a tokenizer that writes <s> question </s></s> text "
            "</s>, as allenai/longformer-base-4096 does, or another family",
        )
