"""The choice of a native kernel within a process."""

from chunkattn.backends.cpu import library


def use(name):
    """Make the kernel called `name` serve this process, or the best one if `name` is empty. Return why it cannot, or None."""
    found = library._load()
    if isinstance(found, str):
        return found
    why = found.chunkattn_use(name.encode())
    return why.decode() if why else None
