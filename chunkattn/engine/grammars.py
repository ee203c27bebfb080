"""`Grammars`: compiles the shapes of texts, and follows texts through them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from threading import Lock
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from chunkattn.engine.kept_shapes import KeptShapes
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.errors import RequestError
from chunkattn.structured_outputs import PARAM, StructuredOutputsParams

_END = b"<|end of the text|>"
"""Token behind the vocabulary whose bit in a mask says that the text may end."""
_HEADER = '%llguidance {"no_forcing": true}\n'
"""Without this option, a mask allows one token where the next bytes are known, which depends on the tokenizer's merges."""
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 4_000,  # taking a token beside 1,000 optional properties, four items each, takes 4 ms
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
"""Limits on the work of one mask, whose slowest took 12 ms on a core of 2 GHz, of 17 grammars that were tried."""
_TEXT_S, _TOKEN_S = 0.5, 0.02
"""Limit on the processor time of one text: 0.5 s plus 20 ms for each token. A mask over 262,144 tokens takes about 3 ms."""
_SLOW_S = 0.01
"""Seconds for a mask beyond which it is measured, on average over the masks that a processor fills in a step."""
_SLOW_TOKEN_S = 0.001
"""Seconds to take a token beyond which the masks of its text are measured. Most grammars take less than a tenth."""
_PROCESSORS = os.cpu_count() or 1
_WHITESPACE = r"[ \n\r\t]{0,20}"
"""White space between two tokens of JSON: a model that goes on with spaces would reach its limit of tokens."""
_GBNF_ROOT = re.compile(r"^\s*root\s*::=", re.MULTILINE)
_LONGEST_REASON = 400
_NO_TOKEN = "NoExtensionBias"
"""The library's word for a text that no token of the vocabulary can go on with."""
_STUCK = "no token may follow the text, and no token may end it"
_EXCERPT = re.compile(r"\n *\d+ \| |<state>|<non-verbose/>")
"""Begin of the lines of the grammar, or of its state, which follow the library's words on an error."""


def grammar_of(shape: StructuredOutputsParams) -> str:
    """Return the grammar of a shape, in llguidance's dialect of Lark.

    Raises:
        RequestError: a schema is no JSON, or nested too deep; or a grammar in GBNF is malformed.
    """
    if shape.grammar is not None:
        return f"{_lark_of(shape.grammar)}\n{_HEADER}"
    if shape.regex is not None:
        return f"{_HEADER}start: /{regex_to_lark(shape.regex, use_ascii='')}/"
    if shape.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in shape.choice)
        return f"{_HEADER}start: TEXT\nTEXT: {texts}"  # one lexeme; as rules, the texts would be as many items
    schema: Any = {"type": "object"}
    if shape.json is not None:
        try:
            schema = json.loads(str(shape.json))
        except RecursionError:
            raise refused("json is nested too deep") from None
        except ValueError as error:
            raise refused(f"json is no JSON schema: {error}") from None
    if isinstance(schema, dict):
        own = schema.get("x-guidance")
        asked = own if isinstance(own, dict) else {}
        compact = {"whitespace_flexible": False} if shape.disable_any_whitespace else {}
        schema = {**schema, "x-guidance": ({} if compact else {"whitespace_pattern": _WHITESPACE}) | asked | compact}
    return f"{_HEADER}start: %json {json.dumps(schema)}"


def _lark_of(grammar: str) -> str:
    """Return a grammar in Lark's dialect as it is, and one of llama.cpp's GBNF translated.

    Raises:
        RequestError: the GBNF is malformed.
    """
    if not _GBNF_ROOT.search(grammar):
        return grammar
    try:
        return gbnf_to_lark(grammar).replace("%llguidance {}", "", 1)
    except Exception as error:
        raise refused(f"grammar is no GBNF that llguidance reads: {error}") from None


def refused(reason: str) -> RequestError:
    """Return the error for a shape that cannot be compiled."""
    return RequestError(f"{PARAM}: {reason}", param=PARAM)


