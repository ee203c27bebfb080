"""Output items of `/v1/responses` while they grow, with the events of each: `WrittenItem` and `CallItem`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Event = dict[str, Any]


class OutputItem:
    """Output item that grows. An event is valid until the next one is made.

    Args:
        index: place of the item among the response's.
        item: the item without any content.

    Attributes:
        item: the item so far.
    """

    def __init__(self, index: int, item: Mapping[str, Any]) -> None:
        self.item: dict[str, Any] = {**item, "status": "in_progress"}
        self._index = index
        self._place: dict[str, Any] = {"item_id": item["id"], "output_index": index}

    def added(self) -> Iterator[Event]:
        """Yield the events that add the item to the response."""
        yield {"type": "response.output_item.added", "output_index": self._index, "item": self.item}

    def done(self, status: str) -> Iterator[Event]:
        """Yield the events that end the item.

        Args:
            status: its status, `"completed"` or `"incomplete"`.
        """
        self.item["status"] = status
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.item}


class WrittenItem(OutputItem):
    """Message, or reasoning, with one part of text.

    Args:
        index: place of the item among the response's.
        item: the item without its content.
        part: fields of the part beside its text.
        most: number of log-probabilities up to which the item has them; an item with more has none.
    """

    def __init__(self, index: int, item: Mapping[str, Any], part: Mapping[str, Any], most: float = math.inf) -> None:
        super().__init__(index, {**item, "content": []})
        self._part: dict[str, Any] = {**part, "text": ""}
        self._kind = f"response.{part['type']}"
        self._place["content_index"] = 0
        self._texts: list[str] = []
        self._left = most

    def cited(self, annotations: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
        """Yield the events of annotations of a message's text."""
        for annotation in annotations:
            place = {**self._place, "annotation_index": len(self._part["annotations"])}
            self._part["annotations"].append(annotation)
            yield {"type": f"{self._kind}.annotation.added", **place, "annotation": annotation}

    def added(self) -> Iterator[Event]:
        """Yield the events that add the item and its part."""
        yield from super().added()
        yield {"type": "response.content_part.added", **self._place, "part": self._part}

    def grown(self, text: str, logprobs: Sequence[Mapping[str, Any]]) -> Event:
        """Return the event of more text.

        Args:
            text: the text.
            logprobs: log-probabilities of its tokens in a chat's form, of a message alone.
        """
        self._texts.append(text)
        event = {"type": f"{self._kind}.delta", **self._place, "delta": text}
        if "logprobs" in self._part:
            self._left -= sum(1 + len(one["top_logprobs"]) for one in logprobs)
            self._part["logprobs"] += logprobs
            if self._left < 0:
                self._part["logprobs"].clear()
            event["logprobs"] = list(logprobs)
        return event

    def done(self, status: str) -> Iterator[Event]:
        """Yield the events that end the text, its part and the item."""
        self._part["text"] = "".join(self._texts)
        told: Event = {name: self._part[name] for name in ("text", "logprobs") if name in self._part}
        yield {"type": f"{self._kind}.done", **self._place, **told}
        yield {"type": "response.content_part.done", **self._place, "part": self._part}
        self.item["content"] = [self._part]
        yield from super().done(status)


class CallItem(OutputItem):
    """Call of a function.

    Args:
        index: place of the item among the response's.
        item: the item without its arguments.
    """

    def __init__(self, index: int, item: Mapping[str, Any]) -> None:
        super().__init__(index, {**item, "arguments": ""})
        self._texts: list[str] = []

    def grown(self, text: str) -> Event:
        """Return the event of more text of the arguments."""
        self._texts.append(text)
        return {"type": "response.function_call_arguments.delta", **self._place, "delta": text}

    def done(self, status: str) -> Iterator[Event]:
        """Yield the events that end the arguments and the item."""
        self.item["arguments"] = "".join(self._texts)
        told: Event = {name: self.item[name] for name in ("name", "arguments")}
        yield {"type": "response.function_call_arguments.done", **self._place, **told}
        yield from super().done(status)
