"""Names of this machine in Host headers, and origins of pages, as people write them."""

import pytest
from fastapi.testclient import TestClient

from chunkattn.addresses import is_host, names_this_machine
from chunkattn.async_llm import AsyncLLM
from chunkattn.errors import ConfigError
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "localhost", "::ffff:127.0.0.1"])
def test_every_loopback_address_checks_names(host):
    client = TestClient(create_app(AsyncLLM(), ServerConfig(host=host)), base_url="http://evil.example:8000")
    assert client.get("/v1/models").status_code == 403
    for name, status in (("LOCALHOST.:80", 200), ("1.2.3.4", 403), ("[::1", 400)):
        assert client.get("/v1/models", headers={"Host": name}).status_code == status


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "localhost.", "127.0.0.1", "127.0.0.1.", "127.8.9.1", "[::1]"])
@pytest.mark.parametrize("port", ["", ":", ":80", ":8000"])
def test_names_of_this_machine(host, port):
    assert is_host(host + port)
    assert names_this_machine(host + port)


@pytest.mark.parametrize(
    "host",
    [
        *("", ":80", ".", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "localhost..", "localhost:x"),
        *("::1", "0.0.0.0", "10.0.0.1", "[::2]", "[::1", "::1]", "localhost@evil.example", "evil.example:80:80"),
        *(
            "localhost:80:80",
            "127.1",
            "2130706433",
            "0x7f.0.0.1",
            "localhost,evil.example",
            "\uff4cocalhost",
            "localhost:\u0663",
        ),
    ],
)
def test_names_of_other_machines(host):
    assert not is_host(host) or not names_this_machine(host)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("https://app.example", "https://app.example"),
        ("HTTPS://App.Example", "https://app.example"),
        ("https://app.example/", "https://app.example"),
        (" https://app.example ", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:80/", "http://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("http://localhost:03000", "http://localhost:3000"),
        ("http://[0:0::1]:3000", "http://[::1]:3000"),
        ("https://m\u00fcller.example", "https://xn--mller-kva.example"),
        ("http://my_host", "http://my_host"),
        ("chrome-extension://abcdefgh", "chrome-extension://abcdefgh"),
        ("*", "*"),
        ("null", "null"),
    ],
)
def test_origins_are_as_browsers_send_them(given, expected):
    assert ServerConfig(allowed_origins=(given, expected)).allowed_origins == (expected,)


@pytest.mark.parametrize(
    "given",
    [
        *("app.example", "localhost:3000", "//app.example", "https://", "https://app.example/path", "https://app.example//"),
        *("https://app.example?x", "https://app.example#x", "https://user@app.example", "https://*.app.example", "https://*"),
        *("https://app.example:0", "https://app.example:99999", "https://app.example:x", "https://app.example:*", "http://::1"),
        *(
            "https://a.example,https://b.example",
            "https://a.example https://b.example",
            "http://[::g]",
            "https://a..\u00fc",
            "Null",
        ),
    ],
)
def test_what_is_no_origin_is_refused(given):
    with pytest.raises(ConfigError, match=r"allowed_origins .* (is no origin|has no valid)"):
        ServerConfig(allowed_origins=(given,))


def test_methods_are_as_browsers_send_them():
    assert ServerConfig(allowed_methods=("get", "Post")).allowed_methods == ("GET", "POST")
