"""The Kubernetes manifests: schemas of Kubernetes, names that must agree, and the options of our commands."""

import json
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from chunkattn.cli import app
from chunkattn.config import make_config
from chunkattn.errors import ConfigError
from chunkattn.integrations.vllm.serve import chunk_arguments
from chunkattn.web.keys import Keys
from chunkattn.web.paths import OPEN_PATHS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
VERSION = "1.30"
"""Release of Kubernetes whose schemas the manifests are checked with, the oldest that they are meant for."""


def read(file):
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


@pytest.fixture(scope="module", params=FILES, ids=lambda file: file.stem)
def manifest(request):
    return read(request.param)


def of_kind(manifest, *kinds):
    return [entry for entry in manifest if entry["kind"] in kinds]


def workloads(manifest):
    """StatefulSet of the servers and Deployment of the gateway, by component."""
    found = of_kind(manifest, "StatefulSet", "Deployment")
    by_component = {labels(entry)["app.kubernetes.io/component"]: entry for entry in found}
    assert len(by_component) == len(found) == 2
    return by_component


def labels(workload):
    return workload["spec"]["template"]["metadata"]["labels"]


def pod(workload):
    return workload["spec"]["template"]["spec"]


def container(workload):
    (only,) = pod(workload)["containers"]
    return only


def ports(workload):
    return {entry["name"]: entry["containerPort"] for entry in container(workload)["ports"]}


def matched(manifest, selector):
    """Components of the pods that a selector matches."""
    assert selector
    return {name for name, entry in workloads(manifest).items() if selector.items() <= labels(entry).items()}


def secret_of(manifest):
    (secret,) = of_kind(manifest, "Secret")
    return secret


def environment(manifest, workload, secret):
    """Variables of a container, those of the Secret with the given values."""
    made = {}
    for entry in container(workload).get("env", []):
        if "value" in entry:
            made[entry["name"]] = entry["value"]
        else:
            reference = entry["valueFrom"]["secretKeyRef"]
            assert reference["name"] == secret_of(manifest)["metadata"]["name"]
            made[entry["name"]] = secret[reference["key"]]
    return made


def parsed(monkeypatch, manifest, workload, secret):
    """Return the parameters of a `chunkattn` command, parsed from the arguments and variables of its container."""
    taken = {}
    monkeypatch.setattr("chunkattn.server.run.serve", lambda engine, server: taken.update(engine=engine, server=server))
    monkeypatch.setattr(
        "chunkattn.gateway.run.route", lambda urls, gateway, server: taken.update(urls=urls, gateway=gateway, server=server)
    )
    for name in [name for name in os.environ if name.startswith("CHUNKATTN_")]:
        monkeypatch.delenv(name)
    result = CliRunner().invoke(app, container(workload)["args"], env=environment(manifest, workload, secret))
    return result, taken


def is_ours(workload):
    return container(workload)["image"].partition(":")[0] == "chunkattn"


def mounts(workload):
    return {entry["name"]: entry["mountPath"] for entry in container(workload)["volumeMounts"]}


SECRET = {"api-keys": "anna:key-of-anna", "replica-key": "key-of-the-gateway", "metrics-key": "key-of-prometheus"}


def test_there_are_manifests():
    assert [file.stem for file in FILES] == ["chunkattn", "vllm"]


def test_schemas(manifest):
    for entry in manifest:
        kubernetes_validate.validate(entry, VERSION, strict=True)
    names = [(entry["kind"], entry["metadata"]["name"]) for entry in manifest]
    assert len(set(names)) == len(names)


def test_both_files_can_be_applied_to_one_namespace():
    names = [{(entry["kind"], entry["metadata"]["name"]) for entry in read(file)} for file in FILES]
    assert not set.intersection(*names)


