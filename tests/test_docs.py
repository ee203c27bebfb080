"""The documentation is true: its code and commands run, its links lead somewhere, its reference tables are complete."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

import chunkattn
from chunkattn.calls.decide_files import read_questions
from chunkattn.cli import app
from chunkattn.config import EngineConfig
from chunkattn.documents.routes import documents_router
from chunkattn.engine.metrics import EngineMetrics
from chunkattn.gateway.metrics import GatewayMetrics
from chunkattn.gateway.options import GatewayOptions
from chunkattn.sampling_params import SamplingParams
from chunkattn.web.http_state import HttpMetrics
from chunkattn.web.options import ServerConfig
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
_SPEC = spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
hooks = module_from_spec(_SPEC)
_SPEC.loader.exec_module(hooks)
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
QUICK = {"README.md", "docs/guides/rag.md"}
"""Pages whose code runs among the quick tests."""


def name_of(page):
    return str(page.relative_to(ROOT))


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def reference(name):
    return read(f"docs/reference/{name}.md")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", read(page), flags=re.DOTALL)


def having(language):
    return [page for page in PAGES if blocks(page, language)]


# Code and commands


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=() if name_of(p) in QUICK else pytest.mark.ci, id=name_of(p)) for p in having("python")]
)
def test_python(page, capsys):
    names = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
    if page.name == "README.md":
        answer, scores, decided = capsys.readouterr().out.splitlines()
        assert answer.strip() == "Pegelu"
        assert [s > 0.5 for s in map(float, scores.strip("[]").split(","))] == [False, True]
        assert decided.split()[:2] == ["baker", "Kirora"]


RUN = (
    "README.md",
    "docs/quickstart.md",
    "docs/guides/rag.md",
    "docs/guides/reranking.md",
    "docs/guides/triage.md",
    "docs/reference/cli.md",
)
"""Pages whose `chunkattn` commands run; those of other pages need a checkpoint, a key file or hours."""


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("chunkattn.server.run.serve", lambda *_: None)  # it would not end; tests of the server start it
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "nila.txt").write_text("Nila lives in Tunise.\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = [words for words in bash_commands(page) if words[0] == "chunkattn"]
    assert commands
    for words in commands:
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, f"{words}: {result.output}"


def bash_commands(page):
    """The commands of a page's bash blocks, in words. A line that is indented continues the one before."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    starts = [line for line in lines if line and line[0] not in ' "{}#']
    return [shlex.split(line.partition("-d '{")[0], comments=True) for line in starts]


def inline_commands(page):
    """Commands that stand within a sentence or a table."""
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    spans = re.findall(r"`((?:chunkattn |make |python -m (?:benchmarks|tests|training)\.)[^`]+)`", text)
    return [shlex.split(span) for span in spans]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page):
    for words in [*bash_commands(page), *inline_commands(page)]:
        check_command(words)


@pytest.mark.parametrize(
    "wrong",
    [
        "chunkattn generate --file prompt.txt",
        "chunkattn cache clean",
        "python -m benchmarks.steps --geometri small",
        "python -m benchmarks.nothing",
        "CHUNKATTN_API_KEI=x chunkattn serve",
        "make tests",
        "pip install -e '.[gpu]'",
        "curl -s localhost:8000/v1/rank",
        "frobnicate",
    ],
)
def test_a_wrong_command_is_noticed(wrong):
    with pytest.raises(AssertionError):
        check_command(shlex.split(wrong))


