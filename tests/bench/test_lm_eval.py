"""lm-evaluation-harness reads the log-likelihoods of transformers from the server."""

import json
from types import SimpleNamespace

import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from scipy.special import log_softmax
from transformers import AutoTokenizer

from chunkattn.models.loader import DEMO_FOLDER
from tests.checkpoints import Oracle
from tests.server_helpers import SMALL, ServerProcess

STORY = "Read the documents and answer the question. Lezudo likes honey. Lezudo has a house in Pegelu."
QUESTIONS = [
    (f"{STORY} Where does Lezudo live? Answer:", [" Pegelu", " Kirora", " honey and figs"]),
    ("Find a person who lives in Kirora. Zenuso works as a baker. Zenuso lives in Kirora.", [" yes", " no"]),
    ("Taraku is a sailor. The best friend of Taraku", [" is Vikalu.", " was born in Vikalu. Taraku likes Öl, 油 and 🍯."]),
    ("Mukaba", [" was born in Sinoba. Mukaba has a friend called Bimupu."]),
]


@pytest.fixture(scope="module")
def server():
    made = ServerProcess(*SMALL)
    yield made
    assert made.close() == 0


class Witness:
    """transformers on the demo model."""

    def __init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
        self.oracle = Oracle(DEMO_FOLDER)

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def likelihood(self, ids, known):
        """Log-probability of the ids behind the first `known`, and whether each is the likeliest."""
        rows = log_softmax(self.oracle.logits(ids)[known - 1 : -1], axis=-1)
        wanted = ids[known:]
        return rows[range(len(wanted)), wanted].sum(), rows.argmax(-1).tolist() == wanted

    def next_word(self, text):
        """The likeliest continuation by one token."""
        ids = self.ids(text)
        longer = [*ids, int(self.oracle.logits(ids)[-1].argmax())]
        return self.tokenizer.decode(longer).removeprefix(self.tokenizer.decode(ids))


@pytest.fixture(scope="module")
def witness():
    return Witness()


@pytest.fixture
def evaluate(server, tmp_path, monkeypatch):
    """lm_eval on documents, through the server: what it tells of each, and its metrics."""
    # It would ask pip about every package.
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")

    def run(documents, task, *, batch_size=1, **options):
        file = tmp_path / "documents.jsonl"
        file.write_text("".join(json.dumps(d) + "\n" for d in documents), encoding="utf-8")
        data = {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")}
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "chunkattn-demo",
                "base_url": f"{server.url}/v1/completions",
                "tokenizer_backend": "huggingface",
                "tokenizer": str(DEMO_FOLDER),
                "max_length": 512,
                "max_retries": 1,
                **options,
            },
            tasks=[{"task": "asked", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **task}],
            batch_size=batch_size,
            task_manager=TaskManager(include_defaults=False),
        )
        samples = sorted(results["samples"]["asked"], key=lambda sample: sample["doc_id"])
        assert len(samples) == len(documents)
        return SimpleNamespace(samples=samples, metrics=results["results"]["asked"])

    return run


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        {"tokenized_requests": True},
        pytest.param({"tokenized_requests": True, "batch_size": 4}, marks=pytest.mark.slow),
        pytest.param({"tokenized_requests": True, "num_concurrent": 3, "batch_size": 2}, marks=pytest.mark.ci),
        pytest.param({"tokenized_requests": False}, marks=pytest.mark.slow),
        pytest.param({"tokenized_requests": False, "batch_size": 4}, marks=pytest.mark.ci),
    ],
    ids=["ids", "ids-batched", "ids-at-once", "texts", "texts-batched"],
)
def test_choices(evaluate, witness, options):
    documents = [
        # One choice is the likeliest, which is told apart; none comes twice.
        {"context": context, "choices": [*dict.fromkeys([*choices, witness.next_word(context)])], "gold": 0}
        for context, choices in QUESTIONS
    ]
    task = {
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",
    }
    told = evaluate(documents, task, **options)
    right, kinds = 0, set()
    for document, sample in zip(documents, told.samples):
        context, expected = document["context"], []
        for choice, ((value, greedy),) in zip(document["choices"], sample["resps"], strict=True):
            expected.append(witness.likelihood(witness.ids(context + choice), len(witness.ids(context))))
            assert value == pytest.approx(expected[-1][0], abs=1e-3)
            assert greedy == expected[-1][1]
            kinds.add(greedy)
        right += max(expected)[0] == expected[0][0]
    assert kinds == {True, False}
    assert told.metrics["acc,none"] == right / len(documents)


@pytest.mark.ci
def test_whole_texts(evaluate, witness):
    """Perplexity: each text behind the first token of all."""
    documents = [{"text": context + choices[0]} for context, choices in QUESTIONS]
    task = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
    told = evaluate(documents, task, tokenized_requests=True)
    for document, sample in zip(documents, told.samples):
        ((value,),) = sample["resps"]
        expected, _ = witness.likelihood([witness.tokenizer.bos_token_id, *witness.ids(document["text"])], 1)
        assert value == pytest.approx(expected, abs=1e-3)
