"""`LoadedAdapters`: the adapters of an engine by name, and the slots that hold them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Set
from pathlib import Path

from chunkattn.adapter_salt import folders_of, split
from chunkattn.config import EngineConfig
from chunkattn.errors import CapacityError, ConfigError, ModelError, RequestError
from chunkattn.models.adapter_slots import AdapterSlots
from chunkattn.models.adapters import Adapter, adapter_folder, read_adapter
from chunkattn.models.loader import ModelFiles
from chunkattn.models.shards import Shards
from chunkattn.models.spec import DecoderSpec

logger = logging.getLogger(__name__)


class LoadedAdapters:
    """Adapters by name. A name stands for the same contents for the life of the engine.

    Args:
        slots: slots of the adapters.
        spec: shape of the base model.
        adapters: adapters of `lora_modules` by name, which keep their slots.
        is_open: whether requests may bring adapters of their own, which take the other slots in turn.
    """

    def __init__(self, slots: AdapterSlots, spec: DecoderSpec, adapters: Mapping[str, Adapter], *, is_open: bool) -> None:
        self.slots, self._spec, self._is_open = slots, spec, is_open
        self._known: dict[str, tuple[Path, str]] = {}  # folder and digest by name
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # by digest, the least recently used first
        self._fixed: set[int] = set()
        for name, adapter in adapters.items():
            if adapter.digest not in self._slot_of:
                self._put(len(self._slot_of), adapter)
            self._known[name] = adapter.path, adapter.digest
            self._fixed.add(self._slot_of[adapter.digest])

    @staticmethod
    def read(config: EngineConfig, spec: DecoderSpec) -> dict[str, Adapter]:
        """Return the adapters of `lora_modules` by name.

        Args:
            config: options of the engine.
            spec: shape of the base model.

        Raises:
            ConfigError: an entry is malformed.
            ModelError: as `read_adapter`.
        """
        return {name: read_adapter(adapter_folder(place), spec) for name, place in folders_of(config.lora_modules).items()}

    @staticmethod
    def of(config: EngineConfig, files: ModelFiles, shards: Shards, adapters: Mapping[str, Adapter]) -> LoadedAdapters | None:
        """Return the adapters of an engine; None for an engine without.

        Args:
            config: options of the engine.
            files: checkpoint of the base model.
            shards: devices of the model.
            adapters: result of `read`.

        Raises:
            ConfigError: an adapter fits no slot.
        """
        if not adapters and not config.enable_lora:
            return None
        count = max(len(adapters), config.max_loras if config.enable_lora else 0)
        only = None if config.enable_lora else adapters.values()
        slots = AdapterSlots(files.spec, files.dtype, shards, count, config.max_lora_rank, only)
        return LoadedAdapters(slots, files.spec, adapters, is_open=config.enable_lora)

    def find(self, salt_key: str | None, *, computes: bool = True) -> tuple[int, str] | None:
        """Return the slot and the digest of the adapter that a request's salt names; None for the base model.

        Args:
            salt_key: salt of the request, see `chunkattn.adapter_salt`.
            computes: whether the request computes; for a look-up, the slot of an adapter that has lost it is -1.

        Raises:
            RequestError: the adapter is not loaded.
        """
        name, _ = split(salt_key)
        if name is None:
            return None
        _, digest = self._known.get(name, (None, ""))
        if digest and not computes:
            return self._slot_of.get(digest, -1), digest
        if digest not in self._slot_of:
            why = "is not loaded; name one of lora_modules, or load it"
            if digest:
                why = "gave its slot to another one; raise max_loras"
            raise RequestError(f"the adapter {name!r} {why}", param="model")
        self._slot_of.move_to_end(digest)
        return self._slot_of[digest], digest

    def load(self, name: str, place: str, in_use: Set[int | None]) -> None:
        """Load an adapter that a request brings, unless it is loaded, in place of the least recently used idle one.

        Args:
            name: name of the adapter.
            place: folder or hub id; empty for an adapter that is loaded.
            in_use: slots of unfinished requests.

        Raises:
            RequestError: the name stands for another adapter, the adapter is unusable, or requests cannot bring adapters.
            CapacityError: unfinished requests use all slots.
        """
        folder, digest = self._known.get(name, (None, ""))
        if digest in self._slot_of and (not place or adapter_folder(place) == folder):
            return
        if not self._is_open:
            raise RequestError("an adapter by lora_path needs the option enable_lora", param="lora_request")
        try:
            adapter = read_adapter(adapter_folder(place), self._spec)
            self.slots.check(adapter)
        except (ModelError, ConfigError) as error:
            raise RequestError(str(error), param="lora_request") from None
        if digest not in ("", adapter.digest):
            text = f"lora_name {name!r} stands for other contents, of {folder}; give this adapter a name of its own"
            raise RequestError(text, param="lora_request")
        if adapter.digest not in self._slot_of:
            self._put(self._free(in_use), adapter)
        self._known[name] = adapter.path, adapter.digest

    def _free(self, in_use: Set[int | None]) -> int:
        """Return a slot that is free, or becomes free."""
        if free := set(range(self.slots.count)) - set(self._slot_of.values()):
            return min(free)
        for digest, slot in self._slot_of.items():
            if slot not in in_use and slot not in self._fixed:
                del self._slot_of[digest]
                return slot
        raise CapacityError(f"all {self.slots.count} slots of adapters are in use; raise max_loras", param="lora_request")

    def _put(self, slot: int, adapter: Adapter) -> None:
        self.slots.check(adapter)
        self.slots.put(slot, adapter)
        self._slot_of[adapter.digest] = slot
        logger.info("adapter %s: %d matrices in slot %d", adapter.path, len(adapter.deltas), slot)