def check_command(words):
    """Check that a command, and each of its flags, exists."""
    if words[0] == "eval":
        words = shlex.split(re.fullmatch(r"\$\((.*)\)", words[1])[1])
    said = " ".join(words)
    for variable in re.findall(r"\bCHUNKATTN_\w+", said):
        assert variable in environment(), f"{said}: no option reads {variable}"
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    ends = [place for place, word in enumerate(words) if word in ("<", ">", "|")]
    name, *rest = words[: ends[0]] if ends else words
    flags = {word.partition("=")[0] for word in rest if re.match(r"-{1,2}[A-Za-z]", word)}
    if name == "chunkattn":
        found = [c for c in hooks.commands() if rest[: len(c.split())] == c.split()]
        groups = {command.split()[0] for command in hooks.commands()}
        assert found or (len(rest) == 1 and rest[0] in groups), f"{said}: no such command"
        assert flags - {"--help"} <= (flags_of(found[0]) if found else set()), f"{said}: no such flag"
    elif name in ("python", ".venv/bin/python") and rest[0] == "-m":
        assert flags - {"-m", "--help"} <= script_flags(rest[1]), f"{said}: no such flag"
    elif name in ("python", ".venv/bin/python"):
        assert (ROOT / rest[0]).exists(), said
    elif name == "make":
        assert re.search(rf"^{rest[0]}:", read("Makefile"), flags=re.MULTILINE), said
    elif name in ("pip", ".venv/bin/pip"):
        extras = set(tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"])
        assert set(re.findall(r"\[(\w+)\]", said)) <= extras, said
    elif name == "curl":
        path = next(word for word in rest if word.startswith("localhost:8000")).removeprefix("localhost:8000")
        assert any(re.fullmatch(re.sub(r"{\w+}", "[^/]+", known), path) for _, known, _ in hooks.routes()), said
    else:
        assert name in ("auditwheel", "docker", "kubectl", ".ci/run"), said


def flags_of(command):
    return {flag for p in hooks.commands()[command].params for flag in (*p.opts, *p.secondary_opts)}


def environment():
    return {p.envvar for p in hooks.commands()["serve"].params}


@cache
def script_flags(module):
    """Flags that a script of the repository adds to its parser."""
    folder = ROOT / module.replace(".", "/")
    file = folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")
    assert file.exists(), f"there is no {module}"
    calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
    added = [c.args for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "add_argument"]
    return {arg.value for args in added for arg in args if isinstance(arg, ast.Constant)}


def test_options_and_questions_in_yaml_exist(tmp_path):
    files = [block for page in PAGES for block in blocks(page, "yaml")]
    assert files
    for block in files:
        if isinstance(options := yaml.safe_load(block), list):
            (tmp_path / "questions.yaml").write_text(block)
            assert read_questions(tmp_path / "questions.yaml")
            continue
        if "deployments" in options:  # part of a configuration of Ray Serve
            assert [deployment["name"] for deployment in options["deployments"]] in (["Gateway"], ["Engine"])
            continue
        assert set(options) <= {p.name for p in hooks.commands()["serve"].params}


def test_flags_that_migrants_are_told_exist():
    rows = re.findall(r"^\| (.*) \| (.*) \|$", read("docs/guides/migrate.md"), flags=re.MULTILINE)
    told = {f for left, right in rows for f in re.findall(r"`(--[\w-]+)", left if right.startswith("the same") else right)}
    assert len(told) > 20
    assert told <= flags_of("serve")


# Links


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", read(page)):
        target = page.parent / link if link else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), f"{link}#{anchor}"


@cache
def anchors(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE))


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"\b([\w/-]+\.md)\b", read("mkdocs.yml").partition("\nnav:")[2])
    assert sorted(listed) == sorted([*(str(p.relative_to(ROOT / "docs")) for p in DOCS), *hooks.REPOSITORY_PAGES.values()])


