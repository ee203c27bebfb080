"""Words for what is no model here: what a name, a file or a folder is instead, and what to do."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from chunkattn.gguf_names import example_quant, list_quants, quant_of
from chunkattn.local_files import pointer_of_lfs

_MOST_FILES = 10_000
"""Files of a folder that are looked at."""
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co", "hf-mirror.com")
_CONVERT = (
    'convert them to safetensors, with PyTorch installed: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{place}').save_pretrained('{place}')\""
)
_UNPACK, _PASS = "unpack it and pass the folder inside", "pass a safetensors folder or a GGUF file"

_HOLDS = (
    (("*.incomplete", "*.part", "*.crdownload", "*.aria2"), "a download into it is incomplete; run the download again"),
    (
        ("adapter_config.json",),
        "it holds a PEFT adapter without adapter_model.safetensors; save the adapter so, or get it again",
    ),
    (("model_index.json",), "it holds a diffusion pipeline, which is no language model"),
    (("params.json", "consolidated*.safetensors"), "consolidated.safetensors has Mistral's own names; get model*.safetensors"),
    (("consolidated*.pth",), "it holds Meta's own format; get the folder of the hub with model*.safetensors"),
    (("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt"), f"it holds pickled weights of PyTorch, not read; {_CONVERT}"),
    (("*.onnx",), "it holds an ONNX model; get the folder that it was exported from"),
    (("openvino_*.xml",), "it holds an OpenVINO model; get the folder that it was exported from"),
    (("*.npz",), "it holds weights of MLX in NumPy's format; get the safetensors folder or a GGUF file of the model"),
    (("*.h5", "*.msgpack"), "it holds weights of TensorFlow or Flax; get the safetensors folder of the model"),
    (("*.zip", "*.tar", "*.tar.*", "*.tgz", "*.7z"), f"it holds an archive; {_UNPACK}"),
)
"""Patterns of files, any of which tells what a folder holds, with the words."""
_ZIP = b"PK\x03\x04"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAGIC = (
    ((_ZIP, b"\x80"), _PICKLES, f"a pickle of PyTorch; {_PASS}"),
    (_ZIP, ("",), f"a zip archive; {_UNPACK}"),
    (b"\x1f\x8b", ("",), f"a gzip archive; {_UNPACK}"),
    (b"7z\xbc\xaf", ("",), f"a 7z archive; {_UNPACK}"),
    (b"\x89HDF", ("",), f"a file of TensorFlow; {_PASS}"),
    ((b"lmgg", b"fmgg", b"tjgg"), ("",), "of llama.cpp's format before GGUF; convert the model anew"),
    (b"", (".safetensors", ".json", ".model", ".jinja"), "one file of a checkpoint; pass its folder, {parent}"),
    (b"", (".onnx",), f"an ONNX model; {_PASS}"),
    (b"", (".tar",), f"an archive; {_UNPACK}"),
)
"""First bytes and suffixes of files, with the words."""


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF files do, whatever its name; Ollama's blobs have no suffix.

    Args:
        path: local file.
    """
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def explain_name(model: str) -> str | None:
    """Return what a model's name is that is neither a local path nor a hub id; None if nothing tells.

    Args:
        model: model as the user names it.
    """
    if model.startswith("file:"):
        return f"it is a URL; pass the path {unquote(urlsplit(model).path)!r}"
    host, _, rest = re.sub(r"^(https?|hf)://", "", model).partition("/")
    if model.startswith("hf://"):
        host, rest = _HUB_HOSTS[0], f"{host}/{rest}"
    if host.lower() in _HUB_HOSTS and rest.count("/"):
        return _on_the_hub(rest)
    if "://" in model:
        return "it is a URL; download the model and pass the path of its folder or GGUF file"
    if model.lower().endswith(".gguf"):
        return "there is no such file; pass the path of a GGUF file that exists"
    if re.match(r"(/|~|\.\.?/)", model) or "\\" in model or model.rstrip("/").count("/") > 1 or not model.strip():
        return "nothing is there; check the path"
    return None


def _on_the_hub(path: str) -> str:
    owner, name, *inside = path.split("?")[0].rstrip("/").split("/")
    hub_id, _, quant = f"{owner}/{name}".partition(":")
    file = "/".join(inside[2:])
    if file.endswith(".gguf"):
        named = "" if (tag := quant_of(file)) is None else f", or pass '{hub_id}:{tag}'"
        return f"it is an address of the hub; download the file with `hf download {hub_id} {file}` and pass its path{named}"
    return f"it is an address of the hub; pass the hub id {f'{hub_id}:{quant}' if quant else hub_id!r}"


