"""Replicas on one machine: `chunkattn serve --replicas N` starts Ray on the loopback interface and stops it again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from chunkattn.adapter_salt import folders_of
from chunkattn.config import make_config
from chunkattn.distributions import version_of
from chunkattn.errors import ConfigError, EngineDeadError
from chunkattn.gguf_names import split_quant
from chunkattn.integrations.ray import check_ray
from chunkattn.integrations.ray.keys import reload_everywhere
from chunkattn.integrations.ray.logs import LogServer
from chunkattn.integrations.ray.options import ELSEWHERE, AppOptions, environment
from chunkattn.models.loader import open_files
from chunkattn.web.listening import listen, run, set_up_logs, url_of
from chunkattn.web.options import ServerConfig

logger = logging.getLogger(__name__)

APP = "chunkattn"
"""Name of the application."""
_OBJECT_STORE_BYTES = 80 << 20
"""Size of Ray's object store, which the application does not use; about the smallest that Ray accepts."""
_DEFAULT_KV_BYTES = 1 << 30
"""Size of the KV pool of one engine on a CPU by default."""
_KV_SHARE = 0.5
"""Share of the machine's memory that the KV pools of all replicas may take by default."""
_DEFAULT_STATE_BYTES = 2 << 30
"""Size of the states of recurrent layers of one engine on a CPU at most by default."""
_STATE_SHARE = 0.25
"""Share of the machine's memory that these states of all replicas may take by default."""
_ACCELERATORS = {"GPU": ("jax-cuda12-plugin", "jax-cuda13-plugin"), "TPU": ("libtpu",)}
"""Resources of Ray, and the distributions with which JAX uses them."""
_WATCH_S, _SILENCE_S = 5.0, 60.0
_SHUTDOWN_S = 75.0
_LAST_S = 5.0


def serve_replicas(options: Mapping[str, Any], config: ServerConfig, count: int) -> None:
    """Serve `count` replicas until a signal stops the process. Replicas and gateway are started again when they die.

    Args:
        options: arguments of `AsyncLLM`, including the model; `kv_cache_memory_bytes` and `state_cache_memory_bytes` are the
            sizes for each replica.
        config: options of the server.
        count: number of replicas.

    Raises:
        ConfigError: an option is invalid, Ray is missing, or the address cannot be bound.
        ModelError: the model cannot be found or read, or is not supported.
        EngineDeadError: a replica failed at its start, or Ray died.
    """
    check_ray()
    engine_config = make_config(options.get("model"), {k: v for k, v in options.items() if k != "model"})
    with listen(config) as listening:  # tells whether the gateway can listen
        config, url = replace(config, port=listening.getsockname()[1]), url_of(listening)
    set_up_logs(config.log_format)
    open_files(engine_config)  # tells in seconds whether the model can be read
    cpus = max(os.cpu_count() or 1, count)
    with tempfile.TemporaryDirectory(prefix="chunkattn-ray-", ignore_cleanup_errors=True) as folder:
        _set_environment(config, folder)
        log = LogServer(folder)
        import ray

        try:
            _stop_at_signals()
            _start_ray(cpus)
            _stop_at_signals()  # Ray has set a handler of its own
            resources = _resources(count, cpus, ray.cluster_resources())
            engine = {
                **_absolute(options),
                "kv_cache_memory_bytes": _kv_bytes(engine_config.kv_cache_memory_bytes, count, resources),
                "state_cache_memory_bytes": _state_bytes(engine_config.state_cache_memory_bytes, count, resources),
            }
            server = {n: v for n, v in asdict(config).items() if n not in ELSEWHERE}
            gateway = {"document_store": str(Path(config.document_store or f"{folder}/documents").resolve())}
            application = AppOptions(
                engine=engine, server=_absolute(server), gateway=gateway, replicas=count, ray_actor_options=resources
            )
            _serve(application, config, url)
        except _Stopped:
            logger.warning("stopped before the replicas were ready")
        finally:
            ray.shutdown()
            log.close()


def _start_ray(cpus: int) -> None:
    """Start Ray on this machine alone.

    Raises:
        EngineDeadError: it does not start.
    """
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level="error",
            log_to_driver=False,
        )
    except Exception as error:  # Ray raises many classes, and `Exception` itself where it has waited too long
        text = str(error).partition("\n")[0]
        raise EngineDeadError(f"Ray does not start: {text}; a busy machine may need another try") from None


class _Stopped(BaseException):
    """A signal has come while the replicas start."""


def _stop_at_signals() -> None:
    def stop(number: int, _: Any) -> None:
        raise _Stopped

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _serve(options: AppOptions, config: ServerConfig, url: str) -> None:
    """Deploy the application, wait for a signal, drain and stop."""
    from ray import serve

    from chunkattn.integrations.ray.application import local_application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")
    try:
        serve.run(local_application(options, config), name=APP, route_prefix=None)
    except RuntimeError as error:
        raise EngineDeadError(f"the replicas did not start: {_reason() or error}") from None
    run(_watch(config, url))


def _reason() -> str:
    """Return why the engines did not start, if they have told so."""
    from ray import serve

    from chunkattn.integrations.ray.replica import NOT_STARTED

    application = serve.status().applications.get(APP)
    messages = [] if application is None else [deployment.message for deployment in application.deployments.values()]
    return next((message.rpartition(NOT_STARTED)[2].strip() for message in messages if NOT_STARTED in message), "")


