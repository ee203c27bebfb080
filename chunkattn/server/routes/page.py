"""Routes of the browser page: a few static files without external resources."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Response

from chunkattn.server.state import State
from chunkattn.web.errors import ApiError

router = APIRouter(tags=["page"])

_PAGE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {"schema": {"type": "string"}}}}}
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; style-src 'self'; frame-ancestors 'none'; "
        "base-uri 'none'; form-action 'none'"
    ),
}


def _load() -> dict[str, tuple[bytes, str]]:
    """Return content and media type of every file of the page, by name."""
    contents = {}
    for file in (files("chunkattn.server") / "static").iterdir():
        media_type = _MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None and file.is_file():
            contents[file.name] = (file.read_bytes(), media_type)
    return contents


# Read once, so a client's name is looked up in a dict and never becomes a path.
_FILES = _load()


@router.get("/", response_class=Response, responses=_PAGE)
async def page() -> Response:
    """Return the page."""
    return _answer("index.html")


@router.get("/static/page.json", include_in_schema=False)
async def settings(state: State) -> dict[str, Any]:
    """Return what the page needs to know of the server.

    These are its separator, its limit on log-probabilities, and whether to use the chat template. `chat_template` is None until
    the engine has started. The bundled demo model completes texts.
    """
    config, has_template = state.llm.config, None
    if state.llm.client.limits is not None:
        tokenizer = state.llm.frontend.tokenizer
        has_template = bool(tokenizer is not None and tokenizer.chat_template)
    by_default = bool(has_template and config.model is not None)
    chat = {"chat_template": has_template, "chat_by_default": by_default}
    return {"separator": config.chunk_separator, "max_logprobs": config.max_logprobs, **chat}


@router.get("/static/{name}", include_in_schema=False)
async def static(name: str) -> Response:
    """Return a static file of the page."""
    return _answer(name)


def _answer(name: str) -> Response:
    if name not in _FILES:
        raise ApiError(404, f"the page has no file {name!r}", code="not_found")
    content, media_type = _FILES[name]
    return Response(content, media_type=media_type, headers=_HEADERS)
