"""Route of `/v1/cache/report`, which servers have with the option `report_documents`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from chunkattn.server.state import State

router = APIRouter(tags=["cache"], prefix="/v1/cache")


@router.get("/report")
async def report(
    state: State,
    since: Annotated[int, Query(ge=0, description="Version of an earlier report; only what was sent later is returned.")] = 0,
) -> dict[str, Any]:
    """Return which documents the server was sent, by routing key; with the option `report_documents`."""
    health = state.health
    readiness = {"ready": health in ("ready", "unresponsive"), "responsive": health != "unresponsive"}
    return state.reports.report(since) | readiness
