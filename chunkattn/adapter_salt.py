"""Adapters by request, and their names inside cache salts.

A salt goes wherever something may be cached or stored: calls, K/V, documents, remembered scores. So the name of an adapter is a
part of the salt, and nothing that was computed under one adapter can be found under another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from chunkattn.errors import ConfigError, RequestError, shown

MAX_NAME_CHARS = 128
NOT_OPEN = "an adapter by lora_path needs the option enable_lora"
_MARK = "\x1f"
"""Separator of the parts of a salt; no name holds it."""
_BEGIN = f"{_MARK}lora{_MARK}"


class LoRARequest(NamedTuple):
    """LoRA adapter of a call, with vLLM's names. A name stands for one adapter for the life of an engine.

    Attributes:
        lora_name: name of the adapter.
        lora_int_id: number of the adapter in vLLM; it has no effect.
        lora_path: folder or hub id of the adapter; not needed for an adapter of `lora_modules`.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def salted(adapter: str | None, salt: str | None) -> str | None:
    """Return a salt that names an adapter; the salt itself without one.

    Args:
        adapter: name of the adapter, or None.
        salt: the caller's salt, or None.
    """
    return salt if adapter is None else f"{_BEGIN}{adapter}{_MARK}{salt or ''}"


def split(salt: str | None) -> tuple[str | None, str | None]:
    """Return the name of the adapter and the caller's salt from a result of `salted`."""
    if salt is None or not salt.startswith(_BEGIN):
        return None, salt
    name, _, own = salt.removeprefix(_BEGIN).partition(_MARK)
    return name, own or None


def salt_for(request: Any, salt: str | None) -> str | None:
    """Return the salt of a call.

    Args:
        request: the call's `LoRARequest` or vLLM's; None for the base model, which leaves an adapter in the salt.
        salt: the caller's salt.

    Raises:
        RequestError: the request is no `LoRARequest`, or its name is invalid.
    """
    if request is None:
        return salt
    if not hasattr(request, "lora_name"):
        raise RequestError(f"lora_request must be a LoRARequest, got {shown(request)}", param="lora_request")
    return salted(check_name(request.lora_name), salt)


def check_name(name: Any, error: type[ConfigError] | type[RequestError] = RequestError) -> str:
    """Return a valid name of an adapter.

    Args:
        name: the name.
        error: class of the error.

    Raises:
        ChunkAttnError: `error`; the name is no text of 1 to `MAX_NAME_CHARS` printable characters.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise error(f"lora_name must be a text of 1 to {MAX_NAME_CHARS} printable characters, got {shown(name)}")
    return name


def folders_of(modules: tuple[str, ...]) -> dict[str, str]:
    """Return the folder of each adapter of `lora_modules`, by name.

    Args:
        modules: entries `name=folder`.

    Raises:
        ConfigError: an entry has another form, or a name occurs twice.
    """
    folders: dict[str, str] = {}
    for entry in modules:
        name, equals, folder = entry.partition("=")
        if not equals or not folder:
            raise ConfigError(f"lora_modules must be of the form name=folder, got {entry!r}")
        if check_name(name, ConfigError) in folders:
            raise ConfigError(f"lora_modules names {name!r} twice")
        folders[name] = folder
    return folders
