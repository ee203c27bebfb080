"""Outputs that grow while a stream reads them."""

import pytest
from transformers import AutoTokenizer

from chunkattn import SamplingParams
from chunkattn.calls.detokenizer import token_decoder
from chunkattn.calls.generate import OutputBuilder
from chunkattn.engine.messages import GenerateRequest, TokenOutput
from chunkattn.models.loader import DEMO_FOLDER
from chunkattn.parsers import ParsedPrompt
from chunkattn.rope.positions import make_layout
from chunkattn.server.texts import Tail

TEXT = "Bukepi likes onions and lives in Pegelu."


@pytest.mark.parametrize("stop", [(), ("zzzzzz",)])
@pytest.mark.parametrize("late", [1, 3])
def test_tokens_that_come_between_an_output_and_its_reader_are_not_lost(stop, late):
    """The last tokens arrive when the output has been handed over and not been read yet."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    request = GenerateRequest("r", make_layout([], [], [5]), SamplingParams(stop=stop, max_tokens=len(ids)))
    prompt = ParsedPrompt(request.layout, None)
    builder, tail = OutputBuilder(request, prompt, tokenizer, token_decoder(tokenizer)), Tail(stop)
    for token in ids[:-late]:
        builder.add_tokens(TokenOutput("r", 0, (token,)))
    handed_over = builder.read()
    for place, token in enumerate(ids[-late:], 1):
        builder.add_tokens(TokenOutput("r", 0, (token,), finish_reason="length" if place == late else None))
    parts = [tail.take(handed_over.outputs[0])]
    parts.append(tail.take(builder.read().outputs[0]))
    assert "".join(part.text for part in parts if part) == builder.output.outputs[0].text
    assert [token for part in parts if part for token in part.token_ids] == ids
    assert [part.finish_reason for part in parts if part][-1] == "length"
