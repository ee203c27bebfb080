"""Backends that count portions from absolute slots, like a kernel of KV tiles, built from `xla`."""

from chunkattn.backends import get_backend
from chunkattn.backends.own_sequences import own_sequences


class FromSlotZero(get_backend("xla")):  # type: ignore[misc]
    """Counts the portions of all parts from slot 0. A row sees too much of a part that begins within a portion."""

    def build_metadata(self, batch):
        metadata = super().build_metadata(batch)
        return metadata._replace(
            **{
                name: tasks and tasks._replace(begin=tasks.begin // 128 * 128)
                for name, tasks in (("many", metadata.many), ("few", metadata.few))
            }
        )


class Tiled(FromSlotZero):
    """Counts portions from absolute slots, like a kernel of KV tiles."""

    keeps_bits, can_keep_bits = False, True

    def build_metadata(self, batch):
        return super().build_metadata(own_sequences(batch, 128) if self.batch_invariant else batch)


class OwnSequences(get_backend("reference")):  # type: ignore[misc]
    """The reference over the sequences of every part, with the right results wherever parts begin."""

    keeps_bits, can_keep_bits = False, True

    def build_metadata(self, batch):
        return super().build_metadata(own_sequences(batch, 128) if self.batch_invariant else batch)
