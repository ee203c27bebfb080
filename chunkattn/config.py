"""`EngineConfig`: options of the engine, with their validation."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from chunkattn.adapter_salt import folders_of
from chunkattn.calibration import Calibration, calibration_of, checked
from chunkattn.errors import ConfigError
from chunkattn.options import options_of, take_paths

GPU_SHARE = 0.92
"""Default of `gpu_memory_utilization`, that of vLLM."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
GENERATION_AUTO, GENERATION_NONE = "auto", ("none", "vllm")
"""Values of `generation_config`: the model's sampling defaults, or none; vLLM writes "vllm" for none."""
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": DTYPES,
    "weights": ("auto", "packed", "dequantized"),
    "activations": ("int16", "int8"),
    "quantization": (None, "int8"),
    "decide_method": ("auto", "letters", "likelihood", "separate", "head"),
    "kv_cache_dtype": KV_CACHE_DTYPES,
}
"""Values of the options that have few."""

_DOCUMENT = "{document}"
_PLACEHOLDER = re.compile(r"\{\w+\}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine, under vLLM's names where vLLM has one.

    Attributes:
        model: local Hugging Face folder, GGUF file or hub id; `MODEL:QUANT`, such as `owner/name:Q4_K_M`, is one GGUF file of a
            folder or hub id. By default the bundled demo model.
        tokenizer: folder, GGUF file or hub id of the tokenizer; by default the model's own.
        revision: revision of the model on the hub.
        skip_tokenizer_init: load no tokenizer. Prompts must then be token ids.
        generation_config: sampling defaults of requests that leave a parameter out: `"auto"` takes those of the model
            (`generation_config.json`, or the metadata of a GGUF file), `"none"` takes those of `SamplingParams`, and a folder
            takes those of its `generation_config.json`.
        dtype: dtype of weights, activations and KV: `"auto"` (the checkpoint's own), `"float32"`, `"bfloat16"` or `"float16"`.
        weights: `"packed"` multiplies the blocks of a quantised checkpoint as they are, on CPUs; `"dequantized"` casts every
            weight to `dtype` at the load. `"auto"` packs what it can on CPUs, unless `dtype` is float32.
        activations: integers that the rows become in products with packed weights: `"int16"`, or `"int8"`, which is faster for
            many rows and less exact.
        quantization: `"int8"` rounds the matrices of an unquantised checkpoint to packed blocks of 8 bits at the load, on CPUs.
        adapter: folder or hub id of a LoRA adapter that PEFT saved; the load adds its products to the weights in float32 and
            rounds once. Matrices that it touches are not packed.
        lora_modules: adapters that requests choose by name, each `name=PLACE`, a folder or hub id; servers take the name as
            `model`.
        enable_lora: let calls bring adapters of their own (`lora_request`). Every matrix then has room for factors.
        max_loras: adapters that the engine holds at once with `enable_lora`, those of `lora_modules` included. Requests of more
            wait their turn, and later requests behind them.
        max_lora_rank: largest rank of adapters by request; smaller ones cost as much.
        attention_backend: name of a registered attention backend: `"cpu"`, `"pallas_gpu"`, `"pallas_tpu"`, `"xla"`,
            `"reference"` or another one; `"auto"` chooses by platform, and compares a kernel for GPUs or TPUs with `xla` first.
        max_logprobs: highest `logprobs` or `prompt_logprobs` that a request may ask for.
        seed: seed of requests without a seed.
        tensor_parallel_size: number of devices that share the model: its heads, its MLP and its KV pool are divided over the
            first devices that JAX sees, on all hosts together.
        num_hosts: number of machines whose devices share the model, an equal number on each. Every one runs
            `chunkattn serve` with the same options and its own `host_index`.
        host_index: number of this machine. Machine 0 schedules and serves; the others compute what it tells them.
        coordinator: address `HOST:PORT` of machine 0, where the others find it.
        group_secret_file: file of the secret that the machines share, the same on all of them; the variable
            `CHUNKATTN_GROUP_SECRET` may hold the secret instead. Needed unless the coordinator is a loopback address.
        enable_chunk_aware: split text and token id prompts at `chunk_separator`.
        chunk_separator: text between prefix, chunks and question.
        document_template: text of a document's chunk, with `{document}` once where the document's text goes. The engine adds it
            to documents given as text, and to nothing else. By default the checkpoint's own (`document_template` in
            `tokenizer_config.json`), or else `"Document: {document}"` and a blank line.
        chat_template: chat template in place of the tokenizer's own: a file, the name of one of the tokenizer's templates, or
            the template itself.
        rerank_template: template of reranks that name none: `"generic"`, `"qwen3-reranker"`, `"mxbai-rerank-v2"`, `"plain"`, or
            a text with `{query}` and `{document}`. By default the checkpoint's own, or else `"generic"`.
        special_tokens_in_documents: let the text of a special token become that token in chunks, documents, user and tool
            messages and rerank texts. The default is safe for untrusted documents.
        special_tokens_in_prompts: let the text of a special token become that token in prefixes, questions, plain prompts,
            other messages and scoring texts.
        position_strategy: strategy of position ids, `"shared"` or `"offset"`.
        chunk_position_gap: positions left free between the prefix and every chunk, under `shared` positions; by default what
            the calibration file says, else 0. Scoring has no gap.
        chunk_temperature: divisor of the attention scores between a question and its chunks; by default what the calibration
            file says, else 1.
        chunk_scale: factor of the chunks' log-sum-exp in a question's attention; by default what the calibration file says,
            else 1.
        chunk_calibration: file of the three values and of the calibration of labels, as `chunkattn calibrate` writes it. By
            default the file `chunk_calibration.json` in the model's folder or on the hub; beside a GGUF file it applies unless
            its field `model` names another file. `"off"` ignores it.
        multi_item_scoring_delimiter: token id that separates query and items in packed scoring sequences.
        max_model_len: limit on the highest position id + 1; by default the checkpoint's own.
        max_chunk_len: limit on the tokens of one chunk.
        max_chunks_per_prompt: limit on the chunks of one prompt, including empty chunks.
        score_algorithm: default algorithm of scoring requests; `"auto"` takes the algorithm predicted to be cheapest.
        decide_method: default method of decisions: `"head"`, `"letters"`, `"likelihood"` or `"separate"`; `"auto"` asks the
            model built-in questions once, at a server's start or before the first decision, and keeps the verdict.
        max_items_per_request: limit on the items of one scoring request, over all of its queries, and on the documents of
            one precompute call.
        max_tokens_per_call: limit on the tokens that the engine computes for one call. Generation counts the prompts and
            `max_tokens` of every sample. Scoring counts the items, and the query as often as the algorithm computes it.
        max_num_seqs: number of sequences that run at once. Each of a request's `n` samples counts.
        max_num_batched_tokens: token budget of one step.
        long_prefill_token_threshold: prompt tokens that a step computes of one sequence before other sequences get
            their turn; the first sequence gets the rest of the budget. By default half of the budget is for the first
            sequence in line, and half for the sequences with the fewest tokens left.
        batch_invariant: give every score, log-probability and token the same bits whatever else the engine computes. True pads
            steps to one size where the machine needs that, as GPUs and TPUs do; False promises nothing; by default on where it
            needs no padding: on CPUs whose products pass a test at the start.
        warmup: compile every program ahead: a server and `AsyncLLM` beside the first requests, `LLM` at its start. By default a
            server and `AsyncLLM` do, and `LLM` does not.
        warmup_tokens: tokens of the longest sequence, prompt and answer, whose programs are compiled ahead. A longer one
            compiles its programs when it comes. Each chunk begins a page and so counts as up to a page more. By default all
            programs are compiled.
        max_decode_gap_s: limit in seconds on the expected time of a step while text is generated. Steps with prompts or
            items are cut to the largest token bucket within the limit, and to no less than 128 tokens.
        num_scheduler_steps: most tokens that every sequence generates in one program, up to 16, while nothing waits and the
            program is short. The tokens are those of single steps. 1 runs single steps.
        max_queued_requests: number of calls that an `AsyncLLM` accepts at once; further calls are refused.
        engine_hang_timeout_s: seconds without a sign of life, or in one step that is not compiling, after which an
            `AsyncLLM` restarts its engine process. Choose more than the longest step takes on your machine.
        kv_cache_dtype: dtype of the KV pool. `"auto"` is `dtype`; `"fp8"` and `"fp8_e4m3"` store one byte per value, at
            scale 1.
        block_size: tokens per KV page, a power of two; by default 64 on GPUs and 16 elsewhere.
        kv_cache_memory_bytes: size of the KV pool on each device in bytes; by default chosen by platform.
        state_cache_memory_bytes: size of the states of recurrent layers on each device in bytes, of running requests and kept
            ones; by default chosen by platform. Other models have none.
        gpu_memory_utilization: share of each GPU's memory that JAX takes at its start, for weights, KV pool and steps. JAX's
            own variable `XLA_CLIENT_MEM_FRACTION` comes first, as does its deprecated name `XLA_PYTHON_CLIENT_MEM_FRACTION`.
            It has no effect once the process has used JAX.
        enable_prefix_caching: keep the K/V of prefixes, chunks and questions for later requests.
        kv_store: folder that keeps the K/V of prefixes and chunks beyond this process. By default K/V stays in memory.
        kv_store_max_bytes: size limit of the `kv_store` folder in bytes.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    skip_tokenizer_init: bool = False
    generation_config: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    activations: str = "int16"
    quantization: str | None = None
    adapter: str | None = None
    lora_modules: tuple[str, ...] = ()
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    attention_backend: str = "auto"
    max_logprobs: int = 20
    seed: int = 0
    tensor_parallel_size: int = 1
    num_hosts: int = 1
    host_index: int = 0
    coordinator: str | None = None
    group_secret_file: str | None = None
    enable_chunk_aware: bool = False
    chunk_separator: str = " # # "
    document_template: str | None = None
    chat_template: str | None = None
    rerank_template: str | None = None
    special_tokens_in_documents: bool = False
    special_tokens_in_prompts: bool = True
    position_strategy: str = "shared"
    chunk_position_gap: int | None = None
    chunk_temperature: float | None = None
    chunk_scale: float | None = None
    chunk_calibration: str | None = None
    multi_item_scoring_delimiter: int | None = None
    max_model_len: int | None = None
    max_chunk_len: int = 8192
    max_chunks_per_prompt: int = 4096
    score_algorithm: str = "auto"
    decide_method: str = "auto"
    max_items_per_request: int = 10_000
    max_tokens_per_call: int = 1 << 26
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int | None = None
    batch_invariant: bool | None = None
    warmup: bool | None = None
    warmup_tokens: int | None = None
    max_decode_gap_s: float = 0.5
    num_scheduler_steps: int = 16
    max_queued_requests: int = 1024
    engine_hang_timeout_s: float = 60.0
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    state_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = GPU_SHARE
    enable_prefix_caching: bool = True
    kv_store: str | None = None
    kv_store_max_bytes: int = 16 << 30

    def __post_init__(self) -> None:
        take_paths(self)
        if isinstance(self.lora_modules, list):
            object.__setattr__(self, "lora_modules", tuple(self.lora_modules))
        for name in ("model", "tokenizer", "adapter", "kv_store", "generation_config", "group_secret_file"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty; leave it out instead")
        for option in options_of(type(self)).values():
            if not option.accepts(value := getattr(self, option.name)):
                raise ConfigError(f"{option.name} must be of type {option.type_name}, got {value!r}")
            least = option.name not in _MAY_BE_ZERO
            if option.kind is int and value is not None and value < least and option.name not in _CALIBRATED:
                raise ConfigError(f"{option.name} must be at least {least:d}, got {value}")
        for name, known in _CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} {value!r} is unknown; choose one of {', '.join(filter(None, known))}")
        if self.quantization is not None and self.weights == "dequantized":
            raise ConfigError(f"quantization={self.quantization!r} packs the weights, and weights='dequantized' packs none")
        for name, value in checked(self._calibrated).items():
            object.__setattr__(self, name, value)
        if self.chunk_position_gap and self.position_strategy != "shared":
            raise ConfigError(f"chunk_position_gap needs position_strategy 'shared', got {self.position_strategy!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}: "
                "a step could not advance every running sequence"
            )
        _check_hosts(self)
        folders_of(self.lora_modules)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")
        if self.document_template is not None:
            split_document_template(self.document_template)
        if not 0 < self.gpu_memory_utilization <= 1:  # NaN compares false
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")
        if not self.max_decode_gap_s > 0:  # NaN compares false
            raise ConfigError(f"max_decode_gap_s must be above 0, got {self.max_decode_gap_s}")
        if not 1 <= self.engine_hang_timeout_s < float("inf"):  # NaN compares false
            raise ConfigError(f"engine_hang_timeout_s must be a number of at least 1, got {self.engine_hang_timeout_s}")

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Return the names of `lora_modules`."""
        return tuple(folders_of(self.lora_modules))

    @property
    def calibration(self) -> Calibration:
        """Return gap, temperature and scale of the chunks."""
        return Calibration(**self._calibrated)

    @property
    def _calibrated(self) -> dict[str, Any]:
        return {name: value for name in _CALIBRATED if (value := getattr(self, name)) is not None}


def _check_hosts(config: EngineConfig) -> None:
    """Check the options of a model on several hosts.

    Raises:
        ConfigError: an option is missing, wrong or unsupported.
    """
    hosts, size = config.num_hosts, config.tensor_parallel_size
    if config.host_index >= hosts:
        raise ConfigError(f"host_index must be below num_hosts {hosts}, got {config.host_index}; host 0 schedules")
    if config.coordinator is not None:
        split_address(config.coordinator)
    if hosts == 1:
        for name in ("coordinator", "group_secret_file"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name} needs num_hosts, the number of machines that share the model, of at least 2")
        return
    if config.coordinator is None:
        raise ConfigError(f"num_hosts={hosts} needs coordinator, the address HOST:PORT of host 0")
    if size % hosts:
        raise ConfigError(
            f"tensor_parallel_size={size} is no multiple of num_hosts={hosts}; it counts the devices of all hosts, "
            "an equal number on each"
        )
    if config.lora_modules or config.enable_lora:
        raise ConfigError(f"adapters by request are not supported with num_hosts={hosts}; merge one at the load (adapter=)")
    if config.kv_store is not None:
        raise ConfigError(f"kv_store is not supported with num_hosts={hosts}: each host holds only a part of the K/V")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address `HOST:PORT`; an IPv6 address stands in brackets.

    Raises:
        ConfigError: the address has another form.
    """
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and host and port.isdecimal() and 0 < int(port) < 2**16) or (":" in host and address[0] != "["):
        raise ConfigError(f"coordinator must be HOST:PORT with a port of 1 to 65535, got {address!r}")
    if host in ("0.0.0.0", "::", "*"):
        raise ConfigError(f"coordinator must name host 0 as the other hosts reach it, got {address!r}")
    return host, int(port)


