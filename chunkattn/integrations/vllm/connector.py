"""`ChunkConnector`: vLLM's KV connector for chunked prompts.

A chunk's isolated K/V is what the ordinary prompt prefix + chunk computes. The connector saves it by content, and loads it into
the blocks of prefix + chunks + question with its keys moved to where the question must see them. vLLM then computes the
question alone, with its own causal kernels. `requests.py` says which requests a client sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, KVConnectorTransferResults

from chunkattn.integrations.vllm.metrics import ConnectorPromMetrics, ConnectorStats
from chunkattn.integrations.vllm.options import ConnectorOptions
from chunkattn.integrations.vllm.scheduler_side import SchedulerSide
from chunkattn.integrations.vllm.step import StepWork
from chunkattn.integrations.vllm.support import check_engine, check_layers, model_rotation
from chunkattn.integrations.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class ChunkConnector(KVConnectorBase_V1):
    """Connector of one scheduler or one worker. `role` is scheduler or worker.

    Raises:
        UnsupportedError: the model or an option of the engine cannot be served exactly.
        ValueError: an option of the connector is invalid.
    """

    requires_kv_delivery = False  # a lost save is a later miss

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = ConnectorOptions.parse(self._kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        if role == KVConnectorRole.SCHEDULER:
            bytes_per_token = _bytes_per_token(kv_cache_config) * vllm_config.parallel_config.tensor_parallel_size
            self.scheduler_side = SchedulerSide(self._options, self._block_size, bytes_per_token, self._block_ids)
        else:
            self.worker_side = WorkerSide(self._block_size)

    # Scheduler

    def on_new_request(self, request: Request) -> None:
        """Read a new request's parameters."""
        self.scheduler_side.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load, and whether the load is the failing one of a refused request."""
        return self.scheduler_side.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load into the allocated blocks."""
        self.scheduler_side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepWork:
        """Return the step's work for the workers."""
        return self.scheduler_side.build_step(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that ended. Its blocks may be freed."""
        self.scheduler_side.finish(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Drop all stored K/V, for example after a change of the weights."""
        self.scheduler_side.reset()
        return True

    def _block_ids(self, request_id: str) -> list[int]:
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager.get_block_ids(request_id)[0]

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the layers' caches, and the model's rotary embedding."""
        modules = self._vllm_config.compilation_config.static_forward_context
        layers = [(modules[name], cache) for name, cache in kv_caches.items()]
        check_layers(layers, self._vllm_config.model_config.hf_text_config.num_hidden_layers, self._block_size)
        self.worker_side.register(layers, model_rotation(self._options.chunk_position_gap))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Run the step's loads. vLLM calls this before the forward pass of a step with loads."""
        self.worker_side.run_loads(self._get_connector_metadata())

    def wait_for_save(self) -> None:
        """Run the step's saves and evictions, after the forward pass."""
        self.worker_side.run_evictions_and_saves(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report the loads of refused requests as failed: vLLM ends these requests with an error."""
        failed = set(self._get_connector_metadata().failed_loads)
        return KVConnectorTransferResults(finished_recving=failed, failed_recving=failed)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: saves run after the forward pass."""

    # Metrics

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return this side's statistics since the last call."""
        side = self.scheduler_side if self.role == KVConnectorRole.SCHEDULER else self.worker_side
        return side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Return statistics that another process sent."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> ConnectorPromMetrics:
        """Register the connector's Prometheus metrics."""
        return ConnectorPromMetrics(*args)


def _bytes_per_token(kv_cache_config: KVCacheConfig) -> int:
    """Return one rank's K/V bytes of one token."""
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    return len(group.layer_names) * spec.page_size_bytes // spec.block_size
