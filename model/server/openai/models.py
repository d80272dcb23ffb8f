"""`/v1/models`: what this server has, for OpenAI's clients and in the form that Codex reads."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from ..http.errors import ApiError
from ..serving.served import Served


def model_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    def entry(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "pykernels",
            "type": "model",  # this and the next two are Anthropic's
            "display_name": name,
            "created_at": datetime.fromtimestamp(served.created, UTC).isoformat(),
            "max_model_len": served.facts.longest,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = served.settings.names
        return {
            "object": "list",
            "has_more": False,
            "data": [entry(name) for name in names],
            "models": [catalogue_entry(served, name, i) for i, name in enumerate(names)],
        }

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name not in served.settings.names:
            raise ApiError(404, f"There is no model {name}.", "model", "model_not_found")
        return entry(name)

    return router


_INSTRUCTIONS = "You are a coding agent that works in the user's terminal. Be precise and brief."


def catalogue_entry(served: Served, name: str, priority: int) -> dict[str, Any]:
    """One model in the catalogue of Codex, whose client wants every one of these fields."""
    efforts = []
    if "reasoning_effort" in served.prompts.template:
        efforts = [{"effort": e, "description": f"{e} effort"} for e in ("low", "medium", "high")]
    return {
        "slug": name,
        "display_name": name,
        "description": "served by pykernels",
        "default_reasoning_level": "medium" if efforts else None,
        "supported_reasoning_levels": efforts,
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": priority,
        "upgrade": None,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": served.facts.longest,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
