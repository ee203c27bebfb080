"""An application that everybody could use is refused, and Ray's open ports are told of."""

import logging

import pytest

from chunkattn.errors import ConfigError
from chunkattn.integrations.ray import exposure
from chunkattn.integrations.ray.options import AppOptions
from tests.ray import serve_cluster
from tests.ray.cluster import free_port, wait_for
from tests.ray.conftest import ENGINE, stop

KEYS = {"no key": {}, "key": {"api_key": "x" * 32}, "key file": {"api_key_file": "/etc/keys"}}


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-1", "127.0.0.1", "::1", "localhost", None])
def test_an_open_port_needs_a_key(host, keys, allowed):
    options = AppOptions(server=KEYS[keys], allow_unauthenticated=allowed)
    is_open = host not in ("127.0.0.1", "::1", "localhost", None)
    if is_open and keys == "no key" and not allowed:
        with pytest.raises(ConfigError, match=r"api_key_file, or http_options.host 127.0.0.1, or allow_unauthenticated"):
            exposure.check_http(options.server_config, host, allowed=options.allow_unauthenticated)
    else:
        exposure.check_http(options.server_config, host, allowed=options.allow_unauthenticated)


@pytest.mark.parametrize(
    ("mode", "address", "lines"),
    [(None, "10.0.0.7", 1), ("disabled", "10.0.0.7", 1), ("token", "10.0.0.7", 0), (None, "127.0.0.1", 0)],
)
def test_open_ports_of_ray_are_told_in_one_line(mode, address, lines, monkeypatch, caplog):
    monkeypatch.setenv("RAY_AUTH_MODE", mode or "")
    monkeypatch.setattr(logging.getLogger("chunkattn"), "propagate", True)
    exposure.warn_of_open_ports(address)
    assert len(caplog.messages) == lines
    assert all("RAY_AUTH_TOKEN" in line and address in line for line in caplog.messages)


@pytest.mark.slow
def test_a_cluster_refuses_an_open_port_without_a_key(tmp_path):
    config = serve_cluster.configuration(free_port(), engine=ENGINE, server={})
    config["http_options"]["host"] = "0.0.0.0"
    cluster = serve_cluster.start(tmp_path / "log", config, wait=False)
    try:
        wait_for(lambda: cluster.application().get("status") == "DEPLOY_FAILED", 120, "failed")
        assert "because no API key is set" in cluster.application()["message"]
        assert not cluster.processes.living("engine")
    finally:
        stop(cluster)
        cluster.remove_files()
