"""Checks of arguments: lists, token ids, documents and cache salts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Integral
from typing import Any

import numpy as np

from chunkattn.adapter_salt import salted, split
from chunkattn.answer_parsers.tools import check_tools
from chunkattn.citations import Document
from chunkattn.errors import CapacityError, RequestError, shown
from chunkattn.parsers.token_lists import TokenLists
from chunkattn.sampling_params import MAX_SALT_CHARS


def as_list(values: Any, name: str) -> list[Any]:
    """Return an iterable as a list.

    Args:
        values: argument of the caller.
        name: name of the argument, for error messages.

    Raises:
        RequestError: `values` is not iterable, or is one text or mapping.
    """
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, got {type(values).__name__}", param=name)
    return list(values)


def list_chats(messages: Any) -> list[Any]:
    """Return a list of conversations.

    Args:
        messages: conversation or list of conversations.

    Raises:
        RequestError: as `as_list`.
    """
    listed = as_list(messages, "messages")
    return listed if listed and isinstance(listed[0], (list, tuple)) else [listed]


def check_template_options(value: Any) -> Mapping[str, Any]:
    """Return the variables of a chat template; None gives none.

    Args:
        value: argument of the caller.

    Raises:
        RequestError: the value is no mapping with texts as keys.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        got = "a key that is no text" if isinstance(value, Mapping) else type(value).__name__
        raise RequestError(f"chat_template_kwargs must be a mapping by name, got {got}", param="chat_template_kwargs")
    return value


def chat_options(
    variables: Mapping[str, Any] | None,
    chat_template: str | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    *,
    tools: Any = None,
) -> dict[str, Any]:
    """Return the variables of a chat template with the arguments that decide how it is rendered.

    Args:
        variables: argument `chat_template_kwargs` of the caller, which may hold the other arguments too.
        chat_template: template in place of the tokenizer's own; None for its own.
        add_generation_prompt: whether the text ends with the beginning of an answer; None says so unless the last message is
            continued.
        continue_final_message: whether the text ends with the content of the last message, for the model to continue.
        tools: functions that the template shows; see `check_tools`.

    Raises:
        RequestError: an argument has a wrong type, a tool is malformed, or an answer is to begin and the last message to go on.
    """
    explicit = {
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message or None,
        "tools": check_tools([] if tools is None else tools) or None,
    }
    options = {**check_template_options(variables), **{name: value for name, value in explicit.items() if value is not None}}
    for name, kind in (("chat_template", str), ("add_generation_prompt", bool), ("continue_final_message", bool)):
        if not isinstance(options.get(name, kind()), kind):
            raise RequestError(f"{name} must be of type {kind.__name__}, got {shown(options[name])}", param=name)
    if options.get("continue_final_message") and options.get("add_generation_prompt"):
        text = "continue_final_message and add_generation_prompt exclude each other; leave one of them out"
        raise RequestError(text, param="continue_final_message")
    return options


def is_list(value: Any) -> bool:
    """Return whether a value is a list, another sequence or an array, and no text."""
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes))


def one_each(value: Any, kind: type, count: int, name: str) -> list[Any]:
    """Return one value for each of `count` prompts: the entries of a list, or a single value repeated.

    Args:
        value: one value of type `kind`, or a list or tuple of `count` values.
        kind: type of a value.
        count: number of prompts.
        name: name of the argument, for error messages.

    Raises:
        RequestError: a value has another type, or the list has another length.
    """
    what = "an integer" if kind is Integral else kind.__name__
    listed = value if isinstance(value, (list, tuple)) else [value] * count
    for entry in listed:
        if not isinstance(entry, kind) or isinstance(entry, bool):
            raise RequestError(f"{name} must be {what}, or a list of such, got {type(entry).__name__}", param=name)
    if len(listed) != count:
        raise RequestError(f"{len(listed)} {name} for {count} prompts", param=name)
    return list(listed)


