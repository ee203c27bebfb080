"""Answer questions over real documents with a real model: SmolLM2-135M-Instruct by default, from its GGUF file.

`make run-real` gets the file and runs this program. Any other model works too: a folder, a GGUF file or a hub id.
"""

import argparse

from chunkattn import LLM, SamplingParams

OPTIONS = {"dtype": "float32", "max_model_len": 2048, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 512 << 20}
"""Options of the engine; every other option of `LLM` may be added."""

SYSTEM = "You answer questions."

DOCUMENTS = (
    "Penicillin was discovered by Alexander Fleming in London in 1928. He noticed that a mould had killed the bacteria in one "
    "of his dishes.",
    "The Eiffel Tower stands in Paris, France. It was built for the World's Fair of 1889 by the company of Gustave Eiffel. "
    "It is made of wrought iron and is about 330 metres tall.",
    "The first person to walk on the Moon was Neil Armstrong, on 20 July 1969. Buzz Aldrin followed him, while Michael Collins "
    "stayed in orbit.",
    "The Great Barrier Reef lies off the coast of Queensland, Australia. It is the largest coral reef system of the world and "
    "consists of about 2,900 separate reefs.",
    "Mount Everest lies on the border between Nepal and China. Its summit is 8,849 metres above sea level. "
    "Edmund Hillary and Tenzing Norgay were the first to reach the summit, on 29 May 1953.",
    "The Amazon River flows through Peru, Colombia and Brazil into the Atlantic Ocean. "
    "It carries more water than any other river in the world.",
    "Honey bees tell each other where flowers are by dancing. Karl von Frisch described this waggle dance and received the "
    "Nobel Prize in 1973.",
    "Water boils at 100 degrees Celsius at sea level. On high mountains the air pressure is lower, so water boils at a lower "
    "temperature.",
)

QUESTIONS = (
    "Who discovered penicillin?",
    "How tall is the Eiffel Tower?",
    "Who was the first person to walk on the Moon?",
    "How many reefs are in the Great Barrier Reef?",
)


def chat(question, documents=()):
    """Return the messages of a question, with documents in the user's message."""
    text = "".join(f"Document: {document}\n\n" for document in documents) + f"{question} Answer briefly."
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder, GGUF file or hub id")
    parser.add_argument("--documents", type=int, default=4, help="number of documents that each question is asked of")
    parser.add_argument("--max-tokens", type=int, default=24, help="length of an answer, in tokens")
    parser.add_argument("--calibration", help="calibration file; answers with it are shown beside those without")
    args = parser.parse_args()

    llm = LLM(args.model, chunk_calibration="off" if args.calibration else None, **OPTIONS)
    calibrated = LLM(args.model, chunk_calibration=args.calibration, **OPTIONS) if args.calibration else None
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    documents = DOCUMENTS[: args.documents]
    print(f"{args.model}: {len(documents)} documents")
    for question in QUESTIONS:
        print(f"\n{question}")
        # As chunks: no document sees another, and each is computed once for all questions.
        if calibrated is not None:
            show("chunks, calibrated", calibrated.chat(chat(question), params, documents=documents, use_tqdm=False)[0])
        show("chunks", llm.chat(chat(question), params, documents=documents, use_tqdm=False)[0])
        # As one text: every document sees those before it.
        show("one text", llm.chat(chat(question, documents), params, use_tqdm=False)[0])


def show(kind, out):
    cached = f"{out.num_cached_tokens} of {len(out.prompt_token_ids)} prompt tokens cached"
    print(f"  {kind}: {out.outputs[0].text.strip()}  ({cached})")


if __name__ == "__main__":
    main()
