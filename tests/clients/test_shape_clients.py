"""Answers with a shape, and calls of tools, by the clients of others, unchanged."""

import json
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

MODEL = "chunkattn-demo"
QUESTION = "Ana lives in Oslo. Where does Ana live?"
CITIES = ("Oslo", "Rome")


class Place(BaseModel):
    """Where a person lives."""

    model_config = ConfigDict(extra="forbid")  # else the demo model adds properties without end

    city: Literal["Oslo", "Rome"]


def look_up(city: Literal["Oslo", "Rome"]) -> str:
    """Look a city up."""
    return f"{city}."


@pytest.fixture
def openai_client(server):
    import openai

    return openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def langchain(server):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=server + "/v1", api_key="none", model=MODEL, max_retries=0, temperature=0, max_tokens=100)


def test_openai_parses_chats(openai_client):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 300}
    answer = openai_client.chat.completions.parse(**asked, response_format=Place)
    assert isinstance(answer.choices[0].message.parsed, Place)
    with openai_client.chat.completions.stream(**asked, response_format=Place) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_openai_parses_responses(openai_client):
    asked = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 300}
    answer = openai_client.responses.parse(**asked, text_format=Place)
    assert isinstance(answer.output_parsed, Place)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structures_output(method, langchain):
    assert isinstance(langchain.with_structured_output(Place, method=method).invoke(QUESTION), Place)


def test_langchain_binds_tools(langchain):
    bound = langchain.bind_tools([look_up], tool_choice="look_up")
    (call,) = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "look_up"
    assert call["args"]["city"] in CITIES
    pieces = None
    for piece in bound.stream(QUESTION):
        pieces = piece if pieces is None else pieces + piece
    assert [(one["name"], one["args"]) for one in pieces.tool_calls] == [(call["name"], call["args"])]


def test_langgraph_loops(langchain):
    """A graph calls the model, the tool, and the model again."""
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    tools = [look_up]
    first = langchain.bind_tools(tools, tool_choice="required")
    later = langchain.bind_tools(tools, tool_choice="none", max_tokens=12)

    def ask(state):
        answered = any(isinstance(message, ToolMessage) for message in state["messages"])
        return {"messages": [(later if answered else first).invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "ask")
    messages = graph.compile().invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
    assert [type(message) for message in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert messages[2].content in {look_up(city) for city in CITIES}
    assert messages[3].content


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])  # JSON puts a long prompt before, which the demo model cannot read
def test_instructor(mode, openai_client):
    import instructor

    client = instructor.from_openai(openai_client, mode=getattr(instructor.Mode, mode))
    messages = [{"role": "user", "content": QUESTION}]
    asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 150, "max_retries": 0}
    assert isinstance(client.chat.completions.create(response_model=Place, **asked), Place)


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_openai_agents(api, server):
    import agents
    import openai

    client = openai.AsyncOpenAI(base_url=server + "/v1", api_key="none", max_retries=0)
    made = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    agents.set_tracing_disabled(True)
    used = []

    @agents.function_tool
    def look(city: Literal["Oslo", "Rome"]) -> str:
        """Look a city up."""
        used.append(city)
        return look_up(city)

    def run(**options):
        settings = agents.ModelSettings(temperature=0, max_tokens=100, tool_choice=options.pop("tool_choice", None))
        agent = agents.Agent(name="guide", model=made(model=MODEL, openai_client=client), model_settings=settings, **options)
        return agents.Runner.run_sync(agent, QUESTION, max_turns=4).final_output

    assert isinstance(run(output_type=Place), Place)
    assert isinstance(run(tools=[look], tool_choice="required"), str)
    assert used
    assert set(used) <= {*CITIES}


def test_anthropic_calls_tools(server):
    import anthropic

    client = anthropic.Anthropic(base_url=server, api_key="none", max_retries=0)
    schema = {"type": "object", "properties": {"city": {"enum": [*CITIES]}}, "required": ["city"]}
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"name": "look_up", "description": "Look a city up.", "input_schema": schema}],
        "tool_choice": {"type": "tool", "name": "look_up"},
    }
    answer = client.messages.create(**asked, max_tokens=100)
    usage = answer.usage
    count = client.messages.count_tokens(**asked).input_tokens
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    assert answer.stop_reason == "tool_use"
    (call,) = (block for block in answer.content if block.type == "tool_use")
    assert call.input["city"] in CITIES
    assert json.dumps(call.input)
