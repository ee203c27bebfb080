"""`ChunkOptions`: how prompts become chunks, for `ChunkLLM` and for vLLM's server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from chunkattn.calibration import calibration_of
from chunkattn.config import EngineConfig, split_document_template
from chunkattn.errors import CapacityError, ConfigError
from chunkattn.integrations.vllm.options import ConnectorOptions
from chunkattn.integrations.vllm.requests import (
    PARAMS_KEY,
    POSITIONS,
    EngineRequest,
    Positions,
    PromptPlan,
    plan_prompt,
    segment_keys,
)
from chunkattn.options import options_of
from chunkattn.parsers import ParsedPrompt, PromptParser
from chunkattn.parsers.document_encoder import pick_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams

CONNECTOR = "ChunkConnector"
CONNECTOR_MODULE = "chunkattn.integrations.vllm.connector"

_WEIGHTS = ("chunk_temperature", "chunk_scale")


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """Options of chunk-aware prompts in vLLM, under the names of `chunkattn.config.EngineConfig`.

    In a set-up of your own they stand in `kv_connector_extra_config`, beside the options of the connector.

    Attributes:
        enable_chunk_aware: split text and token id prompts at `chunk_separator`.
        chunk_separator: text between prefix, chunks and question.
        document_template: text of a document's chunk, with `{document}` once; by default the checkpoint's own.
        special_tokens_in_documents: let the text of a special token become that token in chunks, documents, and user and tool
            messages. The default is safe for untrusted documents.
        special_tokens_in_prompts: let the text of a special token become that token in prefixes, questions, plain prompts and
            other messages.
        position_strategy: `"shared"`, or `"reordered"`: every chunk is computed behind the prefix, and the question sees the
            chunks at consecutive positions in the caller's order.
        chunk_position_gap: positions left free between the prefix and every chunk, under `shared` positions; by default what
            the calibration file says, else 0.
        chunk_calibration: file of the gap. By default the file `chunk_calibration.json` in the model's folder, if there is
            one; `"off"` ignores it. A file whose temperature or scale is not 1 is refused.
        max_chunk_len: limit on the tokens of one chunk.
        max_chunks_per_prompt: limit on the chunks of one prompt, including empty chunks.

    Raises:
        ConfigError: a value is invalid.
    """

    enable_chunk_aware: bool = False
    chunk_separator: str = " # # "
    document_template: str | None = None
    special_tokens_in_documents: bool = False
    special_tokens_in_prompts: bool = True
    position_strategy: str = "shared"
    chunk_position_gap: int | None = None
    chunk_calibration: str | None = None
    max_chunk_len: int = 8192
    max_chunks_per_prompt: int = 4096

    def __post_init__(self) -> None:
        if self.position_strategy == "offset":
            raise ConfigError(
                "position_strategy 'offset' ties a document to its place, so vLLM cannot reuse it elsewhere; choose 'shared' "
                "or 'reordered', or chunkattn.LLM"
            )
        if self.position_strategy not in POSITIONS:
            raise ConfigError(f"unknown position_strategy {self.position_strategy!r}; choose one of {', '.join(POSITIONS)}")
        if self.chunk_position_gap and self.position_strategy != "shared":
            raise ConfigError(f"chunk_position_gap needs position_strategy 'shared', got {self.position_strategy!r}")
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "position_strategy"}
        EngineConfig(**shared)  # the same checks of types and ranges
        if self.document_template is not None:
            split_document_template(self.document_template)

    @property
    def positions(self) -> Positions:
        """Return the position strategy of the requests."""
        return cast("Positions", self.position_strategy)

    @property
    def gap(self) -> int:
        """Return the positions left free between prefix and chunks."""
        return self.chunk_position_gap or 0

    def extra_config(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, for `kv_connector_extra_config`."""
        changed = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        return {name: value for name, value in changed.items() if name != "chunk_position_gap" or value}

    def parser(self, tokenizer: PreTrainedTokenizerBase | None) -> PromptParser:
        """Return the parser of prompts.

        The parser's position ids are those of `shared` positions; the engine derives its own from the bounds of the chunks.

        Args:
            tokenizer: tokenizer of the model, or None.

        Raises:
            ConfigError: an option or the checkpoint's document template is malformed.
        """
        return PromptParser(
            tokenizer,
            separator=self.chunk_separator,
            strategy="shared",
            gap=self.gap,
            chunk_aware=self.enable_chunk_aware,
            document_template=pick_template(self.document_template, tokenizer),
            special_tokens_in_documents=self.special_tokens_in_documents,
            special_tokens_in_prompts=self.special_tokens_in_prompts,
            max_chunks=self.max_chunks_per_prompt,
        )

    def plan(
        self, prompt: ParsedPrompt, max_model_len: int, cache_salt: str | None = None, adapter: str | None = None
    ) -> PromptPlan:
        """Return the requests that answer a parsed prompt.

        Args:
            prompt: prompt of `parser`.
            max_model_len: vLLM's limit on the tokens of a sequence.
            cache_salt: salt of a prompt without one of its own.
            adapter: `adapter_key` of the LoRA adapter.

        Raises:
            CapacityError: a chunk or the prompt is too long.
        """
        layout = prompt.layout
        for number, length in enumerate(layout.chunk_lens):
            if length > self.max_chunk_len:
                text = f" has {length} tokens, max_chunk_len is {self.max_chunk_len}"
                raise CapacityError(text, param=prompt.names.chunks, part=prompt.names.of(number))
        if len(layout) >= max_model_len:
            raise _too_long(len(layout), max_model_len, "the prompt", "prompt")
        first, *chunks, last = parts_of(prompt)
        salt = prompt.cache_salt or cache_salt
        return plan_prompt(first, chunks, last, positions=self.positions, gap=self.gap, cache_salt=salt, adapter=adapter)

    def plan_prefix(
        self, prefix: Sequence[int], max_model_len: int, cache_salt: str | None = None, adapter: str | None = None
    ) -> PromptPlan:
        """Return a plan whose one request saves a prefix without chunks.

        Args:
            prefix: token ids of the prefix, at least one.
            max_model_len: see `plan`.
            cache_salt: salt of the later prompts.
            adapter: see `plan`.

        Raises:
            CapacityError: the prefix is too long.
        """
        if len(prefix) >= max_model_len:
            raise _too_long(len(prefix), max_model_len, "the prefix", "prefix")
        key, _ = segment_keys(prefix, [], cache_salt=cache_salt, adapter=adapter)
        params = {PARAMS_KEY: {"save": len(prefix), "positions": self.positions}}
        request = EngineRequest(list(prefix), cache_salt, params, (key,))
        return PromptPlan(request, (), request, ())


