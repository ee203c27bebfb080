"""Chromium, a server of the demo model, and its page at both widths."""

import os
import shutil

import pytest

from tests.server.browser.page import opened
from tests.server_helpers import SMALL, ServerProcess


@pytest.fixture(scope="package")
def programs():
    """Chromium and its driver."""
    found = []
    for name, variable in (("chromium", "CHROMIUM"), ("chromedriver", "CHROMEDRIVER")):
        path = shutil.which(os.environ.get(variable) or name)
        if path is None:
            text = f"{name} is missing: install Debian's packages chromium and chromium-driver, or set {variable} to its path"
            pytest.fail(text, pytrace=False)
        found.append(path)
    return found


@pytest.fixture(scope="package")
def server(programs):
    made = ServerProcess(*SMALL)
    yield made
    assert made.close() == 0


@pytest.fixture(params=[1400, 390], ids="{}px".format)
def page(request, programs, server, tmp_path):
    with opened(programs, server.url, server.url, request.param, tmp_path) as made:
        yield made