def test_the_gateway_is_started_with_valid_options(manifest, monkeypatch):
    gateway = workloads(manifest)["gateway"]
    result, taken = parsed(monkeypatch, manifest, gateway, SECRET)
    assert result.exit_code == 0, result.output
    (url,) = taken["urls"]
    assert taken["gateway"].resolve
    (service,) = [s for s in of_kind(manifest, "Service") if s["metadata"]["name"] == urlsplit(url).hostname]
    assert service["spec"]["clusterIP"] == "None"
    servers = workloads(manifest)["server"]
    assert urlsplit(url).port == ports(servers)["http"]  # a headless service translates no ports
    assert ports(gateway) == {"http": taken["server"].port}
    assert taken["server"].host == "0.0.0.0"
    assert taken["server"].metrics_key == SECRET["metrics-key"]


def test_our_servers_are_started_with_valid_options(monkeypatch):
    manifest = read(FILES[0])
    both = workloads(manifest)
    result, taken = parsed(monkeypatch, manifest, both["server"], SECRET)
    assert result.exit_code == 0, result.output
    make_config(taken["engine"].pop("model"), taken["engine"])
    server = taken["server"]
    assert server.report_documents
    assert server.host == "0.0.0.0"
    assert ports(both["server"]) == {"http": server.port}
    gateway = parsed(monkeypatch, manifest, both["gateway"], SECRET)[1]
    assert server.api_key == gateway["gateway"].replica_key == SECRET["replica-key"]
    assert server.api_key_file == gateway["server"].api_key_file
    assert server.metrics_key is None  # the gateway reads the servers' metrics with its replica key


def test_vllm_is_started_with_options_of_the_guide():
    server = workloads(read(FILES[1]))["server"]
    given, rest = chunk_arguments().parse_known_args(container(server)["args"])
    assert container(server)["command"][1:] == ["-m", "chunkattn.integrations.vllm.serve"]
    assert given.max_store_bytes == 8 << 30
    model, *flags = rest
    assert not model.startswith("-")
    guide = (ROOT / "docs" / "guides" / "vllm.md").read_text(encoding="utf-8")
    address = {"--host=0.0.0.0", f"--port={ports(server)['http']}"}
    assert address <= set(flags)
    assert all(flag in guide for flag in set(flags) - address)


def test_kubernetes_sets_none_of_our_options(manifest):
    """A service named chunkattn would give every pod the variable CHUNKATTN_PORT."""
    for workload in workloads(manifest).values():
        assert pod(workload)["enableServiceLinks"] is False


def test_ports_agree(manifest):
    both = workloads(manifest)
    for service in of_kind(manifest, "Service"):
        (component,) = matched(manifest, service["spec"]["selector"])
        for entry in service["spec"]["ports"]:
            assert entry["port"] == ports(both[component])[entry["targetPort"]]
    for workload in both.values():
        probes = [value for key, value in container(workload).items() if key.endswith("Probe")]
        assert {p["httpGet"]["port"] for p in probes} == set(ports(workload))


def test_probes_ask_routes_without_a_key(manifest):
    for workload in workloads(manifest).values():
        paths = {key: value["httpGet"]["path"] for key, value in container(workload).items() if key.endswith("Probe")}
        if is_ours(workload):
            assert set(paths.values()) <= set(OPEN_PATHS)
            assert paths["livenessProbe"] == "/livez"  # a busy, starting or draining server is alive
            assert paths["readinessProbe"] == "/readyz"
        else:
            assert set(paths.values()) == {"/health"}


def test_selectors_match(manifest):
    for component, workload in workloads(manifest).items():
        assert matched(manifest, workload["spec"]["selector"]["matchLabels"]) == {component}
    services = {entry["metadata"]["name"]: entry["spec"] for entry in of_kind(manifest, "Service")}
    governing = services.pop(workloads(manifest)["server"]["spec"]["serviceName"])
    assert governing["clusterIP"] == "None"
    assert matched(manifest, governing["selector"]) == {"server"}
    (front,) = services.values()
    assert matched(manifest, front["selector"]) == {"gateway"}
    (budget,) = of_kind(manifest, "PodDisruptionBudget")
    assert matched(manifest, budget["spec"]["selector"]["matchLabels"]) == {"server"}