def check_salt(salt: Any) -> str | None:
    """Return a cache salt: None, or a text of 1 to `MAX_SALT_CHARS` characters.

    Args:
        salt: argument of the caller.

    Raises:
        RequestError: the salt is empty, too long, not a text, or not valid Unicode.
    """
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise RequestError(f"cache_salt must be a non-empty string, got {shown(salt)}", param="cache_salt")
    if len(own := split(salt)[1] or "") > MAX_SALT_CHARS:
        text = f"cache_salt has {len(own)} characters, at most {MAX_SALT_CHARS} are allowed; send a hash of it"
        raise RequestError(text, param="cache_salt")
    try:
        salt.encode()
    except UnicodeEncodeError as error:  # a lone surrogate
        raise RequestError(f"cache_salt {salt!r} is no valid Unicode", param="cache_salt") from error
    return salt


def salt_key(salt: Any) -> str | None:
    """Return the digest of a cache salt for messages to the engine: 32 hexadecimal digits for any length.

    The name of an adapter stays readable: the result is `salted` of the name and the digest of the caller's salt.

    Args:
        salt: argument of the caller; None gives None.

    Raises:
        RequestError: the salt is invalid (see `check_salt`).
    """
    adapter, own = split(check_salt(salt))
    return salted(adapter, None if own is None else hashlib.blake2b(own.encode(), digest_size=16).hexdigest())


def check_ids(ids: Any, name: str, param: str = "prompt", *, most: int | None = None) -> list[int]:
    """Return a caller's token ids as a list of ints that fit int32. `EngineLimits` checks them against the vocabulary.

    Args:
        ids: argument of the caller.
        name: name of the ids, for error messages.
        param: name of the argument that holds the ids.
        most: number of ids above which they can never be served, judged before any id; None for no limit.

    Raises:
        RequestError: `ids` is not a sequence of non-negative integers.
        CapacityError: there are more than `most` ids.
    """
    if not is_list(ids):
        raise RequestError(f"{name} must be a list of token ids, got {type(ids).__name__}", param=param)
    if most is not None and len(ids) > most:
        text = f" has {len(ids)} tokens, a prompt of this engine has at most {most}; send less or raise kv_cache_memory_bytes"
        raise CapacityError(text, param=param, part=name)
    values = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    kinds = set(map(type, values))  # a loop in Python over all ids would take most of the time of a call with many documents
    if all(map(_is_integer, kinds)) and (not values or (min(values) >= 0 and max(values) < 2**31)):
        return values if kinds <= {int} else [*map(int, values)]
    index, bad = next((n, v) for n, v in enumerate(values) if not _is_integer(type(v)) or not 0 <= v < 2**31)
    got = shown(bad.item() if isinstance(bad, np.generic) else bad)
    raise RequestError(f"[{index}] is not a token id: {got}", param=param, part=name)


def plain_ids(lists: Sequence[Any], most: int | None) -> TokenLists | None:
    """Return copies of many lists of token ids that `check_ids` accepts, in a fraction of its time.

    Args:
        lists: arguments of the caller.
        most: see `check_ids`.

    Returns:
        The copies. None if an entry is no plain list of ints that fits; `check_ids` then names the reason, if there is one.
    """
    if set(map(type, lists)) != {list} or (most is not None and max(map(len, lists)) > most):
        return None
    ids = [*chain.from_iterable(lists)]
    if not ids or set(map(type, ids)) != {int}:
        return None
    try:
        flat = np.fromiter(ids, np.int64, len(ids))
    except OverflowError:
        return None
    if flat.min() < 0 or flat.max() >= 2**31:
        return None
    return TokenLists([entry.copy() for entry in lists], flat.astype(np.int32))


def _is_integer(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and kind is not bool


def document_of(document: Any, name: str, param: str = "documents") -> str | list[int]:
    """Return a document of a caller: a text, or a list of token ids.

    Args:
        document: argument of the caller; of a `Document`, its content.
        name: name of the document, for error messages.
        param: name of the argument that holds the document.

    Raises:
        RequestError: the document is neither text nor token ids.
    """
    if isinstance(document, Document):
        document = document.content
    if isinstance(document, str):
        return document
    if not is_list(document):
        text = f" must be a string or token ids, got {type(document).__name__}"
        raise RequestError(text, param=param, part=name)
    return check_ids(document, name, param)
