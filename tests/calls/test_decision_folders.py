"""Folders of decision models: heads in other dtypes, settings that are legal and rare, and what is refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast
from transformers.decision.template_utils import label_token_ids

from chunkattn import LLM, Choice
from chunkattn.calls.head_prompts import HeadPrompts
from chunkattn.errors import ConfigError, ModelError, RequestError
from chunkattn.models.decision_files import DecisionModel
from chunkattn.models.decision_prompts import generic
from chunkattn.parsers.encode import PartEncoder, PlainEncoder
from tests.calls.test_decision_models import (
    OPTIONS,
    QUESTIONS,
    STATES,
    TEMPLATE,
    check,
    check_kev,
    labelled,
    request,
    shares_of,
)
from tests.chat_templates import CHATML
from tests.decision_models import CODES, add_codes, add_judge, make_base, pipeline, pointer_head, save_kev
from tests.tokenizer_files import FILES


def test_a_head_in_safetensors(tmp_path):
    folder, head = make_base(tmp_path, "qwen3"), pointer_head(8, seed=4)
    save_file({f"head.{name}": tensor.to(torch.bfloat16) for name, tensor in head.items()}, tmp_path / "head.safetensors")
    (tmp_path / "calibration.json").write_text('{"temperature": 0.5}')
    rounded = {name: tensor.to(torch.bfloat16).float() for name, tensor in head.items()}
    check_kev(LLM(folder, **OPTIONS), folder, rounded, 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_heads_of_other_dtypes(dtype, tmp_path):
    """Beside the head, `head.pt` may hold anything plain."""
    base, head = make_base(tmp_path, "qwen3"), {name: tensor.to(dtype) for name, tensor in pointer_head(8, seed=5).items()}
    more = {"more": torch.ones(2), "q.weight": torch.nn.Parameter(head["q.weight"])}
    save_kev(base, "b", {**head, **more}, temperature=torch.tensor(2.5), epoch=3, metrics=[(1, 0.5), {"a": None}])
    check_kev(LLM(base, **OPTIONS), base, {name: tensor.float() for name, tensor in head.items()}, 2.5)


def test_templates_with_marks_of_a_pointer_head(tmp_path):
    """Options before the state, labels of `decision.json`, and equal tokens with marks in other places."""
    folder, head = make_base(tmp_path, "qwen3"), pointer_head()
    save_kev(folder, "b", head)
    labels = {"labels": {"choice": ["first", "second"], "noul": []}, "chat_template": "{{ state }}{{ question }}"}
    (folder / "decision.json").write_text(json.dumps(labels))
    template = "{% for o in question.options %}{{ question.labels[loop.index0] }} {{ o }}<|mark|>{% endfor %}"
    (folder / "decision_template.jinja").write_text(template + "{{ state }} {{ question.instructions }}<|mark|>")
    llm = LLM(folder, **OPTIONS)
    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    for options in (["a", "b"], ["a second b", "c"], ["a", "b second c"]):
        ids, ends = list[int](), list[int]()
        texts = [f"{label} {option}" for label, option in zip(["first", "second"], options, strict=True)]
        for text in [*texts, "figs Who?"]:
            ids += tokenizer(text, add_special_tokens=False).input_ids
            ends.append(len(ids) - 1)
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        query = hidden[-1] @ head["q.weight"].T + head["q.bias"]
        keys = hidden[ends[:-1]] @ head["k.weight"].T + head["k.bias"]
        shares = torch.softmax(keys @ query / len(query) ** 0.5, -1)
        (answer,) = llm.decide("figs", [Choice("Who?", options)]).answers
        np.testing.assert_allclose(shares_of(answer), shares, atol=1e-4)


class Evil:
    def __reduce__(self):
        return print, ("loaded",)


def test_bad_heads(tmp_path, capfd):
    make_base(tmp_path, "qwen3")
    good = pointer_head()
    cases = [
        (lambda: save_kev(tmp_path, "b", good, option_isolation=True), "option_isolation is not supported"),
        (lambda: save_kev(tmp_path, "b", good, temperature=0.0), "temperature: noul must be a positive number"),
        (lambda: save_kev(tmp_path, "b", good, evil=Evil()), r"the file holds (builtins|__builtin__).print"),
        (lambda: save_kev(tmp_path, "b", {**good, "k.bias": torch.zeros(3)}), "'k.bias' has the shape"),
        (lambda: save_kev(tmp_path, "b", {**good, "q.bias": good["q.bias"] * float("nan")}), "not finite"),
        (lambda: save_kev(tmp_path, "b", {"q.weight": good["q.weight"]}), "lacks 'q.bias'"),
        (lambda: torch.save({"head": None}, tmp_path / "head.pt"), "holds no head"),
        (lambda: (tmp_path / "head.pt").write_bytes(b"\x80\x02}q\x00."), "cannot be read"),
    ]
    for make, message in cases:
        make()
        with pytest.raises(ModelError, match=message):
            LLM(tmp_path, **OPTIONS)
    assert "loaded" not in capfd.readouterr().out


def test_a_readout_with_a_bias(tmp_path):
    add_codes(make_base(tmp_path))
    weight = load_file(tmp_path / "readout.safetensors")["weight"]
    save_file({"proj.weight": weight, "proj.bias": torch.randn(len(CODES))}, tmp_path / "readout.safetensors")
    check(LLM(tmp_path, **OPTIONS).decide(STATES[0], QUESTIONS), pipeline(tmp_path)(request(STATES[0], QUESTIONS)), QUESTIONS)


def test_settings_of_decision_json(tmp_path):
    """A template in `decision.json` counts where there is no file, and labels of no text are the default ones."""
    labelled(make_base(tmp_path), "")
    settings = json.loads((tmp_path / "decision.json").read_text())
    settings |= {"chat_template": TEMPLATE, "labels": {**settings["labels"], "choice": []}}
    (tmp_path / "decision.json").write_text(json.dumps(settings))
    llm = LLM(tmp_path, **OPTIONS)
    check(llm.decide(STATES[0], QUESTIONS), pipeline(tmp_path)(request(STATES[0], QUESTIONS)), QUESTIONS)
    prompts = llm.frontend.head_prompts
    assert prompts.items("a", [prompts.asked(QUESTIONS[0], "q")], ["q"])[0].labels
    (tmp_path / "decision.json").write_text(json.dumps({**settings, "labels": {"choice": ["first", "second", "third"]}}))
    with pytest.raises(RequestError, match="the labels first, second, third of this decision model"):
        LLM(tmp_path, **OPTIONS).decide("a", QUESTIONS[2:3])


def test_a_label_outside_the_vocabulary():
    """The unknown token is no label, as in transformers."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=FILES["no-prefix"][0], unk_token="<unk>", chat_template=CHATML)
    model = DecisionModel(None, "chat", write=generic, labels={"choice": ["a", "\u8a9e"]})
    prompts = HeadPrompts(model, PlainEncoder(PartEncoder(tokenizer)))
    assert len(tokenizer("\u8a9e", add_special_tokens=False).input_ids) == 1
    with pytest.raises(ValueError, match="not distinct single tokens"):
        label_token_ids(tokenizer, ("a", "\u8a9e"))
    with pytest.raises(RequestError, match="not different single tokens"):
        prompts.items("state", [prompts.asked(Choice("Who?", ["x", "y"]), "q")], ["q"])


