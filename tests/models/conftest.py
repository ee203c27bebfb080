import pytest
from gguf import GGMLQuantizationType as Kind

from tests.gguf_files import Written, write


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A named random model in a GGUF file, made once."""
    made: dict[tuple, Written] = {}

    def get(name, kind=Kind.F16):
        if (name, kind) not in made:
            made[name, kind] = write(tmp_path_factory.mktemp("gguf") / f"{name}-{kind.name}.gguf", name, kind)
        return made[name, kind]

    return get
