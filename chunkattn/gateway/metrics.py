"""Metrics of the gateway, and the metrics of all replicas in one text."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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


def merge(texts: Mapping[str, str], label: str = "replica") -> str:
    """Return several metrics texts as one, each sample with the name of its text as a label.

    Args:
        texts: texts in Prometheus's format, by the name of their process.
        label: name of the label.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for name, text in texts.items():
        escaped = name.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        own = f'{label}="{escaped}"'
        current, described = ([], []), set[str]()  # type: tuple[list[str], list[str]], set[str]
        for line in text.splitlines():
            if line.startswith("# "):
                kind, _, rest = line[2:].partition(" ")
                family = rest.partition(" ")[0]
                if kind not in ("HELP", "TYPE"):
                    continue
                current = families.setdefault(family, ([], []))
                if not any(known.startswith(f"# {kind} ") for known in current[0]):
                    current[0].append(line)
                described.add(family)
            elif line.strip():
                current[1].append(_labelled(line, own))
    return "".join(f"{line}\n" for head, samples in families.values() for line in (*head, *samples))


def _labelled(line: str, label: str) -> str:
    """Return a sample with one label more."""
    place = min((n for n in (line.find("{"), line.find(" ")) if n >= 0), default=len(line))
    if line[place : place + 1] == "{":
        after = line[place + 1 :]
        return f"{line[:place]}{{{label}{'' if after.startswith('}') else ','}{after}"
    return f"{line[:place]}{{{label}}}{line[place:]}"
