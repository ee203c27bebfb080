"""Answer questions over real documents with a real model: SmolLM2-135M-Instruct by default, from its GGUF file.

`make run-real` gets the file and runs this program. Any other model works too: a folder, a GGUF file or a hub id.
"""

import argparse
import random
import time
from collections import Counter
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

WAYS = ("chunks", "focus", "one text")


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


def ask(llm, question, documents, way, max_tokens):
    """Return the greedy answer over documents: each a chunk, the chosen one alone, or all in one text under full attention."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1)
    if way == "one text":
        return llm.chat(chat(question, documents), params, use_tqdm=False)[0]
    focus = 1 if way == "focus" else None
    return llm.chat(chat(question), params, documents=documents, focus=focus, use_tqdm=False)[0]


def first_token(llm, question, documents, way):
    """Print how much of a new prompt is computed, and return the seconds until its first token."""
    began = time.perf_counter()
    out = ask(llm, question, documents, way, max_tokens=1)
    seconds = time.perf_counter() - began
    computed = len(out.prompt_token_ids) - out.num_cached_tokens + (out.focus.computed_tokens if out.focus else 0)
    show(way, f"{computed} prompt tokens computed, first token after {seconds:.2f} s")
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
        weights = "packed" if args.model.endswith(".gguf") else "auto"  # in float32, only by name
        llm = LLM(args.model, weights=weights, chunk_calibration=args.calibration, **OPTIONS)
    with stage(f"Computing {len(DOCUMENTS)} documents, each alone and once"):
        llm.precompute(chat("")[:1], DOCUMENTS, use_tqdm=False)
    for way in WAYS:
        with stage(f"Compiling for questions over {way}"):
            ask(llm, "What is this about?", DOCUMENTS, way, max_tokens=2)

    print("\nchunks: no document sees another, so each is reused in any order")
    print("focus: the question chooses one of the chunks and is answered from it alone")
    print("one text: every document sees those before it")
    shuffled, right, same, seconds = random.Random(0), Counter(), Counter(), {way: [] for way in WAYS}
    for question, expected in QUESTIONS:
        print(f"\n{question}")
        show("expected", expected)
        right["no documents"] += show_answer("no documents", ask(llm, question, (), "one text", args.max_tokens), expected)
        order, other = (shuffled.sample(DOCUMENTS, len(DOCUMENTS)) for _ in range(2))
        for way in WAYS:
            seconds[way].append(first_token(llm, question, order, way))
            answer = ask(llm, question, order, way, args.max_tokens)
            right[way] += show_answer("", answer, expected)
            if way != "one text":
                equal = ask(llm, question, other, way, args.max_tokens).outputs[0] == answer.outputs[0]
                show("  in another order", "the same answer, bit for bit" if equal else "ANOTHER ANSWER, or other bits of it")
                same[way] += equal

    count, slow = len(QUESTIONS), median(seconds["one text"])
    listed = ", ".join(f"{right[way]} over {way}" for way in WAYS)
    print(f"\nRight answers, of {count}: {listed}, {right['no documents']} without documents.")
    for way in ("chunks", "focus"):
        said = f"{same[way]} of {count} answers have the same tokens and log-probability bits"
        print(f"Other order of the documents, {way}: {said}.")
    listed = ", ".join(f"{median(taken):.2f} s over {way} (1/{slow / median(taken):.0f})" for way, taken in seconds.items())
    print(f"First token, median: {listed}.")


if __name__ == "__main__":
    main()
