"""Metrics of the gateway, and the metrics of all replicas in one text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][\w:]*)[ \t]*(?:\{{((?:[^\"}}]|{_QUOTED})*)\}})?[ \t]*([-+]?(?:[\d.]+(?:e[-+]?\d+)?|Inf|NaN)(?:[ \t].*)?)$",
    re.ASCII | re.IGNORECASE,
)
"""Name, labels, and value with what follows it."""
_LABEL = re.compile(rf"(\w+)[ \t]*=[ \t]*({_QUOTED})", re.ASCII)
_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)


class GatewayMetrics:
    """Metrics of the gateway's own work.

    Args:
        registry: registry of the process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "chunkattn_gateway_"
        of = ["replica"]
        self.sent = Counter(prefix + "sent", "Requests sent to a replica, tries included", of, registry=registry)
        self.retries = Counter(prefix + "retries", "Tries that another replica took over", ["reason"], registry=registry)
        self.waiting = Gauge(
            prefix + "waiting_requests", "Requests that wait for a replica to take requests", registry=registry
        )
        self.cut = Counter(prefix + "cut", "Answers that a replica did not finish", registry=registry)
        self.asked = Counter(prefix + "asked_bytes", "Bytes of text of the pieces of requests", registry=registry)
        self.missing = Counter(
            prefix + "missing_bytes", "Bytes of them that the chosen replica was expected not to hold", registry=registry
        )
        self.decision = Histogram(prefix + "decision_seconds", "Time to choose a replica", buckets=_SECONDS, registry=registry)
        self.ready = Gauge(prefix + "ready", "1 if the replica takes requests", of, registry=registry)
        self.queued = Gauge(prefix + "queued_bytes", "Bytes of text queued at a replica", of, registry=registry)
        self.pieces = Gauge(prefix + "recorded_pieces", "Pieces that a replica is expected to hold", of, registry=registry)
        self.bytes_per_token = Gauge(prefix + "bytes_per_token", "Bytes of text per token of KV cache", registry=registry)


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
