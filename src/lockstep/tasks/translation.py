"""Translation with any model that `AutoModelForSeq2SeqLM` knows, pretrained or from scratch with its own tokenizers.

In: pairs of texts: a `translation` column as the Hub has it, or two columns. Out: loss and perplexity per target token,
BLEU and chrF of what the model writes, all from sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import BaseModel, Field

from lockstep.config.run import Run, RunError
from lockstep.data import lm_documents, source, splitting, stream, tokenizer
from lockstep.data.stream import Stream
from lockstep.data.token_counts import TokenCounts
from lockstep.data.tokens import VERSION, Columns, Make, Prepared, content, digest, encode
from lockstep.tasks import length_curves
from lockstep.tasks.abilities import Generates, GivesPredictions, Predicts, Streams
from lockstep.tasks.metric_arrays import listed
from lockstep.tasks.models import bleu, seq2seq_data
from lockstep.tasks.models.seq2seq_data import WritingOptions as WritingOptions
from lockstep.tasks.per_token import losses, of_examples, perplexity, summed_losses
from lockstep.tasks.task import spread_rows
from lockstep.tasks.text_task import TextTask

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.data.batch import MicroBatch, Sums
    from lockstep.tasks.models.decoding import Decoding


_WORDS = "by_words"


class TranslationOptions(WritingOptions):
    """The task's own keys in the run file."""

    bleu: bool = Field(True, description="write translations at each evaluation, and score them by BLEU and chrF")
    bleu_tokenizer: str = Field("13a", description="sacrebleu's tokenizer: 13a, intl, zh, ja-mecab, char, ...")