class TextMatcher:
    """State of one text in its grammar.

    The library's limits bound the states that it finds for a token. An ambiguous grammar finds the same states again and again,
    and its time for a token grows with the cube of the text's length. So the time of a text is limited, too.

    Args:
        grammar: matcher at the beginning of the grammar, which is copied.

    Attributes:
        matcher: the library's matcher.
        length: number of tokens that it has taken.
        is_stuck: whether no token may follow the text, and none may end it.
        spent_s: seconds of processor time for them and for those of their masks that were measured.
    """

    def __init__(self, grammar: LLMatcher) -> None:
        self.matcher, self.length, self.is_stuck = grammar.deep_copy(), 0, False
        self.spent_s = self._token_s = self._mask_s = 0.0

    def follow(self, output_ids: Sequence[int]) -> None:
        """Take the tokens of a text that have not been taken."""
        if new := output_ids[self.length :]:
            began = thread_time()
            self.matcher.consume_tokens([*new])
            self.length, self._token_s = len(output_ids), self._spend(began) / len(new)

    def take(self, token: int) -> None:
        """Take the next token of a text, all of whose tokens have been taken."""
        began = thread_time()
        self.matcher.consume_tokens([token])
        self.length, self._token_s = self.length + 1, self._spend(began)

    def fill(self, words: np.ndarray, row: int) -> None:
        """Set the bits of the tokens that may follow the text.

        Args:
            words: int32 `[R, W]`, see `Grammars.masks`.
            row: row of the text.
        """
        began = thread_time()
        fill_next_token_bitmask(self.matcher, words, row)
        self._mask_s = self._spend(began)

    def _spend(self, began: float) -> float:
        """Count the processor time since `began`, and return it in seconds."""
        spent_s = thread_time() - began
        self.spent_s += spent_s
        return spent_s

    @property
    def token_s(self) -> float:
        """Return the seconds of processor time for the last token and for the last mask that was measured."""
        return self._token_s + self._mask_s

    @property
    def is_slow(self) -> bool:
        """Return whether the text is slow in its grammar: its masks are measured, and it takes turns with others."""
        return self._token_s > _SLOW_TOKEN_S or self._mask_s > _SLOW_S

    @property
    def is_complete(self) -> bool:
        """Return whether the grammar allows no further text, and the text follows it."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def has_no_token(self) -> bool:
        """Return whether the text follows the grammar, and no token of the vocabulary may follow the text."""
        began = thread_time()
        mask = self.matcher.compute_bitmask() if self.matcher.is_accepting() else None
        self._spend(began)
        return mask is not None and int.from_bytes(mask, "little").bit_count() == 1  # the end is a token to the library

    @property
    def error(self) -> str:
        """Return why the matcher can go no further, such as a limit; an empty text if it can."""
        if self.spent_s > _TEXT_S + _TOKEN_S * self.length:
            return f"the grammar is too ambiguous: a text of {self.length} tokens took {self.spent_s:.2f} s of processor time"
        return _STUCK if self.is_stuck else _reason(self.matcher)


class _Tokens:
    """Vocabulary as the library reads it; see `llguidance.TokenizerWrapper`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary.tokens)
        self.tokens = [*vocabulary.tokens, _END]
        self.special_token_ids = [*vocabulary.special, self.eos_token_id]
        self.split: Callable[[str], list[int]]

    def __call__(self, text: str) -> list[int]:
        """Return tokens of a text: a grammar may ask for them, whatever `_HEADER` says."""
        return self.split(text)


class Grammars:
    """Compiled shapes of texts, of which the last used are kept. Threads may share the object.

    Args:
        vocabulary: vocabulary of the model.

    Attributes:
        special: tokens that stand for no text, which a text has only where a grammar names them.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.special, tokens = frozenset(vocabulary.special), _Tokens(vocabulary)
        self._end = tokens.eos_token_id
        self._tokenizer = LLTokenizer(tokens, slices=[])  # type: ignore[arg-type]
        tokens.split = self._tokenizer.greedy_tokenize
        self._limits = LLParserLimits(**_LIMITS)
        self._compiled = KeptShapes[LLMatcher]()
        self._lock, self._threads, self._is_slow = Lock(), LLExecutor(), False

    def get(self, shape: StructuredOutputsParams) -> LLMatcher | None:
        """Return the compiled grammar of a shape if it is kept, or None."""
        with self._lock:
            return self._compiled.get(shape)

    def compile(self, shape: StructuredOutputsParams) -> LLMatcher:
        """Return the compiled grammar of a shape. The library lets other threads run meanwhile.

        Raises:
            RequestError: the library refuses the grammar; the error has the library's words.
        """
        if (known := self.get(shape)) is not None:
            return known
        grammar = LLMatcher(self._tokenizer, grammar_of(shape), log_level=0, limits=self._limits)
        if grammar.is_error():
            raise refused(_reason(grammar))
        fill_next_token_bitmask(grammar, self._mask_rows(1))  # copies share what it has found
        if grammar.is_error() and (reason := _reason(grammar)) != _STUCK:
            raise refused(reason)
        if grammar.is_stopped():
            raise refused("no text has this shape")
        with self._lock:
            self._compiled.put(shape, grammar)
        return grammar

    def _mask_rows(self, rows: int) -> np.ndarray:
        return np.zeros((rows, self._end // 32 + 1), np.int32)

    def masks(self, matchers: Sequence[TextMatcher]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that may follow each text, and whether each text may end there.

        Args:
            matchers: states of `R` texts, all different.

        Returns:
            int32 `[R, W]`, whose bit `t % 32` of word `t // 32` stands for token id `t`, and bool `[R]`. A matcher with an
            error allows nothing.
        """
        words, others = self._mask_rows(len(matchers)), list[tuple[LLMatcher, int]]()
        for row, text in enumerate(matchers):
            if len(matchers) == 1 or self._is_slow or text.is_slow:
                text.fill(words, row)
            else:
                others.append((text.matcher, row))
        began = perf_counter()
        if others:
            fill_next_token_bitmask_par(self._threads, others, words)
        self._is_slow = perf_counter() - began > _SLOW_S * -(-len(others) // _PROCESSORS)
        word, bit = divmod(self._end, 32)
        end = np.int32(np.uint32(1 << bit).view(np.int32))
        may_end = (words[:, word] & end) != 0
        words[:, word] &= ~end
        return words, may_end


def _reason(matcher: LLMatcher) -> str:
    """Return the library's words on an error, without the state that it prints; an empty text without an error."""
    reason = _EXCERPT.split(str(matcher.get_error()), maxsplit=1)[0].strip()
    reason = _STUCK if reason == _NO_TOKEN else reason
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]} ..."
