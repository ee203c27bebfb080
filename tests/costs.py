"""Plugin: `TEST_COSTS=1 make test` prints the compilations and the CPU time of each test file."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator

import jax
import pytest

SECONDS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
EVENTS = {"/jax/compilation_cache/cache_hits": "hits", "/jax/compilation_cache/cache_misses": "misses"}
COLUMNS = ("cpu", "programs", "hits", "misses", "trace", "lower", "compile")


def cpu_seconds() -> float:
    """CPU time of this process and of the child processes that it has waited for."""
    return sum(os.times()[:4])


class Costs:
    """Sums costs by test file; an xdist worker hands its sums to the controller."""

    def __init__(self) -> None:
        self.sums: dict[str, Counter[str]] = defaultdict(Counter)
        self.file = "import"
        self.sums[self.file]["cpu"] += cpu_seconds()
        jax.monitoring.register_event_duration_secs_listener(self._duration)
        jax.monitoring.register_event_listener(self._event)

    def _duration(self, event: str, seconds: float, **_: object) -> None:
        if name := SECONDS.get(event):
            self.sums[self.file][name] += seconds
            self.sums[self.file]["programs"] += name == "compile"

    def _event(self, event: str, **_: object) -> None:
        if name := EVENTS.get(event):
            self.sums[self.file][name] += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.file, start = item.nodeid.partition("::")[0], cpu_seconds()
        done = yield
        self.sums[self.file]["cpu"] += cpu_seconds() - start
        return done

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = {file: dict(sums) for file, sums in self.sums.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        for file, sums in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self.sums[file].update(sums)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total: Counter[str] = Counter()
        for sums in self.sums.values():
            total.update(sums)
        terminalreporter.section("costs: CPU seconds, programs, and seconds of tracing, lowering and compiling")
        terminalreporter.write_line(" ".join(f"{name:>8}" for name in COLUMNS))
        for file, sums in [*sorted(self.sums.items(), key=lambda pair: -pair[1]["cpu"]), ("total", total)]:
            terminalreporter.write_line(" ".join(f"{sums[name]:8.0f}" for name in COLUMNS) + f" {file}")
