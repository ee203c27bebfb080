"""Where a model lies: what is downloaded, which GGUF file is taken, and what other names, files and folders are told."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest

from chunkattn import LLM, EngineConfig
from chunkattn.calibration import FILE_NAME, Calibration
from chunkattn.config import make_config
from chunkattn.errors import ModelError
from chunkattn.gguf_names import pick_gguf, split_quant
from chunkattn.models.loader import DEMO_FOLDER, load_model_tokenizer, load_tokenizer, open_files
from chunkattn.models.locate import resolve_path
from chunkattn.web.options import ServerConfig
from tests.gguf_files import CONFIGS, Kind, Written
from tests.hub import FakeHub
from tests.reranker_files import qwen_tokenizer, write_tokenizer

QWEN = "---\nbase_model: Qwen/Qwen3-Reranker-0.6B\n---\n# tuned\n"
GGUF = b"GGUF\x03\0\0\0"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    return FakeHub(tmp_path / "cache", monkeypatch)


@pytest.fixture
def make(tmp_path):
    """A folder with files: contents by name, None for empty ones."""

    def made(files, name="model"):
        for file, content in files.items():
            (path := tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content or b"")
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name

    return made


# Downloads

LOADED = {
    *("README.md", "chat_template.jinja", "config.json", "config_sentence_transformers.json", "generation_config.json"),
    *("merges.txt", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"),
    *("modules.json", "1_LogitScore/config.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("vocab.json", "chunk_calibration.json"),
}
NOT_LOADED = {
    *(".gitattributes", "LICENSE", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "flax_model.msgpack"),
    *("tf_model.h5", "modeling_own.py", "original/consolidated.00.pth", "model-Q4_K_M.gguf"),
}


def test_what_is_downloaded(hub, make):
    """A model's card is among its files, a tokenizer has no weights, and a quantisation is all shards of one file."""
    hub.add("some/model", make(dict.fromkeys(LOADED | NOT_LOADED, b"{}")))
    resolve_path("some/model")
    assert {*hub.taken} == LOADED
    with pytest.raises(ModelError):
        load_tokenizer("some/model")
    assert not [name for name in hub.taken if re.search(r"safetensors|gguf|bin|h5|README|1_Logit", name)]
    assert {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"} <= {*hub.taken}
    assert resolve_path("some/model:Q4_K_M").name == "model-Q4_K_M.gguf"
    assert hub.taken == ["model-Q4_K_M.gguf"]
    shards = [f"Q8_0/m-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    hub.add("some/shards", make(dict.fromkeys([*shards, "m-Q4_K_M.gguf", "mmproj-Q8_0.gguf", "README.md"], GGUF), "shards"))
    assert resolve_path("some/shards:q8_0").name == "m-Q8_0-00001-of-00003.gguf"
    assert hub.taken == shards
    hub.offline = True
    assert resolve_path("some/shards:Q8_0").is_file()
    with pytest.raises(ModelError, match="'nobody/x' is no local folder and cannot be loaded from the hub"):
        resolve_path("nobody/x:Q8_0")


def test_the_template_of_a_downloaded_reranker(hub, checkpoint, tmp_path):
    """A fine-tune under a name of its own: its card names the base model, whose template it was trained on."""
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "tuned")
    (folder / "README.md").write_text(QWEN)
    hub.add("someone/tuned", folder)
    files = open_files(EngineConfig(model="someone/tuned", skip_tokenizer_init=True))
    assert files.reranker.template == "qwen3-reranker"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "m-Q4_K_M.gguf", "m-Q8_0.gguf"], r"no model\*\.safetensors: .*\(Q4_K_M, Q8_0\); .*'a/b:Q4_K_M'"),
        (["m-Q8_0.gguf"], r"no config\.json: it holds GGUF files \(Q8_0\); pass one as MODEL:QUANT, such as 'a/b:Q8_0'"),
        (["config.json", "pytorch_model.bin"], r"pickled weights of PyTorch.*from_pretrained\('a/b'\)"),
        (["adapter_config.json", "adapter_model.bin"], r"PEFT adapter without adapter_model\.safetensors"),
        (["model_index.json", "unet/config.json"], "diffusion pipeline"),
        (["onnx/model.onnx", "config.json"], "ONNX"),
    ],
    ids=str,
)
def test_repositories_without_a_checkpoint(files, message, hub, make):
    hub.add("a/b", make(dict.fromkeys(files, b"{}")))
    with pytest.raises(ModelError, match=message):
        resolve_path("a/b")


