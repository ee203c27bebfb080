"""Messages of `benchmarks.tool_choice`: a user's message, the tools beside it, and the tool that answers it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).with_suffix("").with_name("tool_choice.yaml")
_OTHERS = 3
"""Most tools of other domains beside those of a message's domain."""
_PLAIN, _NEAR, _LACKING = "plain", "near", "lacking"


@dataclass(frozen=True)
class Message:
    """Message of a user, with tools.

    Attributes:
        text: the message.
        tools: three to eight tools in OpenAI's form, in a drawn order.
        right: name of the tool that answers the message; None for none.
        kind: `tool`; or `plain`, `near` for messages about the tools' domain, and `lacking` where the right tool is left out.
        domain: domain of most tools.
    """

    text: str
    tools: tuple[Mapping[str, Any], ...]
    right: str | None
    kind: str
    domain: str


def draw_messages(seed: int) -> list[Message]:
    """Return twenty messages of each domain of `tool_choice.yaml` in a drawn order, five of them without a right tool.

    Args:
        seed: seed of the tools beside each message, of their order, and of the messages whose tool is left out.
    """
    data, rng = yaml.safe_load(_FILE.read_text(encoding="utf-8")), random.Random(seed)
    domains: dict[str, Any] = data["domains"]
    plain = iter(rng.sample(data["plain"], len(data["plain"])))
    messages = []
    for domain, content in domains.items():
        tools = {name: _shown(name, fields) for name, fields in content["tools"].items()}
        others = [_shown(*tool) for other, content in domains.items() if other != domain for tool in content["tools"].items()]
        asked: list[tuple[str, str | None, str]] = [
            (text, name, "tool") for name, fields in content["tools"].items() for text in fields["messages"]
        ]
        lacking, tool, _ = rng.choice(asked)
        asked += [(text, None, _NEAR) for text in content["near"]]
        asked += [(next(plain), None, _PLAIN) for _ in range(2)]
        asked.append((lacking, None, _LACKING))
        for text, right, kind in asked:
            beside = [name for name in tools if name != (tool if kind == _LACKING else right)]
            own = [tools[name] for name in rng.sample(beside, rng.randint(2, 4))]
            own += [] if right is None else [tools[right]]
            far = rng.sample(others, rng.randint(1, _OTHERS))
            listed = [*own, *far]
            messages.append(Message(text, tuple(rng.sample(listed, len(listed))), right, kind, domain))
    return rng.sample(messages, len(messages))


def group_of(messages: Sequence[Message]) -> list[int]:
    """Return 0 or 1 for each message: the group of its domain."""
    domains = sorted({message.domain for message in messages})
    return [domains.index(message.domain) % 2 for message in messages]


def _shown(name: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool in OpenAI's form; all its parameters are required."""
    properties = {key: _schema(kind) for key, kind in fields["parameters"].items()}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    function = {"name": name, "description": fields["description"], "parameters": parameters}
    return {"type": "function", "function": function}


def _schema(kind: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}} if kind == "array" else {"type": kind}
