"""The routes about the model that is served."""

from __future__ import annotations

import time

from fastapi import APIRouter

from shoal.api import Shoal
from shoal.constraints.fim import middle_tokens
from shoal.constraints.syntax.requests import LANGUAGES
from shoal.serve import response_models
from shoal.serve.handler import ApiHandler
from shoal.serve.model_identity import people_call
from shoal.serve.openapi import REFUSALS


def model_routes(handler: ApiHandler) -> APIRouter:
    """Returns the routes about the model under each of its names, and its abilities."""
    router = APIRouter()
    models_by_name = {name: _model(handler, name) for name in handler.settings.names}

    @router.get("/v1/models", responses={401: REFUSALS[401]})
    async def models() -> response_models.ModelList:
        """The model that is served, under each of its names."""
        return response_models.ModelList(object="list", data=list(models_by_name.values()))

    @router.get("/v1/models/{name:path}", responses={401: REFUSALS[401], 404: REFUSALS[404]})
    async def one_model(name: str) -> response_models.Model:
        """The same by its name."""
        handler.require_model(name)
        return models_by_name[name]

    return router


def _model(handler: ApiHandler, name: str) -> response_models.Model:
    shoal, settings, engine = handler.shoal, handler.settings, handler.worker.thread.engine
    about = {
        "context": engine.context,
        "rows": engine.scheduler.capacity,
        "max_n": settings.max_n,
        "max_tokens": settings.max_tokens,
        "speculation": shoal.drafter_name is not None,
        "seeds": settings.seeds,
        "chat": bool(settings.chat_template or shoal.tokenizer.chat_template),
        "fill_in_middle": middle_tokens(shoal.tokenizer) is not None,
        "syntax": LANGUAGES,
        "members": settings.members,
        "loaded": shoal.loaded,
        "names": _names(shoal),
        "lossy": engine.stats.lossy or None,
    }
    return response_models.Model(
        id=name,
        object="model",
        created=int(time.time()),
        owned_by="shoal",
        max_model_len=engine.context,
        shoal=about,
    )


def _names(shoal: Shoal) -> dict[str, str | None]:
    """Returns the names of the two models, see `people_call`."""
    drafter = shoal.drafter_name
    return {
        "target": people_call(shoal.target.name),
        "drafter": None if drafter is None else people_call(drafter),
    }
