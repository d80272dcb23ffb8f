"""The server's application: its routes, on one model."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from pykernels import __version__

from .anthropic.messages import message_routes
from .backend.interface import ServedModel
from .cluster.routes import node_routes
from .guard import Guard
from .health import health_routes
from .http.errors import add_handlers
from .http.settings import ROUTER, ServerSettings
from .insight.routes import insight_routes
from .openai.chat import chat_routes
from .openai.completions import completion_routes
from .openai.models import model_routes
from .page.routes import page_routes
from .responses.routes import response_routes
from .serving.served import Served
from .tokens import token_routes


def create_app(
    model: ServedModel, settings: ServerSettings, read_roof: float | None = None
) -> FastAPI:
    """An ASGI application; ``app.state.served`` is its model.

    Args:
        read_roof: see ``Served``.
    """
    served = Served(model, settings, read_roof)
    # FastAPI keeps the functions of routes for the process's life, and is to keep no model by them.
    of_routes: Served = weakref.proxy(served)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        model.attach()
        yield
        served.close()
        await model.detach()

    app = FastAPI(
        title="pykernels",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # they fetch scripts from elsewhere
        redoc_url=None,
        strict_content_type=False,  # a body without a type is JSON: see Guard
    )
    app.state.served = served
    add_handlers(app)
    for routes in (
        chat_routes,
        completion_routes,
        model_routes,
        response_routes,
        message_routes,
        token_routes,
        health_routes,
        insight_routes,
    ):
        app.include_router(routes(of_routes))
    if settings.role not in (None, ROUTER):
        app.include_router(node_routes(of_routes))
    app.include_router(page_routes())
    app.add_middleware(Guard, served=served)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app
