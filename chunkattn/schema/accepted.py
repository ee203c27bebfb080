"""Fields that clients send by default and that cannot change an answer: they are accepted and have no effect.

A field that would change the answer under some values is accepted under the others alone, and refused by name otherwise.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo

from chunkattn.schema.base import Strict
from chunkattn.web.errors import ApiError

_MAX_TEXT = 1024
_MAX_ENTRIES = 64


def no_effect(accepted: str, effect: str) -> Any:
    """Return the description of a field for the table of fields without effect.

    Args:
        accepted: accepted values, in words.
        effect: reason why the field has no effect.
    """
    return Field(description=f"Accepted: {accepted}.", json_schema_extra={"accepted": accepted, "effect": effect})


def only(*allowed: Any) -> BeforeValidator:
    """Return a validator that accepts some values alone and refuses all others as a field that is not supported.

    Args:
        *allowed: accepted values.
    """

    def check(value: Any, info: ValidationInfo) -> Any:
        # True == 1 in Python, and 1.0 equals 1 in JSON.
        if any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in allowed):
            return value
        name = str(info.field_name)
        shown = " or ".join(map(json.dumps, allowed))
        text = f"{name} is not supported by this server; leave it out, or send {shown}"
        raise ApiError(400, text, param=name, code="unsupported_parameter")

    return BeforeValidator(check)


Flag = bool | None
ShortText = Annotated[str, Field(max_length=_MAX_TEXT)] | None
ShallowObject = Annotated[dict[str, Any], Field(max_length=_MAX_ENTRIES)] | None
"""Object whose values are not validated, so its depth costs nothing."""
NoEntries = Annotated[list[Any], Field(max_length=0), only([])] | None

AN_OBJECT = f"an object of up to {_MAX_ENTRIES} entries"
_TEXT, _FLAG = f"a text of up to {_MAX_TEXT} characters", "true or false"


class SharedNoEffect(Strict):
    """Fields without effect of completions and chats."""

    metadata: Annotated[ShallowObject, no_effect(AN_OBJECT, "nothing is stored")] = None
    store: Annotated[Flag, no_effect(_FLAG, "nothing is stored")] = None
    service_tier: Annotated[ShortText, no_effect(_TEXT, "there is one tier; see `priority`")] = None
    safety_identifier: Annotated[ShortText, no_effect(_TEXT, "requests are counted by API key")] = None
    prompt_cache_key: Annotated[ShortText, no_effect(_TEXT, "every prompt of one `cache_salt` shares the cache")] = None
    prompt_cache_retention: Annotated[ShortText, no_effect(_TEXT, "the cache evicts the least recently used")] = None
    prompt_cache_options: Annotated[ShallowObject, no_effect(AN_OBJECT, "caching is automatic")] = None
    request_id: Annotated[ShortText, no_effect(_TEXT, "the header `X-Request-Id` names a request")] = None
    session_id: Annotated[ShortText, no_effect(_TEXT, "there are no sessions")] = None
    use_beam_search: Annotated[bool, only(False), no_effect("false", "no beam search")] = False
    early_stopping: Annotated[bool, only(False), no_effect("false", "no beam search")] = False
    length_penalty: Annotated[float, only(1), no_effect("1", "no beam search")] = 1.0
    bad_words: Annotated[NoEntries, no_effect("an empty list", "no word is excluded")] = None
    spaces_between_special_tokens: Annotated[bool, only(True), no_effect("true", "the tokenizer decides")] = True
    return_token_ids: Annotated[bool, only(False), no_effect("false", "see `return_tokens_as_token_ids`")] = False


class CompletionNoEffect(SharedNoEffect):
    """Fields without effect of completions."""

    best_of: Annotated[int | None, no_effect("the value of `n`", "every sample is returned")] = None
    suffix: Annotated[str, only(""), no_effect("an empty text", "nothing follows the answer")] = ""


class ChatNoEffect(SharedNoEffect):
    """Fields without effect of chats."""

    functions: Annotated[NoEntries, no_effect("an empty list", "see `tools`")] = None
    function_call: Annotated[str, only("none"), no_effect('"none"', "see `tool_choice`")] = "none"
    modalities: Annotated[list[str] | None, only(["text"]), no_effect('["text"]', "answers are text")] = None
    verbosity: Annotated[str, only("medium"), no_effect('"medium"', "it is the default")] = "medium"
    prediction: Annotated[ShallowObject, no_effect(AN_OBJECT, "nothing is predicted")] = None
    add_special_tokens: Annotated[bool, only(False), no_effect("false", "the chat template writes them")] = False


class MessageNoEffect(Strict):
    """Fields without effect of a message."""

    id: Annotated[ShortText, no_effect(_TEXT, "the chat template does not get it")] = None
    annotations: Annotated[NoEntries, no_effect("an empty list", "the chat template does not get it")] = None
    refusal: Annotated[str, only(""), no_effect("an empty text", "the chat template does not get it")] = ""
    cache_control: Annotated[ShallowObject, no_effect(AN_OBJECT, "caching is automatic")] = None
