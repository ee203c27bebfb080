"""The demo model's SentencePiece vocabulary, trained on text of the training worlds."""

from __future__ import annotations

import json
import string
from pathlib import Path

import sentencepiece as spm

from training.world import EOS, PREFIX, SYLLABLES, World

CHAT_TEMPLATE = (
    "{% if tools %}Tools:{% for tool in tools %} {{ tool['function'] | tojson }}{% endfor %}"
    ' Call: <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call> {% endif %}'
    "{% if messages[0]['role'] != 'system' %}" + PREFIX + "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ message['content'] }}"
    "{% if not loop.last or add_generation_prompt %} Answer:{% endif %}"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{% for call in message['tool_calls'] or [] %}"
    """{% set called = call['function'] %}<tool_call>{"name": {{ called['name'] | tojson }}, "arguments": """
    "{{ called['arguments'] | tojson }}}</tool_call>{% endfor %}"
    + EOS
    + "{% elif message['role'] == 'tool' %} {{ message['content'] }}"
    "{% if loop.last and add_generation_prompt %} Answer:{% endif %}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


def corpus(sentences: int, seed: int = 0) -> list[str]:
    """Return training-world texts of every kind, about `sentences` of them and half as many lines of syllables."""
    world, lines = World(seed, held_out=False), [PREFIX]
    while len(lines) < sentences:
        reading, judging = world.reading(3, 2), world.judging(3)
        lines += [*reading.documents, *(q.text for q in reading.questions), *(q.answer for q in reading.questions)]
        lines += [judging.query, *judging.items, "yes", "no", PREFIX]
    # Separate syllables make the vocabulary cut names at syllable boundaries.
    return lines + [".".join(world.rng.choices(SYLLABLES, k=40)) for _ in range(sentences // 2)]


def train_tokenizer(folder: Path, vocab_size: int = 704) -> None:
    """Write `tokenizer.model` and its Hugging Face configuration to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus(60_000)),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=vocab_size,
        model_type="bpe",
        # Letters and digits that the worlds lack, so that a user's own text is not all bytes.
        required_chars=string.ascii_letters + string.digits + ".,:;!?'\"()-",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": EOS,
        "unk_token": "<unk>",
        "add_bos_token": False,
        "add_eos_token": False,
        "legacy": False,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "document_template": "{document}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