def test_an_adapter_on_the_hub_is_a_model(hub, checkpoint, make):
    """It stands for its base model, at the revision that it names."""
    hub.add("some/base", checkpoint("qwen3"))
    fields = json.dumps({"base_model_name_or_path": "some/base", "peft_type": "LORA"}).encode()
    hub.add("a/b", make({"adapter_config.json": fields, "adapter_model.safetensors": b"", "head.pt": b"", "train.log": b""}))
    assert {file.name for file in resolve_path("a/b").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "head.pt",
    }
    with pytest.raises(ModelError, match=r"head\.pt is no file|head\.pt cannot be read"):
        open_files(EngineConfig(model="a/b", skip_tokenizer_init=True))


# Quantisations


@pytest.mark.parametrize(
    ("names", "quant", "expected"),
    [
        (["a-Q4_K_M.gguf", "a-Q4_K_S.gguf"], "Q4_K_M", "a-Q4_K_M.gguf"),
        (["a-Q4_K_M.gguf", "a-Q4_K_S.gguf"], "q4_k_s", "a-Q4_K_S.gguf"),
        (["a.q4_0.gguf", "a.Q8_0.gguf"], "Q4_0", "a.q4_0.gguf"),
        (["a-BF16.gguf", "a-F16.gguf"], "F16", "a-F16.gguf"),
        (["a-UD-Q4_K_XL.gguf", "a-Q4_K_M.gguf"], "Q4_K_XL", "a-UD-Q4_K_XL.gguf"),
        (["a-UD-Q4_K_XL.gguf", "a-Q4_K_XL.gguf"], "Q4_K_XL", "a-Q4_K_XL.gguf"),
        (["a-UD-Q4_K_XL.gguf", "a-Q4_K_XL.gguf"], "UD-Q4_K_XL", "a-UD-Q4_K_XL.gguf"),
        (["Q6_K/a.gguf", "Q8_0/a.gguf"], "Q6_K", "Q6_K/a.gguf"),
        (["a-Q8_0-00002-of-00002.gguf", "a-Q8_0-00001-of-00002.gguf"], "Q8_0", "a-Q8_0-00001-of-00002.gguf"),
        (["a-Q8_0.gguf", "mmproj-a-Q8_0.gguf", "a.imatrix.gguf"], "Q8_0", "a-Q8_0.gguf"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", r"2 GGUF models of quantisation 'Q8_0' \(a-Q8_0.gguf, b-Q8_0.gguf\)"),
        (["a-Q8_0.gguf", "b-UD-Q4_K_XL.gguf", "c.gguf"], "Q4_K_M", r"it has Q8_0, UD-Q4_K_XL, c.gguf$"),
        (["model.safetensors"], "main", "no GGUF files at all; a revision goes into revision="),
    ],
    ids=str,
)
def test_the_file_of_a_quantisation(names, quant, expected):
    if expected in names:
        assert pick_gguf(names, quant, "x")[0] == expected
    else:
        with pytest.raises(ModelError, match=expected):
            pick_gguf(names, quant, "x")


@pytest.mark.parametrize("name", ["a/b:Q4_K_M", "/x/y:Q8_0", "gpt2:F16"])
def test_names_with_a_quantisation(name):
    assert split_quant(name) == (name.rpartition(":")[0], name.rpartition(":")[2])


@pytest.mark.parametrize("name", ["a/b", "/x/y", "http://h:80", "file:///x", "a:b/c", ":Q4", "a/:", "C:\\models", "a/b:"])
def test_names_without_a_quantisation(name):
    assert split_quant(name) == (name, None)


# Local files of one real model


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """A GGUF file with a tokenizer."""
    config = CONFIGS["qwen3"].__class__(**{**CONFIGS["qwen3"].to_dict(), "vocab_size": 512})
    path = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    return Written(path, config, Kind.F32, change=lambda writer: write_tokenizer(writer, qwen_tokenizer())).path


def test_gguf_files_under_every_name(gguf, make, hub, caplog):
    """Ollama's blobs have no suffix. A quantisation picks among several, in a folder and on the hub, with its calibration."""
    blob = make({"blobs/sha256-0f": gguf.read_bytes()}, "ollama") / "blobs" / "sha256-0f"
    calibrated = json.dumps({"chunk_position_gap": 9, "model": "tiny-Q8_0.gguf"}).encode()
    files = {"tiny-Q8_0.gguf": gguf.read_bytes(), "tiny-Q4_0.gguf": GGUF, FILE_NAME: calibrated}
    folder = make(files, "several")
    hub.add("some/tiny", folder)
    for name in (blob, f"{folder}:Q8_0", "some/tiny:Q8_0", gguf):
        opened = open_files(EngineConfig(model=name))
        assert opened.gguf is not None
        assert opened.path.is_file()
        for given in (load_tokenizer(str(name)), load_model_tokenizer(str(name))):
            assert given.get_vocab() == opened.tokenizer.get_vocab()
    assert make_config(f"{folder}:Q8_0", {}).calibration == Calibration(9)
    assert make_config(f"{folder}:Q4_0", {}).calibration == Calibration()
    assert "is ignored: it is the calibration of 'tiny-Q8_0.gguf'" in caplog.text
    with pytest.raises(ModelError, match=r"several:Q8_0'|several:Q4_0'"):
        resolve_path(str(folder))
    with pytest.raises(ModelError, match=r"is a file, so it takes no quantisation"):
        resolve_path(f"{gguf}:Q8_0")


def test_a_gguf_file_beside_a_configuration(gguf, make, checkpoint, tmp_path, caplog):
    """Safetensors count, and a warning says so. Without them the GGUF file is what there is to load."""
    caplog.set_level(logging.INFO)
    both = shutil.copytree(checkpoint("qwen3"), tmp_path / "both")
    shutil.copy(gguf, both)
    assert resolve_path(str(both)) == both
    assert "its safetensors are loaded, not tiny-Q8_0.gguf; to load a GGUF file, pass its path" in caplog.text
    shards = make({"config.json": b"{}", "model-00001-of-00002.safetensors": b"", "draft.gguf": GGUF}, "shards")
    assert resolve_path(str(shards)) == shards  # the loader says that the index is missing
    alone = make({"config.json": b"{}", "tiny-Q8_0.gguf": gguf.read_bytes()}, "alone")
    assert resolve_path(str(alone)) == alone / "tiny-Q8_0.gguf"
    assert "has a config.json and no safetensors: tiny-Q8_0.gguf is loaded" in caplog.text
    (alone / "tiny-Q4_0.gguf").touch()
    with pytest.raises(ModelError, match=r"holds 2 GGUF models .*pass the path of one file, or .*alone:Q"):
        resolve_path(str(alone))


# Words


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file:///models/my%20model", r"it is a URL; pass the path '/models/my model'"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "address of the hub; pass the hub id 'Qwen/Qwen3-0.6B'$"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "pass the hub id 'Qwen/Qwen3-0.6B'$"),
        ("https://hf.co/a/b/resolve/main/b-Q4_K_M.gguf?download=true", "`hf download a/b b-Q4_K_M.gguf` .*'a/b:Q4_K_M'"),
        ("hf.co/a/b-GGUF:Q4_K_M", "pass the hub id 'a/b-GGUF:Q4_K_M'$"),
        ("hf://a/b", "pass the hub id 'a/b'$"),
        ("s3://bucket/model", "it is a URL; download the model and pass the path"),
        ("https://example.com/model.gguf", "it is a URL; download the model and pass the path"),
        ("/no/where", "no local folder or file .*nothing is there; check the path"),
        ("./nowhere", "nothing is there; check the path"),
        ("~/nowhere", "nothing is there; check the path"),
        ("models/a/b", "nothing is there; check the path"),
        ("C:\\models\\a", "nothing is there; check the path"),
        ("/no/where:Q4_K_M", "nothing is there; check the path"),
        ("nowhere/model.gguf", "there is no such file; pass the path of a GGUF file that exists"),
        ("llama3:8b", "A name of Ollama is no hub id: pass the path of its blob, which `ollama show --modelfile NAME` prints"),
    ],
)
def test_names_that_are_no_model(name, message, hub):
    for load in (resolve_path, load_tokenizer):
        with pytest.raises(ModelError, match=message if load is resolve_path else message.removesuffix("$")):
            load(name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"\x08\0\0\0", "one file of a checkpoint; pass its folder, .*model$"),
        ("config.json", b"{}", "one file of a checkpoint; pass its folder"),
        ("pytorch_model.bin", b"PK\x03\x04", "a pickle of PyTorch"),
        ("model.pt", b"\x80\x02}", "a pickle of PyTorch"),
        ("model.zip", b"PK\x03\x04", "a zip archive; unpack it"),
        ("model.tar.gz", b"\x1f\x8b\x08", "a gzip archive; unpack it"),
        ("model.onnx", b"\x08\x07", "an ONNX model"),
        ("ggml-model-q4_0.bin", b"tjgg\x03", "llama.cpp's format before GGUF"),
        ("sha256-0f", b"{}", "no GGUF file: it begins with b'{}'"),
        ("model.safetensors", LFS, "a pointer of Git LFS: run `git lfs pull`"),
        ("model.safetensors", b"", "it is empty; get it again"),
    ],
    ids=str,
)
def test_files_that_are_no_model(name, content, message, make):
    path = make({name: content}) / name
    for load in (resolve_path, load_tokenizer):
        with pytest.raises(ModelError, match=message if load is resolve_path else message.removesuffix("$")):
            load(str(path))


