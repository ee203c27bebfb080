"""Registries of stored documents over engines, called without HTTP."""

from chunkattn.documents.records import Scope
from chunkattn.schema.documents import CacheBody
from chunkattn.server.state import ServerState
from chunkattn.web.options import ServerConfig


def registry_of(llm, **options):
    """Return the registry of a server with some options."""
    return ServerState(llm, ServerConfig(**options)).documents


async def add(registry, name="a", text="A text.", owner=None, **fields):
    """Add a document, and return its record."""
    body = CacheBody(prefix="Read.", documents=[{"id": name, "text": text}], **fields)
    ((record, _),) = await registry.add(Scope(owner, owner), body)
    return record
