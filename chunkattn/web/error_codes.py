"""`CODES`: every code of an error answer of the server and the gateway."""

from __future__ import annotations

from typing import NamedTuple


class ErrorCode(NamedTuple):
    """Code of an error answer.

    Attributes:
        status: HTTP status of the answer.
        code: value of `code`.
        when: reason for the answer, as Markdown of `docs/reference/http.md`.
    """

    status: int
    code: str
    when: str


CODES = (
    ErrorCode(400, "invalid_value", "a value has a wrong type, is out of range, or contradicts another field"),
    ErrorCode(400, "missing_required_parameter", "a field, or the body, is missing"),
    ErrorCode(400, "invalid_json", "the body is not a JSON object"),
    ErrorCode(
        400,
        "unsupported_parameter",
        "the field does not exist here, or [not with this value](#fields-without-effect), or the server's options "
        "exclude the call",
    ),
    ErrorCode(
        400,
        "message_not_rendered",
        "the chat template leaves out a message, a part of it, or its `tool_calls` ([messages](#messages))",
    ),
    ErrorCode(400, "context_length_exceeded", "a text is too long, or the request can never fit"),
    ErrorCode(400, "no_tokenizer", "the engine has no tokenizer, so it has no text of tokens"),
    ErrorCode(
        400,
        "too_many_documents",
        "`max_cached_documents`, or `max_cached_documents_per_key`, are remembered already; or the documents that "
        "one request adds, or names by id, have more than 2,097,152 tokens",
    ),
    ErrorCode(
        400,
        "too_many_pins",
        "pinned documents would hold more than `max_pinned_share`, or `max_pinned_share_per_key`, of the KV pool",
    ),
    ErrorCode(400, "invalid_host", "the request has no `Host` header, or a malformed one, or several"),
    ErrorCode(400, "invalid_header", "the request has several `Authorization` headers"),
    ErrorCode(400, "invalid_path", "the target of the request is no path"),
    ErrorCode(400, "websocket_not_supported", "the request opens a websocket"),
    ErrorCode(
        400,
        "invalid_http",
        "the bytes are no HTTP request, or the request line and headers are too long; the connection is closed",
    ),
    ErrorCode(
        400,
        "invalid_encoding",
        "the body does not match its `Content-Encoding`; a zstd frame needs a window of more than 8 MiB",
    ),
    ErrorCode(
        400,
        "body_too_complex",
        "the body has more than 4 x `max_items_per_request` objects and lists, 32 x `max_items_per_request` texts "
        "(names of fields included), 1,048,576 values, or 64 levels",
    ),
    ErrorCode(401, "invalid_api_key", "the key is missing or wrong, or was removed while its documents were computed"),
    ErrorCode(
        403, "host_not_allowed", "a server without a key, reachable from this machine only, got a request for another host name"
    ),
    ErrorCode(404, "model_not_found", "the model of the request is not served here"),
    ErrorCode(404, "document_not_found", "the request names a document that is not stored"),
    ErrorCode(404, "not_found", "the route does not exist; the message names the path and a similar path"),
    ErrorCode(405, "method_not_allowed", "the path takes other methods; the message and the header `Allow` name them"),
    ErrorCode(
        408, "timeout", "headers or body took longer than `header_timeout_s` or `body_timeout_s`; the connection is closed"
    ),
    ErrorCode(
        413,
        "request_too_large",
        "the body, or what its `Content-Encoding` expands to, exceeds `max_body_bytes`; at a gateway also what the ids of "
        "documents stand for, more than an object or list for 64 bytes of it, or more than a text for 16 bytes",
    ),
    ErrorCode(
        415, "unsupported_encoding", "the `Content-Encoding` is neither gzip nor deflate nor zstd, or has more than two codings"
    ),
    ErrorCode(429, "queue_full", "`max_queued_requests` requests are under way"),
    ErrorCode(
        429,
        "queue_share_exceeded",
        "the requests of this API key, or without a key file this request, hold `max_queue_share` of the queue",
    ),
    ErrorCode(
        429,
        "body_share_exceeded",
        "other large bodies and answers of this client held `max_body_bytes_per_client` until `request_timeout_s`, "
        "or 128 of its requests wait",
    ),
    ErrorCode(499, "client_closed_request", "the client has left before its body was whole; it does not read this answer"),
    ErrorCode(
        500,
        "non_finite",
        "a value computed for the request is NaN or infinite; the message names the likely cause ([what "
        "fails](../concepts/scheduling.md#when-a-value-is-not-finite))",
    ),
    ErrorCode(500, "internal_error", "a step failed; the message holds the request's id"),
    ErrorCode(501, "method_not_supported", "the method is CONNECT; the connection is closed"),
    ErrorCode(501, "unsupported_transfer_encoding", "the `Transfer-Encoding` is not `chunked` alone; the connection is closed"),
    ErrorCode(502, "bad_gateway", "of a gateway: the status of the replica's answer ends no request, such as 101 or 999"),
    ErrorCode(503, "too_many_connections", "`max_connections` are open, or the connection was idle while others came"),
    ErrorCode(503, "server_starting", "the engine starts, or stored documents are being restored; try again"),
    ErrorCode(503, "server_degraded", "the engine has ended and is started again; try again"),
    ErrorCode(503, "server_draining", "the server or the gateway has got SIGTERM and ends; try another one"),
    ErrorCode(
        503,
        "engine_not_ready",
        "the engine, or the replica of a gateway, has ended during the request, or accepts none; try again",
    ),
    ErrorCode(503, "no_replica", "no replica of the gateway takes requests, or none holds what the request needs; try again"),
    ErrorCode(503, "document_store_failed", "the file of `document_store` cannot be written, and nothing has changed"),
    ErrorCode(504, "timeout", "`request_timeout_s` has passed"),
    ErrorCode(505, "http_version_not_supported", "the request is in HTTP/2 or HTTP/0.9; the connection is closed"),
)
"""All codes, by status; the reference page shows them."""
