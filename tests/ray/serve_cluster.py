"""A Ray cluster of one node on the loopback interface, and the application on it as a user deploys it."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from chunkattn.integrations.ray.options import AppOptions, environment
from tests.ray.cluster import ROOT, Processes, free_port, wait_for
from tests.ray.requests import Service

START_S = 240
APPLICATION = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
"""The configuration that the guide has users deploy."""


def configuration(port: int, **args: Any) -> dict[str, Any]:
    """Return the guide's configuration on the loopback interface, with other `args`."""
    made = json.loads(json.dumps(APPLICATION))
    made["http_options"] |= {"host": "127.0.0.1", "port": port}
    made["applications"][0]["args"] |= args
    return made


@dataclass
class Cluster(Service):
    """The service behind HAProxy, and the cluster's own interface."""

    dashboard: str = ""
    token: str = ""
    folder: Path = Path()

    def deploy(self, config: dict[str, Any]) -> None:
        """Deploy as `serve deploy` does, by the same interface."""
        self._call("PUT", config)

    def application(self, name: str = "chunkattn") -> dict[str, Any]:
        """Return what `serve status` tells of an application."""
        return self._call("GET")["applications"].get(name, {})

    def replicas_of(self, deployment: str) -> set[str]:
        """Return the ids of the replicas of a deployment that run."""
        listed = self.application().get("deployments", {}).get(deployment, {}).get("replicas", [])
        return {r["replica_id"] for r in listed if r["state"] == "RUNNING"}

    def wait_until_running(self, seconds: float = START_S) -> None:
        """Wait until the application runs and every replica takes requests."""

        def is_running() -> bool:
            state = self.application()
            assert state.get("status") != "DEPLOY_FAILED", state["message"]
            return state.get("status") == "RUNNING" and self.is_whole()

        wait_for(is_running, seconds, "running")

    def is_whole(self) -> bool:
        """Return whether every engine that Ray runs takes requests."""
        try:
            answer = self.ask("/health")
            states = answer.json["replicas"]
        except (OSError, ValueError, KeyError):
            return False
        return answer.status == 200 and all(s["ready"] for s in states.values()) and set(states) == self.replicas_of("Engine")

    def remove_files(self) -> None:
        """Remove the files of Ray."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _call(self, method: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.dashboard}/api/serve/applications/", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method}: {error.code} {error.read().decode()}") from None
        return json.loads(text) if text else None


def start(log: Path, config: dict[str, Any], *, wait: bool = True) -> Cluster:
    """Start a cluster and deploy a configuration with the guide's commands.

    Args:
        log: file of the cluster's output.
        config: the configuration.
        wait: whether to wait until the application serves.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: the paths of sockets are limited
    args, port = AppOptions.of(config["applications"][0]["args"]), config["http_options"]["port"]
    first = 20_000 + secrets.randbelow(150) * 64
    token = secrets.token_hex(32)
    dashboard = f"http://127.0.0.1:{free_port()}"
    server = args.server_config
    given = {"request_timeout_s": server.request_timeout_s, "run_folder": str(folder / "haproxy"), "first_port": first}
    variables = environment(server.max_body_bytes, **given)
    variables |= {"RAY_AUTH_TOKEN": token, "RAY_memory_monitor_refresh_ms": "0"}
    variables |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the node's address is 127.0.0.1
    options = {
        "node-ip-address": "127.0.0.1",
        "port": free_port(),
        "num-cpus": 8,
        "object-store-memory": 80 << 20,
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard.rpartition(":")[2],
        "dashboard-agent-listen-port": free_port(),
        "temp-dir": folder,
    }
    command = Path(sys.executable).parent
    flags = [f"--{name}={value}" for name, value in options.items()]
    processes = Processes([str(command / "ray"), "start", "--head", "--block", *flags], log, variables)
    cluster = Cluster(f"http://127.0.0.1:{port}", processes, dashboard=dashboard, token=token, folder=folder)
    try:
        processes.wait_for_line("Ray runtime started", START_S)
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        deploy = [str(command / "serve"), "deploy", "--address", dashboard, str(file)]
        _run_until_it_works(deploy, processes)
        if wait:
            cluster.wait_until_running()
    except BaseException:
        processes.kill()
        cluster.remove_files()
        raise
    return cluster


def _run_until_it_works(command: list[str], processes: Processes) -> None:
    """Run a command again while it fails and the cluster lives, which may not answer its own processes in time at first."""

    def works() -> bool:
        assert processes.main.poll() is None, "the cluster has ended"
        done = subprocess.run(command, env=processes.variables, cwd=ROOT, capture_output=True, text=True, timeout=START_S)
        outputs.append(done.stdout + done.stderr)
        return done.returncode == 0

    outputs: list[str] = []
    try:
        wait_for(works, START_S, "deployed")
    except AssertionError:
        raise AssertionError(f"{' '.join(command)} failed {len(outputs)} times:\n{''.join(outputs[-1:])}") from None
