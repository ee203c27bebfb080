import openai
import pytest

from tests.posted_parts import posted_parts as posted_parts


@pytest.fixture(scope="module")
def server(demo_server):
    """The server that `client` and `http` speak to; a file with options of its own has its own."""
    return demo_server


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's client, without retries."""
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def http(server):
    """Client of one test."""
    with server.client() as made:
        yield made