def test_only_the_gateway_reaches_the_servers(manifest):
    (policy,) = of_kind(manifest, "NetworkPolicy")
    assert matched(manifest, policy["spec"]["podSelector"]["matchLabels"]) == {"server"}
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    (rule,) = policy["spec"]["ingress"]
    (source,) = rule["from"]
    assert set(source) == {"podSelector"}
    assert matched(manifest, source["podSelector"]["matchLabels"]) == {"gateway"}
    assert [entry["port"] for entry in rule["ports"]] == list(ports(workloads(manifest)["server"]))


def test_volumes_exist(manifest):
    claims = {entry["metadata"]["name"] for entry in of_kind(manifest, "PersistentVolumeClaim")}
    for workload in workloads(manifest).values():
        volumes = {entry["name"]: entry for entry in pod(workload).get("volumes", [])}
        own = {entry["metadata"]["name"] for entry in workload["spec"].get("volumeClaimTemplates", [])}
        assert set(mounts(workload)) == volumes.keys() | own
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "secret" in volume:
                secret = secret_of(manifest)
                assert volume["secret"]["secretName"] == secret["metadata"]["name"]
                assert {entry["key"] for entry in volume["secret"]["items"]} <= secret["stringData"].keys()


def test_paths_of_options_are_mounted(manifest, monkeypatch):
    for workload in filter(is_ours, workloads(manifest).values()):
        taken = parsed(monkeypatch, manifest, workload, SECRET)[1]
        (keys,) = [entry for entry in pod(workload)["volumes"] if "secret" in entry]
        (item,) = keys["secret"]["items"]
        assert taken["server"].api_key_file == f"{mounts(workload)[keys['name']]}/{item['path']}"
        if (gateway := taken.get("gateway")) is not None:
            (claim,) = [entry["name"] for entry in pod(workload)["volumes"] if "persistentVolumeClaim" in entry]
            assert Path(gateway.document_store).parent == Path(mounts(workload)[claim])
        else:
            (cache,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, flags=re.MULTILINE)
            assert mounts(workload)["cache"] == cache


def test_our_image_is_the_dockerfile(manifest):
    for workload in filter(is_ours, workloads(manifest).values()):
        assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, flags=re.MULTILINE)[0]) == ["chunkattn"]
        assert "command" not in container(workload)
        assert str(pod(workload)["securityContext"]["runAsUser"]) in re.findall(r"^USER (\d+)$", DOCKERFILE, flags=re.MULTILINE)


def test_pods_have_time_to_drain(manifest, monkeypatch):
    for workload in workloads(manifest).values():
        grace = pod(workload)["terminationGracePeriodSeconds"]
        if is_ours(workload):
            assert grace >= parsed(monkeypatch, manifest, workload, SECRET)[1]["server"].drain_timeout_s + 10
        else:
            sleep, seconds = container(workload)["lifecycle"]["preStop"]["exec"]["command"]
            assert sleep == "sleep"
            assert grace >= int(seconds) + 10


def test_one_process_owns_the_document_store(manifest):
    gateway = workloads(manifest)["gateway"]
    assert gateway["spec"]["replicas"] == 1
    assert gateway["spec"]["strategy"] == {"type": "Recreate"}


def test_nothing_starts_without_keys(manifest, monkeypatch, tmp_path):
    secret = secret_of(manifest)["stringData"]
    assert set(secret.values()) == {""}
    assert secret.keys() <= SECRET.keys()
    (tmp_path / "keys").write_text(secret["api-keys"])
    with pytest.raises(ConfigError, match="holds no key"):
        Keys(None, str(tmp_path / "keys"))
    for component, workload in workloads(manifest).items():
        if is_ours(workload) and component == "server":
            result, taken = parsed(monkeypatch, manifest, workload, secret)
            assert result.exit_code == 2, result.output
            assert "CHUNKATTN_API_KEY" in result.output
            assert not taken


def test_containers_have_resources(manifest):
    for workload in workloads(manifest).values():
        resources = container(workload)["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert "memory" in resources["limits"]
