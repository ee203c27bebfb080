"""Chat templates that behave as those of well-known model families, in short forms."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# ruff: noqa: E501  (a line of a template is a branch)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The system message stands in the first user message; roles alternate.
LLAMA2 = """
{%- if messages[0].role == 'system' %}{% set system, turns = messages[0].content, messages[1:] %}
{%- else %}{% set system, turns = none, messages %}{% endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content if loop.first and system is not none else m.content %}
{%- if m.role == 'user' %}<s>[INST] {{ text.strip() }} [/INST]{% elif m.role == 'assistant' %} {{ text.strip() }} </s>
{%- endif %}{% endfor %}"""
# Every role has a header, and contents are trimmed; calls are written as JSON, without the content beside them.
LLAMA3 = """
{%- for m in messages %}
{%- if m.role == 'tool' %}<|header|>ipython<|end|>\n\n{{ m.content | tojson }}<|eot|>
{%- elif m.tool_calls %}<|header|>assistant<|end|>\n\n{% if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = m.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot|>
{%- else %}<|header|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|header|>assistant<|end|>\n\n{% endif %}"""
MISTRAL1 = """<s>
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
# The system message stands in the last user message; ids of calls have nine characters.
MISTRAL3 = """
{%- if messages[0].role == 'system' %}{% set system, turns = messages[0].content, messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}<s>
{%- for m in turns %}
{%- if m.role == 'user' %}[INST] {% if loop.last and system is defined %}{{ system + '\n\n' }}{% endif %}{{ m.content }}[/INST]
{%- elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}{{ call.function | tojson }}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('Tool call IDs have length 9!') }}{% endif %}
{%- endfor %}]</s>
{%- elif m.role == 'assistant' %} {{ m.content | trim }}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content }}}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
GEMMA = """<bos>
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}
{%- if add_generation_prompt %}<turn>model\n{% endif %}"""
# Without the reasoning of turns before the last question; tool messages are user turns.
QWEN3 = """
{%- if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}
{%- set ns = namespace(last=messages | length - 1, seeks=true) %}
{%- for m in messages[::-1] %}{% set place = messages | length - 1 - loop.index0 %}
{%- if ns.seeks and m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set ns.seeks = false %}{% set ns.last = place %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n
{%- elif m.role == 'assistant' %}{% set text, thoughts = m.content, '' %}
{%- if m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}
{%- elif '</think>' in text %}{% set thoughts = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n
{%- if loop.index0 > ns.last %}<think>\n{{ thoughts }}\n</think>\n\n{% endif %}{{ text }}
{%- for call in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string -%}
{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}<|im_end|>\n
{%- elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
# Roles without a branch are left out.
ZEPHYR = """
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>\n{{ m.content }}</s>\n{% elif m.role == 'system' %}<|system|>\n{{ m.content }}</s>\n
{%- elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}</s>\n{% endif %}
{%- if loop.last and add_generation_prompt %}<|assistant|>{% endif %}{% endfor %}"""
# The first release, which leaves out the system message.
PHI3 = """<s>
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n<|assistant|>\n{% elif m.role == 'assistant' %}{{ m.content }}<|end|>\n
{%- endif %}{% endfor %}"""
# It names the role `developer`, and one of its own.
GPT_OSS = """
{%- for m in messages %}
{%- if m.role in ['developer', 'system'] %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}<|end|>
{%- elif m.role == 'critic' %}<|start|>critic<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"""

TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral1": MISTRAL1,
    "mistral3": MISTRAL3,
    "gemma": GEMMA,
    "qwen3": QWEN3,
    "zephyr": ZEPHYR,
    "phi3": PHI3,
    "gpt-oss": GPT_OSS,
}


def byte_tokenizer(*special):
    """A tokenizer of one token a byte, and of the special tokens."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*special])
    return PreTrainedTokenizerFast(tokenizer_object=made)
