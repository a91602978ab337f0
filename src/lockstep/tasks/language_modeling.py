"""Causal language modelling with any model that `AutoModelForCausalLM` knows: predict each token from those before it.

In: texts (a column, or plain .txt files), prompts with responses, or conversations. Out: loss and perplexity per token,
per byte and per word of the text, all from sums. The loss is in `per_token.py`, and `data/lm_documents.py` and
`data/conversations.py` make the documents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from lockstep.config.errors import InvalidValue
from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.config.sections import Section
from lockstep.data import arrow_cache, lm_documents, tokenizer
from lockstep.data.arrow_cache import Columns, Make, digest, examples_in
from lockstep.data.batch import MicroBatch, Sums
from lockstep.data.cache import discard
from lockstep.tasks.models import heads
from lockstep.tasks.per_token import LossChunk, PerToken, perplexity
from lockstep.tasks.task import Forward, Generate, Generates
from lockstep.tasks.text_task import Arrays, TextData, check_template, in_batches

if TYPE_CHECKING:
    from datasets import Dataset

    from lockstep.data import conversations, source, splitting, token_checks, usable_rows
    from lockstep.tasks.models import inference, model_configs, models, padding
    from lockstep.tasks.models.model_configs import ModelChoice
else:  # to prepare data that are not in the cache; for conversations and samples; models import torch
    conversations, source, splitting = lazy("lockstep.data", "conversations", "source", "splitting")
    token_checks, usable_rows = lazy("lockstep.data", "token_checks", "usable_rows")
    inference, model_configs = lazy("lockstep.tasks.models", "inference", "model_configs")
    models, padding = lazy("lockstep.tasks.models", "models", "padding")


class LanguageModelingOptions(Section):
    """The task's own keys in the run file."""

    text: str = Field("text", description="column of the text; a .txt file has only this one")
    document: Literal["file", "line"] = Field("file", description="unit of a text in a .txt file")
    prompt: str | None = Field(None, description="column of a prompt, which is read but not learned; needs response")
    response: str | None = Field(None, description="column of the response to learn; needs prompt")
    messages: str | None = Field(
        None, description="column of conversations (lists of role and content); the assistant's messages are learned"
    )
    chat_template: str | None = Field(None, description="Jinja template of conversations; default: the tokenizer's")
    template_arguments: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, such as {enable_thinking: false}"
    )
    tools: str | None = Field(None, description="column of tools for a conversation: lists of schemas, or their JSON")
    turns: Literal["together", "per_turn"] = Field(
        "together",
        description="together: a conversation is one example; per_turn: each assistant turn is one, after the "
        "messages before it as the chat template renders them",
    )
    block_size: int = Field(256, ge=2, description="maximum number of tokens of an example")
    packing: bool | None = Field(None, description="pack texts into full blocks; default: true for plain texts")
    loss_chunk: LossChunk = None
    attend_across_documents: bool = Field(
        True, description="with packing: attend to earlier texts of a block; false: to its own text only"
    )
    samples: int = Field(2, ge=0, description="continuations shown after each evaluation")
    sample_prompt: str | None = Field(None, description="their prompt; default: beginnings of validation texts")
    sample_tokens: int = Field(64, ge=1, description="maximum number of tokens of a continuation")
    temperature: float = Field(
        0.8, ge=0, description="sampling temperature of continuations; 0: the most likely token each time"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> LanguageModelingOptions:
        if (self.prompt is None) != (self.response is None):
            raise InvalidValue("LS3050", "prompt and response belong together; set both or neither")
        if self.prompt is not None and self.messages is not None:
            raise InvalidValue(
                "LS3051", "prompt and response cannot be combined with messages; set either the pair or messages"
            )
        if "text" in self.changed_keys and "task.text" not in self.text_columns:
            columns = " and ".join(key.removeprefix("task.") for key in self.text_columns) or "messages"
            raise InvalidValue("LS3057", f"text has no effect with {columns}; remove task.text")
        defaults: dict[str, Any] = {"chat_template": None, "template_arguments": {}, "tools": None, "turns": "together"}
        for key, default in defaults.items():
            if getattr(self, key) != default and self.messages is None:
                raise InvalidValue(
                    "LS3052", f"{key} has an effect only with task.messages; set task.messages, or remove task.{key}"
                )
        if not self.attend_across_documents and not self.packed:
            raise InvalidValue(
                "LS3053",
                "attend_across_documents has an effect only on packed texts, and these are not packed; remove it",
            )
        return self

    @property
    def text_columns(self) -> dict[str, str]:
        """Key of the run file -> text column."""
        if self.messages is not None:
            return {}
        if self.prompt is not None and self.response is not None:
            return {"task.prompt": self.prompt, "task.response": self.response}
        return {"task.text": self.text}

    @property
    def packed(self) -> bool:
        plain = self.messages is None and self.prompt is None
        return plain if self.packing is None else self.packing

    @property
    def cut(self) -> bool:
        """Whether texts longer than a block are truncated rather than split into several examples."""
        return not self.packed and list(self.text_columns) != ["task.text"]

    @property
    def writing(self) -> conversations.Writing:
        """How conversations are rendered to text."""
        assert self.messages is not None
        each = self.turns == "per_turn"
        return conversations.Writing(self.messages, self.chat_template, self.template_arguments, self.tools, each)

    def values(self, dataset: Dataset) -> dict[str, Any]:
        """The keys that affect the tokens of a split."""
        always = ("text", "prompt", "response", "messages", "chat_template", "block_size")
        options = {k: v for k, v in self.model_dump().items() if k in always}
        options |= {} if self.attend_across_documents else {"cross_documents": False}
        if self.messages is not None:
            further = conversations.further_keys(dataset, self.messages)
            options |= {"written": (self.template_arguments, self.tools, self.turns, further)}
        return options


_SIZES = ("bytes", "words")  # of texts
_LOOKED_AT = 20  # conversations checked for an end token


class LanguageModeling(PerToken, Generates):
    """Next-token prediction."""

    Options = LanguageModelingOptions
    head = heads.CAUSAL
    reads_conversations = True
    greedy_by = "set task.temperature=0, or task.samples=0 for no generation"
    greedy_option = ("temperature", 0.0)
    column_keys = ("text",)
    answer_name = "written"
    column_aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prompt": ("prompt", "instruction", "question", "input", "query"),
        "response": ("response", "completion", "output", "answer", "answers", "chosen", "target"),
        "messages": ("messages", "conversation", "conversations", "dialog", "dialogue"),
    }
    default_model = "openai-community/gpt2"
    pipeline = "text-generation"
    cache_name = ("language modelling",)
    generative = True
    length_key = "task.block_size"
    cuts_blocks = True
    display_keys = ("samples", "sample_prompt", "sample_tokens", "temperature")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def columns_to_read(cls, options: LanguageModelingOptions) -> dict[str, str]:
        return options.text_columns or options.writing.columns

    @classmethod
    def document(cls, options: LanguageModelingOptions) -> str:
        return options.document

    @classmethod
    def valid_rows(cls, rows: Dataset, options: LanguageModelingOptions, split: str, name: str, drop: bool) -> Dataset:
        if options.messages is None:
            return super().valid_rows(rows, options, split, name, drop)
        usable_rows.check_columns(rows, options.writing.columns, split, name)
        return conversations.usable(rows, options.messages, split, name, drop)

    @classmethod
    def dedup_columns(cls, options: LanguageModelingOptions) -> tuple[list[str], list[str]]:
        return list(cls.columns_to_read(options).values()), []

    def holdout_fn(self, data: TextData) -> splitting.Cut:
        return partial(lm_documents.cut, column=self.options.text if "task.text" in self.options.text_columns else None)

    @classmethod
    def tokenizer_texts(cls, rows: Dataset, options: LanguageModelingOptions) -> Iterator[list[str]]:
        for batch in in_batches(rows):
            if options.messages is not None:
                yield [message.get("content") or "" for messages in batch[options.messages] for message in messages]
            else:
                texts = (text for column in options.text_columns.values() for text in batch[column])
                yield [piece for text in texts for piece in lm_documents.pieces(text)]

    def check(self, data: TextData, folder: Path, tok: Any) -> None:
        if self.options.messages is not None:
            check_template(tok, self.options.chat_template, "messages")
            _check_template_arguments(self.options.chat_template or tok.chat_template, self.options.template_arguments)
        _check_model(self.model_choice, self.options)

    def limits(self, read_by: Mapping[str, Any]) -> dict[str, token_checks.Limit]:
        return {}  # texts are cut into blocks of any tokens, special or not

    def answer_notes(self, data: TextData, rows: Dataset, tok: Any) -> list[str]:
        if self.options.messages is None:
            return []
        some = range(min(len(rows), _LOOKED_AT))
        how = self.options.writing
        learned = (each.ids[each.scored] for each, _ in conversations.documents_of(rows, tok, how, some))
        return conversations.never_ends(tok, learned, conversations.turn_end(tok, how))

    def key_parts(self, data: TextData, tok: Any, rows: Dataset | None) -> list[Any]:
        options = self.options
        written = tokenizer.template_of(tok, options.chat_template) if options.messages is not None else []
        if rows is None:
            displayed = {*self.display_keys, "loss_chunk"}
            return [options.model_dump(exclude=displayed), *written]
        return [options.values(rows), options.packed, *written]

    def encode_split(self, data: TextData, split: str, folder: Path, tok: Any, key: str) -> tuple[str, list[int]]:
        full_key = digest(f"with openings{' and what was cut' * self.options.cut}", key)
        encode = partial(_encode, tok=tok, options=self.options)
        file, counts = source.encode_by_source(data.splits[split], full_key, encode)
        if examples_in(file) == 0:
            discard(Path(file))
            raise RunError(
                "LS3054",
                f"task: the {split} split of {data.name} has no token to predict: every text is a single token, or "
                f"every prompt fills all {self.options.block_size} tokens of task.block_size",
            )
        return file, counts

    @classmethod
    def content_name(cls, file: str, key: str, counts: list[int]) -> str:
        return f"{digest(key, counts) if counts else key}.arrow"

    def facts(self, data: TextData, files: Mapping[str, str]) -> dict[str, Any]:
        ends = {split: _cut(rows, files[split], self.options) for split, rows in data.splits.items()}
        fits = models.most_tokens(self.run.model) if any(ends.values()) else None
        positions = {} if fits is None or fits > self.options.block_size else {"positions": fits}
        ends = {split: left | positions for split, left in ends.items() if left}
        texts = {split: len(rows) for split, rows in data.splits.items()}
        return {"texts": texts} | ({"cut_texts": ends} if ends else {})

    def plain_options(self) -> dict[str, Any]:
        return {"packing": self.options.packed}

    def idle_keys(self, facts: Mapping[str, Any]) -> list[str]:
        length, options = self.run.data.max_length, self.options
        notes: list[str] = []
        if length != options.block_size:
            size = f"task.block_size ({options.block_size}) sets the length of examples"
            notes.append(f"data.max_length: {length} has no effect; {size}")
        if options.sample_prompt is not None and not options.samples:
            notes.append("task.sample_prompt has no effect with task.samples: 0")
        return notes

    def example_maker(self, folder: str, facts: Mapping[str, Any]) -> Make:
        options = self.options
        tok = tokenizer.load(folder, self.run.model.trust_remote_code)

        def make(rows: Dataset) -> pa.RecordBatch:
            documents = [each for each, _ in _documents(rows, tok, options, range(len(rows)))]
            return lm_documents.examples(lm_documents.joined(documents, options.packed), options.block_size)

        return make

    # -- in every process --------------------------------------------------------------------------------------------

    metric_names = ("accuracy", "perplexity", "bits_per_byte", "byte_perplexity", "word_perplexity")

    def checked_entries(self) -> dict[str, Any]:
        return model_configs.causal_entries(self.run.model)

    @property
    def chat_template(self) -> str | None:
        return self.options.chat_template

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        """Inputs and targets. Without `attend_across_documents`, positions restart with each text of a block, which
        transformers takes as a block-diagonal mask if there is no `attention_mask`."""
        inputs, targets = super().tensors(columns, rows)
        if self.options.attend_across_documents:
            return inputs, targets
        starts, _ = columns.ragged("starts").padded(rows, 1)  # [B, T]
        place = np.arange(starts.shape[1])
        positions = place - np.maximum.accumulate(np.where(starts == 1, place, 0), axis=1)
        return {"input_ids": inputs["input_ids"], "position_ids": positions}, targets

    def score_texts(self, generate: Generate, batch: MicroBatch, columns: Columns, rows: np.ndarray) -> Sums:
        import torch

        device = batch.targets.device
        measured = {name: int(columns.flat(name)[rows].sum()) for name in _SIZES}
        return {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in measured.items()}

    def score_split(self, forward: Forward, columns: Columns, rows: np.ndarray, device: Any) -> Sums:
        """`openings`: loss, bytes and words of the tokens that no token precedes, predicted after the token that begins
        or ends a text. Empty if the tokenizer has neither token, and for a stream."""
        import torch

        begin = lm_documents.start_of(self.tokenizer)
        if begin is None or not isinstance(columns, Columns) or "openings" not in columns.names:
            return {}
        openings = columns.ragged("openings")
        curve_rows = [openings.row(int(row)) for row in rows[openings.lengths[rows] > 0]]
        counts = {f"opening_{each}": float(columns.flat(f"opening_{each}")[rows].sum()) for each in _SIZES}
        sums = {name: torch.tensor(count, dtype=torch.float64) for name, count in counts.items()}
        if not curve_rows:
            return sums | {"openings": torch.zeros((), dtype=torch.float64)}
        inputs = {"input_ids": torch.tensor([[begin]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
        if not self.options.attend_across_documents:
            inputs = {"input_ids": inputs["input_ids"], "position_ids": torch.zeros(1, 1, dtype=torch.long)}
        logits = forward({name: values.to(device) for name, values in inputs.items()})[0, -1].double().cpu()
        return sums | {"openings": -logits.log_softmax(-1)[torch.from_numpy(np.concatenate(curve_rows)).long()].sum()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Metrics per token, and per byte and word as in lm-evaluation-harness: the loss of the whole text, opening
        tokens included, over its bytes or words. The latter do not depend on the tokenizer."""
        metrics = super().metrics(sums)
        if "openings" not in sums:
            return metrics
        whole, size, count = (
            float(sums[one] + sums[other])
            for one, other in (("loss", "openings"), *((each, f"opening_{each}") for each in _SIZES))
        )
        if size > 0:
            metrics |= {"bits_per_byte": whole / math.log(2) / size, "byte_perplexity": perplexity(whole / size)}
        if count > 0:
            metrics["word_perplexity"] = perplexity(whole / count)
        return metrics

    def samples(self, generate: Generate, forward: Forward) -> list[dict[str, str]]:
        columns = self.splits["validation"]
        options = self.options
        if not options.samples:
            return []
        if options.sample_prompt is not None:
            prompt_ids = self.tokenizer(options.sample_prompt, verbose=False)["input_ids"]
            if prompt_ids and prompt_ids[-1] == lm_documents.end_of(self.tokenizer):
                prompt_ids = prompt_ids[:-1]
            starts = [prompt_ids] * options.samples
        else:
            rows = np.linspace(0, len(columns) - 1, options.samples).astype(int)
            starts = [self._beginning(columns, int(row)) for row in rows]
        inputs = inference.padded([{"input_ids": s} for s in starts], {"input_ids": int(self.tokenizer.pad_token_id)})
        room = max(1, options.block_size - inputs["input_ids"].shape[1])  # the model may have no more positions
        tokens = generate(inputs, self._decoding(min(options.sample_tokens, room))).tolist()
        texts = [
            [self.tokenizer.decode(part, skip_special_tokens=True) for part in both]
            for both in zip(starts, tokens, strict=True)
        ]
        return [{"prompt": start, "written": text} for start, text in texts]

    @property
    def example_input(self) -> str:
        if self.options.messages is not None:
            return "a message of the user"
        return "some text" if self.options.prompt is None else "a prompt"

    def sample_input(self, sample: Mapping[str, str]) -> str:
        """The text of a sample in the form that a user would enter; empty for a conversation, whose sample is already
        rendered by the chat template."""
        return "" if self.options.messages is not None else super().sample_input(sample)

    @property
    def usage(self) -> str:
        talks, options = self.options.messages is not None, self.options
        lengths = options.sample_tokens, options.block_size
        return tokenizer.written_by(super().usage, self.tokenizer, self.chat_template, talks, *lengths)

    def _beginning(self, columns: Columns, row: int) -> list[int]:
        """Tokens before an example's first target, or else its first quarter."""
        ids = columns.ragged("input_ids").row(row).tolist()
        first = int(np.argmax(columns.ragged("targets").row(row) >= 0)) + 1
        return ids[: first if first > 1 else max(1, min(len(ids), self.options.block_size) // 4)]

    def decodes_greedily(self) -> bool:
        options = self.options
        return options.temperature == 0 or options.samples == 0

    @property
    def end_tokens(self) -> list[int]:
        return self._decoding(0).ends

    def _decoding(self, tokens: int) -> inference.Decoding:
        end = lm_documents.end_of(self.tokenizer)
        pad = int(self.tokenizer.pad_token_id)
        talks = self.options.messages is not None
        other = conversations.turn_end(self.tokenizer, self.options.writing) if talks else None
        options = self.options
        return inference.Decoding(tokens, pad, end, turn_end=other, temperature=options.temperature, seed=self.run.seed)

    def input_columns(self) -> tuple[str, ...]:
        options = self.options
        return (options.prompt or options.text,)

    def conversation_columns(self) -> tuple[str, ...]:
        options = self.options
        return tuple(column for column in (options.messages, options.tools) if column is not None)

    def predict(self, folder: Path, rows: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
        """Yield the continuation of the text as `written`."""
        options = self.options
        model, tok = models.exported(self.head, folder, self.run.model)

        talks = options.writing if options.messages is not None else None
        most = options.block_size, options.sample_tokens
        return inference.continuations(model, tok, rows, talks, *most, options.temperature, self.run.seed)


# -- preparing -------------------------------------------------------------------------------------------------------


def _documents(
    dataset: Dataset, tok: Any, options: LanguageModelingOptions, rows: range
) -> lm_documents.EncodedDocuments:
    """Encode some rows to documents, ready to be split into examples."""
    if options.messages is not None:
        documents = conversations.documents_of(dataset, tok, options.writing, rows)
    elif options.prompt is not None and options.response is not None:
        documents = lm_documents.of_prompts(dataset, tok, options.prompt, options.response, rows)
    else:
        documents = lm_documents.of_texts(dataset, tok, options.text, rows)
    if options.packed and not options.attend_across_documents:
        return ((lm_documents.separate(parts), count) for parts, count in documents)
    if not options.cut:
        return documents
    most = options.block_size + 1  # a response stays with its prompt
    return ((each.beginnings(most), count) for each, count in documents)


def _encode(dataset: Dataset, key: str, tok: Any, options: LanguageModelingOptions) -> str:
    def tokens(rows: range) -> lm_documents.EncodedDocuments:
        return _documents(dataset, tok, options, rows)

    read = list((options.text_columns or options.writing.columns).values())
    parts = arrow_cache.cuts(dataset.select_columns(list(dict.fromkeys(read))))
    separate = not options.attend_across_documents
    return lm_documents.write(parts, tokens, options.block_size, options.packed, key, separate, options.cut, True)


def _cut(dataset: Dataset, file: str, options: LanguageModelingOptions) -> dict[str, Any]:
    """Counts of truncated and unused texts and of the tokens cut off a split, for reports; empty if every text is
    whole."""
    if not options.cut:
        return {}
    columns = Columns(file)
    cuts = columns.flat("left")[np.arange(len(columns))]
    of = conversations.documents_in(dataset, options.writing) if options.messages is not None else len(dataset)
    cut_off = {"texts": int((cuts > 0).sum()), "tokens": int(cuts.sum()), "nothing": of - len(columns), "of": of}
    if not cut_off["texts"] and not cut_off["nothing"]:
        return {}
    return cut_off | {"most": options.block_size, "key": "task.block_size"}


def _check_template_arguments(template: Any, arguments: Mapping[str, Any]) -> None:
    """Check that the chat template uses every variable. Errors: `RunError`."""
    for name in arguments:
        if not re.search(rf"\b{re.escape(name)}\b", str(template)):
            raise RunError(
                "LS3058",
                f"task.template_arguments: the chat template does not read {name!r}; correct its name, or remove it",
            )


def _check_model(choice: ModelChoice, options: LanguageModelingOptions) -> None:
    entries = model_configs.causal_entries(choice.section)
    models.check(choice, heads.CAUSAL, options.block_size, "task.block_size", **entries)
    padding.check_foresight(choice.section, "causal")
    if not options.attend_across_documents and (why := padding.crosses(choice)) is not None:
        raise RunError(
            "LS3055",
            f"task.attend_across_documents: false is not supported for this family of models: {why}; remove it",
        )
