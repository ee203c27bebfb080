"""The compose file: keys of the specification, names and ports that must agree, and the options of our commands."""

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from chunkattn.cli import app
from chunkattn.config import make_config
from chunkattn.web.middleware import METRICS_PATH
from tests.deploy.test_dashboard import DASHBOARD

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "compose.yaml").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PUBLIC = ROOT / "compose.public.yaml"


class PublicLoader(yaml.SafeLoader):
    """Loader of an override file. A list with the tag `!override` takes the place of the former."""


PublicLoader.add_constructor("!override", yaml.SafeLoader.construct_sequence)
SERVICE = {
    "image": str,
    "build": (str, dict),
    "command": list,
    "environment": list,
    "configs": list,
    "ports": list,
    "volumes": list,
    "depends_on": list,
    "stop_grace_period": str,
    "restart": str,
}
"""Types of a service's keys in use, from the Compose Specification."""


def filled(text, **variables):
    """Return a text with its variables replaced, as compose does. Of the operators, it has `:-` and `:?`."""

    def value(found):
        name, operator, other = found.groups()
        if operator == ":?" and not variables.get(name):
            raise ValueError(f"required variable {name} is missing a value: {other}")
        return variables.get(name) or other or ""

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", value, text)


def read(**variables):
    return yaml.safe_load(filled(TEXT, **variables))


FILE = read()
SERVICES = FILE["services"]
CONFIGS = {name: yaml.safe_load(own["content"]) for name, own in FILE["configs"].items()}


def published(name):
    """Address, port of the host and port of the container of a service's only port."""
    (port,) = SERVICES[name]["ports"]
    address, outside, inside = port.split(":")
    return address, int(outside), int(inside)


def target(service, source):
    (found,) = [entry["target"] for entry in SERVICES[service]["configs"] if entry["source"] == source]
    return found


def parsed(monkeypatch, name, **variables):
    """Return what a `chunkattn` command of a service would start."""
    taken = {}
    monkeypatch.setattr("chunkattn.server.run.serve", lambda engine, server: taken.update(engine=engine, server=server))
    monkeypatch.setattr(
        "chunkattn.gateway.run.route", lambda urls, gateway, server: taken.update(urls=urls, gateway=gateway, server=server)
    )
    service = read(**variables)["services"][name]
    environment = dict.fromkeys(("CHUNKATTN_MODEL", "CHUNKATTN_API_KEY", "CHUNKATTN_METRICS_KEY"))
    for entry in service.get("environment", []):
        key, is_given, value = entry.partition("=")
        environment[key] = value if is_given else variables.get(key)
    result = CliRunner().invoke(app, service["command"], env=environment)
    assert result.exit_code == 0, result.output
    return taken


def test_keys_are_those_of_the_specification():
    assert FILE.keys() == {"name", "services", "volumes", "configs"}
    for service in SERVICES.values():
        assert service.keys() <= SERVICE.keys()
        assert all(isinstance(value, SERVICE[key]) for key, value in service.items())
        assert set(service.get("depends_on", ())) <= SERVICES.keys()
        assert service["restart"] in ("no", "always", "on-failure", "unless-stopped")
        assert all(re.fullmatch(r"\w+(=.*)?", entry) for entry in service.get("environment", ()))
        assert {entry["source"] for entry in service.get("configs", ())} <= FILE["configs"].keys()
        named = [entry.split(":")[0] for entry in service.get("volumes", ())]
        assert {name for name in named if not name.startswith(".")} <= FILE["volumes"].keys()
        assert all((ROOT / name).exists() for name in named if name.startswith("."))


def test_only_this_machine_reaches_the_ports():
    assert {name: published(name)[0] for name in SERVICES if "ports" in SERVICES[name]} == dict.fromkeys(
        ("gateway", "prometheus", "grafana"), "127.0.0.1"
    )
    assert read(CHUNKATTN_BIND="0.0.0.0") == FILE


