"""Route of `/v1/cache/report`, which servers have with the option `report_documents`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from chunkattn.server.state import State

router = APIRouter(tags=["cache"], prefix="/v1/cache")


@router.get("/report")
async def report(
    state: State,
    since: Annotated[int, Query(ge=0, description="Version of an earlier report; only later findings are returned.")] = 0,
) -> dict[str, Any]:
    """Return which documents the KV cache holds, by routing key; with the option `report_documents`."""
    assert state.reports is not None
    told, health = await state.reports.report(since), state.health
    return {**told, "ready": health in ("ready", "unresponsive"), "responsive": health != "unresponsive"}
