"""What the run file says of language modelling, and what follows from it for the data.

In: the keys of `task`. Out: frozen values: which columns are read, whether texts are packed or cut, how conversations
are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lockstep.config import key_aliases
from lockstep.data import conversations

if TYPE_CHECKING:
    from datasets import Dataset


class LanguageModelingOptions(BaseModel):
    """The task's own keys in the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    text: str = Field("text", description="column of the text; a .txt file has this one only")
    document: Literal["file", "line"] = Field("file", description="what of a .txt file is one text")
    prompt: str | None = Field(None, description="column of a prompt, which is read and not learned; with response")
    response: str | None = Field(None, description="column of the response to learn; with prompt")
    messages: str | None = Field(
        None, description="column of conversations (lists of role and content); the assistant's words are learned"
    )
    chat_template: str | None = Field(None, description="Jinja template of conversations; default: the tokenizer's")
    template_arguments: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, such as {enable_thinking: false}"
    )
    tools: str | None = Field(
        None, description="column of the tools that a conversation may call: lists of schemas, or JSON of them"
    )
    turns: Literal["together", "per_turn"] = Field(
        "together",
        description="together: a conversation is one example; per_turn: every turn of the assistant is one, with what "
        "is before it as the chat template writes it then",
    )
    block_size: int = Field(256, ge=2, description="tokens an example has, at most")
    packing: bool | None = Field(
        None, description="texts follow each other in blocks that are all full; default: true for texts alone"
    )
    loss_chunk: Annotated[int, Field(ge=1, strict=True)] | Literal["liger"] | None = Field(
        None,
        description="tokens whose logits are in memory at once: the loss in chunks, without the matrix of logits; "
        "liger: by Liger-Kernel, on CUDA; default: all tokens of a micro-batch",
    )
    attend_across_documents: bool = Field(
        True, description="of packed texts: whether a text is read after those before it in its block; false: by itself"
    )
    samples: int = Field(2, ge=0, description="continuations to show after each evaluation")
    sample_prompt: str | None = Field(None, description="what they continue; default: beginnings of validation texts")
    sample_tokens: int = Field(64, ge=1, description="tokens of a continuation, at most")
    temperature: float = Field(0.8, ge=0, description="of continuations; 0: the likeliest token each time")

    @model_validator(mode="after")
    def _one_kind(self) -> LanguageModelingOptions:
        if (self.prompt is None) != (self.response is None):
            raise ValueError("give prompt and response, or neither")
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give prompt and response, or messages, and not both")
        for key, default in (
            ("chat_template", None),
            ("template_arguments", {}),
            ("tools", None),
            ("turns", "together"),
        ):
            if getattr(self, key) != default and self.messages is None:
                raise ValueError(f"{key} is for messages; name their column")
        if not self.attend_across_documents and not self.packed:
            raise ValueError("attend_across_documents is about packed texts, and these are not packed; leave it out")
        return self

    @property
    def columns(self) -> dict[str, str]:
        """Key of the run file -> the column of texts that it names."""
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
        """Whether texts longer than a block lose their ends, rather than become several examples."""
        return not self.packed and list(self.columns) != ["task.text"]

    @property
    def writing(self) -> conversations.Writing:
        """How conversations are written."""
        assert self.messages is not None
        each = self.turns == "per_turn"
        return conversations.Writing(self.messages, self.chat_template, self.template_arguments, self.tools, each)

    def values(self, dataset: Dataset) -> dict[str, Any]:
        """What of these keys decides the tokens of a split."""
        always = ("text", "prompt", "response", "messages", "chat_template", "block_size")
        found = {k: v for k, v in self.model_dump().items() if k in always}
        found |= {} if self.attend_across_documents else {"cross_documents": False}
        if self.messages is not None:  # keys that are younger than checkpoints: what they are without them
            asked = (
                self.template_arguments,
                self.tools,
                key_aliases.former("task", {"turns": self.turns})["turns"],
                conversations.further_keys(dataset, self.messages),
            )
            found |= {} if asked == ({}, None, "together", []) else {"written": asked}
        return found
