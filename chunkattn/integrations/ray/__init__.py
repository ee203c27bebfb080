"""Replicas of the server on Ray Serve: `chunkattn serve --replicas N` on one machine, `serve run` on a cluster.

Importing this package imports neither Ray nor JAX. `check_ray` tells whether the installed Ray is supported.
"""

from chunkattn.distributions import version_of
from chunkattn.errors import ConfigError

SUPPORTED = ((2, 60), (2, 61))
"""Lowest supported version of Ray, and the lowest unsupported version above it, as major and minor numbers."""
_INSTALL = "pip install 'chunkattn[ray]'"


def check_ray() -> None:
    """Check that a supported Ray is installed.

    Raises:
        ConfigError: Ray is missing, or its version is not supported.
    """
    if (installed := version_of("ray")) is None:
        raise ConfigError(f"replicas need Ray, which is not installed; {_INSTALL}")
    low, high = (".".join(map(str, v)) for v in SUPPORTED)
    if not SUPPORTED[0] <= tuple(int(n) for n in installed.split(".")[:2]) < SUPPORTED[1]:
        raise ConfigError(f"Ray {installed} is installed, replicas need at least {low} and less than {high}; {_INSTALL}")
