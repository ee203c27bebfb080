"""Answer questions over real documents with a real model: SmolLM2-135M-Instruct by default, from its GGUF file.

`make run-real` gets the file and runs this program. Any other model works too: a folder, a GGUF file or a hub id.
"""

import argparse
import random
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from chunkattn import LLM, SamplingParams

OPTIONS = {"dtype": "float32", "max_model_len": 2048, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 512 << 20}
"""Options of the engine; every other option of `LLM` may be added."""

SYSTEM = "You answer questions."

DOCUMENTS = (
    "Chess is played on a board of 64 squares. Each player begins with 16 pieces. The first official world champion was "
    "Wilhelm Steinitz, who won the title in 1886.",
    "The marathon is a race of 42.195 kilometres. The women's marathon became Olympic in Los Angeles in 1984, where Joan "
    "Benoit of the United States won it.",
    "The giant panda lives in the mountains of central China. It eats 12 to 38 kilograms of bamboo a day. A newborn panda "
    "weighs about 100 grams.",
    "Lake Baikal in Siberia, Russia, is the deepest lake in the world. It is 1,642 metres deep and holds a fifth of the "
    "unfrozen fresh water on the surface of the Earth. The Baikal seal lives only there.",
    "Vulcanized rubber was invented by Charles Goodyear in 1839. He dropped rubber mixed with sulfur on a hot stove. The "
    "tyre company was named after him in 1898, long after his death.",
    "The violin has four strings. Antonio Stradivari built about 1,100 instruments in Cremona, Italy, of which some 650 "
    "survive.",
    "Iceland has no army. Its capital is Reykjavik, and about 390,000 people live on the island. Its parliament, the "
    "Althing, was founded in 930.",
    "The Sahara is the largest hot desert on Earth. It covers 9.2 million square kilometres in the north of Africa. Its "
    "highest mountain is Emi Koussi, a volcano in Chad.",
    "The painting Mona Lisa was made by Leonardo da Vinci at the beginning of the 16th century. It hangs in the Louvre "
    "museum in Paris. In 1911 it was stolen by Vincenzo Peruggia, and it was found in Florence two years later.",
    "The Eiffel Tower stands in Paris, France. It was built for the World's Fair of 1889 by the company of Gustave Eiffel. "
    "It is made of wrought iron and is about 330 metres tall.",
)

QUESTIONS = (
    ("How many grams does a newborn panda weigh?", "100 grams"),
    ("Who won the women's marathon in 1984?", "Joan Benoit"),
    ("How many people live in Iceland?", "390,000"),
    ("How many square kilometres does the Sahara cover?", "9.2 million"),
    ("In which museum does the Mona Lisa hang?", "Louvre"),
    ("What is the height of the Eiffel Tower in Paris?", "330 meters"),
)
"""Questions, each with the text that a right answer contains."""


def chat(question, documents=()):
    """Return the messages of a question, with documents in the user's message."""
    text = "".join(f"Document: {document}\n\n" for document in documents) + f"{question} Answer briefly."
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


@contextmanager
def stage(text):
    """Print what begins, and the seconds it took."""
    print(f"{text} ... ", end="", flush=True)
    began = time.perf_counter()
    yield
    print(f"{time.perf_counter() - began:.1f} s", flush=True)


def ask(llm, question, documents, isolated, max_tokens):
    """Return the greedy answer over documents: each a chunk of its own, or all in one text under full attention."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1)
    if isolated:
        return llm.chat(chat(question), params, documents=documents, use_tqdm=False)[0]
    return llm.chat(chat(question, documents), params, use_tqdm=False)[0]


def first_token(llm, question, documents, isolated):
    """Print how much of a new prompt is in the cache, and return the seconds until its first token."""
    began = time.perf_counter()
    out = ask(llm, question, documents, isolated, max_tokens=1)
    seconds = time.perf_counter() - began
    cached = f"{out.num_cached_tokens} of {len(out.prompt_token_ids)} prompt tokens cached"
    show("chunks" if isolated else "one text", f"{cached}, first token after {seconds:.2f} s")
    return seconds


def show(name, text):
    print(f"  {name:21}{text}", flush=True)


def show_answer(name, out, expected):
    """Print an answer, and return whether it contains the expected text."""
    text = " ".join(out.outputs[0].text.split())
    show(name, f"{text} [{'right' if expected in text else 'wrong'}]")
    return expected in text


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder, GGUF file or hub id")
    parser.add_argument("--max-tokens", type=int, default=24, help="length of an answer, in tokens")
    parser.add_argument("--calibration", help="calibration file; by default that of the model's folder, if there is one")
    args = parser.parse_args()

    with stage(f"Loading {Path(args.model).name}"):
        llm = LLM(args.model, chunk_calibration=args.calibration, **OPTIONS)
    with stage(f"Computing {len(DOCUMENTS)} documents, each alone and once"):
        llm.precompute(chat("")[:1], DOCUMENTS, use_tqdm=False)
    for isolated, name in ((True, "chunks"), (False, "one text")):
        with stage(f"Compiling for questions over {name}"):
            ask(llm, "What is this about?", DOCUMENTS, isolated, max_tokens=2)

    print("\nchunks: no document sees another, so each is reused in any order\none text: every document sees those before it")
    shuffled, right, same, seconds = random.Random(0), [0, 0, 0], 0, ([], [])
    for question, expected in QUESTIONS:
        print(f"\n{question}")
        show("expected", expected)
        right[0] += show_answer("no documents", ask(llm, question, (), False, args.max_tokens), expected)
        order, other = (shuffled.sample(DOCUMENTS, len(DOCUMENTS)) for _ in range(2))
        seconds[0].append(first_token(llm, question, order, True))
        answer = ask(llm, question, order, True, args.max_tokens)
        right[1] += show_answer("", answer, expected)
        equal = ask(llm, question, other, True, args.max_tokens).outputs[0] == answer.outputs[0]
        show("chunks, other order", "the same answer, bit for bit" if equal else "ANOTHER ANSWER, or other bits of it")
        same += equal
        seconds[1].append(first_token(llm, question, order, False))
        right[2] += show_answer("", ask(llm, question, order, False, args.max_tokens), expected)

    count, fast, slow = len(QUESTIONS), *map(median, seconds)
    print(f"\nRight answers: {right[1]} of {count} over chunks, {right[2]} over one text, {right[0]} without documents.")
    print(f"Other order of the documents: {same} of {count} answers over chunks have the same tokens and log-probability bits.")
    print(f"First token, median: {fast:.2f} s over chunks, {slow:.2f} s over one text, {slow / fast:.0f} times as long.")


if __name__ == "__main__":
    main()
