"""`Answer` and `Completion`: requests for generated text, and the builders of their answers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from heapq import nlargest
from typing import Any

from chunkattn.calls.generate import COST, GenerateJob, generate_job
from chunkattn.citations import Document
from chunkattn.errors import RequestError
from chunkattn.outputs import CompletionOutput, RequestOutput
from chunkattn.parsers import DocumentPrompt, ParsedPrompt
from chunkattn.parsers.choice import shortest
from chunkattn.parsers.prompt import Prompt
from chunkattn.sampling_params import SamplingParams
from chunkattn.schema.citations import citations_of
from chunkattn.schema.generation import ChatBody, CompletionBody, focus_of
from chunkattn.server.citations import citation_objects
from chunkattn.server.state import ServerState, new_id
from chunkattn.server.texts import (
    Entry,
    Offsets,
    Tail,
    completion_logprobs,
    prompt_logprobs,
    token_name,
    usage,
)
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Caller


class Answer(ABC):
    """Request for generated text, and the builder of its answer.

    Args:
        body: body of the request.
        state: state of the server.
        caller: client of the request.

    Attributes:
        kind: prefix of the answer's id.
        object_name: `object` of a whole answer.
        chunk_name: `object` of a stream's event.
        params: sampling parameters of all prompts.
        salt: cache salt of the engine.
        focus: choice among the documents; None shows all documents alike.
        field: name of the field with the documents.
        stored: documents that the request names by id, by the number of their chunk.
        contents: what the parser makes their chunks of.
        citations: how the answer cites documents; None without citations.
    """

    kind: str
    object_name: str
    chunk_name: str
    field: str
    params: SamplingParams

    def __init__(self, body: CompletionBody | ChatBody, state: ServerState, caller: Caller) -> None:
        self.options, self.state, self.caller, self.texts = body, state, caller, state.texts
        self.salt, self.focus = caller.salt(body.cache_salt), focus_of(body.focus)
        self.stored = state.named_documents(body.named(), caller, body.cache_salt, field=self.field)
        self.citations = citations_of(body.citations)
        cited = self.citations is not None
        self.contents = {number: document.content_for(cited=cited) for number, document in self.stored.items()}
        self._moved: list[int] | None = None
        self.id, self.created = new_id(self.kind), int(time.time())

    @abstractmethod
    async def streams(self) -> list[AsyncGenerator[RequestOutput, None]]:
        """Return a generator of outputs per prompt; none has begun.

        Raises:
            ApiError: 400, the number of prompts is out of range; 429, the client exceeds its share of the queue.
            RequestError: a parameter is out of range.
        """

    @abstractmethod
    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return the choice of a finished sample."""

    @abstractmethod
    def begin(self, index: int, output: RequestOutput, tail: Tail) -> dict[str, Any] | None:
        """Return the choice that opens a sample's stream before any text, or None."""

    @abstractmethod
    def delta(self, index: int, new: CompletionOutput, output: RequestOutput, tail: Tail) -> dict[str, Any] | None:
        """Return a choice with what a sample has gained, or None if nothing of it is sent."""

    def check_size(self) -> None:
        """Check the number of log-probabilities in the answer, before any work.

        Without `max_tokens`, generated tokens are counted by `check_generated`.

        Raises:
            ApiError: 400, prompts x samples x tokens x log-probabilities exceed `max_answer_values`.
        """
        name = "prompt_logprobs" if self.params.logprobs is None else "logprobs"
        self.state.check_answer_values(self.answer_values, f"tokens, samples or log-probabilities ({name})", name)

    @property
    def answer_values(self) -> int:
        """Return a bound on the log-probabilities in the answer."""
        values = 0
        if self.params.logprobs is not None and self.params.max_tokens is not None:
            values += self.num_prompts * self.params.n * self.params.max_tokens * (1 + self.params.logprobs)
        if self.params.prompt_logprobs is not None:
            values += self.prompt_size * self.params.n * (1 + self.params.prompt_logprobs)
        return values

    def check_generated(self, job: GenerateJob, prompt: ParsedPrompt) -> None:
        """Check the number of log-probabilities of all tokens that fit behind the prompt, for a request without `max_tokens`.

        Args:
            job: job of the request's only prompt.
            prompt: the prompt. Under `focus`, more tokens fit behind shorter documents.

        Raises:
            ApiError: as `check_size`.
        """
        if self.params.logprobs is None or self.params.max_tokens is not None:
            return
        values, frontend = 0, self.state.llm.frontend
        shown = shortest(prompt, frontend.config.calibration.chunk_position_gap)
        for request in job.requests:
            most = frontend.limits.max_tokens(replace(request, layout=shown.layout))
            values += self.params.n * most * (1 + self.params.logprobs)
            if self.params.prompt_logprobs is not None:
                values += self.params.n * len(request.layout) * (1 + self.params.prompt_logprobs)
        self.state.check_answer_values(values, "tokens, samples or log-probabilities (max_tokens)", "logprobs")

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts."""
        return 1

    @property
    @abstractmethod
    def prompt_size(self) -> int:
        """Return the characters or token ids of all prompts: a bound on their tokens without the chat template."""

    def documents_size(self, documents: Sequence[Any]) -> int:
        """Return the characters or token ids of documents, with their template; of those that are read again, twice."""
        template = self.state.llm.frontend.parser.documents.size
        contents = (document.content if isinstance(document, Document) else document for document in documents)
        sizes = [len(content) + (template if isinstance(content, str) else 0) for content in contents]
        again = nlargest(self.focus.top_n, sizes) if self.focus is not None and self.focus.mode == "reread" else []
        return sum(sizes) + sum(again)

    def job_of(self, prompt: ParsedPrompt, **options: Any) -> GenerateJob:
        """Return the job of a prompt.

        Args:
            prompt: the prompt.
            **options: further options of `generate_job`.
        """
        if self.stored:  # their contents as they were given, without the document template
            sources = list(prompt.sources)
            for number, document in self.stored.items():
                sources[number] = document.record.source
            prompt = replace(prompt, sources=sources)
        body, frontend = self.options, self.state.llm.frontend
        options |= {"cache_salt": self.salt, "final_only": not body.stream}
        return generate_job(frontend, [prompt], self.params, body.priority, **options)

    @property
    def token_name(self) -> Callable[[int], str]:
        """Return the function from a token id to its name in log-probabilities."""
        return token_name if self.options.return_tokens_as_token_ids else self.state.texts.piece

    def usage(self, outputs: list[RequestOutput]) -> dict[str, object]:
        """Return the usage of the request."""
        return usage(outputs, chunks=self.options.return_chunk_usage, moved=self.moved(outputs))

    def moved(self, outputs: list[RequestOutput]) -> list[int]:
        """Return the numbers of the documents named by id whose stored K/V is of another prefix than the prompt's.

        Joined documents have other K/V than stored ones whatever their prefix, and are not among them.
        """
        if len(outputs[0].joined or ()) > 1:
            return []
        if self._moved is None:
            self._moved = [n for n, document in self.stored.items() if not document.follows(outputs[0])]
        return self._moved

    def common(self, name: str) -> dict[str, Any]:
        """Return the fields common to all objects of the answer.

        Args:
            name: value of `object`.
        """
        return {"id": self.id, "object": name, "created": self.created, "model": self.state.name_for(self.caller)}

    def entry(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: Any,
        sample: CompletionOutput | None = None,
        output: RequestOutput | None = None,
    ) -> dict[str, Any]:
        """Return a choice.

        Args:
            index: index of the choice.
            content: fields with its text.
            logprobs: log-probabilities of its tokens, or None.
            sample: the sample; None before its first token.
            output: output of the prompt for a finished sample, which may report the prompt's log-probabilities.
        """
        ends = {"finish_reason": sample and sample.finish_reason, "stop_reason": sample and sample.stop_reason}
        choice = {"index": index, **content, "logprobs": logprobs, **ends}
        if output is not None and self.options.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def indexed(self, number: int, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        """Yield the samples of a prompt with their indices in the answer."""
        for sample in output.outputs:
            yield number * self.options.n + sample.index, sample


class Completion(Answer):
    """Request to `/v1/completions`."""

    kind, object_name, chunk_name, field = "cmpl", "text_completion", "text_completion", "chunks.documents"

    def __init__(self, body: CompletionBody, state: ServerState, caller: Caller) -> None:
        super().__init__(body, state, caller)
        self.body, self.prompts = body, body.prompts(self.contents)
        self._known_offsets: dict[str, tuple[list[int], int]] = {}
        echoed = body.logprobs if body.echo else None
        defaults, limit = state.llm.frontend.sampling_defaults, body.max_tokens or 1
        self.params = body.sampling(defaults, max_tokens=limit, logprobs=body.logprobs, prompt_logprobs=echoed)

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)

    @property
    def prompt_size(self) -> int:
        """Return the characters or token ids of all prompts."""
        if isinstance(prompt := next(iter(self.prompts), None), DocumentPrompt):
            return len(prompt.prefix) + len(prompt.question) + self.documents_size(prompt.documents)
        listed: list[Any] = self.body.prompt if isinstance(self.body.prompt, list) else [self.body.prompt]
        size = len(listed) if listed and isinstance(listed[0], int) else sum(map(len, listed))
        return 2 * size if self.focus is not None and self.focus.mode == "reread" else size

    async def streams(self) -> list[AsyncGenerator[RequestOutput, None]]:
        """Return a generator of outputs per prompt."""
        limit, prompts = self.state.most_prompts, self.prompts
        if not 0 < len(prompts) <= limit:
            raise ApiError(
                400, f"there are {len(prompts)} prompts; give between 1 and {limit}", param="prompt", code="invalid_value"
            )
        self.caller.take(len(prompts))
        llm, timeout = self.state.llm, self.state.config.request_timeout_s
        if len(prompts) > 1:  # check all prompts before the first begins
            jobs = await llm.threads.run(self._jobs, prompts)
            return [llm.stream(job, timeout=timeout, snapshots=False) for job in jobs]
        return [llm.stream(lambda: self._job(prompts[0]), timeout=timeout, snapshots=False)]

    def _job(self, prompt: Prompt) -> GenerateJob:
        """Return the job of one prompt."""
        frontend, body = self.state.llm.frontend, self.body
        options: dict[str, Any] = {"chunk_mode": body.chunk_mode, "citations": self.citations}
        options["add_special_tokens"] = body.add_special_tokens
        (parsed,) = frontend.parse([prompt], body.chunk_aware, self.focus, **options)
        return self.job_of(parsed, prompt_only=not body.max_tokens)

    def _jobs(self, prompts: Sequence[Prompt]) -> list[GenerateJob]:
        """Return a job for each prompt. Errors name the prompt by its number."""
        jobs = []
        for number, prompt in enumerate(prompts):
            try:
                jobs.append(self._job(prompt))
            except RequestError as error:
                raise type(error)(f"prompt {number}: {error}", param=error.param) from None
        self.state.llm.frontend.limits.check_tokens(sum(job.tokens for job in jobs), COST, "prompt")
        return jobs

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return the choice of a finished sample."""
        text, token_logprobs = sample.text, None
        if sample.logprobs is not None:
            ids, offsets, end = sample.token_ids, list[int](), 0
            entries: list[Entry] = [*sample.logprobs]
            if self.body.echo:
                prompt_offsets, end = self._prompt_offsets(output)
                offsets += prompt_offsets
            growing = self._offsets(output, end)
            offsets += [growing.take(token) for token in ids]
            if self.body.echo:
                ids, entries = output.prompt_token_ids + ids, [*(output.prompt_logprobs or []), *entries]
            token_logprobs = self._logprobs(ids, entries, offsets)
        before = self._prompt_text(output) if self.body.echo else ""
        fields = {"text": before + text, **self._cited_at(sample, len(before))}
        return self.entry(index, fields, token_logprobs, sample, output)

    def begin(self, index: int, output: RequestOutput, tail: Tail) -> dict[str, Any] | None:
        """Return a choice with the prompt under `echo`, or None."""
        if not self.body.echo:
            return None
        token_logprobs = None
        if self.body.logprobs is not None:
            offsets, end = self._prompt_offsets(output)
            tail.offsets = self._offsets(output, end)
            token_logprobs = self._logprobs(output.prompt_token_ids, output.prompt_logprobs or [], offsets)
        return self.entry(index, {"text": self._prompt_text(output)}, token_logprobs)

    def delta(self, index: int, new: CompletionOutput, output: RequestOutput, tail: Tail) -> dict[str, Any]:
        """Return a choice with what a sample has gained."""
        token_logprobs = None
        if new.logprobs is not None:
            tail.offsets = tail.offsets or self._offsets(output, 0)
            token_logprobs = self._logprobs(new.token_ids, new.logprobs, [tail.offsets.take(t) for t in new.token_ids])
        shift = len(self._prompt_text(output)) if self.body.echo and new.citations else 0
        return self.entry(index, {"text": new.text, **self._cited_at(new, shift)}, token_logprobs, new)

    def _cited_at(self, sample: CompletionOutput, shift: int) -> dict[str, Any]:
        """Return the field `citations` of a text that begins behind `shift` characters; no field without citations."""
        cited = sample.citations
        return {} if cited is None else {"citations": citation_objects(cited, lambda one: (one.start + shift, one.text))}

    def _prompt_text(self, output: RequestOutput) -> str:
        return self.texts.whole(output.prompt_token_ids) if output.prompt is None else output.prompt

    def _prompt_offsets(self, output: RequestOutput) -> tuple[list[int], int]:
        """Return the offsets of the prompt's tokens and their end; all samples share them."""
        if output.request_id not in self._known_offsets:
            self._known_offsets[output.request_id] = self.texts.prompt_offsets(
                output, add_special_tokens=self.body.add_special_tokens
            )
        return self._known_offsets[output.request_id]

    def _offsets(self, output: RequestOutput, begin: int) -> Offsets:
        """Return offsets for generated tokens, the first at `begin`."""
        skip = self.body.skip_special_tokens
        return Offsets(self.texts.tokenizer, begin, output.prompt_token_ids, skip_special_tokens=skip)

    def _logprobs(self, ids: list[int], entries: Sequence[Entry], offsets: list[int]) -> dict[str, Any]:
        return completion_logprobs(ids, entries, self.body.logprobs or 0, offsets, self.token_name)
