"""`NamedRouter`: a Ray Serve request router that sends each call to the replica that the call names."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from chunkattn.integrations.ray.membership import membership


class NamedRouter(RequestRouter):
    """Router that obeys the keyword argument `to` of a call, a pair of the replica's name and the number of the call.

    The gateway chooses replicas, because the choice needs the body of a request. The router tells the gateway which replicas
    there are. A call without `to` goes to any replica.
    """

    def initialize_state(self, channel: str = "", **_: Any) -> None:
        """Connect the router to the transport of this process. Ray calls this method with `request_router_kwargs`.

        Args:
            channel: name that the transport uses, too.
        """
        self._members = membership(channel)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the present replicas."""
        super().update_replicas(replicas)
        self._members.update(r.replica_id.unique_id for r in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a dead replica."""
        super().on_replica_actor_died(replica_id)
        self._members.remove(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the named replica alone, or nothing if it is gone; the transport then ends the call."""
        if pending_request is None or "to" not in pending_request.kwargs:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        name, _ = pending_request.kwargs["to"]
        return [[r] for r in candidate_replicas if r.replica_id.unique_id == name]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that a replica has accepted a call, which it finishes even when it is being stopped."""
        if "to" in pending_request.kwargs:
            self._members.settle(*pending_request.kwargs["to"])