def _too_long(tokens: int, max_model_len: int, part: str, param: str) -> CapacityError:
    return CapacityError(
        f" has {tokens} tokens, vLLM's max_model_len {max_model_len} leaves none to generate", param=param, part=part
    )


def parts_of(prompt: ParsedPrompt) -> list[list[int]]:
    """Return the token ids of prefix, chunks and question, in the caller's order."""
    return [prompt.layout.part(segment).tolist() for segment in prompt.layout.segments]


def take_options(model: str | None, options: Mapping[str, Any]) -> tuple[ChunkOptions, dict[str, Any], dict[str, Any]]:
    """Return the chunk options among some options, vLLM's `kv_transfer_config`, and the other options.

    Args:
        model: local folder or hub id; its calibration file gives the chunk gap.
        options: options of chunks, of the connector and of vLLM, by name. The model's `revision` is one of vLLM's.

    Raises:
        ConfigError: an option is invalid, or asks for a temperature or scale of chunks.
    """
    names = options_of(ChunkOptions).keys()
    connector = options_of(ConnectorOptions).keys() - names
    rest = {name: value for name, value in options.items() if name not in names | connector}
    for name in _WEIGHTS:
        if (value := rest.pop(name, None)) not in (None, 1, 1.0):
            raise ConfigError(
                f"{name} {value!r}: vLLM's kernels cannot weigh chunks; use chunkattn.LLM, or a chunk_position_gap alone"
            )
    chunk = {name: value for name, value in options.items() if name in names}
    chosen = _calibrated(model, options.get("revision"), chunk)
    extra = {name: value for name, value in options.items() if name in connector and value is not None}
    try:
        ConnectorOptions.parse(extra)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",  # "recompute" would compute a missing document causally
        "kv_connector_extra_config": {**chosen.extra_config(), **extra},
    }
    return chosen, transfer, rest


def _calibrated(model: str | None, revision: str | None, options: Mapping[str, Any]) -> ChunkOptions:
    """Return chunk options, with the gap of the model's calibration file if none is given."""
    chosen = ChunkOptions(**options)
    if (read := calibration_of(model, chosen.chunk_calibration, revision)) is None:
        return chosen
    if read.weighs:
        raise ConfigError(
            f"the model's calibration has temperature {read.chunk_temperature} and scale {read.chunk_scale}, and vLLM's "
            "kernels cannot weigh chunks; set chunk_calibration='off', or use chunkattn.LLM"
        )
    if chosen.chunk_position_gap is None and chosen.position_strategy == "shared":
        return replace(chosen, chunk_position_gap=read.chunk_position_gap)
    return chosen


def server_options(model: str, extra: Mapping[str, Any], revision: str | None = None) -> ChunkOptions:
    """Return the chunk options of an engine that runs already.

    Args:
        model: local folder or hub id.
        extra: the engine's `kv_connector_extra_config`.
        revision: revision of the model on the hub.

    Raises:
        ConfigError: as `take_options`.
    """
    options = {name: value for name, value in extra.items() if name in options_of(ChunkOptions)}
    # The connector's gap, which a calibration file cannot change any more.
    return _calibrated(model, revision, {**options, "chunk_position_gap": extra.get("chunk_position_gap", 0)})


def check_parallel(data_parallel_size: Any) -> None:
    """Refuse data parallelism inside one server.

    Raises:
        ConfigError: there is more than one data-parallel rank.
    """
    if (data_parallel_size or 1) > 1:
        raise ConfigError(
            f"data_parallel_size {data_parallel_size}: vLLM may send a prompt to a rank whose store lacks its documents; run "
            "one server for each replica, behind a router"
        )


def refused_param(params: SamplingParams) -> str | None:
    """Return the name of a sampling parameter that a prompt with chunks cannot have, None if there is none.

    Args:
        params: vLLM's sampling parameters.
    """
    names = ("prompt_logprobs", "prompt_logprob_token_ids")
    name = next((name for name in names if getattr(params, name) is not None), None)
    return name or ("skip_reading_prefix_cache" if params.skip_reading_prefix_cache else None)
