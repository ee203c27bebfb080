"""Metrics of the gateway, and the metrics of all replicas in one text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from chunkattn.described_metrics import DescribedMetrics

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][\w:]*)[ \t]*(?:\{{((?:[^\"}}]|{_QUOTED})*)\}})?[ \t]*([-+]?(?:[\d.]+(?:e[-+]?\d+)?|Inf|NaN)(?:[ \t].*)?)$",
    re.ASCII | re.IGNORECASE,
)
"""Name, labels, and value with what follows it."""
_LABEL = re.compile(rf"(\w+)[ \t]*=[ \t]*({_QUOTED})", re.ASCII)
_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)


class GatewayMetrics(DescribedMetrics):
    """Metrics of the gateway's own work.

    Args:
        registry: registry of the process.

    Metrics:
        sent: requests sent to a replica, tries included.
        retries: tries that another replica took over.
        waiting_requests: requests that wait for a replica to take requests.
        cut: answers that a replica did not finish.
        asked_bytes: bytes of text of the pieces of requests.
        missing_bytes: bytes of them that the chosen replica was expected not to hold.
        decision_seconds: time to choose a replica.
        ready: 1 if the replica takes requests.
        queued_bytes: bytes of text queued at a replica.
        recorded_pieces: pieces that a replica is expected to hold.
        bytes_per_token: bytes of text per token of KV cache.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("chunkattn_gateway_", _SECONDS, registry)
        self.sent = self.counter("sent", "replica")
        self.retries = self.counter("retries", "reason")
        self.waiting = self.gauge("waiting_requests")
        self.cut = self.counter("cut")
        self.asked = self.counter("asked_bytes")
        self.missing = self.counter("missing_bytes")
        self.decision = self.histogram("decision_seconds")
        self.ready = self.gauge("ready", "replica")
        self.queued = self.gauge("queued_bytes", "replica")
        self.pieces = self.gauge("recorded_pieces", "replica")
        self.bytes_per_token = self.gauge("bytes_per_token")


def merge(gateway_text: str, texts: Mapping[str, str]) -> str:
    """Return several metrics texts as one, each sample with the label `replica`.

    The gateway's own samples that have the label keep it. A replica's label of that name becomes `exported_replica`, as in
    Prometheus.

    Args:
        gateway_text: metrics of the gateway in Prometheus's text format; their label is `gateway`.
        texts: metrics of replicas, by the name of the replica.
    """
    families: dict[str, tuple[dict[str, str], list[str]]] = {}
    for name, text in (("", gateway_text), *texts.items()):
        escaped = name.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        label, family = f'replica="{escaped or "gateway"}"', ""
        for line in text.split("\n"):  # labels may hold other line separators
            if line.startswith("#"):
                mark, _, rest = line[1:].strip().partition(" ")
                if mark in ("HELP", "TYPE"):
                    family = rest.partition(" ")[0]
                    families.setdefault(family, ({}, []))[0].setdefault(mark, line)
            elif sample := _SAMPLE.match(line):
                if not sample[1].startswith(family):  # a sample without a description
                    family = sample[1]
                families.setdefault(family, ({}, []))[1].append(_labelled(sample, label, keep=not name))
    lines = [line for head, samples in families.values() for line in (*head.values(), *samples)]
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: re.Match[str], label: str, *, keep: bool) -> str:
    """Return a sample with one label more; one that has the label stays as it is, or has it renamed."""
    name, labels, rest = sample.groups("")
    pairs = list(_LABEL.finditer(labels)) if "replica" in labels else ()
    if any(pair[1] == "replica" for pair in pairs):
        if keep:
            return sample[0]
        labels = ",".join(f"{'exported_' * (pair[1] == 'replica')}{pair[1]}={pair[2]}" for pair in pairs)
    return f"{name}{{{label}{',' if labels else ''}{labels}}} {rest}"