@pytest.mark.slow  # CI runs `make docs`
def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    pages = [page.read_text(encoding="utf-8") for page in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > len(DOCS)
    for page in pages:  # nothing is fetched from elsewhere
        assert re.findall(r"<(?:script|img|link rel=.stylesheet.)[^>]*(?:src|href)=.https?:", page) == []
        assert "<!-- table:" not in page
        assert "<!-- end of table" not in page


# Reference


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_tables_are_up_to_date(page):
    assert hooks.expand(read(page)) == read(page), "run `make reference`"


def test_a_table_that_differs_is_written_again():
    page = "# Title\n\n<!-- table: metrics -->\n\nAbove.\n\n<!-- table: routes -->\n\nBelow.\n"
    written = hooks.expand(page)
    assert written.count(hooks._END) == 2
    assert hooks.expand(written) == written
    row = re.search(r"^\| `chunkattn_steps_total` .*\n", written, flags=re.MULTILINE)[0]
    conflict = f"<<<<<<< ours\n=======\n{row}{row}>>>>>>> theirs\n"
    assert hooks.expand(written.replace(row, "").replace("| --- |\n", "| --- |\n" + conflict)) == written
    assert [text in written for text in ("# Title\n", "\nAbove.\n", "\nBelow.\n")] == [True] * 3


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_rows_have_the_columns_of_their_table(page):
    """GitHub drops what a row has beyond the columns of the head, and reads `<word>` as HTML."""
    head = None
    for line in re.sub(r"```.*?```", "", read(page), flags=re.DOTALL).splitlines():
        cells = len(re.split(r"(?<!\\)\|", line)) if line.startswith("|") else None
        assert head is None or cells in (None, head), line
        head = cells
    for table in re.findall(r"<!-- table: .*?<!-- end of table -->", read(page), flags=re.DOTALL):
        assert set(re.findall(r"<\w+", re.sub(r"`[^`]*`", "", table))) <= {"<br", "<code"}


def test_a_cell_keeps_pipes_and_angle_brackets_readable():
    assert hooks._cell("P(label | query), `a | b<c>`, <int>, `x`\nnext  line") == (
        r"P(label \| query), <code>a &#124; b&lt;c&gt;</code>, &lt;int>, `x`<br>next line"
    )


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_option_is_on_its_page(config):
    page = reference("options")
    for option in fields(config):
        assert f"`{option.name}`" in page
        if option.name != "model":  # the argument of the command
            assert f"`--{option.name.replace('_', '-')}`" in page


def test_types_and_defaults_are_on_the_page_of_options():
    rows = re.findall(r"^\| `(\w+)`(?:<br>[^|]*)? \| ([^|]*) \| ([^|]*) \| [^|]", reference("options"), flags=re.MULTILINE)
    options = [
        f for cls in (ServerConfig, EngineConfig, SamplingParams, GatewayOptions) for f in fields(cls) if f.name != "model"
    ]
    assert len(rows) == len(options)
    for option in options:
        default = {} if option.name == "logit_bias" else option.default
        shown = "" if default is None else f"`{default!r}`"
        assert (option.name, option.type.replace(" | ", "` or `").join("``"), shown) in rows


def test_every_command_and_flag_is_on_its_page():
    page = reference("cli")
    sections = dict(re.findall(r"^## chunkattn (.*?)\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL))
    assert set(sections) == set(hooks.commands())
    options = reference("options")
    for command, section in sections.items():
        text = section + (options if re.search(r"^- \[\w+\]\(options\.md.*\): all\b", section, re.MULTILINE) else "")
        shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]*", shown)) - {"--help"}:
            assert f"`{flag}`" in text, f"{command} {flag}"
        for flag in flags_of(command):
            named = flag if flag.startswith("-") else flag.upper()
            assert f"`{named}`" in text, f"{command} {named}"


def test_every_script_is_on_its_page():
    for folder in ("benchmarks", "tests/soak"):
        scripts = [f.stem for f in (ROOT / folder).glob("*.py") if '__name__ == "__main__"' in f.read_text()]
        assert scripts
        for script in scripts:
            assert f"`python -m {folder.replace('/', '.')}.{script}`" in read("docs/reference/cli.md")


def test_every_metric_is_on_its_page():
    page = reference("metrics")
    gateway = CollectorRegistry()
    GatewayMetrics(gateway)
    for registry in (EngineMetrics().registry, HttpMetrics().registry, gateway):
        types = re.findall(r"^# TYPE (\w+) (\w+)$", generate_latest(registry).decode(), flags=re.MULTILINE)
        names = [name for name, _ in types if not name.endswith("_created")]
        assert names
        for name in names:
            assert f"`{name}`" in page


def test_every_route_is_on_its_page():
    page = reference("http")
    routers = (ROOT / "chunkattn" / "server" / "routes").glob("*.py")
    declared = [m for file in routers for m in re.findall(r"@router\.(\w+)\(\s*\"([^\"]*)\"", file.read_text())]
    declared += documents_router(APIRoute).routes
    assert len(declared) == len(hooks.routes()) - 1  # OpenAPI's is FastAPI's own
    for method, path, _ in hooks.routes():
        assert f"`{method} {path}`" in page


def test_every_body_and_field_is_on_its_page():
    """A field has a row, or stands below the table beside the link to its description."""
    page = read("docs/reference/http.md")
    for name, body in hooks.bodies().items():
        text = page.partition(f"<!-- table: body {name} -->\n")[2].partition(hooks._END)[0]
        assert "|  |\n" not in text
        rows = re.findall(r"^\| `(\w+)`", text, flags=re.MULTILINE)
        named = re.findall(r"`(\w+)`", "".join(re.findall(r"^- .*", text, flags=re.MULTILINE)))
        effective = {f for f, field in body.model_fields.items() if "accepted" not in (field.json_schema_extra or {})}
        assert sorted([*rows, *named]) == sorted(effective - {*hooks.EVERY_BODY})
    for field in hooks.EVERY_BODY:
        assert f"`{field}`" in page


def test_what_a_table_names_is_described_where_its_link_leads():
    for name in ("cli", "http"):
        titled = [section.split("\n", 1) for section in reference(name).split("\n## ")[1:]]
        rows = {title.lower().replace(" ", "-"): re.findall(r"^\| (`[^|]*) \|", body, re.MULTILINE) for title, body in titled}
        for anchor, names in re.findall(r"^- As in \[[^]]*\]\(#(.*?)\): (.*)$", reference(name), flags=re.MULTILINE):
            assert [listed for listed in names.split(", ") if listed not in ", ".join(rows[anchor])] == []


def test_every_public_name_is_on_its_page():
    shown = set(re.findall(r"^::: chunkattn\.(\w+)$", read("docs/reference/python.md"), flags=re.MULTILINE))
    assert set(chunkattn.__all__) <= shown


# Form


def test_every_page_begins_with_what_its_reader_can_do():
    for page in [*DOCS, ROOT / "CONTRIBUTING.md"]:
        if page.name != "index.md":
            assert re.match(r"# .+\n\nAfter this page ", page.read_text(encoding="utf-8")), page.name


def test_every_version_of_the_changelog_lists_its_breaks():
    versions = re.findall(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", read("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert versions == sorted(versions, key=lambda version: [*map(int, version.split("."))], reverse=True)
    assert [first for _, first in re.findall(r"^## (.*)\n\n### (.*)$", read("CHANGELOG.md"), re.MULTILINE)] == [
        "Breaking"
    ] * len(re.findall(r"^## ", read("CHANGELOG.md"), re.MULTILINE))


def test_a_decision_has_three_short_lines():
    sections = re.split(r"^###? .*\n", read("docs/decisions.md"), flags=re.MULTILINE)[1:]
    starts = ["- **Decision.**", "- **Reason.**", "- **Changes with.**"]
    for section in filter(str.strip, sections):
        lines = section.strip().split("\n")
        assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
        assert [line for line in lines if len(line.split()) > 40] == []


def test_files_that_are_named_exist():
    named = re.findall(r"`((?:chunkattn|examples|tests|docs)/[\w/]+(?:\.py|/))`", read("CONTRIBUTING.md"))
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []
    named = re.findall(r"`([a-z_]+/[\w/]*(?:\.py)?)`", read("docs/concepts/architecture.md"))
    assert [path for path in named if not any((base / path).exists() for base in (ROOT, ROOT / "chunkattn"))] == []


def test_a_place_is_found_within_two_files():
    rows = re.findall(r"^\| (Wh.*) \| (.*) \|$", read("CONTRIBUTING.md"), flags=re.MULTILINE)
    assert len(rows) > 25
    counts = {question: len(set(re.findall(r"`(chunkattn/[\w/]+(?:\.py|/))`", files))) for question, files in rows}
    assert {question: count for question, count in counts.items() if not 1 <= count <= 2} == {}


def figures_of_isolation():
    """Return the two tables of the guide, for five and for ten passages: the cells of each condition's row."""
    tables = re.findall(r"^\| condition \| log-.*\n.*\n((?:\|.*\n)+)", read("docs/guides/isolation.md"), flags=re.MULTILINE)
    rows = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()] for table in tables]
    return [{name: cells for name, *cells in table} for table in rows]


def test_the_price_is_told_with_the_share_of_right_answers():
    """README and front page have the guide's log-probabilities and shares, those of the control among them."""
    tables = figures_of_isolation()
    names = ["`full`", "`full`, T 0.55, S 0.55 (control)", "`shared`", "`shared`, gap 8, T 0.55, S 0.55"]
    rows = [table[name] for table in tables for name in names]
    told = re.findall(r"^\| .*(?:full attention|isolated).* \|(.*)\| ([\d.]+) \|$", read("README.md"), flags=re.MULTILINE)
    differences = [re.sub(r"\[(.*), (.*)\]", r"(\1 to \2)", row[1]) for row in rows]
    assert [(a.strip(), b) for a, b in told] == [(a, row[-1]) for a, row in zip(differences, rows, strict=True)]
    front = re.findall(r"^\| .* \| ([\d.]+); (\S+) \| ([\d.]+); (\S+) \|$", read("docs/index.md"), flags=re.MULTILINE)
    five, ten = tables
    assert front == [(five[n][-1], five[n][0], ten[n][-1], ten[n][0]) for n in names]


def test_the_house_is_as_drawn():
    rows = re.findall(r"^\| `(chunkattn/[\w/]*)` \| .* \| (.*) \|$", read("docs/concepts/architecture.md"), flags=re.MULTILINE)
    drawn = {folder: set(listed.split(", ")) for folder, listed in rows}
    house: dict[str, set[str]] = {}
    for file in (ROOT / "chunkattn").rglob("*.py"):
        if not file.stem.startswith("__"):
            house.setdefault(f"{file.parent.relative_to(ROOT)}/", set()).add(file.stem)
    missing = {folder: modules - drawn.get(folder, set()) for folder, modules in house.items()}
    gone = {folder: modules - house.get(folder, set()) for folder, modules in drawn.items()}
    assert {folder: modules for folder, modules in missing.items() if modules} == {}
    assert {folder: modules for folder, modules in gone.items() if modules} == {}