_CALIBRATED = tuple(field.name for field in fields(Calibration))
"""Options that a calibration file can set."""
_MAY_BE_ZERO = ("max_logprobs", "seed", "host_index", "multi_item_scoring_delimiter")
"""Integer options whose least value is 0; that of others is 1."""


def split_document_template(template: str) -> tuple[str, str]:
    """Return the text before and the text after the document.

    Args:
        template: text with `{document}` once and no other placeholder.

    Raises:
        ConfigError: the template has no `{document}`, several, or another placeholder, or is not valid Unicode.
    """
    if _PLACEHOLDER.findall(template) != [_DOCUMENT]:
        raise ConfigError(f"document_template must hold {_DOCUMENT} exactly once and no other placeholder, got {template!r}")
    try:
        template.encode()
    except UnicodeEncodeError as error:  # a lone surrogate
        raise ConfigError(f"document_template {template!r} is not valid Unicode") from error
    before, _, after = template.partition(_DOCUMENT)
    return before, after


def make_config(model: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of an engine.

    Args:
        model: see `EngineConfig`; a text or a `pathlib.Path`.
        options: other fields of `EngineConfig`, by name.

    Raises:
        ConfigError: an option is unknown or invalid, or the calibration file is.
    """
    known = options_of(EngineConfig)
    if unknown := sorted(options.keys() - known.keys()):
        raise ConfigError(f"unknown option {unknown[0]!r}; options are {', '.join(sorted(known))}")
    values = {name: value for name, value in options.items() if value is not None or name not in _CALIBRATED}
    values["model"] = model
    config = EngineConfig(**values)
    if not (calibration := calibration_of(config.model, config.chunk_calibration, config.revision)):
        return config
    filled = asdict(calibration)
    if config.position_strategy != "shared":
        del filled["chunk_position_gap"]
    return EngineConfig(**{**filled, **values})
