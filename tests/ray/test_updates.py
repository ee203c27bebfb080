"""Updates of a cluster under load: no request is lost, and no stored document."""

import copy
import os
import signal
from functools import partial

import pytest

from tests.ray.conftest import ENGINE
from tests.ray.updates import replaced, under_load, with_deployments


def with_engine(config, **options):
    """Return a configuration with other options of the engines. Its update replaces engines and gateway."""
    changed = copy.deepcopy(config)
    changed["applications"][0]["args"]["engine"] = ENGINE | options
    return changed


def scaled(cluster, count):
    """Return a function that tells whether this number of replicas serves."""
    return lambda: len(cluster.replicas_of("Engine")) == count and cluster.is_whole()


def test_an_update_of_everything_loses_no_request(cluster, config, load, stored):
    """The former gateway still answers a request then: it holds neither the update nor the stored documents."""
    changed = with_engine(config, max_queued_requests=33)
    held = under_load(cluster, load, [(partial(cluster.deploy, changed), partial(replaced, cluster, "Gateway", "Engine"))])
    assert held.status == 200
    assert set(load.outcomes) == {"complete"}, (load.outcomes, load.refused)


@pytest.mark.slow
@pytest.mark.parametrize("deployment", ["Engine", "Gateway"])
def test_ten_updates_lose_no_request(deployment, cluster, config, load, stored):
    changes = []
    for number in range(10):
        changed = with_deployments(config, {deployment: {"ray_actor_options": {"num_cpus": (number + 1) / 100}}})
        changes.append((partial(cluster.deploy, changed), partial(replaced, cluster, deployment)))
    under_load(cluster, load, changes, holds=False)
    assert set(load.outcomes) == {"complete"}, (load.outcomes, load.refused)


@pytest.mark.slow
def test_fewer_and_more_replicas_lose_no_request(cluster, config, load, stored):
    """The update of the only replica begins with the new one, as `max_surge_percent` says."""
    changes = [
        ({"num_replicas": 1}, lambda: scaled(cluster, 1)),
        (
            {"num_replicas": 1, "max_surge_percent": 100, "ray_actor_options": {"num_cpus": 0.5}},
            partial(replaced, cluster, "Engine"),
        ),
        ({"num_replicas": 3, "ray_actor_options": {"num_cpus": 0.5}}, lambda: scaled(cluster, 3)),
        ({"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}}, lambda: scaled(cluster, 2)),
    ]
    made = [(partial(cluster.deploy, with_deployments(config, {"Engine": options})), watch) for options, watch in changes]
    under_load(cluster, load, made, holds=False)
    assert set(load.outcomes) == {"complete"}, (load.outcomes, load.refused)


@pytest.mark.slow
def test_a_replica_that_dies_during_an_update(cluster, config, load, stored):
    """The first new replica is killed once it serves: its streams end with an error event, and no other request is lost."""

    def watch():
        before, killed = set(cluster.processes.living("replica")), list[int]()
        served, is_replaced = cluster.replicas_of("Engine"), replaced(cluster, "Engine", may_fail=True)

        def is_done():
            if not killed and cluster.replicas_of("Engine") - served:
                killed.extend(sorted(set(cluster.processes.living("replica")) - before))
                os.kill(killed[0], signal.SIGKILL)
                return False
            return is_replaced()

        return is_done

    changed = with_deployments(config, {"Engine": {"ray_actor_options": {"num_cpus": 0.7}}})
    under_load(cluster, load, [(partial(cluster.deploy, changed), watch)], holds=False)
    assert set(load.outcomes) <= {"complete", "error event"}, (load.outcomes, load.refused)
    assert load.outcomes["error event"] <= 6
