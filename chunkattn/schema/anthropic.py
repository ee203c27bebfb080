"""Request body of `/v1/messages`, in Anthropic's schema."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from chunkattn.answer_parsers.tools import MAX_TOOLS
from chunkattn.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS
from chunkattn.schema.accepted import AN_OBJECT, ShallowObject, ShortText, no_effect, only
from chunkattn.schema.base import FastList, Strict
from chunkattn.schema.decide import Kinds
from chunkattn.schema.generation import MAX_MESSAGES
from chunkattn.schema.messages_chat import joined_blocks, messages_chat
from chunkattn.schema.rendered import ReasoningEffort
from chunkattn.schema.translated import Translated
from chunkattn.web.errors import UNSUPPORTED_KIND

CacheControl = Annotated[ShallowObject, no_effect(AN_OBJECT, "caching is automatic")]


# Content


class TextBlock(Strict):
    """Text of a message, of the system or of a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[list[Any] | None, no_effect("a list", "the chat template does not get it")] = None


class PlainSource(Strict):
    """Document as a text."""

    type: Literal["text"]
    media_type: Annotated[str, only("text/plain")] = "text/plain"
    data: str


class BlockSource(Strict):
    """Document as a text or text blocks."""

    type: Literal["content"]
    content: str | FastList[Annotated[TextBlock, Kinds()]]


class DocumentCitations(Strict):
    """Switch of the citations of a document."""

    enabled: bool | None = None


class DocumentBlock(Strict):
    """Document, which becomes a chunk: its title and its context are lines before its text."""

    type: Literal["document"]
    source: Annotated[PlainSource | BlockSource, Kinds()]
    title: str | None = None
    context: str | None = None
    citations: DocumentCitations | None = None
    cache_control: CacheControl = None

    @property
    def text(self) -> str:
        """Return the text of the source, as the model sees it."""
        if isinstance(self.source, PlainSource):
            return self.source.data
        return joined_blocks(block.text for block in blocks) if isinstance(blocks := self.source.content, list) else blocks

    @property
    def num_blocks(self) -> int | None:
        """Return the number of blocks of the source; None for plain text."""
        if isinstance(self.source, PlainSource):
            return None
        return len(self.source.content) if isinstance(self.source.content, list) else 1


class ThinkingBlock(Strict):
    """Thinking of the assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str | None, no_effect("a text", "thinking is sent as text")] = None


class ToolUseBlock(Strict):
    """Call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None


class ToolResultBlock(Strict):
    """Result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | FastList[Annotated[TextBlock, Kinds()]] | None = None
    is_error: Annotated[bool | None, no_effect("true or false", "the content tells it")] = None
    cache_control: CacheControl = None


class UserTurn(Strict):
    """Message of a user, with documents and results of tools."""

    role: Literal["user"]
    content: str | FastList[Annotated[TextBlock | DocumentBlock | ToolResultBlock, Kinds()]]


class AssistantTurn(Strict):
    """Message of the assistant, with calls of tools."""

    role: Literal["assistant"]
    content: str | FastList[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Kinds()]]


class SystemTurn(Strict):
    """Message of the system within a conversation."""

    role: Literal["system"]
    content: str | FastList[Annotated[TextBlock, Kinds()]]


# Options


class Tool(Strict):
    """Tool that the model may call."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl = None
    eager_input_streaming: Annotated[bool | None, no_effect("true or false", "arguments are sent as they are written")] = None
    defer_loading: Annotated[bool, only(False), no_effect("false", "the prompt shows every tool")] = False
    allowed_callers: Annotated[
        list[str] | None, only(["direct"], []), no_effect('["direct"]', "tools are called by the answer alone")
    ] = None


def _of_client(tool: Any) -> Any:
    """Refuse a tool that Anthropic's server would run."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        shown = repr(kind[:80].encode("utf-8", "replace").decode())
        raise PydanticCustomError(UNSUPPORTED_KIND, "type {kind} is not supported by this server", {"kind": shown})
    return tool


class ToolChoice(Strict):
    """Choice among the tools without a name."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedTool(Strict):
    """Choice of one tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Thinking before the answer: `enable_thinking` of the chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, no_effect("an integer", "`max_tokens` bounds thinking and text together")] = None
    display: Annotated[str, only("summarized"), no_effect('"summarized"', "thinking is returned whole")] = "summarized"


class SchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """Form of the answer."""

    effort: ReasoningEffort | None = None
    format: SchemaFormat | None = None


class MessagesBody(Translated):
    """Request body of `/v1/messages`."""

    messages: Annotated[
        FastList[Annotated[UserTurn | AssistantTurn | SystemTurn, Kinds()]],
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    """Turns of user and assistant; a last turn of the assistant is continued."""
    max_tokens: int
    """Number of tokens to generate at most, thinking included."""
    system: str | FastList[Annotated[TextBlock, Kinds()]] | None = None
    """Content of a system message before the turns."""
    stop_sequences: (
        Annotated[FastList[Annotated[str, Field(max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_STOP_STRINGS)] | None
    ) = None
    """Another name of `stop`."""
    tools: Annotated[FastList[Annotated[Tool, BeforeValidator(_of_client)]], Field(max_length=MAX_TOOLS)] | None = None
    """Tools that the model may call, with an `input_schema` each."""
    tool_choice: Annotated[ToolChoice | NamedTool, Kinds()] | None = None
    """`{"type"}` with `auto`, `any`, `none`, or `tool` and its `name`; `disable_parallel_tool_use` for one call at most."""
    thinking: Thinking | None = None
    """`{"type"}` with `enabled` or `disabled`, the variable `enable_thinking` of the chat template, or `adaptive`."""
    output_config: OutputConfig | None = None
    """`{"effort"}`, the variable `reasoning_effort`, and `{"format": {"type": "json_schema", "schema"}}`."""
    metadata: Annotated[ShallowObject, no_effect(AN_OBJECT, "nothing is stored")] = None
    service_tier: Annotated[ShortText, no_effect("a text of up to 1024 characters", "there is one tier; see `priority`")] = None
    cache_control: CacheControl = None

    fields_of: ClassVar = {
        "documents": ("documents", "messages"),
        "stop": ("stop_sequences", "stop"),
        "response_format": ("output_config",),
        "reasoning_effort": ("output_config",),
    }
    translate = staticmethod(messages_chat)

    @model_validator(mode="after")
    def _check_stops(self) -> Self:
        if self.stop_sequences and self.stop:
            raise ValueError("stop_sequences and stop name one argument; give one of them")
        return self

    @model_validator(mode="after")
    def _check_citations(self) -> Self:
        cited = {bool(block.citations and block.citations.enabled) for block in self.document_blocks}
        if len(cited) > 1 and self.citations is None:
            raise ValueError("citations must be enabled on all document blocks or on none")
        return self

    @property
    def document_blocks(self) -> list[DocumentBlock]:
        """Return the documents in the turns. They follow those of the field `documents`."""
        contents = (turn.content for turn in self.messages if isinstance(turn, UserTurn) and isinstance(turn.content, list))
        return [block for content in contents for block in content if isinstance(block, DocumentBlock)]


class CountBody(MessagesBody):
    """Request body of `/v1/messages/count_tokens`: a message whose answer is not generated."""

    max_tokens: int = 1
    """No effect: nothing is generated."""
