"""`LoadedAdapters`: the adapters of an engine by name, and the slots that hold them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

from chunkattn.adapter_salt import NOT_OPEN, split
from chunkattn.config import EngineConfig
from chunkattn.engine.request import Request
from chunkattn.errors import CapacityError, ConfigError, ModelError, RequestError
from chunkattn.models.adapter_slots import AdapterSlots, SlotShape
from chunkattn.models.adapters import Adapter, read_adapter
from chunkattn.models.loader import ModelFiles
from chunkattn.models.shards import Shards
from chunkattn.models.spec import DecoderSpec

logger = logging.getLogger(__name__)


class LostAdapterError(Exception):
    """Failure to load the adapter of a waiting request again."""

    def __init__(self, request: Request, reason: str) -> None:
        super().__init__(reason)
        self.request = request


class LoadedAdapters:
    """Adapters by name. A name stands for the same contents for the life of the engine.

    A request has a slot while it runs. An idle adapter gives its slot to that of the next request, and is read from its folder
    again for its own next request.

    Args:
        slots: slots of the adapters.
        spec: shape of the base model.
        adapters: adapters of `lora_modules` by name, which keep their slots.
        is_open: whether requests may bring adapters of their own, which take the other slots in turn.

    Attributes:
        slots: slots of the adapters.
        slot_of: slot of each adapter that has one, by digest, the least recently used first.
        num_read: number of adapters read again for a request.
    """

    def __init__(self, slots: AdapterSlots, spec: DecoderSpec, adapters: Mapping[str, Adapter], *, is_open: bool) -> None:
        self.slots, self._spec, self._is_open = slots, spec, is_open
        self.slot_of: OrderedDict[str, int] = OrderedDict()
        self._known: dict[str, tuple[Path, str]] = {}  # folder and digest by name
        self.num_read = 0
        self._fixed: set[int] = set()
        for name, adapter in adapters.items():
            if adapter.digest not in self.slot_of:
                self._put(len(self.slot_of), adapter)
            self._note(name, adapter)
            self._fixed.add(self.slot_of[adapter.digest])

    @staticmethod
    def read(files: ModelFiles) -> dict[str, Adapter]:
        """Return the adapters of `lora_modules` by name.

        Args:
            files: checkpoint of the base model, with the folders of the adapters.

        Raises:
            ModelError: as `read_adapter`.
        """
        return {name: read_adapter(folder, files.spec) for name, folder in files.adapters.items()}

    @staticmethod
    def of(config: EngineConfig, files: ModelFiles, shards: Shards, adapters: Mapping[str, Adapter]) -> LoadedAdapters | None:
        """Return the adapters of an engine; None for an engine without.

        Args:
            config: options of the engine.
            files: checkpoint of the base model.
            shards: devices of the model.
            adapters: result of `read`.
        """
        if (shape := SlotShape.of(config, files.spec, adapters.values())) is None:
            return None
        return LoadedAdapters(AdapterSlots(shape, files.dtype, shards), files.spec, adapters, is_open=config.enable_lora)

    def digest(self, salt_key: str | None) -> str | None:
        """Return the digest of the adapter that a request's salt names; None for the base model.

        Args:
            salt_key: salt of the request, see `chunkattn.adapter_salt`.

        Raises:
            RequestError: the adapter has never been loaded.
        """
        name, _ = split(salt_key)
        if name is not None and name not in self._known:
            raise RequestError(f"the adapter {name!r} is not loaded; name one of lora_modules, or load it", param="model")
        return None if name is None else self._known[name][1]

    def load(self, name: str, folder: Path, holders: Iterable[Request]) -> None:
        """Read an adapter that a request brings, unless its name is known, and put it into a slot if one is free or idle.

        Args:
            name: name of the adapter.
            folder: local folder of the adapter.
            holders: requests that keep their slots.

        Raises:
            RequestError: the name stands for another adapter, the adapter is unusable, or requests cannot bring adapters.
            CapacityError: the adapters of `lora_modules` have all slots.
        """
        known, digest = self._known.get(name, (None, ""))
        if known == folder:
            return
        if not self._is_open:
            raise RequestError(NOT_OPEN, param="lora_request")
        try:
            adapter = read_adapter(folder, self._spec)
            adapter.check_choosable(self._spec, self.slots.shape.rank)
        except (ModelError, ConfigError) as error:
            raise RequestError(str(error), param="lora_request") from None
        if digest not in ("", adapter.digest):
            text = f"stands for other contents, of {known}; give this adapter a name of its own"
            raise RequestError(f"lora_name {name!r} {text}", param="lora_request")
        if len(self._fixed) == self.slots.count and adapter.digest not in self.slot_of:
            text = f"the adapters of lora_modules have all {self.slots.count} slots; raise max_loras"
            raise CapacityError(text, param="lora_request")
        self._note(name, adapter)
        if adapter.digest not in self.slot_of and (slot := self._idle(holders)) is not None:
            self._put(slot, adapter)

    def has_slot(self, request: Request) -> bool:
        """Return whether the adapter of a request has a slot, or the request has no adapter."""
        return request.adapter is None or request.adapter in self.slot_of

    def has_room(self, request: Request, holders: Iterable[Request]) -> bool:
        """Return whether the adapter of a request has a slot, or can get one.

        Args:
            request: request that waits.
            holders: requests that keep their slots.
        """
        return self.has_slot(request) or self._idle(holders) is not None

    def take(self, request: Request, holders: Iterable[Request]) -> bool:
        """Give the adapter of a request a slot. Return False if the request has to wait.

        Args:
            request: request that waits.
            holders: requests that keep their slots.

        Raises:
            LostAdapterError: the adapter cannot be read again, or its folder has other contents now.
        """
        if (digest := request.adapter) is None:
            return True
        if digest not in self.slot_of:
            if (slot := self._idle(holders)) is None:
                return False
            self._put(slot, self._read_again(request))
        self.slot_of.move_to_end(digest)
        return True

    def _read_again(self, request: Request) -> Adapter:
        reason = ""
        for folder in [folder for folder, digest in self._known.values() if digest == request.adapter]:
            try:
                adapter = read_adapter(folder, self._spec)
            except ModelError as error:
                reason = f"the adapter cannot be read again: {error}"
                continue
            if adapter.digest == request.adapter:
                self.num_read += 1
                return adapter
            reason = f"the adapter in {folder} has changed since it was loaded; pass it under a new lora_name"
        raise LostAdapterError(request, reason)

    def _idle(self, holders: Iterable[Request]) -> int | None:
        """Return a slot that is free, or that of the least recently used idle adapter; None if there is none."""
        if free := set(range(self.slots.count)) - set(self.slot_of.values()):
            return min(free)
        used = self._fixed | {self.slot_of[r.adapter] for r in holders if r.adapter and r.adapter in self.slot_of}
        return next((slot for slot in self.slot_of.values() if slot not in used), None)

    def _note(self, name: str, adapter: Adapter) -> None:
        self._known[name] = adapter.path, adapter.digest

    def _put(self, slot: int, adapter: Adapter) -> None:
        for digest in [digest for digest, own in self.slot_of.items() if own == slot]:
            del self.slot_of[digest]
        self.slots.put(slot, adapter)
        self.slot_of[adapter.digest] = slot
        logger.info("adapter %s: %d matrices in slot %d", adapter.path, len(adapter.deltas), slot)