async def _watch(config: ServerConfig, url: str) -> None:
    """Print that the application is ready, and wait for its end.

    Raises:
        EngineDeadError: Ray or the gateway has not answered for a minute.
    """
    from ray import serve

    loop, ends = asyncio.get_running_loop(), [asyncio.Event(), asyncio.Event()]

    def note() -> None:
        next((e for e in ends if not e.is_set()), ends[-1]).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note)
    gateway = serve.get_deployment_handle("Gateway", APP)
    engines = serve.get_deployment_handle("Engine", APP)
    loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(reload_everywhere(gateway, engines)))
    stopping, forced = (asyncio.ensure_future(e.wait()) for e in ends)
    watching = asyncio.ensure_future(_watch_gateway(gateway, engines, url))
    await asyncio.wait({stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
    watching.cancel()
    if not stopping.done():
        watching.result()  # raises
    ending = asyncio.ensure_future(_end(gateway, config))
    await asyncio.wait({ending, forced}, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()


async def _watch_gateway(gateway: Any, engines: Any, url: str) -> None:
    heard, announced = time.monotonic(), False
    while True:
        try:
            await asyncio.wait_for(gateway.check_health.remote(), _SILENCE_S)
            heard = time.monotonic()
            if not announced:
                names = await engines.broadcast("ready_name").results_async(timeout_s=_WATCH_S)
                if announced := all(names):
                    print(f"{names[0]} is ready at {url}", flush=True)
        except Exception as error:
            if time.monotonic() - heard > _SILENCE_S:
                raise EngineDeadError(f"the gateway has not answered for {_SILENCE_S:g} s: {error!r}") from None
        await asyncio.sleep(_WATCH_S if announced else 0.1)


async def _end(gateway: Any, config: ServerConfig) -> None:
    """Let the gateway finish the running requests, and stop the application."""
    from ray import serve

    with suppress(Exception):  # the gateway has died, or its requests are not over
        await asyncio.wait_for(gateway.drain.remote(), config.drain_timeout_s + _LAST_S)
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.to_thread(serve.delete, APP), _SHUTDOWN_S)


def _set_environment(config: ServerConfig, folder: str) -> None:
    """Set the variables that Ray reads when it is imported. Its processes inherit them."""
    os.environ.update(environment(config.max_body_bytes, haproxy=False))
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the node's address is 127.0.0.1
        "RAY_AUTH_TOKEN": token_hex(32),  # for the ports of replicas, which Ray opens on all interfaces
        "RAY_TMPDIR": folder,
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else processes without an accelerator see none
        "RAY_memory_monitor_refresh_ms": "0",  # it kills replicas when other programs fill the memory
    }


def _resources(count: int, cpus: int, cluster: Mapping[str, float]) -> dict[str, Any]:
    """Return the resources of one replica: its share of the processors, and an accelerator if JAX uses one here.

    Raises:
        ConfigError: there are fewer accelerators than replicas.
    """
    resources: dict[str, Any] = {"num_cpus": max(1, cpus // count)}
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return resources
    for kind, distributions in _ACCELERATORS.items():
        devices = int(cluster.get(kind, 0))
        if not devices or version_of(*distributions) is None:
            continue
        if devices < count:
            text = f"{count} replicas need {count} {kind}s, this machine has {devices}"
            raise ConfigError(f"{text}; lower --replicas, or set JAX_PLATFORMS=cpu")
        return resources | ({"num_gpus": 1} if kind == "GPU" else {"resources": {kind: devices // count}})
    return resources


def _kv_bytes(size: int | None, count: int, resources: Mapping[str, Any]) -> int | None:
    """Return the size of the KV pool of one replica; None for the engine's default, the free memory of its accelerator.

    Raises:
        ConfigError: the pools do not fit the machine.
    """
    if resources.keys() - {"num_cpus"}:
        return size
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size is None:
        return min(_DEFAULT_KV_BYTES, int(most * _KV_SHARE / count))
    return _checked("kv_cache_memory_bytes", size, count, most)


def _state_bytes(size: int | None, count: int, resources: Mapping[str, Any]) -> int | None:
    """Return the size of the states of recurrent layers of one replica; None for the engine's default.

    Raises:
        ConfigError: the states do not fit the machine.
    """
    if resources.keys() - {"num_cpus"}:
        return size
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size is None:
        share = int(most * _STATE_SHARE / count)
        return None if share >= _DEFAULT_STATE_BYTES else share
    return _checked("state_cache_memory_bytes", size, count, most)


def _checked(name: str, size: int, count: int, most: int) -> int:
    """Return the size that an option gives each of `count` replicas.

    Raises:
        ConfigError: all together exceed the machine's `most` bytes.
    """
    if size * count > most:
        text = f"{count} replicas with {name} {size} each need {size * count} bytes"
        raise ConfigError(f"{text}, this machine has {most}; lower one of the two")
    return size


def _absolute(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with absolute paths: replicas may run in another folder. A model may also be a hub id."""
    resolved = dict(options)
    for name in ("model", "tokenizer", "adapter", "generation_config", "chunk_calibration", "kv_store", "api_key_file"):
        if not isinstance(resolved.get(name), (str, os.PathLike)):
            continue
        path = Path(named := os.fspath(resolved[name])).expanduser()
        folder, quant = split_quant(named)
        if path.exists() or name in ("kv_store", "api_key_file"):
            resolved[name] = str(path.resolve())
        elif quant and (place := Path(folder).expanduser()).exists():
            resolved[name] = f"{place.resolve()}:{quant}"
    if modules := folders_of(tuple(resolved.get("lora_modules") or ())):
        places = {name: Path(folder).expanduser() for name, folder in modules.items()}
        resolved["lora_modules"] = [
            f"{name}={path.resolve() if path.exists() else modules[name]}" for name, path in places.items()
        ]
    return resolved
