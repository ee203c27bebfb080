"""`ChunkLLM`, with vLLM's engine in a process of its own."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from vllm import SamplingParams as VllmParams

from chunkattn import ChunkedPrompt, DocumentPrompt, SamplingParams
from chunkattn.errors import CapacityError, ConfigError, RequestError
from chunkattn.integrations.vllm import ChunkLLM
from tests.vllm.models import VOCAB
from tests.vllm.witness import Witness

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "chunkattn" / "models" / "demo"
COUNT = 6
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, logprobs=5, ignore_eos=True)
OPTIONS = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_seqs": 8}
DOCUMENTS = [
    "Zenuso works as a baker. Zenuso lives in Kirora.",
    "Lezudo has a house in Pegelu. Lezudo likes honey.",
    "Nila lives in Tunise.",
    "Rumi is a poet.",
]
PREFIX, QUESTION = "Read the documents and answer the question.", "Where does Lezudo live? Answer:"
MESSAGES = [{"role": "user", "content": "Where does Lezudo live?"}]


@pytest.fixture(scope="module", autouse=True)
def own_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        yield


def started(folder, **options):
    llm = ChunkLLM(str(folder), **{**OPTIONS, **options})
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def demo(own_process):
    yield from started(DEMO, enable_chunk_aware=True, max_model_len=512, max_store_bytes=2 << 20)


@pytest.fixture(scope="module")
def demo_witness():
    return Witness(DEMO)


def check(output, expected):
    tokens, logprobs = expected
    (completion,) = output.outputs
    assert completion.token_ids == tokens
    error = max(abs(entry.logprob - logprobs[token]) for token, entry in completion.logprobs[0].items())
    assert error <= 1e-4
    assert completion.finish_reason == "length"


def parts(llm, prompt):
    layout = llm.parser.parse(prompt).layout
    first, *chunks, last = (layout.part(segment).tolist() for segment in layout.segments)
    return first, chunks, last


def test_every_form_of_prompt_gives_the_same_answer(demo, demo_witness):
    texts = [demo.parser.documents(text, i)[1] for i, text in enumerate(DOCUMENTS)]
    chunked = ChunkedPrompt(PREFIX, texts, QUESTION)
    first, chunks, last = parts(demo, chunked)
    forms = [
        chunked,
        DocumentPrompt(PREFIX, DOCUMENTS, QUESTION),
        " # # ".join([PREFIX, *texts, QUESTION]),
        {"prompt": " # # ".join([PREFIX, *texts, QUESTION])},
        ChunkedPrompt(first, chunks, last),
    ]
    outputs = demo.generate(forms, GREEDY)
    expected = demo_witness.answer(first, chunks, last, COUNT)
    for output in outputs:
        check(output, expected)
        assert output.prompt_token_ids == [*first, *chain(*chunks), *last]
        assert output.chunk_lens == tuple(map(len, chunks))
    assert outputs[0].prompt == PREFIX + "".join(texts) + QUESTION
    assert outputs[4].prompt is None


def test_the_demo_model_answers_from_documents(demo):
    (chat,) = demo.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=8), documents=DOCUMENTS)
    (document,) = demo.generate(DocumentPrompt(PREFIX, DOCUMENTS, QUESTION), SamplingParams(temperature=0, max_tokens=8))
    assert chat.outputs[0].text.strip() == document.outputs[0].text.strip() == "Pegelu"
    assert chat.outputs[0].finish_reason == "stop"


def test_a_warm_prompt_computes_its_question_alone(demo):
    documents = [f"Rumi has {n} houses." for n in ("no", "two", "three")]
    total, question = [], 0
    for order in ((0, 1, 2), (2, 0, 1), (1,)):
        prompt = DocumentPrompt(PREFIX, [documents[i] for i in order], "How many houses does Rumi have? Answer:")
        (output,) = demo.generate(prompt, GREEDY)
        question = len(parts(demo, prompt)[2])
        total.append(
            (len(output.prompt_token_ids) - output.num_cached_tokens, output.num_cached_chunk_tokens, output.chunk_lens)
        )
    cold, *warm = total
    assert cold[0] >= sum(cold[2]) + question
    assert cold[1] == (0, 0, 0)
    for computed, cached, lens in warm:
        assert computed == question
        assert cached == lens


def test_order_does_not_matter_and_is_the_callers_in_the_output(demo):
    outputs = [demo.generate(DocumentPrompt(PREFIX, docs, QUESTION), GREEDY)[0] for docs in (DOCUMENTS, DOCUMENTS[::-1])]
    assert outputs[0].outputs == outputs[1].outputs
    assert outputs[0].chunk_lens == outputs[1].chunk_lens[::-1]
    assert outputs[0].prompt_token_ids != outputs[1].prompt_token_ids


def test_plain_prompts_between_are_untouched(demo, demo_witness):
    first, chunks, last = parts(demo, DocumentPrompt(PREFIX, DOCUMENTS, QUESTION))
    ids = [*first, *chain(*chunks), *last]
    plain, chunked, again = demo.generate(
        [{"prompt_token_ids": ids}, ChunkedPrompt(first, chunks, last), {"prompt_token_ids": ids}], GREEDY, chunk_aware=False
    )
    check(chunked, demo_witness.answer(first, chunks, last, COUNT))
    for output in (plain, again):
        check(output, demo_witness.plain(ids, COUNT))
        assert output.chunk_lens == ()


def test_many_prompts_at_once_in_a_store_that_holds_few(demo, demo_witness):
    rng = np.random.default_rng(5)
    prompts = []
    for _ in range(8):  # each about 200 tokens: the store holds 800
        chunks = [rng.integers(10, 700, int(n)).tolist() for n in rng.integers(1, 60, 6)]
        prompts.append(ChunkedPrompt(rng.integers(10, 700, 20).tolist(), chunks, rng.integers(10, 700, 5).tolist()))
    for prompt, output in zip(prompts, demo.generate(prompts, GREEDY)):
        check(output, demo_witness.answer(prompt.prefix, prompt.chunks, prompt.question, COUNT))


def test_precomputed_documents_are_cached(demo):
    documents = ["Nobody lives in Kirora any more.", "Kirora is a town."]
    demo.precompute(PREFIX, documents)
    (output,) = demo.generate(DocumentPrompt(PREFIX, documents, QUESTION), GREEDY)
    assert output.num_cached_chunk_tokens == output.chunk_lens


def test_evicted_documents_are_precomputed_again(demo):
    documents = ["Kirora has a harbour.", "Pegelu has a school."]
    rng = np.random.default_rng(6)
    demo.precompute(PREFIX, documents)
    demo.precompute([9], [rng.integers(10, 700, 150).tolist() for _ in range(6)])  # more than the store holds
    demo.precompute(PREFIX, documents)
    (output,) = demo.generate(DocumentPrompt(PREFIX, documents, QUESTION), GREEDY)
    assert output.num_cached_chunk_tokens == output.chunk_lens


def test_a_prefix_is_precomputed_alone(demo):
    prefix = "Read the documents one by one and then answer."
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            demo, "_send", lambda requests, use_tqdm: sent.extend(requests) or ChunkLLM._send(demo, requests, use_tqdm)
        )
        demo.precompute(prefix, [])
        demo.generate(DocumentPrompt(prefix, ["A document."], QUESTION), GREEDY)
    alone, save, _ = (s.request for s in sent)
    assert alone.token_ids == save.token_ids[: len(alone.token_ids)]
    assert alone.kv_transfer_params["chunkattn"]["save"] == len(alone.token_ids)
    assert alone.keys[0] == save.keys[0], "the prefix's key"


def test_a_reset_forgets_the_store(demo):
    prompt = DocumentPrompt(PREFIX, ["Tunise is far away."], QUESTION)
    demo.generate(prompt, GREEDY)
    held = demo._held
    assert demo.reset_prefix_cache()
    assert not len(demo._held)
    demo._held = held  # the composed request is sent alone, and finds nothing
    (output,) = demo.generate(prompt, GREEDY)
    assert output.num_cached_chunk_tokens == (0,)


def test_threads_get_their_own_answers(demo):
    questions = ["Where does Lezudo live? Answer:", "Who is a poet? Answer:", "Where does Nila live? Answer:"]
    prompts = [DocumentPrompt(PREFIX, DOCUMENTS, question) for question in questions] * 4
    expected = [output.outputs[0].token_ids for output in demo.generate(prompts, GREEDY)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: demo.generate(prompt, GREEDY)[0].outputs[0].token_ids, prompts))
    assert answers == expected


def test_salts_share_nothing(demo):
    prompt = DocumentPrompt(PREFIX, ["A secret of one tenant."], QUESTION)
    outputs = [demo.generate(prompt, GREEDY, cache_salt=salt)[0] for salt in ("a", "a", "b")]
    assert [sum(o.num_cached_chunk_tokens) > 0 for o in outputs] == [False, True, False]
    assert outputs[0].outputs == outputs[2].outputs


def test_samples_stop_strings_and_vllms_own_parameters(demo):
    prompt = DocumentPrompt(PREFIX, DOCUMENTS, QUESTION)
    (output,) = demo.generate(prompt, VllmParams(n=2, top_k=1, max_tokens=8, stop=["gelu"]))
    assert [o.text.strip() for o in output.outputs] == ["Pe", "Pe"]
    assert output.outputs[0].stop_reason == "gelu"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda llm: llm.generate(DocumentPrompt("a", ["b"], "c"), SamplingParams(prompt_logprobs=1)),
            RequestError,
            "prompt_logp",
        ),
        (lambda llm: llm.generate(DocumentPrompt("a", ["b"], "")), RequestError, "question is empty"),
        (lambda llm: llm.generate(ChunkedPrompt([1], [[2] * 600], [3])), CapacityError, "602 tokens, vLLM's max_model_len 512"),
        (lambda llm: llm.generate("x", [SamplingParams()] * 2), RequestError, "2 sampling_params for 1 prompts"),
        (lambda llm: llm.score("q", ["i"]), AttributeError, "ChunkLLM has no score"),
        (lambda llm: llm.precompute("a", ["b"], pin=True), RequestError, "pin is not offered"),
        (lambda llm: llm.precompute([], []), RequestError, "neither a prefix nor a document"),
        (lambda llm: llm.precompute([1], [[2]] * 6 + [[3] * 600]), CapacityError, "a prompt with document 6 has 602 tokens"),
        (lambda llm: llm.precompute([1] * 600, []), CapacityError, "the prefix has 600 tokens"),
        (lambda llm: llm.generate("x", VllmParams(logprobs=50)), RequestError, "50"),
        (lambda llm: llm.generate(DocumentPrompt("a", ["b"], "c"), SamplingParams(logprobs=50)), RequestError, "50"),
        (lambda llm: llm.chat([{"role": "system", "content": "x"}], documents=["y"]), RequestError, "no user message"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(demo, call, error, message):
    with pytest.raises(error, match=message):
        call(demo)


def test_an_error_names_the_argument(demo):
    for call, param in [
        (lambda: demo.generate("x", VllmParams(logprobs=50)), "logprobs"),
        (lambda: demo.precompute([1], [[3] * 600]), "documents"),
    ]:
        with pytest.raises(RequestError) as error:
            call()
        assert error.value.param == param


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_transfer_config": {}}, "kv_transfer_config is set by ChunkLLM"),
        ({"data_parallel_size": 2}, "data_parallel_size 2"),
        ({"kv_store": "folder"}, "option 'kv_store' of chunkattn.LLM does not exist in vLLM"),
        ({"chunk_scale": 0.5}, "chunk_scale 0.5"),
    ],
)
def test_options_are_refused_before_vllm_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        ChunkLLM(str(DEMO), **options)


JAX = """
import json, sys
from chunkattn import LLM, ChunkedPrompt, DocumentPrompt, SamplingParams
prompts = [ChunkedPrompt(*p) if kind == "chunked" else DocumentPrompt(*p) for kind, p in json.load(sys.stdin)]
llm = LLM(dtype="float32")
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
print(json.dumps([[o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].text] for o in outputs]))
"""


def test_the_engine_in_jax_gives_the_same_tokens(demo):
    rng = np.random.default_rng(9)
    prompts = [["documents", [PREFIX, DOCUMENTS, QUESTION]], ["documents", [PREFIX, DOCUMENTS[2:], "Who is a poet? Answer:"]]]
    for lens in ([7, 30, 1], [64], [3] * 12, [33, 0, 31]):
        chunks = [rng.integers(10, 700, n).tolist() for n in lens]
        prompts.append(["chunked", [rng.integers(10, 700, 9).tolist(), chunks, rng.integers(10, 700, 4).tolist()]])
    done = subprocess.run(
        [ROOT / ".venv" / "bin" / "python", "-c", JAX],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    made = [ChunkedPrompt(*p) if kind == "chunked" else DocumentPrompt(*p) for kind, p in prompts]
    outputs = demo.generate(made, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    found = [[o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].text] for o in outputs]
    assert found == json.loads(done.stdout.splitlines()[-1])


# Other families and strategies


FAMILIES = {
    "llama3-rope": {"chunk_position_gap": 7},
    "mistral": {"position_strategy": "reordered"},
    "qwen2": {"max_store_bytes": 200 * 2 * 2 * 2 * 32 * 4},  # 200 tokens
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families(checkpoint, witness, rng, name):
    options = FAMILIES[name]
    for llm in started(checkpoint(name), skip_tokenizer_init=True, max_model_len=1024, **options):
        prompts = []
        for count in (1, 3, 8):
            chunks = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 20, count)]
            prefix, question = rng.integers(0, VOCAB, 11).tolist(), rng.integers(0, VOCAB, 5).tolist()
            prompts += [ChunkedPrompt(prefix, chunks, question), ChunkedPrompt(prefix, chunks[::-1], question)]
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY)):
            positions, gap = options.get("position_strategy", "shared"), options.get("chunk_position_gap", 0)
            check(output, witness(name).answer(prompt.prefix, prompt.chunks, prompt.question, COUNT, positions, gap))
        if "max_store_bytes" in options:
            with pytest.raises(CapacityError, match="raise the bytes of the chunk store"):
                llm.generate(ChunkedPrompt([1], [[2] * 150, [3] * 150], [4]), GREEDY)


@pytest.mark.slow
def test_the_code_of_the_guide_runs(own_process, capsys):
    guide = (ROOT / "docs" / "guides" / "vllm.md").read_text(encoding="utf-8")
    for block in re.findall(r"```py\n(.*?)```", guide, flags=re.DOTALL):
        names = {}
        exec(compile(block.replace("Qwen/Qwen3-0.6B", str(DEMO)), "vllm.md", "exec"), names)
        names["llm"].close()
    assert capsys.readouterr().out.split()[:2] == ["Pegelu", "Pegelu"]
