"""Python runs this module at its start if PYTHONPATH names its folder. A gateway then ranks replicas by `ROUTING_POLICY`."""

import os

if name := os.environ.get("ROUTING_POLICY"):
    from benchmarks.routing_policies import POLICIES
    from chunkattn.gateway import app

    app.Policy = POLICIES[name]  # type: ignore[misc]