def test_ranges_of_a_judge_may_overlap(tmp_path):
    add_judge(make_base(tmp_path))
    settings = json.loads((tmp_path / "judge_config.json").read_text())
    settings["slots"]["ranges"] = {"noul": [0, 2], "score": [1, 8], "choice": [3, 24]}
    (tmp_path / "judge_config.json").write_text(json.dumps(settings))
    check(LLM(tmp_path, **OPTIONS).decide(STATES[0], QUESTIONS), pipeline(tmp_path)(request(STATES[0], QUESTIONS)), QUESTIONS)


MARKS = {
    "{% for o in question.options %}{{ o }}<|mark|>{% endfor %}{{ state }}<|mark|>": "first mark behind 1 tokens",
    "{{ state }}{{ question.options }}<|mark|>": "writes 1 marks for 2 options, and its head reads 3",
}


@pytest.mark.parametrize("template", MARKS)
def test_marks_that_a_head_cannot_read(template, tmp_path):
    save_kev(make_base(tmp_path, "qwen3"), "b", pointer_head())
    (tmp_path / "decision_template.jinja").write_text(template)
    with pytest.raises(RequestError, match=MARKS[template]):
        LLM(tmp_path, **OPTIONS).decide("figs", [Choice("Who?", ["a", "b"])])


