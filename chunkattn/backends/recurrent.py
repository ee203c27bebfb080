"""Choice of the form in which a device computes recurrent layers."""

from __future__ import annotations

import jax

from chunkattn.backends.cpu.recurrence import NativeRecurrence
from chunkattn.backends.recurrence import Recurrence, RecurrentSpec
from chunkattn.backends.xla_recurrence import XlaRecurrence


def make_recurrence(spec: RecurrentSpec) -> Recurrence:
    """Return the native form on CPUs where its library is there, else the form that XLA computes.

    Args:
        spec: sizes of the layers on one device.
    """
    return NativeRecurrence(spec) if jax.default_backend() == "cpu" and NativeRecurrence.serves() else XlaRecurrence(spec)