class Translation(TextTask, Streams, Predicts, Generates, GivesPredictions):
    """One text for another."""

    Options: ClassVar[type[BaseModel]] = TranslationOptions
    head = "seq2seq"
    column_keys = ("source", "target")
    default_model = "google-t5/t5-small"
    row_is_example = True
    pipeline = "translation"
    display_keys: ClassVar[tuple[str, ...]] = ("bleu", "bleu_tokenizer", "beams", "samples")
    answer: ClassVar[str] = "translation"  # what `predict` calls what is written
    metric_inputs = ("written",)
    metric_names: tuple[str, ...] = ("accuracy", "perplexity", "bleu", "chrf")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def overlap_of(cls, options: Any) -> Any:
        """What scores the texts that are written, by `sums` and `scores`; None: nothing does. Errors: `RunError`."""
        if options.bleu:
            bleu.check(options.bleu_tokenizer)
        return bleu.Overlap(options.bleu_tokenizer) if options.bleu else None

    @classmethod
    def prepare(cls, run: Run) -> Prepared:
        options: Any = cls.Options.model_validate(run.task.options)
        cls.overlap_of(options)
        asked = {"task.source": options.source, "task.target": options.target}
        data = source.load(run.data, run.seed, columns=asked, tokens=TokenCounts.of(run, [options.target]))
        splits = {
            s: seq2seq_data.pairs(found, options, s, data.name, run.data.drop_missing)
            for s, found in data.splits.items()
        }
        rows = cls.stream(run).found(splits, ["source", "target"]) if run.data.stream else None
        splits, left_out = splitting.deduplicate_and_split(
            data, splits, run, ["source", "target"], [], lm_documents.cut
        )
        hashes = {split: content(dataset, ["source", "target"]) for split, dataset in splits.items()}
        if rows is not None:
            folder = seq2seq_data.tokenizers(run, rows, rows.content if run.tokenizer.train else "", options)
        else:
            folder = seq2seq_data.tokenizers(run, splits["train"], hashes["train"], options)
        _check_model(run, options, folder)
        files = {}
        read = [run.data.max_length, options.prefix, options.target_length]
        for split, dataset in splits.items():
            key = digest("translation", VERSION, hashes[split], folder.name, *read)
            files[split] = encode(dataset, *seq2seq_data.encoder_of(run, folder, options), key)
        if rows is not None:
            index = rows.index(
                cls.example_maker(run, str(folder), {}), digest("translation", VERSION, folder.name, *read)
            )
            files, left_out = {"train": str(index)} | files, stream.facts(index, left_out)
        return Prepared(digest(stream.names_of(files)), files, str(folder), {"source": data.name} | left_out)

    @classmethod
    def stream(cls, run: Run) -> Stream:
        options: Any = cls.Options.model_validate(run.task.options)
        whole = partial(seq2seq_data.pairs, options=options, split="train", drop=run.data.drop_missing)
        asked = {"task.source": options.source, "task.target": options.target}
        return Stream(run.data, asked, lambda rows, name: whole(rows, name=name), within=seq2seq_data.PAIR)

    @classmethod
    def example_maker(cls, run: Run, folder: str, facts: Mapping[str, Any]) -> Make:
        return stream.maker(*seq2seq_data.encoder_of(run, Path(folder), cls.Options.model_validate(run.task.options)))  # type: ignore[arg-type]

    # -- in every process --------------------------------------------------------------------------------------------

    def __init__(self, run: Run, prepared: Prepared) -> None:
        from lockstep.tasks.models import model_configs

        super().__init__(run, prepared)
        self.target_tokenizer = seq2seq_data.target_tokenizer(run, Path(prepared.tokenizer), self.tokenizer)
        self.entries = _entries(run, self.tokenizer, self.target_tokenizer)
        self.unpadded = self.padded_because is None
        self.starts_from_first = model_configs.load_config(run).model_type in model_configs.FROM_FIRST_TOKEN
        self.overlap = self.overlap_of(self.options)

    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import chunked_loss, models

        model = models.build(self.run, "seq2seq", self.tokenizer, empty, **self.entries)
        return chunked_loss.install(model, self.options.loss_chunk, self.options.label_smoothing)

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        """Teacher forcing: the decoder reads its start token and then the targets, one behind."""
        import torch

        from lockstep.data.batch import IGNORED, MicroBatch
        from lockstep.tasks.models.chunked_loss import with_targets

        blank = len(rows) == 0
        rows = np.zeros(1, dtype=np.int64) if blank else rows
        ids, mask = columns.ragged("input_ids").padded(rows, int(self.tokenizer.pad_token_id))  # [B, S]
        wanted, real = columns.ragged("target_ids").padded(rows, int(self.target_tokenizer.pad_token_id))  # [B, T]
        read = np.roll(wanted, 1, axis=1)
        read[:, 0] = self.entries["decoder_start_token_id"]
        targets = torch.from_numpy(np.where(real == 1, wanted, IGNORED))
        targets = torch.full_like(targets, IGNORED) if blank else targets
        arrays = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": read}
        if self.unpadded or self.starts_from_first:  # which would take a start for padding that has its number
            arrays["decoder_attention_mask"] = real
        inputs = {name: torch.from_numpy(values) for name, values in arrays.items()}
        return MicroBatch(index, with_targets(inputs, targets, self.options.loss_chunk), targets)

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return int(columns.ragged("target_ids").lengths[rows].sum())

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        if self.options.loss_chunk:
            return outputs.loss
        return summed_losses(outputs.logits.float(), targets, self.options.label_smoothing)

    def loss_each(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.options.loss_chunk:
            return outputs.loss, of_examples(outputs.logits)
        each = losses(outputs.logits.float(), targets, self.options.label_smoothing)
        return each.sum(), of_examples(each)

    def score(self, forward: Callable[[Mapping[str, Tensor]], Tensor], batch: MicroBatch) -> Sums:
        logits = forward(batch.inputs)  # [B, T, V]
        if self.options.loss_chunk:
            from lockstep.tasks.models.chunked_loss import scored

            return scored(logits, batch.targets)
        real = batch.targets >= 0  # [B, T]
        return {
            "loss": summed_losses(logits.float(), batch.targets).double(),
            "examples": real.any(1).sum().double(),
            "targets": real.sum().double(),
            "right": ((logits.argmax(-1) == batch.targets) & real).sum().double(),
        }

    def score_texts(
        self,
        generate: Callable[[Mapping[str, Tensor], Decoding], Tensor],
        batch: MicroBatch,
        columns: Columns,
        rows: np.ndarray,
    ) -> Sums:
        import torch

        if self.overlap is None and not self.per_example_outputs:
            return {}
        tokens = generate(_asked(batch), self._decoding())
        gathered = {"written": tokens.int()} if self.per_example_outputs else {}  # as wide for every batch
        if self.overlap is None:
            return gathered
        found = self._overlaps(self._written(tokens)[: len(rows)], columns.texts("reference", rows))
        sums = {name: torch.from_numpy(counts).to(batch.targets.device).double() for name, counts in found.items()}
        return gathered | sums

    def _overlaps(self, written: list[str], wanted: list[str]) -> dict[str, np.ndarray]:
        """What the scores of texts are made of, in bins by the words of the references: [bins, ...] each."""
        words = [len(text.split()) for text in wanted]
        place = length_curves.bin_of(words)
        of_bins = [
            self.overlap.sums(*([texts[i] for i in np.flatnonzero(place == b)] for texts in (written, wanted)))
            for b in range(len(length_curves.BINS))
        ]
        return {_WORDS: length_curves.binned(words)} | {
            name: np.stack([of[name] for of in of_bins]) for name in of_bins[0]
        }

    def tables(self, sums: Sums) -> dict[str, Any]:
        """The scores of texts by the words of the references."""
        if self.overlap is None or _WORDS not in sums:
            return {}

        def score(name: str, b: int) -> float:
            return float(self.overlap.scores({key: sums[key][b] for key in self.overlap.names})[name])

        lines = {name: length_curves.curve(sums[_WORDS], partial(score, name)) for name in self.overlap.scored}
        return {"plots": [{"title": ", ".join(lines), "x": "words of the reference", "lines": lines}]}

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What was written, and the references: texts [N] each."""
        return listed(self._written(sums["written"])), listed(columns.texts("reference", rows))

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        return listed(["a text that is written", "another one", ""]), listed(["a text as it is wanted", "another", "x"])

    def metrics(self, sums: Sums) -> dict[str, float]:
        loss = float(sums["loss"]) / float(sums["targets"])
        accuracy = float(sums["right"]) / float(sums["targets"])
        found = {"loss": loss, "perplexity": perplexity(loss), "accuracy": accuracy}
        if self.overlap is None or _WORDS not in sums:
            return found
        return found | self.overlap.scores({name: sums[name].sum(0) for name in self.overlap.names})

    def samples(
        self,
        generate: Callable[[Mapping[str, Tensor], Decoding], Tensor],
        forward: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> list[dict[str, str]]:
        columns = self.splits["validation"]
        rows = spread_rows(columns, self.options.samples)
        if len(rows) == 0:
            return []
        batch = self.collate(columns, rows, 0)
        written = self._written(generate(_asked(batch), self._decoding()))
        asked = self.tokenizer.batch_decode(batch.inputs["input_ids"].tolist(), skip_special_tokens=True)
        wanted = columns.texts("reference", rows)
        return [
            {"source": a.strip(), "written": w, "reference": r} for a, w, r in zip(asked, written, wanted, strict=True)
        ]

    def sample_input(self, sample: Mapping[str, str]) -> str:
        """Without the prefix, as the tokenizer writes it: `predict` puts it there."""
        text, prefix = super().sample_input(sample), self.options.prefix
        ids = self.tokenizer(prefix, add_special_tokens=False)["input_ids"] if prefix else []
        prefixes = (prefix.strip(), str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip())
        return next((text.removeprefix(each) for each in prefixes if text.startswith(each)), text).strip()

    @property
    def usage(self) -> str:
        """transformers has no pipeline for translation any more."""
        target = 'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_REPO")\n'
        written, most = "tokenizer", seq2seq_data.most(self.run, self.options)
        if self.target_tokenizer is not self.tokenizer:
            target += 'targets = AutoTokenizer.from_pretrained("PATH_OR_REPO", subfolder="target")\n'
            written = "targets"
        return (
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
            f'{target}model = AutoModelForSeq2SeqLM.from_pretrained("PATH_OR_REPO")\n'
            f'ids = tokenizer("{self.options.prefix}some text", return_tensors="pt")["input_ids"]\n'
            f"tokens = model.generate(ids, num_beams={self.options.beams}, max_new_tokens={most})\n"
            f"{written}.decode(tokens[0], skip_special_tokens=True)"
        )

    @classmethod
    def decodes_greedily(cls, run: Run) -> bool:
        options: Any = cls.Options.model_validate(run.task.options)
        return options.beams == 1 or not (options.samples or cls.overlap_of(options) or run.metrics)

    def _decoding(self) -> Decoding:
        from lockstep.tasks.models.decoding import Decoding

        pad, end = int(self.target_tokenizer.pad_token_id), lm_documents.end_of(self.target_tokenizer)
        start = int(self.entries["decoder_start_token_id"])
        return Decoding(seq2seq_data.most(self.run, self.options), pad, end, start, self.options.beams)

    def _written(self, tokens: Tensor) -> list[str]:
        found = self.target_tokenizer.batch_decode(tokens.tolist(), skip_special_tokens=True)
        return [text.strip() for text in found]

    @classmethod
    def input_columns(cls, run: Run) -> tuple[str, ...]:
        options: Any = cls.Options.model_validate(run.task.options)
        return (options.source,)

    @classmethod
    def predict(cls, run: Run, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """The `translation`, or what else is written."""
        from lockstep.tasks.models import batched_inference, models
        from lockstep.tasks.models.decoding import Decoding, by_transformers

        options: Any = cls.Options.model_validate(run.task.options)
        model, sources = models.exported("seq2seq", folder, run)
        targets = seq2seq_data.target_tokenizer(run, folder, sources)
        most, start = run.data.max_length, model.config.decoder_start_token_id
        how = Decoding(
            seq2seq_data.most(run, options), targets.pad_token_id, lm_documents.end_of(targets), start, options.beams
        )

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            read = [sources(options.prefix + row[0], truncation=True, max_length=most) for row in rows]
            tokens = by_transformers(
                model, batched_inference.padded(read, {"input_ids": int(sources.pad_token_id)}), how
            )
            written = targets.batch_decode(tokens.tolist(), skip_special_tokens=True)
            return [{cls.answer: text.strip()} for text in written]

        return batched_inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        return str(answer[cls.answer])

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from lockstep.tasks.models import models

        models.save(self.model(), weights, self.tokenizer, folder, self.run)
        if self.target_tokenizer is not self.tokenizer:
            tokenizer.save(self.target_tokenizer, folder / tokenizer.TARGET)


def _asked(batch: MicroBatch) -> dict[str, Tensor]:
    """What is to be translated, without what the decoder would read."""
    return {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}


# -- preparing -------------------------------------------------------------------------------------------------------


def _entries(run: Run, sources: Any, targets: Any) -> dict[str, Any]:
    """Entries of the config: where a decoder starts, and the vocabularies of a model from scratch."""
    from lockstep.tasks.models import model_configs

    config = model_configs.load_config(run)
    known = config.to_dict()
    if run.model.type is None:
        start = known.get("decoder_start_token_id")
        start = start if start is not None else known.get("bos_token_id")
        return {"use_cache": False, "decoder_start_token_id": sources.pad_token_id if start is None else start}
    # BART begins with its end token, T5Gemma with the first of texts; Marian, T5 and the others with padding
    start = lm_documents.end_of(targets) if config.model_type in ("bart", "mbart") else targets.pad_token_id
    if config.model_type in model_configs.FROM_FIRST_TOKEN and targets.bos_token_id is not None:
        start = targets.bos_token_id
    entries = {"use_cache": False, "decoder_start_token_id": start, "forced_eos_token_id": None}
    if "decoder_vocab_size" in known:
        separate = targets is not sources
        entries |= {"decoder_vocab_size": len(targets), "share_encoder_decoder_embeddings": not separate}
    return entries


def _check_model(run: Run, options: WritingOptions, folder: Path) -> None:
    from lockstep.tasks.models import model_configs, models

    key = "task.target_length" if (options.target_length or 0) > run.data.max_length else "data.max_length"
    models.check(run, "seq2seq", max(run.data.max_length, seq2seq_data.most(run, options)), key, use_cache=False)
    known = model_configs.load_config(run).to_dict()
    known_to = tokenizer.load(str(folder), run.model.trust_remote_code)
    two = (folder / tokenizer.TARGET).is_dir() or getattr(known_to, "separate_vocabs", False)
    if run.model.source is not None and known.get("share_encoder_decoder_embeddings") is False and not two:
        raise RunError(
            f"model.source: {run.model.source} has a vocabulary of its own for targets, and no tokenizer for it was "
            f"found in {tokenizer.TARGET}/ beside its tokenizer: targets would be read with the tokenizer of sources"
        )
    check_start(run)
    if "num_layers" in known and known.get("num_decoder_layers", 0) > known["num_layers"]:
        raise RunError(
            f"model.config: transformers cannot decode with {known['num_decoder_layers']} decoder layers on "
            f"{known['num_layers']} encoder layers of a {known['model_type']}; set num_decoder_layers to that, or less"
        )
    if options.tokenizers == "separate" and "decoder_vocab_size" not in known:
        raise RunError(
            f"task.tokenizers: a {run.model.type or 'pretrained'} model has one vocabulary for both languages; use "
            "shared ones, or model.type: marian"
        )


def check_start(run: Run) -> None:
    """Errors: `RunError` where a pretrained T5Gemma names two tokens that its decoder starts from."""
    from lockstep.tasks.models import model_configs

    config = model_configs.load_config(run)
    if run.model.source is None or config.model_type not in model_configs.FROM_FIRST_TOKEN:
        return
    start, own = getattr(config, "decoder_start_token_id", None), config.decoder.bos_token_id
    start = config.bos_token_id if start is None else start
    if start != own:
        raise RunError(
            f"model.source: the decoder of this {config.model_type} starts from token {start} where it writes, and "
            f"from {own} where transformers trains it (decoder.bos_token_id of its config); set "
            f"model.config.decoder_start_token_id={own}, or give its config.json one token for both"
        )
