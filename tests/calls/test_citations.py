"""Answers of the demo model that cite the documents of their prompts, in any order of the documents."""

import asyncio
import itertools
import re

import pytest

from chunkattn import AsyncLLM, Document, DocumentPrompt, SamplingParams, StructuredOutputsParams
from chunkattn.errors import RequestError

PREFIX, QUESTION = "Read the documents and answer the question.", "Where does Nila live? Answer:"
DOCUMENTS = [
    Document("Nila lives in Tunise.", "nila"),
    Document("Rumi is a poet.", "rumi"),
    "Lezudo likes honey.",
    Document("Zenuso works as a baker.", "b c"),
]
REQUIRED = {"mode": "required", "instruction": "", "within": 8}
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=48),
    "seeded": SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=48),
}


def numbered(output, order):
    """Texts, tokens and citations of all samples, with the documents' numbers in the first order."""
    return [
        (o.text, o.token_ids, [(c.start, c.end, [(s.id, order[s.index]) for s in c.sources]) for c in o.citations])
        for o in output.outputs
    ]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("options", [{}, {"focus": 2}, {"chunk_mode": "joined"}], ids=str)
def test_the_order_of_the_documents_changes_nothing_but_indices(demo, kind, options):
    orders = list(itertools.permutations(range(4)))[:: 5 if options else 3]
    prompts = [DocumentPrompt(PREFIX, [DOCUMENTS[n] for n in order], QUESTION) for order in orders]
    outputs = demo.generate(prompts, PARAMS[kind], citations=REQUIRED, **options)
    first, *others = [numbered(output, order) for output, order in zip(outputs, orders)]
    assert all(other == first for other in others)
    assert all(citations for _, _, citations in first)
    if "focus" in options:
        shown = {orders[0][n] for n in outputs[0].focus.shown}
        assert {number for _, _, citations in first for *_, sources in citations for _, number in sources} <= shown


def test_raw_texts_hold_markers_of_the_prompt_alone(demo):
    prompt = DocumentPrompt(PREFIX, DOCUMENTS, QUESTION)
    params = SamplingParams(temperature=1.5, seed=1, n=8, max_tokens=60)
    kept = demo.generate(prompt, params, citations={**REQUIRED, "keep_markers": True})[0].outputs
    removed = demo.generate(prompt, params, citations=REQUIRED)[0].outputs
    markers = set(demo.parser.parse(prompt, citations=True).cited.numbers())
    for with_markers, without in zip(kept, removed):
        assert with_markers.token_ids == without.token_ids
        raw = demo.tokenizer.decode(with_markers.token_ids, skip_special_tokens=True)
        found = re.findall(r"\[doc:[^\]]*\]", raw)
        assert found
        assert set(found) <= markers
        assert with_markers.text.strip() == raw.strip()
        assert without.text == re.sub(r"[ \t]*\[doc:[^\]]*\]", "", with_markers.text)
        for output in (with_markers, without):
            assert all(c.text == output.text[c.start : c.end] for c in output.citations)


def test_chats_cite_and_an_answer_without_citations_has_none(demo):
    user = {"role": "user", "content": "Where does Nila live?"}
    output = demo.chat([user], PARAMS["greedy"], documents=DOCUMENTS, citations=REQUIRED)[0].outputs[0]
    assert output.citations
    assert demo.chat([user], PARAMS["greedy"], documents=DOCUMENTS, citations=True)[0].outputs[0].citations is not None
    assert demo.chat([user], PARAMS["greedy"], documents=DOCUMENTS)[0].outputs[0].citations is None
    assert demo.chat([user], PARAMS["greedy"], documents=[], citations=True)[0].outputs[0].citations == []


def test_chunks_with_markers_serve_any_order_and_company(demo):
    own = {"citations": True, "cache_salt": "of markers"}
    demo.precompute(PREFIX, DOCUMENTS[:2], **own)
    found = demo.lookup(PREFIX, [DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[3]], **own).documents
    assert [document.was_cached for document in found] == [True, True, False]
    plain = demo.lookup(PREFIX, ["Rumi is a poet."], cache_salt="of markers").documents
    assert not plain[0].was_cached
    output = demo.generate(DocumentPrompt(PREFIX, DOCUMENTS[2::-1], QUESTION), PARAMS["greedy"], **own)[0]
    assert [bool(count) for count in output.num_cached_chunk_tokens] == [False, True, True]


@pytest.mark.parametrize(
    ("documents", "params", "options", "reason"),
    [
        (DOCUMENTS, {"structured_outputs": StructuredOutputsParams(choice=["a", "b"])}, True, "exclude each other"),
        ([], {}, "required", "no document to cite"),
        ([DOCUMENTS[0], DOCUMENTS[0]], {}, True, "document 0 and document 1 have the id 'nila'"),
        (["Same.", "x", "Same."], {}, True, "document 0 and document 2 have equal contents and no ids"),
    ],
)
def test_refusals(demo, documents, params, options, reason):
    with pytest.raises(RequestError, match=reason):
        demo.generate(DocumentPrompt(PREFIX, documents, QUESTION), SamplingParams(**params), citations=options)


def test_streams_of_the_asynchronous_engine_end_like_the_other(demo):
    """No text and no citation is taken back, and snapshots do not change."""
    prompt, params = DocumentPrompt(PREFIX, DOCUMENTS, QUESTION), PARAMS["greedy"]

    async def run():
        async with AsyncLLM(warmup=False, max_num_batched_tokens=256, max_num_seqs=8) as llm:
            return [output async for output in llm.generate(prompt, params, citations=REQUIRED)]

    outputs = [output.outputs[0] for output in asyncio.run(run())]
    for one, two in itertools.pairwise(outputs):
        assert two.text.startswith(one.text)
        assert two.citations[: len(one.citations)] == one.citations
    whole = demo.generate(prompt, params, citations=REQUIRED)[0].outputs[0]
    assert (outputs[-1].text, outputs[-1].citations) == (whole.text, whole.citations)
