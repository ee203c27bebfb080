"""A hub of Hugging Face in memory: the client's own filter of patterns over listings of files."""

from pathlib import Path

from huggingface_hub.utils import filter_repo_objects


class FakeHub:
    """Repositories by id, each a local folder; remembers what was downloaded.

    Attributes:
        repositories: folder of each repository.
        offline: whether the hub cannot be asked, so only what was downloaded is there.
        taken: names of the files of the last download.
    """

    def __init__(self, cache, monkeypatch):
        self.repositories, self.offline, self.taken = {}, False, []
        self._cache = cache
        monkeypatch.setattr("huggingface_hub.snapshot_download", self._download)
        monkeypatch.setattr("huggingface_hub.list_repo_files", self._list)

    def add(self, hub_id, folder):
        """Publish a local folder."""
        self.repositories[hub_id] = Path(folder)

    def _list(self, hub_id, revision=None):
        if self.offline or hub_id not in self.repositories:
            raise OSError(f"404 for {hub_id} at {revision}")
        folder = self.repositories[hub_id]
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def _download(self, hub_id, revision=None, allow_patterns=None, local_files_only=False):
        place = self._cache / hub_id.replace("/", "--")
        if local_files_only or self.offline:
            if not place.exists():
                raise OSError(f"{hub_id} is not in the cache")
            return str(place)
        self.taken = list(filter_repo_objects(self._list(hub_id, revision), allow_patterns=allow_patterns))
        place.mkdir(exist_ok=True)
        for name in self.taken:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes((self.repositories[hub_id] / name).read_bytes())
        return str(place)
