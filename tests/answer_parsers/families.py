"""Calls as the chat templates of the families write them, in Jinja of their own."""

from jinja2 import Environment

# ruff: noqa: E501  (a line of a template is a branch)

_JSON = '{"name": "{{ c.name }}", "%s": {{ c.arguments | tojson }}}'
_GEMMA = """{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is boolean %}{{ 'true' if v else 'false' }}
{%- elif v is none %}null{% elif v is mapping %}{{ '{' }}{% for k, e in v | items %}{{ k }}:{{ value(e) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}
{%- elif v is sequence %}[{% for e in v %}{{ value(e) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}
{%- for c in calls %}OPENcall:{{ c.name }}{{ value(c.arguments) }}CLOSE{% endfor %}"""
_PYTHONIC = "[{% for c in calls %}{{ ', ' if not loop.first }}{{ c.name }}({% for k, v in c.arguments | items %}{{ ', ' if not loop.first }}{{ k }}={{ VALUE }}{% endfor %}){% endfor %}]"

TEMPLATES = {
    "hermes": "{% for c in calls %}{{ '\n' if not loop.first }}<tool_call>\n"
    + _JSON % "arguments"
    + "\n</tool_call>{% endfor %}",
    "llama3_json": "{% for c in calls %}{{ '; ' if not loop.first }}" + _JSON % "parameters" + "{% endfor %}",
    "mistral": "[TOOL_CALLS] [{% for c in calls %}{{ ', ' if not loop.first }}{{ c | tojson }}{% endfor %}]",
    "mistral ids": '[TOOL_CALLS] [{% for c in calls %}{{ \', \' if not loop.first }}{{ (c | tojson)[:-1] }}, "id": "abcdefgh1"}{% endfor %}]',
    "mistral args": "{% for c in calls %}[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}{% endfor %}",
    "qwen3_coder": """{% for c in calls %}{{ '\n' if not loop.first }}<tool_call>\n<function={{ c.name }}>{{ '\n' }}
{%- for k, v in c.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}""",
    "pythonic": _PYTHONIC.replace("VALUE", "v | string if v is boolean or v is none else v | tojson"),
    "pythonic repr": _PYTHONIC.replace("VALUE", "'%r' | format(v)"),
    "functiongemma": _GEMMA.replace("QUOTE", "<escape>")
    .replace("OPEN", "<start_function_call>")
    .replace("CLOSE", "<end_function_call>"),
    "gemma4": _GEMMA.replace("QUOTE", '<|"|>').replace("OPEN", "<|tool_call>").replace("CLOSE", "<tool_call|>"),
}
"""Templates of calls by the name of the parser; a second word tells forms of one family apart."""

AT_BEGINNING = ("llama3_json", "pythonic", "pythonic repr")
"""Forms whose calls are the whole answer."""

_environment = Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers renders
_environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
_environment.filters["tojson"] = lambda value: __import__("json").dumps(value, ensure_ascii=False)


def written(form: str, calls: list[dict]) -> str:
    """Return the text of calls.

    Args:
        form: key of `TEMPLATES`.
        calls: `{"name", "arguments"}` of each call.
    """
    return _environment.from_string(TEMPLATES[form].replace("\\n", "\n")).render(calls=calls)
