"""The RayService: fields of KubeRay, schemas of its pods, and the application's options."""

import ast
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from chunkattn.integrations.ray import SUPPORTED
from chunkattn.integrations.ray.options import AppOptions, environment
from chunkattn.web.options import ServerConfig

ROOT = Path(__file__).parents[2]
SECRET, SERVICE = yaml.safe_load_all((ROOT / "deploy" / "kuberay" / "rayservice.yaml").read_text(encoding="utf-8"))
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
CONTAINERS = [container for group in GROUPS for container in group["template"]["spec"]["containers"]]
POD = {"rayStartParams": dict, "template": dict}
FIELDS = {
    "service": {"serveConfigV2": str, "rayClusterConfig": dict, "excludeHeadPodFromServeSvc": bool},
    "cluster": {"rayVersion": str, "authOptions": dict, "headGroupSpec": dict, "workerGroupSpecs": list},
    "head": POD,
    "worker": POD | {"groupName": str} | dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), int),
}
"""Names and types of the fields in use, from the API reference of KubeRay, `ray.io/v1`."""


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ("service", SERVICE["spec"]),
        ("cluster", CLUSTER),
        ("head", CLUSTER["headGroupSpec"]),
        *(("worker", group) for group in CLUSTER["workerGroupSpecs"]),
    ],
)
def test_fields_are_those_of_kuberay(fields, given):
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("ray.io/v1", "RayService")
    assert {name: type(value) for name, value in given.items()} == FIELDS[fields]
    assert all(type(value) is str for value in given.get("rayStartParams", {}).values())


def test_schemas_of_secret_and_pods():
    kubernetes_validate.validate(SECRET, "1.30", strict=True)
    for group in GROUPS:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        kubernetes_validate.validate(pod, "1.30", strict=True)


def test_the_application_is_that_of_the_serve_file():
    assert yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8")) == SERVE


def test_idle_connections_are_kept_as_long_as_those_of_the_server():
    assert SERVE["http_options"]["keep_alive_timeout_s"] >= ServerConfig().timeout_keep_alive


def test_the_application_exists_and_takes_its_arguments():
    (application,) = SERVE["applications"]
    module, name = application["import_path"].split(":")
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    assert name in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    options = AppOptions.of(application["args"])
    (workers,) = CLUSTER["workerGroupSpecs"]
    cpus = int(CONTAINERS[1]["resources"]["requests"]["cpu"])
    assert options.replicas * options.ray_actor_options["num_cpus"] <= workers["replicas"] * cpus
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in GROUPS:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > options.graceful_shutdown_timeout_s


def test_every_node_has_the_environment():
    (application,) = SERVE["applications"]
    server = AppOptions.of(application["args"]).server_config
    needed = environment(server.max_body_bytes, request_timeout_s=server.request_timeout_s)
    for container in CONTAINERS:
        assert {entry["name"]: entry["value"] for entry in container["env"]} == needed


def test_every_port_asks_for_a_key_or_a_token():
    """Clients bring a key of the Secret, which every pod that may run the gateway mounts; Ray's own ports ask for a token."""
    server = AppOptions.of(SERVE["applications"][0]["args"]).server_config
    assert CLUSTER["authOptions"] == {"mode": "token"}
    assert SECRET["stringData"] == {"api-keys": ""}
    for group, container in zip(GROUPS, CONTAINERS, strict=True):
        (mount,), (volume,) = container["volumeMounts"], group["template"]["spec"]["volumes"]
        assert volume == {"name": mount["name"], "secret": {"secretName": SECRET["metadata"]["name"]}}
        assert server.api_key_file == f"{mount['mountPath']}/api-keys"


def test_ports_agree():
    for container in CONTAINERS:
        ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
        assert ports["serve"] == SERVE["http_options"]["port"]
        inner = {int(v) for k, v in environment().items() if k.endswith("_PORT")}
        assert not inner & set(ports.values())


def test_the_version_of_ray_is_supported():
    low, high = SUPPORTED
    assert low <= tuple(map(int, CLUSTER["rayVersion"].split(".")[:2])) < high
    assert len({container["image"] for container in CONTAINERS}) == 1