def explain_file(path: Path) -> str:
    """Return what a file is that is no GGUF file, and what to do.

    Args:
        path: local file.
    """
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        return f"it cannot be read: {error}"
    if not head:
        return "it is empty; get it again"
    if pointer := pointer_of_lfs(path):
        return pointer
    for magic, suffixes, words in _MAGIC:
        if head.startswith(magic) and path.name.lower().endswith(suffixes):
            return f"it is {words.format(parent=str(path.parent))}"
    return f"it is no GGUF file: it begins with {head[:4]!r} instead of b'GGUF'; pass a model's folder or GGUF file"


def list_files(folder: Path) -> list[str]:
    """Return the relative paths of the files of a folder and of two levels below; of hidden folders, those of `.cache` alone.

    Args:
        folder: local folder.
    """

    def walk(place: Path, depth: int) -> Iterator[str]:
        try:
            inside = sorted(place.iterdir())
        except OSError:
            return
        for path in inside:
            if path.is_dir() and depth and (not path.name.startswith(".") or path.name == ".cache"):
                yield from walk(path, depth + 2 if path.name == ".cache" else depth - 1)
            elif not path.is_dir():
                yield path.relative_to(folder).as_posix()

    return list(islice(walk(folder, 2), _MOST_FILES))


def explain_folder(folder: Path) -> str | None:
    """Return what a folder holds that is no checkpoint here, and what to do; None if nothing tells.

    Args:
        folder: local folder.
    """
    if (folder / "snapshots").is_dir() and folder.name.startswith("models--"):
        hub_id = _hub_id(folder)
        where = "" if (snapshot := _snapshot(folder)) is None else f", or the folder {snapshot}"
        return f"it is the folder of {hub_id!r} in the hub's cache; pass the hub id {hub_id!r}{where}"
    if cached := sorted(folder.glob("models--*")):
        return f"it is the hub's cache of several models; pass a hub id, such as {_hub_id(cached[0])!r}"
    if (folder / "manifests").is_dir() and (folder / "blobs").is_dir():
        return "it is Ollama's store; `ollama show --modelfile NAME` prints the blob of a model after FROM: pass that path"
    names = list_files(folder)
    if not names:
        return "it is empty; is the download complete, and the disk mounted?"
    if words := explain_files(names, str(folder)):
        return words
    inner = [name for name in names if PurePosixPath(name).name == "config.json" or name.lower().endswith(".gguf")]
    place = next((str(folder / name.split("/")[0]) for name in inner if "/" in name), None)
    return None if place is None else f"pass the folder below that holds the model, such as {place}"


def explain_files(names: Collection[str], place: str) -> str | None:
    """Return what the files of a folder or of a repository are, if no checkpoint here; None if nothing tells.

    Args:
        names: relative paths of the files.
        place: folder or hub id that holds the files.
    """
    if quants := list_quants(names):
        quant = example_quant(names)
        how = f"pass one as MODEL:QUANT, such as '{place}:{quant}'" if quant else "download one and pass its path"
        return f"it holds GGUF files ({quants}); {how}"
    if any(PurePosixPath(name).name == "model.safetensors" or name.endswith("safetensors.index.json") for name in names):
        return None
    for patterns, words in _HOLDS:
        if any(fnmatch(PurePosixPath(name).name, pattern) for name in names for pattern in patterns):
            return words.format(place=place)
    if shards := sorted(name for name in names if fnmatch(name, "model-*.safetensors")):
        return f"{shards[0]} is one of several shards; get model.safetensors.index.json, too"
    if others := sorted(name for name in names if name.endswith(".safetensors") and "/" not in name):
        return f"{others[0]} has another name than transformers gives; is it a whole model? Rename it to model.safetensors"
    return None


def _hub_id(folder: Path) -> str:
    """Return the hub id of a folder in the hub's cache."""
    return folder.name.removeprefix("models--").replace("--", "/")


def _snapshot(folder: Path) -> Path | None:
    """Return the snapshot of a folder of the hub's cache that `main` names, or else the newest; None without one."""
    snapshots = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
    try:
        named = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        named = folder
    return named if named in snapshots else max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
