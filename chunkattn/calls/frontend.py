"""`Frontend`: the parser, the limits and the checks that all calls of one engine share."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from numbers import Integral
from typing import Any

from chunkattn.adapter_salt import NOT_OPEN, LoRARequest
from chunkattn.calibration import label_scales_of
from chunkattn.calls.algorithm_choice import check_algorithm
from chunkattn.calls.decide_questions import AnswerLabels
from chunkattn.calls.decide_verdict import AUTO, HEAD
from chunkattn.calls.detokenizer import token_decoder
from chunkattn.calls.head_prompts import HeadPrompts
from chunkattn.calls.rerank_template import RerankTemplate, default_template
from chunkattn.calls.score_memory import ScoreMemory
from chunkattn.citations import CitationsLike
from chunkattn.config import EngineConfig
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.errors import ConfigError, ModelError, RequestError, shown
from chunkattn.focus import FocusLike
from chunkattn.models.adapters import adapter_folder
from chunkattn.models.loader import ModelFiles
from chunkattn.parsers import ParsedPrompt, PromptParser
from chunkattn.parsers.arguments import chat_options, list_chats, one_each
from chunkattn.parsers.chat_template import own_template
from chunkattn.parsers.delimited import check_delimiter
from chunkattn.parsers.document_encoder import pick_template
from chunkattn.parsers.encode import ControlTokens, PlainEncoder
from chunkattn.parsers.joined import ISOLATED, in_mode
from chunkattn.parsers.prompt import DocumentLike, Prompt, list_prompts
from chunkattn.parsers.states import StateTemplate
from chunkattn.sampling_params import SamplingParams

_MAX_TEMPLATES = 16
"""Maximum number of rendered chat templates that are kept."""


class Frontend:
    """Entry of the calls of one engine. Threads may share it.

    Attributes:
        config: options of the engine.
        tokenizer: tokenizer, or None for an engine without one.
        eos_token_ids: tokens that end a text.
        reranker: rerank template and class names of the checkpoint.
        sampling_defaults: the model's defaults of `SamplingParams`, by name.
        parser: parser from prompts to layouts.
        decode: function that returns the text of a token id, None without a tokenizer.
        scores: what scoring calls leave for later ones.
        gap: positions left free between the prefix and every chunk.
        label_scales: calibration of labels by kind, from the calibration file; empty if there is none.
        decide_method: method of decisions by default; None for `auto` before the model has been asked.
        has_language_head: whether the logits of the vocabulary have a meaning; False for some decision models.
        sample: function that returns bytes which differ between most checkpoints of one shape.
        adapters: place and folder of each adapter that calls have brought, by name.
        limits: limits of the engine; set by `connect`.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self.config = config
        self.adapters: dict[str, tuple[str, str]] = {}
        self.tokenizer, self.eos_token_ids, self.reranker = files.tokenizer, files.eos_token_ids, files.reranker
        self.sampling_defaults, self.gap = files.sampling, config.calibration.chunk_position_gap
        self.parser = self.make_parser()
        if config.multi_item_scoring_delimiter is not None:
            check_delimiter(self.tokenizer, config.multi_item_scoring_delimiter, files.spec.vocab_size)
        self.decode = token_decoder(self.tokenizer)
        self._ids, self._labels = count(), OrderedDict[str, AnswerLabels]()
        check_algorithm(config.score_algorithm)
        self._decision, self.has_language_head = files.decision, files.has_language_head
        by_default = None if files.decision is None else HEAD
        self.decide_method = by_default if config.decide_method == AUTO else config.decide_method
        if self.head_prompts is None and self.decide_method == HEAD:
            raise ConfigError("decide_method is 'head', and this model has no head for decisions")
        self.sample = replace(files, tokenizer=None, gguf=None).sample
        self.label_scales = label_scales_of(config.model, config.chunk_calibration, config.revision)
        self.scores = ScoreMemory(config.enable_prefix_caching)
        if config.rerank_template is not None:
            try:
                _ = self.rerank_template
            except RequestError as error:
                raise ConfigError(f"rerank_template: {error}") from error

    def make_parser(self) -> PromptParser:
        """Return a parser as `parser` is, without the bounds of the engine."""
        config = self.config
        return PromptParser(
            self.tokenizer,
            separator=config.chunk_separator,
            strategy=config.position_strategy,
            gap=self.gap,
            chunk_aware=config.enable_chunk_aware,
            document_template=pick_template(config.document_template, self.tokenizer),
            special_tokens_in_documents=config.special_tokens_in_documents,
            special_tokens_in_prompts=config.special_tokens_in_prompts,
            max_chunks=config.max_chunks_per_prompt,
        )

    @cached_property
    def rerank_template(self) -> RerankTemplate:
        """Return the template of reranks that name none. If no trait tells of a reranker, the first use warns."""
        return default_template(self.config.rerank_template, self.reranker, self.config.model, self.parser.encode)

    @cached_property
    def head_prompts(self) -> HeadPrompts | None:
        """Return the prompts of a decision model; None for another model."""
        return None if self._decision is None else HeadPrompts(self._decision, self.plain)

    def check_language_head(self, param: str) -> None:
        """Check that the checkpoint has a language model's head.

        Args:
            param: argument that needs it.

        Raises:
            RequestError: the checkpoint is a decision model without one.
        """
        if not self.has_language_head:
            text = "this checkpoint is a decision model without a language model's head: it answers questions by 'head' alone"
            raise RequestError(text, param=param)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary of the model, for the shapes of texts. The engine must have been connected.

        Raises:
            RequestError: as `Vocabulary.of`.
        """
        return Vocabulary.of(self.tokenizer, self.limits.vocab_size)

    @cached_property
    def plain(self) -> PlainEncoder:
        """Return the tokenizer of the users' texts in a rerank template."""
        encode = self.parser.encode
        return PlainEncoder(encode, ControlTokens(encode.tokenizer, {}) if self.config.special_tokens_in_documents else None)

    def answer_labels(self, system: str | None, template_options: Mapping[str, Any] | None) -> AnswerLabels:
        """Return the labels of answers behind the chat template, which is rendered once for all calls with equal arguments.

        Args:
            system: see `StateTemplate`.
            template_options: variables of the chat template.

        Raises:
            RequestError: as `StateTemplate`.
            NotRenderedError: as `StateTemplate`.
        """
        template_options = self.template_options(template_options)
        try:
            key = json.dumps([system, template_options], sort_keys=True)
        except (TypeError, ValueError, RecursionError):  # values that are no JSON
            return AnswerLabels(StateTemplate(self.plain, system, template_options))
        labels = self._labels.pop(key, None) or AnswerLabels(StateTemplate(self.plain, system, template_options))
        self._labels[key] = labels
        while len(self._labels) > _MAX_TEMPLATES:
            self._labels.popitem(last=False)
        return labels

    @property
    def default_sampling(self) -> SamplingParams:
        """Return the parameters of calls that give none."""
        return SamplingParams(**self.sampling_defaults)

    def sampling(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        """Return one set of parameters for each of `count` prompts.

        Args:
            params: one set for all prompts, or one each; None takes the model's defaults. Their limit on tokens becomes None:
                it bounds what fits, instead of being refused where less fits.
            count: number of prompts.

        Raises:
            RequestError: as `one_each`.
        """
        chosen = self.default_sampling if params is None else params
        if params is None and "max_tokens" in self.sampling_defaults:
            chosen = replace(self.default_sampling, max_tokens=None)
        return one_each(chosen, SamplingParams, count, "sampling_params")

    def template_options(self, variables: Mapping[str, Any] | None, tools: Any = None) -> dict[str, Any]:
        """Return the variables of a chat template, with the text of a template that the caller names.

        Args:
            variables: argument `chat_template_kwargs` of the caller.
            tools: functions that the template shows; see `chat_options`.

        Raises:
            RequestError: an argument is malformed, or the template is (see `own_template`).
        """
        options = chat_options(variables, tools=tools)
        if (template := options.get("chat_template")) is not None and self.tokenizer is not None:
            try:
                options["chat_template"] = own_template(self.tokenizer, template)
            except ConfigError as error:
                raise RequestError(str(error), param="chat_template") from None
        return options

    def find_adapter(self, request: LoRARequest) -> tuple[str, str] | None:
        """Return place and local folder of the adapter that a call brings, or that an earlier one brought under its name.

        The files of a hub id are downloaded unless the name and the place are known.

        Args:
            request: adapter of the call.

        Returns:
            The place and the folder; None for an adapter that no call has brought.

        Raises:
            RequestError: there is no such folder, and the hub has no such repository; or calls cannot bring adapters.
        """
        known, place = self.adapters.get(request.lora_name), str(request.lora_path or "")
        if known is not None and place in ("", known[0]):
            return known
        if place and not self.config.enable_lora and request.lora_name not in self.config.lora_names:
            raise RequestError(NOT_OPEN, param="lora_request")
        try:
            return (place, str(adapter_folder(place))) if place else None
        except ModelError as error:
            raise RequestError(str(error), param="lora_request") from None

    def connect(self, limits: EngineLimits) -> None:
        """Store the limits of an engine with an empty cache."""
        self.limits = limits
        self.parser.bound(limits.max_model_len, limits.max_table_pages * limits.block_size)
        self.scores.connect(limits)

    def new_id(self) -> str:
        """Return a new request id."""
        return str(next(self._ids))

    def parse(
        self,
        prompts: Prompt | Sequence[Prompt],
        chunk_aware: bool | None,
        focus: FocusLike | None = None,
        *,
        chunk_mode: str = ISOLATED,
        citations: CitationsLike | None = None,
        add_special_tokens: bool = True,
    ) -> list[ParsedPrompt]:
        """Parse one prompt or many.

        Args:
            prompts: prompt or list of prompts.
            chunk_aware: split text and token ids at the separator; None takes the engine's `enable_chunk_aware`.
            focus: focus of the prompts that have none of their own.
            chunk_mode: one of `CHUNK_MODES`.
            citations: how the answers cite documents; None for no citations.
            add_special_tokens: begin prompts given as text with the tokenizer's leading special tokens.

        Raises:
            RequestError: a prompt is malformed, text or token ids hold no documents to focus on, or the checkpoint is a
                sequence classifier.
        """
        self.limits.check_generates()
        self.check_language_head("prompt")
        parser = self.parser if add_special_tokens else self.parser.without_leading()
        parsed = (parser.parse(prompt, chunk_aware, focus, citations) for prompt in list_prompts(prompts))
        return [in_mode(prompt, chunk_mode, parser.strategy, parser.gap) for prompt in parsed]

    def parse_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        documents: Sequence[DocumentLike] | None,
        template_options: Mapping[str, Any] | None,
        focus: FocusLike | None = None,
        *,
        chunk_mode: str = ISOLATED,
        citations: CitationsLike | None = None,
    ) -> list[ParsedPrompt]:
        """Parse one conversation or many.

        Args:
            messages: conversation or list of conversations.
            documents: see `LLM.chat`.
            template_options: variables of the chat template and arguments of `chat_options`.
            focus: focus of every conversation.
            chunk_mode: one of `CHUNK_MODES`.
            citations: see `parse`.

        Raises:
            RequestError: as `parse`, or the template or an argument is malformed.
        """
        self.limits.check_generates()
        self.check_language_head("prompt")
        options = self.template_options(template_options)
        parsed = (self.parser.parse_chat(m, documents, focus, citations, **options) for m in list_chats(messages))
        return [in_mode(prompt, chunk_mode, self.parser.strategy, self.gap) for prompt in parsed]


def check_priorities(value: Any, count: int) -> list[int]:
    """Return one priority for each of `count` prompts.

    Args:
        value: one priority for all prompts, or a list with one each.
        count: number of prompts.

    Raises:
        RequestError: as `one_each`, or a priority exceeds 64 bits.
    """
    listed = [int(rank) for rank in one_each(value, Integral, count, "priority")]
    for rank in listed:
        if not -(2**63) <= rank < 2**63:
            raise RequestError(f"priority must fit 64 bits, got {shown(rank)}", param="priority")
    return listed