def test_a_pointer_of_git_lfs_in_place_of_a_gguf_file(make):
    with pytest.raises(ModelError, match=r"m.gguf is no GGUF file: it is a pointer of Git LFS: run `git lfs pull`"):
        open_files(EngineConfig(model=make({"m.gguf": LFS}) / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("model", [], "it is empty; is the download complete, and the disk mounted"),
        ("models--a--b", ["refs/main", "snapshots/0f/config.json"], r"cache; pass the hub id 'a/b', or .*snapshots/0f"),
        ("hub", ["models--a--b/refs/main"], r"the hub's cache of several models; pass a hub id, such as 'a/b'"),
        ("ollama", ["manifests/x", "blobs/sha256-0f"], "Ollama's store; `ollama show --modelfile NAME`"),
        ("model", [".cache/huggingface/download/x.incomplete"], "a download into it is incomplete; run the download again"),
        (
            "model",
            ["adapter_config.json", "adapter_model.safetensors"],
            "names no base_model_name_or_path; pass the base as model",
        ),
        ("model", ["model_index.json"], "diffusion pipeline"),
        ("model", ["pytorch_model.bin"], "pickled weights of PyTorch"),
        ("model", ["consolidated.00.pth", "tokenizer.model"], "Meta's own format"),
        ("model", ["onnx/model.onnx"], "ONNX"),
        ("model", ["weights.npz"], "MLX in NumPy's format"),
        ("model", ["tf_model.h5"], "TensorFlow or Flax"),
        ("model", ["model.zip"], "an archive; unpack it"),
        ("model", ["inner/config.json"], r"pass the folder below that holds the model, such as .*inner"),
        ("model", ["Q8_0/m-Q8_0.gguf"], r"it holds GGUF files \(Q8_0\); .*model:Q8_0'"),
        ("model", ["notes.txt"], "is this a Hugging Face model folder?"),
    ],
    ids=str,
)
def test_folders_that_are_no_model(name, files, message, make):
    folder = make(dict.fromkeys(files, b"0f" if files and files[0] == "refs/main" else b"{}"), name)
    with pytest.raises(ModelError, match=f"no config.json; .*{message}"):
        open_files(EngineConfig(model=folder, skip_tokenizer_init=True))


