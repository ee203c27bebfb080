"""`ChatTemplate`: a tokenizer's chat template, rendered at one time, with contents in the form that it reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from jinja2 import TemplateSyntaxError

from chunkattn.errors import ConfigError, RequestError
from chunkattn.parsers.template_clock import fixed_clock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal["string", "parts"]
"""Form of a content: a text, or a list of `{"type": "text", "text": ...}`."""

_JINJA = frozenset("{}\n")
"""Characters one of which a template has, and the name of a file seldom."""
_MAX_KNOWN = 1024
_readable: dict[tuple[str, str], frozenset[Form]] = {}
"""Forms of contents that a template shows, by template and role; at most `_MAX_KNOWN` entries."""
_NUM_PLACES = 4


def load_chat_template(source: str, names: Mapping[str, str] | None = None) -> str:
    """Return the text of a chat template.

    Args:
        source: path of a file, name of one of the tokenizer's templates, or the template itself.
        names: the tokenizer's templates by name, if it has several.

    Raises:
        ConfigError: the text is no template, and neither a file nor a name.
    """
    if names and source in names:
        return names[source]
    try:
        return Path(os.path.expanduser(source)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if _JINJA & {*source} and not isinstance(error, UnicodeError):
            return source
        listed = f" Its own templates are {', '.join(sorted(names))}." if names else ""
        text = f"chat_template must be a file or a Jinja template, and {source[:200]!r} is neither: {error}.{listed}"
        raise ConfigError(text) from None


def own_template(tokenizer: Any, source: str) -> str:
    """Return the text of a template that takes the place of a tokenizer's own.

    Args:
        tokenizer: the tokenizer.
        source: see `load_chat_template`.

    Raises:
        ConfigError: as `load_chat_template`, or the text has a fault of syntax.
    """
    names = getattr(tokenizer, "chat_template", None)
    text = load_chat_template(source, names if isinstance(names, dict) else None)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=text, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template has a fault in line {error.lineno}: {error.message}") from None
    except Exception:  # templates are programs, and may want other messages
        pass
    return text


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message's content, one for each part.

    Args:
        message: message whose content is a text or a list of text parts.
    """
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def with_texts(message: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Return a message with other texts in its content, in the same form.

    Args:
        message: message whose content is a text or a list of text parts.
        texts: one text for each part.
    """
    if isinstance(message["content"], str):
        return {**message, "content": texts[0]}
    return {**message, "content": [_part(text) for text in texts]}


class ChatTemplate:
    """Chat template of one request.

    All renderings show the same time, so the renderings of two conversations differ by their messages alone.

    Args:
        tokenizer: tokenizer with a chat template.
        options: variables of the template and arguments of `apply_chat_template`. `add_generation_prompt` is True by default,
            or False with `continue_final_message`.
        now: time that the template shows; None takes the present.

    Attributes:
        text: text of the template; empty if there is none. Rendering then raises the error.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], now: datetime | None = None) -> None:
        self._tokenizer, self._shown_options = tokenizer, dict[str, Any]()
        self._options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
        try:
            self.text = str(tokenizer.get_chat_template(options.get("chat_template"), options.get("tools")))
        except Exception:
            self.text = ""
            return
        text, variables = fixed_clock(self.text, now or datetime.now())
        # The form of contents is judged with these options alone: all requests share it, whatever their variables.
        self._shown_options = {"add_generation_prompt": True, "chat_template": text, **variables}
        self._options |= {"chat_template": text, **variables}

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a conversation.

        Args:
            messages: messages in the form that the template reads; see `shaped`.

        Raises:
            RequestError: there is no template, or it raises an exception.
        """
        try:
            return self._apply(messages, self._options)
        except Exception as error:  # templates are programs and may raise anything
            raise RequestError(f"the chat template failed: {error}", param="messages") from error

    def shaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with its content in a form that the template reads for this role.

        A content that the template reads stays as it is. Where it reads texts alone, the parts are joined. Where it reads
        parts alone, a text becomes one part.

        Args:
            message: message whose content is a text or a list of text parts.
        """
        texts, role = texts_of(message), message["role"]
        if not isinstance(message["content"], str) and (not texts or not self._reads(role, "parts")):
            message = {**message, "content": "".join(texts)}
        if isinstance(message["content"], str) and not self._reads(role, "string") and self._reads(role, "parts"):
            message = {**message, "content": [_part("".join(texts))]}
        return dict(message)

    def shows_tools(self) -> bool:
        """Return whether the template shows tools: a conversation with a marked one tells."""
        mark = str(uuid4().int)
        parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
        tool = {"type": "function", "function": {"name": mark, "description": "x", "parameters": parameters}}
        try:
            return mark in self._apply([self.shaped({"role": "user", "content": "x"})], {**self._options, "tools": [tool]})
        except Exception:  # rendering the conversation raises the error
            return True

    def _apply(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options))

    def _reads(self, role: str, form: Form) -> bool:
        """Return whether the template shows a role's content in a form: short conversations with a mark tell."""
        place = (self.text, role)
        if (known := _readable.get(place)) is None:
            if len(_readable) >= _MAX_KNOWN:
                _readable.clear()
            known = _readable[place] = self._shown(role)
        return form in known

    def _shown(self, role: str) -> frozenset[Form]:
        user = {"role": "user", "content": "x"}
        if role != "user":
            user = self.shaped(user)
        # The first conversation in which the template shows either form judges both; in later ones it may treat roles alike.
        for place in range(_NUM_PLACES):
            forms: list[Form] = ["string", "parts"]
            if shown := frozenset(form for form in forms if self._shows(role, form, user, place)):
                return shown
        return frozenset()

    def _shows(self, role: str, form: Form, user: Mapping[str, Any], place: int) -> bool:
        mark, key = (str(uuid4().int) for _ in range(2))
        # A template that writes a list of parts as JSON, or as Python does, shows the key.
        content = mark if form == "string" else [{**_part(mark), key: ""}]
        try:
            text = self._apply(_conversation({"role": role, "content": content}, user, place), self._shown_options)
        except Exception:  # templates are programs and may raise anything
            return False
        return mark in text and key not in text


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _conversation(message: Mapping[str, Any], user: Mapping[str, Any], place: int) -> list[Mapping[str, Any]]:
    """Return a conversation with a message in one of `_NUM_PLACES` places, the likeliest for its role first."""
    role = message["role"]
    if role == "user":
        return [message]
    likeliest = [user, message] if role == "assistant" else [message, user]
    if role in ("tool", "function"):
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        message = {**message, "tool_call_id": call["id"], "name": "f"}
        likeliest = [user, {"role": "assistant", "content": "", "tool_calls": [call]}, message]
    return [likeliest, [user, message], [user, message, user], [message]][place]
