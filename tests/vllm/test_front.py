"""Tests that need no engine: versions, options, the composer's rounds, and light imports."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from chunkattn.calls.job import drive
from chunkattn.errors import CapacityError, ConfigError
from chunkattn.integrations import vllm as versions
from chunkattn.integrations.vllm import chunk_options, serve
from chunkattn.integrations.vllm.chunk_options import ChunkOptions, refused_param, server_options, take_options
from chunkattn.integrations.vllm.composer import RETRIES, Costs, HeldKeys, PromptTask, answer, save
from chunkattn.integrations.vllm.llm import _NOT_OFFERED
from chunkattn.integrations.vllm.options import ConnectorOptions
from chunkattn.integrations.vllm.requests import plan_prompt
from chunkattn.parsers import ChunkedPrompt

# Imports and versions


@pytest.mark.parametrize("module", ["requests", "chunk_options", "llm", "endpoints", "connector", "serve"])
def test_no_module_imports_jax(module):
    code = f"import chunkattn.integrations.vllm.{module}, sys; assert not {{'jax', 'flax'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_itself_imports_neither_vllm_nor_torch():
    code = "import chunkattn.integrations.vllm.requests, sys; assert not {'vllm', 'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("found", ["0.32.0", "0.32.7", "0.32.1.dev3+g1234"])
def test_supported_versions(found):
    versions.check_version(found)


@pytest.mark.parametrize("found", ["0.31.2", "0.33.0", "1.32.0", "unknown"])
def test_other_versions_are_refused_by_name(found):
    with pytest.raises(ImportError, match=rf"supports vllm>=0.32,<0.33, found vLLM {found}"):
        versions.check_version(found)


def test_a_missing_vllm_is_an_error_only_where_it_is_needed():
    versions.check_version(None)
    with pytest.raises(ImportError, match="is not installed"):
        versions.check_version(None, required=True)


def test_the_cpu_build_counts():
    assert versions.installed_version().startswith("0.32")


# Options


def test_options_are_shared_out(tmp_path):
    options, config, rest = take_options(
        str(tmp_path), {"max_store_bytes": 1 << 20, "chunk_position_gap": 4, "dtype": "float32"}
    )
    assert (options.gap, options.positions, rest) == (4, "shared", {"dtype": "float32"})
    assert config["kv_load_failure_policy"] == "fail"
    assert config["kv_connector_extra_config"] == {"max_store_bytes": 1 << 20, "chunk_position_gap": 4}
    assert server_options(str(tmp_path), config["kv_connector_extra_config"]) == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_strategy": "offset"}, "offset"),
        ({"position_strategy": "other"}, "choose one of shared, reordered"),
        ({"position_strategy": "reordered", "chunk_position_gap": 3}, "chunk_position_gap needs"),
        ({"chunk_position_gap": -1}, "chunk_position_gap"),
        ({"chunk_temperature": 0.8}, "chunk_temperature 0.8"),
        ({"chunk_scale": 0.8}, "chunk_scale 0.8"),
        ({"max_store_bytes": -1}, "max_store_bytes"),
        ({"document_template": "no place"}, "document_template"),
        ({"chunk_separator": 3}, "chunk_separator"),
    ],
)
def test_options_that_cannot_be_served_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        take_options(None, options)


def calibration(folder, gap, temperature=1.0):
    text = f'{{"chunk_position_gap": {gap}, "chunk_temperature": {temperature}, "chunk_scale": 1.0}}'
    (folder / "chunk_calibration.json").write_text(text)
    return str(folder)


def test_a_calibration_file_gives_its_gap(tmp_path):
    model = calibration(tmp_path, 8)
    options, config, _ = take_options(model, {})
    assert options.gap == config["kv_connector_extra_config"]["chunk_position_gap"] == 8
    assert take_options(model, {"chunk_position_gap": 0})[0].gap == 0
    assert take_options(model, {"position_strategy": "reordered"})[0].gap == 0
    assert server_options(model, {}).gap == 0, "an engine that runs already keeps its own gap"


def test_a_calibrated_temperature_is_refused(tmp_path):
    model = calibration(tmp_path, 8, temperature=0.55)
    with pytest.raises(ConfigError, match=r"temperature 0.55 .* chunk_calibration='off'"):
        take_options(model, {})
    assert take_options(model, {"chunk_calibration": "off"})[0].gap == 0


def test_parameters_of_a_chunked_prompt():
    assert refused_param(SamplingParams()) is None
    assert refused_param(SamplingParams(prompt_logprobs=1)) == "prompt_logprobs"
    assert refused_param(SamplingParams(skip_reading_prefix_cache=True)) == "skip_reading_prefix_cache"


def test_the_server_command():
    line = serve.server_arguments(["MODEL", "--port", "1", "--enable-chunk-aware", "--chunk-position-gap", "3"])
    assert line[:4] == ["MODEL", "--port", "1", "--kv-transfer-config"]
    extra = json.loads(line[4])["kv_connector_extra_config"]
    assert extra["enable_chunk_aware"]
    assert extra["chunk_position_gap"] == 3
    with pytest.raises(ConfigError, match="max-store-bytes"):
        serve.server_arguments(["MODEL", "--kv-transfer-config", "{}"])
    with pytest.raises(ConfigError, match="no model is given"):
        serve.server_arguments(["--port", "1"])
    with pytest.raises(ConfigError, match="chunk_temperature"):
        take_options("MODEL", {"chunk_temperature": 0.5})


def test_the_server_takes_the_options_of_vllm_serve(monkeypatch):
    seen = []
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(seen.append))
    words = ["MODEL", "--enable-chunk-aware", "--headless", "--api-server-count", "0", "--max-store-bytes", "9"]
    monkeypatch.setattr(sys, "argv", ["serve", *words])
    monkeypatch.setenv("VLLM_PLUGINS", "a")
    serve.main()
    (args,) = seen
    assert (args.model_tag, args.headless, args.api_server_count) == ("MODEL", True, 0)
    assert args.kv_transfer_config.kv_connector_extra_config == {"enable_chunk_aware": True, "max_store_bytes": 9}
    assert os.environ["VLLM_PLUGINS"] == "a,chunkattn"


def test_the_servers_plugins():
    assert serve.plugins("a,b").split(",") == ["a", "b", "chunkattn"]
    assert serve.plugins("lora_hf_hub_resolver").split(",") == ["lora_hf_hub_resolver", "chunkattn"]
    loaded = serve.plugins(None).split(",")
    assert "lora_filesystem_resolver" in loaded, "plugins that vLLM loads by itself stay"
    assert "lora_hf_hub_resolver" not in loaded, "vLLM wants this one named by the user"


def test_the_model_of_a_config_file_gives_its_gap(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(f"model: {calibration(tmp_path, 8)}\nport: 1\n")
    line = serve.server_arguments(["--config", str(file)])
    assert json.loads(line[-1])["kv_connector_extra_config"]["chunk_position_gap"] == 8
    file.write_text("kv-transfer-config: {}\n")
    with pytest.raises(ConfigError, match="kv-transfer-config is set"):
        serve.server_arguments(["MODEL", "--config", str(file)])
    with pytest.raises(ConfigError, match="cannot be read"):
        serve.server_arguments(["MODEL", "--config", str(tmp_path / "missing.yaml")])


def test_the_calibration_is_that_of_the_revision(monkeypatch):
    asked = []
    monkeypatch.setattr(chunk_options, "calibration_of", lambda *args: asked.append(args))
    take_options("MODEL", {"revision": "v1"})
    server_options("MODEL", {}, "v2")
    serve.server_arguments(["MODEL", "--revision", "v3"])
    assert asked == [("MODEL", None, name) for name in ("v1", "v2", "v3")]


# The composer


class FakeEngine:
    """Engine that keeps the keys of `capacity` documents, the latest last, and records what it runs.

    Args:
        capacity: number of keys to keep.
        broken: whether every request ends with an error.
    """

    def __init__(self, capacity, broken=False):
        self.capacity, self.broken, self.held, self.sent = capacity, broken, [], []

    def __call__(self, submissions):
        outputs = []
        for submission in submissions:
            request = submission.request
            self.sent.append(request)
            saves = "save" in (request.kv_transfer_params or {"chunkattn": {}})["chunkattn"]
            if saves:
                self.held = [k for k in self.held if k not in request.keys] + list(request.keys)
                self.held = self.held[-self.capacity :]
            reason = "length" if not self.broken and (saves or set(request.keys) <= set(self.held)) else "error"
            completion = SimpleNamespace(finish_reason=reason)
            outputs.append(SimpleNamespace(outputs=[completion], num_cached_tokens=0, keys=request.keys))
        return outputs


def run(engine, plans, held=None):
    return drive(answer([PromptTask(plan, None) for plan in plans], HeldKeys() if held is None else held), engine)


def plans(count, documents=2):
    return [plan_prompt([1], [[10 + n, d] for d in range(documents)], [7]) for n in range(count)]


def test_documents_are_sent_once():
    engine = FakeEngine(100)
    held = HeldKeys()
    (plan,) = plans(1)
    for _ in range(3):
        run(engine, [plan], held)
    assert len(engine.sent) == 2 + 3


def test_prompts_of_one_call_share_their_saves():
    engine = FakeEngine(100)
    (plan,) = plans(1)
    run(engine, [plan, plan])
    assert [bool(r.kv_transfer_params["chunkattn"].get("bounds")) for r in engine.sent] == [False, False, True, True]


def computed_keys(engine):
    found = [r.kv_transfer_params["chunkattn"] for r in engine.sent]
    return [set(fields.get("computed", ())) for fields in found if "bounds" in fields]


def test_a_composed_request_names_what_was_computed_for_it():
    engine = FakeEngine(100)
    held = HeldKeys()
    first, second = (plan_prompt([1], [[10], [11], *more], [7]) for more in ([], [[12]]))
    run(engine, [first, first], held)
    run(engine, [second], held)
    drive(save(plans(1), held), engine)
    run(engine, plans(1), held)
    keys = set(second.composed.keys) - set(first.composed.keys)
    assert len(keys) == 1
    assert computed_keys(engine) == [set(first.composed.keys), set(), keys, set()]


def test_a_lost_document_is_computed_for_the_prompt_that_lost_it():
    engine = FakeEngine(100)
    held = HeldKeys()
    (plan,) = plans(1)
    run(engine, [plan], held)
    engine.held.clear()
    run(engine, [plan], held)
    assert computed_keys(engine) == [set(plan.composed.keys), set(), set(plan.composed.keys)]


def test_a_prompt_whose_documents_were_evicted_is_answered():
    engine = FakeEngine(3)  # the prefix and two documents: one prompt's
    held = HeldKeys()
    answers = run(engine, plans(4), held)
    assert all(output.outputs[0].finish_reason == "length" for output, _ in answers)


def test_documents_that_never_fit_are_an_error():
    engine = FakeEngine(2)
    with pytest.raises(CapacityError, match="2 documents, 4 tokens"):
        run(engine, plans(1))
    assert sum("bounds" in r.kv_transfer_params["chunkattn"] for r in engine.sent) == RETRIES + 1


def test_an_error_of_a_plain_prompt_is_the_engines_own():
    engine = FakeEngine(10, broken=True)
    ((output, _),) = run(engine, [plan_prompt([1], [], [2])])
    assert output.outputs[0].finish_reason == "error"
    assert len(engine.sent) == 1


def test_precomputed_documents_are_sent_although_they_were_sent_before():
    engine = FakeEngine(100)
    held = HeldKeys()
    for _ in range(2):
        drive(save(plans(1), held), engine)
    assert len(engine.sent) == 2 * 2
    run(engine, plans(1), held)
    assert len(engine.sent) == 2 * 2 + 1


def test_a_failed_save_is_an_error():
    held = HeldKeys()
    with pytest.raises(CapacityError, match="ended 2 of the 2 requests"):
        drive(save(plans(1), held), FakeEngine(100, broken=True))
    assert not len(held)


def test_the_memory_of_what_was_sent_is_bounded():
    held = HeldKeys(limit=3)
    held.add(map(str, range(10)))
    assert len(held) == 3
    assert "9" in held
    assert "6" not in held


def test_costs_of_saves_are_no_cache_hits():
    prefix, chunks, question = [1, 2, 3], [[4, 5], [6, 7, 8], [4, 5]], [9]
    plan = plan_prompt(prefix, chunks, question)
    costs = Costs()
    for request in plan.saves:
        costs.add(request, SimpleNamespace(num_cached_tokens=0))
    composed = SimpleNamespace(num_cached_tokens=10)
    assert costs.cached(composed, [prefix, *chunks, question]) == (2, (0, 0, 2)), "a repeated chunk is computed once"
    assert Costs().cached(composed, [prefix, *chunks, question]) == (10, (2, 3, 2))


def test_chunk_limits():
    parser = ChunkOptions().parser(None)
    prompt = parser.parse(ChunkedPrompt([1], [[2, 3, 4]], [5]))
    with pytest.raises(CapacityError, match="chunk 0 has 3 tokens, max_chunk_len is 2"):
        ChunkOptions(max_chunk_len=2).plan(prompt, 100)
    with pytest.raises(CapacityError, match="5 tokens, vLLM's max_model_len 5"):
        ChunkOptions().plan(prompt, 5)
    assert ChunkOptions().plan(prompt, 6).composed.token_ids == [1, 2, 3, 4, 5]


# The guide


GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "vllm.md").read_text(encoding="utf-8")


def test_commands_of_the_guide_are_taken_by_the_server():
    commands = [shlex.split(block) for block in re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)]
    assert len(commands) == 2
    configs = []
    for words in commands:
        if words[:3] == ["python", "-m", "chunkattn.integrations.vllm.serve"]:
            line = serve.server_arguments(words[3:])
        else:
            assert words[:3] == ["VLLM_PLUGINS=chunkattn", "vllm", "serve"]
            line = words[3:]
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
        assert parsed.model_tag == "Qwen/Qwen3-0.6B"
        configs.append(replace(parsed.kv_transfer_config, engine_id="any"))
    assert configs[0] == configs[1]


def test_the_servers_help_describes_every_option():
    assert all(action.help for action in serve.chunk_arguments()._actions)


def test_every_option_stands_in_the_guide():
    for kind in (ChunkOptions, ConnectorOptions):
        for option in fields(kind):
            assert f"`{option.name}`" in GUIDE
    for name in _NOT_OFFERED:
        assert f"`{name}`" in GUIDE
    assert "vllm>=0.32,<0.33" in GUIDE
