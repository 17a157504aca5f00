"""Bodies of requests as OpenAI's API has them, checked strictly: no type is converted, no unknown field taken."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_CHOICES = 128  # n times the prompts of one request
MAX_TOP_LOGPROBS = 20
INT64 = 2**63 - 1

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]  # the first wrong item ends the check: there may be a million
Bias = Annotated[float, Field(ge=-100, le=100)]


class Strict(BaseModel):
    """No conversion of types, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """include_usage: one more chunk with the counts. include_obfuscation: accepted, without effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(Strict):
    """Plain text is the only format."""

    type: Literal["text"]


class Shared(Strict):
    """Fields of both kinds of request. The last ones are accepted and change nothing here."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Stops | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-INT64, le=INT64)] | None = None
    # Not OpenAI's, but known from other servers.
    top_k: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    ignore_eos: bool | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None

    @property
    def choices(self) -> int:
        """n, 1 unless told."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, however they came."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextPart(Strict):
    """A piece of a message; only text is known."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn. Fields beside role and content go to the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it, with the content in one string."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or ())
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class ChatRequest(Shared):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    modalities: Any = None

    @field_validator("tools", "functions")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value:
            raise ValueError("tool calls are left to the engines: octavo serve --engine vllm or sglang")
        return value


class CompletionRequest(Shared):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], Field(fail_fast=True)] | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Any = None
    suffix: Any = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: Any) -> Any:
        if value:
            raise ValueError("text is completed at its end only")
        return value