REFUSED = {
    "Clef": (
        lambda f: (f / "joint_head_config.json").write_text("{}"),
        "the joint head of Clef is not supported: its questions",
    ),
    "pplx 1.1": (
        lambda f: add_codes(f, attention_mode="noncausal_full_attention"),
        "'noncausal_full_attention' is not supported",
    ),
    "mean": (lambda f: add_codes(f, pooling="mean"), "pooling 'mean' is not supported"),
    "prompt": (lambda f: add_codes(f, "other"), "prompt 'other' is not supported; known are pplx, d3"),
    "codes": (lambda f: add_codes(f, codes=[*CODES, "AA"]), "has 26 rows for the 27 codes"),
    "questions": (
        lambda f: labelled(f, "{{ state }}{% for q in questions %}{% endfor %}"),
        "writes all questions into one prompt",
    ),
    "syntax": (lambda f: labelled(f, "{{ state "), "cannot be read"),
    "nothing": (lambda f: labelled(f, "{{ question }}"), "must read state and question"),
    "template": (
        lambda f: (f / "decision.json").write_text('{"chat_template": ["a"]}'),
        "chat_template must read state and question",
    ),
    "no codes": (lambda f: (f / "decision_config.json").write_text("{}"), "without codes in decision_config.json"),
    "ranges": (lambda f: add_judge(f, slots={"num_slots": 2, "verbalizers": ["a"], "ranges": {}}), "slots.ranges must give"),
    "softcap": (lambda f: add_judge(f, softcap=0), "softcap must be a positive number"),
    "settings": (lambda f: (f / "decision.json").write_text('{"temperature": {"noul": -1}}'), "noul must be a positive number"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind, tmp_path):
    make_base(tmp_path)
    make, message = REFUSED[kind]
    make(tmp_path)
    with pytest.raises(ModelError, match=message):
        LLM(tmp_path, **OPTIONS)


def test_a_backbone_without_a_language_head_answers_questions_alone(tmp_path):
    make_base(tmp_path, tie=False)
    add_codes(tmp_path)
    AutoModel.from_pretrained(tmp_path, dtype=torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(tmp_path, **OPTIONS)
    check(llm.decide(STATES[0], QUESTIONS), pipeline(tmp_path)(request(STATES[0], QUESTIONS)), QUESTIONS)
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.score("a", ["b"], labels=["A"]),
        lambda: llm.decide("a", QUESTIONS, method="letters"),
    ):
        with pytest.raises(RequestError, match="a decision model without a language model's head"):
            call()


def test_a_model_without_a_head(tmp_path):
    make_base(tmp_path)
    with pytest.raises(ConfigError, match="this model has no head for decisions"):
        LLM(tmp_path, **{**OPTIONS, "decide_method": "head"})
    llm = LLM(tmp_path, **{**OPTIONS, "decide_method": "letters"})
    with pytest.raises(RequestError, match="this model has no head for decisions"):
        llm.decide("a", QUESTIONS, method="head")
