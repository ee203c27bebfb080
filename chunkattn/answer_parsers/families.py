"""All parsers of calls. Importing this module registers them; of two whose traces a template has, the later one is chosen."""

from chunkattn.answer_parsers import gemma, json_families, pythonic, qwen_xml
from chunkattn.answer_parsers.tool_parser import TOOL_PARSERS

find_tool_parser = TOOL_PARSERS.find

__all__ = ["find_tool_parser", "gemma", "json_families", "pythonic", "qwen_xml"]
