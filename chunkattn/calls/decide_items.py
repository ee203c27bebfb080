"""The questions of `LLM.decide` as items, their calls behind a state and its documents, and the job of many states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Int32

from chunkattn.calls.algorithms import SharedDocuments
from chunkattn.calls.decide_questions import AskedQuestion
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import STAGE_LAYOUT, Flow, LookUp, bounded, together
from chunkattn.calls.score import ScoreCall
from chunkattn.calls.score_job import LOOKUP_BATCH
from chunkattn.engine.messages import PrecomputeRequest, ScoreRequest
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import Names
from chunkattn.outputs import ScoreOutput, ScoreUsage
from chunkattn.parsers.arguments import salt_key
from chunkattn.parsers.joined import joined_ids
from chunkattn.parsers.states import StateTemplate
from chunkattn.rope.positions import make_layout

T = TypeVar("T")

DOCUMENTS = Names("system", "documents", "state", "document", last="state")
"""Names of the parts before a question with documents."""

_LOOKUP_TOKENS = 1 << 16
"""Tokens of documents that the states of one lookup repeat at most."""


def read_documents(frontend: Frontend, documents: Sequence[str | Sequence[int]], *, joins: bool) -> list[np.ndarray]:
    """Return the token ids of each chunk, int32.

    Args:
        frontend: frontend of the engine.
        documents: texts or token ids.
        joins: whether all documents are one chunk.

    Raises:
        RequestError: a document is malformed, there are too many, or the engine has no cache to keep them in.
        CapacityError: the documents have more tokens than a prompt may have.
    """
    chunks = frontend.parser.read_documents(documents)
    if chunks and not frontend.config.enable_prefix_caching:
        text = "decide keeps documents in the cache, and this engine has enable_prefix_caching=False; put them into the state"
        raise RequestError(text, param="documents")
    return [np.asarray(chunk, np.int32) for chunk in (joined_ids(chunks) if joins else chunks)]


class QuestionItems:
    """Items of all questions, and the calls that score them behind states.

    Args:
        frontend: frontend of the engine.
        template: chat template of the call.
        asked: the questions.
        parts: name of each question, for error messages.
        chunks: token ids of each document before the states; empty for none.
        cache_salt: see `LLM.generate`.
        priority: rank in the queue; lower goes first.
        document_names: names of the parts before a question.

    Attributes:
        algorithm: name of the algorithm. It follows from the engine alone, so no other question can change it.
        num_tokens: number of tokens of all items.

    Raises:
        RequestError: a question cannot be tokenized, or there are more items than `max_items_per_request`.
        CapacityError: the items have more tokens than `max_tokens_per_call`.
    """

    def __init__(
        self,
        frontend: Frontend,
        template: StateTemplate,
        asked: Sequence[AskedQuestion],
        parts: Sequence[str],
        chunks: list[np.ndarray],
        *,
        cache_salt: str | None,
        priority: int,
        document_names: Names = DOCUMENTS,
    ) -> None:
        self._document_names = document_names
        self._frontend, self._template, self._chunks = frontend, template, chunks
        self._cache_salt, self._priority = cache_salt, priority
        listed = [part for question, part in zip(asked, parts, strict=True) for _ in question.items]
        frontend.limits.check_count(len(listed), "questions, with one for each option,", "questions")
        self._names = Names("state", "questions", "questions", "question", listed)
        self._before = template.before_ids if chunks else []
        self._items: list[list[int]] = []
        self._labels: list[tuple[int, ...]] = []
        self._reads: list[int] = []
        self.num_tokens = 0
        for question, part in zip(asked, parts, strict=True):
            same = None  # the options of `likelihood` share their pieces
            for number, pieces in enumerate(question.items):
                if pieces is not same:
                    ids, same = template.item(pieces, part), pieces
                    frontend.limits.check_items([], [ids], self._names._replace(listed=[part]))  # before the others are read
                answer = template.answer(question.texts[number], part) if question.texts else []
                self._items.append(ids + answer[:-1])
                self._reads.append(max(len(answer), 1))
                self._labels.append(tuple(answer) or question.label_ids)
                self.num_tokens += len(self._items[-1])
                frontend.limits.check_tokens(self.num_tokens, f"the questions up to {part}", "questions")
        self.algorithm = "prefill_extend" if frontend.config.enable_prefix_caching else "packed_segment"

    def state_ids(self, state: str) -> list[int]:
        """Return the token ids of a state: with everything before it, or what comes behind the documents.

        Args:
            state: text of the state.

        Raises:
            RequestError: the state cannot be tokenized.
        """
        return self._template.prefix(state, behind_documents=bool(self._chunks))

    @property
    def document_tokens(self) -> int:
        """Return the tokens of all documents and of everything before them; 0 without documents."""
        return len(self._before) + sum(map(len, self._chunks))

    def tokens(self, ids: list[int]) -> int:
        """Return the number of tokens that the engine computes for one state without a cache, those of the documents left out.

        Args:
            ids: result of `state_ids`.
        """
        if self.algorithm == "packed_segment":
            return self._call(ids, None).tokens()[self.algorithm]
        return self.num_tokens + len(ids)

    @property
    def most_together(self) -> int:
        """Return the number of states whose layouts may be held at once: each item behind documents is a layout of its own."""
        size = self.document_tokens + max(map(len, self._items))
        return max(1, STAGE_LAYOUT // (size * len(self._items))) if self._chunks else 1 << 31

    @property
    def most_looked_up(self) -> int:
        """Return the number of states of one lookup, which the engine answers between two steps."""
        return max(1, min(LOOKUP_BATCH, _LOOKUP_TOKENS // max(self.document_tokens, 1)))

    def lookup(self, ids: list[int]) -> PrecomputeRequest:
        """Return the request that asks whether everything before the items is cached.

        Args:
            ids: result of `state_ids`.
        """
        layout = self._documents(ids).layout(self._before, []) if self._chunks else make_layout(ids, [], [])
        key, name = salt_key(self._cache_salt), self._frontend.new_id()
        return PrecomputeRequest(name, layout, key, persist=False, priority=self._priority)

    def behind_state(self, ids: list[int]) -> ScoreCall:
        """Return the call of the items behind documents and a state that have been checked.

        Args:
            ids: result of `state_ids`.
        """
        return self._call(self._before, self._documents(ids)) if self._chunks else self._call(ids, None)

    def check(self, ids: list[int]) -> None:
        """Check documents, a state and the items against the limits of the engine.

        Args:
            ids: result of `state_ids`.

        Raises:
            RequestError: a token id is outside the vocabulary, or the checkpoint cannot serve documents.
            CapacityError: a document, the state or a question can never fit.
        """
        limits = self._frontend.limits
        if not self._chunks:
            limits.check_items(ids, self._items, self._names)
            if self.algorithm == "prefill_extend":
                self._check_room(ids)
            return
        documents = self._documents(ids)
        limits.check(PrecomputeRequest("", documents.layout(self._before, [])), self._document_names)
        for number, item in enumerate(self._items):
            limits.check_ids(item, "questions", self._names.of(number), placed=False)
        longest = max(range(len(self._items)), key=lambda number: len(self._items[number]))
        layout, last = documents.layout(self._before, self._items[longest]), f"state with {self._names.of(longest)}"
        labels = (self._labels[longest],)
        request = ScoreRequest(
            "", layout, np.asarray([len(layout) - 1]), labels, share_prefix=True, state_len=len(documents.state)
        )
        limits.check(request, self._document_names._replace(question="questions", last=last))

    def _documents(self, ids: list[int]) -> SharedDocuments:
        parser = self._frontend.parser
        return SharedDocuments(self._chunks, ids, parser.strategy, parser.gap)

    def _call(self, before: list[int], documents: SharedDocuments | None) -> ScoreCall:
        return ScoreCall(
            self._frontend,
            before,
            self._items,
            self._labels,
            algorithm=self.algorithm,
            cache_salt=self._cache_salt,
            priority=self._priority,
            names=self._names,
            reads=self._reads if any(reads > 1 for reads in self._reads) else (),
            documents=documents,
        )

    def _check_room(self, ids: list[int]) -> None:
        """Check that the KV pool has room for every item on pages of its own beside the state's pages.

        Raises:
            CapacityError: there is no room; the error names the question.
        """
        limits = self._frontend.limits
        room = limits.max_request_tokens + len(ids) // -limits.block_size * limits.block_size
        for number, item in enumerate(self._items):
            if len(item) > room:
                text = f" has {len(item)} tokens, the KV pool leaves room for {max(room, 0)} behind the state"
                raise CapacityError(text, param="questions", part=self._names.of(number))


class StatesJob(Generic[T]):
    """Job of many states with the same items behind each; see `chunkattn.calls.job.Job`.

    States whose tokens are in the cache run first, so that the others cannot evict them. A state becomes a `ScoreCall` when its
    turn comes, and a result when the call has ended: until then the job holds only its token ids.

    Args:
        frontend: frontend of the engine.
        states: token ids of each state (see `QuestionItems.state_ids`), which fit the engine with the items.
        items: items behind every state.
        finish: makes the result of a state from its scores, and those of `empty` if there are any.
        empty: call of the content-free state, which runs first; None for none. Its tokens count as computed for the first
            state, and as cached for the others.

    Attributes:
        total: number of states.
        done: number of states whose items have all been scored.
    """

    unit = "states"

    def __init__(
        self,
        frontend: Frontend,
        states: Sequence[Int32[np.ndarray, " T"]],
        items: QuestionItems,
        finish: Callable[[list[ScoreOutput]], T],
        *,
        empty: ScoreCall | None,
    ) -> None:
        self._frontend, self._states, self._items, self._finish, self._empty = frontend, states, items, finish, empty
        if empty is not None:
            empty.plan({})
        self.total, self.done = len(states), 0

    def flow(self) -> Flow[list[T]]:
        """Answer the states, and return the result of each in the caller's order. States that fit one step run together."""
        limits, items, extends = self._frontend.limits, self._items, self._items.algorithm == "prefill_extend"
        order = list(range(self.total))
        if extends:
            ranks: list[tuple[bool, int]] = []
            for first in range(0, self.total, items.most_looked_up):
                asked = [items.lookup(ids.tolist()) for ids in self._states[first : first + items.most_looked_up]]
                for request, cached in zip(asked, (yield LookUp(asked)), strict=True):
                    ranks.append((len(request.layout) - cached.total >= limits.block_size, -cached.total))
            order.sort(key=ranks.__getitem__)  # cached states first, then those that begin with the most cached tokens
        free: list[ScoreOutput] = []
        if self._empty is not None:
            yield from self._empty.flow()
            free = [self._empty.result()]
        # Elsewhere the size of a step decides the bits, and what is cached decides the order.
        shares = limits.batch_invariant or not extends
        most = min(self._frontend.config.max_num_batched_tokens, limits.kv_tokens // 4) if shares else 0
        size = (most, lambda place: max(len(self._states[place]), items.num_tokens))
        results: dict[int, T] = {}
        for places in bounded(order, size, (items.most_together, lambda _: 1)):
            calls = [items.behind_state(self._states[place].tolist()) for place in places]
            for call in calls:
                call.plan({})
            yield from together([call.flow() for call in calls])
            for place, call in zip(places, calls, strict=True):
                others = free if place == 0 else [_as_cached(output) for output in free]
                results[place] = self._finish([call.result(), *others])
            self.done += len(places)
        return [results[place] for place in range(self.total)]


def _as_cached(output: ScoreOutput) -> ScoreOutput:
    tokens = output.usage.prompt_tokens
    return replace(output, usage=ScoreUsage(tokens, 0, tokens))