def test_other_machines_reach_the_gateway_with_keys_alone():
    text, keys = PUBLIC.read_text(encoding="utf-8"), {"CHUNKATTN_API_KEY": "a", "CHUNKATTN_METRICS_KEY": "m"}
    for name in keys:
        for value in ({}, {name: ""}):
            with pytest.raises(ValueError, match=f"{name} is missing"):
                filled(text, **{**{key: "k" for key in keys if key != name}, **value})
    for bind, address in ({}, "0.0.0.0"), ({"CHUNKATTN_BIND": "10.0.0.1"}, "10.0.0.1"):
        opened = yaml.load(filled(text, **keys, **bind), PublicLoader)
        assert opened == {
            "services": {"gateway": {"environment": [f"{k}={v}" for k, v in keys.items()], "ports": [f"{address}:8000:8000"]}}
        }


@pytest.mark.parametrize("variables", [{}, {"CHUNKATTN_MODEL": "a/b", "CHUNKATTN_API_KEY": "k", "CHUNKATTN_METRICS_KEY": "m"}])
def test_the_commands_are_started_with_valid_options(variables, monkeypatch):
    server, gateway = (parsed(monkeypatch, name, **variables) for name in ("server", "gateway"))
    make_config(server["engine"].pop("model"), server["engine"])
    assert server["server"].report_documents
    assert gateway["gateway"].resolve
    (url,) = gateway["urls"]
    assert (urlsplit(url).hostname, urlsplit(url).port) == ("server", server["server"].port)
    assert published("gateway")[2] == gateway["server"].port
    assert server["server"].host == gateway["server"].host == "0.0.0.0"
    assert gateway["server"].api_key == variables.get("CHUNKATTN_API_KEY")
    config = yaml.safe_load(read(**variables)["configs"]["prometheus"]["content"])
    assert config["scrape_configs"][0]["authorization"] == {"credentials": gateway["server"].metrics_key}
    for name, own in (("server", server), ("gateway", gateway)):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= own["server"].drain_timeout_s + 10


def test_what_is_kept_lies_in_a_volume_that_the_image_owns(monkeypatch):
    """A new volume takes the owner of the image's folder; elsewhere it would belong to root."""
    (folder,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    for name in ("server", "gateway"):
        assert SERVICES[name]["volumes"][0].partition(":")[2] == folder
        assert SERVICES[name]["image"] == SERVICES["server"]["image"]
    assert SERVICES["server"]["build"] == "."
    assert str(Path(parsed(monkeypatch, "gateway")["gateway"].document_store).parent) == folder
    assert Path(parsed(monkeypatch, "server")["engine"]["kv_store"]).parent == Path(folder)
    assert SERVICES["server"]["volumes"] != SERVICES["gateway"]["volumes"]


def test_prometheus_asks_the_gateway(monkeypatch):
    (job,) = CONFIGS["prometheus"]["scrape_configs"]
    assert job["metrics_path"] == METRICS_PATH
    ((host_and_port,),) = [entry["targets"] for entry in job["static_configs"]]
    assert host_and_port == f"gateway:{parsed(monkeypatch, 'gateway')['server'].port}"
    assert target("prometheus", "prometheus") == "/etc/prometheus/prometheus.yml"


def test_grafana_shows_the_dashboard_over_prometheus():
    (source,) = CONFIGS["datasource"]["datasources"]
    assert source["url"] == f"http://prometheus:{published('prometheus')[2]}"
    assert source["isDefault"]
    (variable,) = [entry for entry in DASHBOARD["templating"]["list"] if entry["type"] == "datasource"]
    assert source["type"] == variable["query"] == "prometheus"
    for name in ("datasource", "dashboards"):
        assert CONFIGS[name]["apiVersion"] == 1
        assert target("grafana", name).startswith(f"/etc/grafana/provisioning/{name.rstrip('s')}s/")
    (provider,) = CONFIGS["dashboards"]["providers"]
    folder, mounted, mode = SERVICES["grafana"]["volumes"][0].split(":")
    assert (provider["type"], provider["options"]["path"], mode) == ("file", mounted, "ro")
    home = dict(entry.split("=") for entry in SERVICES["grafana"]["environment"])["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads((ROOT / folder / Path(home).relative_to(mounted)).read_text()) == DASHBOARD