def test_a_quantised_model_of_mlx(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "mlx")
    config = json.loads((folder / "config.json").read_text()) | {"quantization": {"group_size": 64, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantized checkpoints of MLX \(quantization\) are not supported"):
        open_files(EngineConfig(model=folder, skip_tokenizer_init=True))


# Paths


@pytest.mark.parametrize("name", ["model", "tokenizer", "kv_store", "chunk_calibration", "generation_config", "revision"])
def test_options_take_paths(name):
    assert getattr(EngineConfig(**{name: Path("a") / "b"}), name) == "a/b"


def test_paths_wherever_a_path_is_text(tmp_path):
    assert ServerConfig(document_store=tmp_path / "documents.db").document_store == str(tmp_path / "documents.db")
    assert make_config(DEMO_FOLDER, {"kv_store": tmp_path}).kv_store == str(tmp_path)
    expected = load_tokenizer(str(DEMO_FOLDER)).get_vocab()
    for load in (load_tokenizer, load_model_tokenizer):
        assert load(DEMO_FOLDER).get_vocab() == expected
    assert resolve_path(DEMO_FOLDER) == DEMO_FOLDER
    llm = LLM(DEMO_FOLDER, tokenizer=DEMO_FOLDER, kv_cache_memory_bytes=1 << 20, kv_store=tmp_path / "store")
    assert llm.config.model == str(DEMO_FOLDER)
    llm.close()
