"""The endpoints of `/v1/files` and `/v1/batches`, as OpenAI's. Used on the event loop; threads use the disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from functools import partial
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message

from sidestream.server.batch_files import URLS
from sidestream.server.batch_store import MOST_FILE_BYTES, BatchStore, Json, new_id, page_of, public
from sidestream.server.body import BodyReader, JsonResponse, parse_object
from sidestream.server.errors import ApiError, ClientGone, bad_request
from sidestream.server.middleware import has_admin_key, request_record
from sidestream.server.operations import check_query

_UPLOAD_S = 600.0
_PIECE = 1 << 20
_WINDOW_S = 24 * 3600
_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")


def batch_routes(store: BatchStore, bodies: BodyReader, allowed_origins: Collection[str]) -> list[Route]:
    """The routes of files and batches in this directory."""

    async def upload(request: Request) -> Response:
        origin = request.headers.get("origin")  # browsers send forms of any page without a preflight
        if origin is not None and not {origin, "*"} & {*allowed_origins}:
            raise ApiError(403, "pages of this origin may not send files: see allowed_origins", kind="permission_error")
        await asyncio.to_thread(store.check_room, "files", int(request.headers.get("content-length", 0)))
        return JsonResponse(public(await _upload(request, store)))

    async def files(request: Request) -> Response:
        found = await asyncio.to_thread(store.all, "files", _owner(request))
        purpose = request.query_params.get("purpose")
        return JsonResponse(_page(request, [one for one in found if purpose in (None, one["purpose"])], "purpose"))

    async def file(request: Request) -> Response:
        name = request.path_params["id"]
        if request.method == "DELETE":
            await asyncio.to_thread(store.delete_file, name, _owner(request))
            return JsonResponse({"id": name, "object": "file", "deleted": True})
        return JsonResponse(public(await asyncio.to_thread(store.get, "files", name, _owner(request))))

    async def content(request: Request) -> Response:
        one = await asyncio.to_thread(store.get, "files", request.path_params["id"], _owner(request))
        return FileResponse(store.path("files", one["id"]), media_type="application/octet-stream")

    async def create(request: Request) -> Response:
        async with bodies.read(request) as body:
            batch = _batch_of(parse_object(body), _owner(request) or "")
        await asyncio.to_thread(store.get, "files", batch["input_file_id"], _owner(request))
        await asyncio.to_thread(store.check_room, "batches")
        await asyncio.to_thread(store.put, "batches", batch)
        return JsonResponse(public(batch))

    async def batches(request: Request) -> Response:
        return JsonResponse(_page(request, await asyncio.to_thread(store.all, "batches", _owner(request))))

    async def batch(request: Request) -> Response:
        name = request.path_params["id"]
        return JsonResponse(public(await asyncio.to_thread(store.get, "batches", name, _owner(request))))

    async def cancel(request: Request) -> Response:
        name = request.path_params["id"]
        return JsonResponse(public(await asyncio.to_thread(store.cancel, name, _owner(request))))

    return [
        Route("/v1/files", upload, methods=["POST"]),
        Route("/v1/files", files, methods=["GET"]),
        Route("/v1/files/{id}", file, methods=["GET", "DELETE"]),
        Route("/v1/files/{id}/content", content),
        Route("/v1/batches", create, methods=["POST"]),
        Route("/v1/batches", batches, methods=["GET"]),
        Route("/v1/batches/{id}", batch),
        Route("/v1/batches/{id}/cancel", cancel, methods=["POST"]),
    ]


def _owner(request: Request) -> str | None:
    """The name of the request's key; empty: it has none of the file of keys. None: the admin key, which sees all."""
    grant = request_record(request.scope).grant
    return None if has_admin_key(request.scope) else "" if grant is None else grant.key.name


def _page(request: Request, found: list[Json], *more: str) -> Json:
    check_query(request, ("limit", "order", "after", *more))
    text = request.query_params.get("limit", "20")
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not 1 <= int(text) <= 10_000:
        raise bad_request(f"limit is {text[:64]!r}: give a whole number in [1, 10000]", "limit")
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request(f"order is {order[:64]!r}: give asc or desc", "order")
    if order == "asc":
        found = found[::-1]
    return page_of(found, after=request.query_params.get("after"), limit=int(text))


async def _upload(request: Request, store: BatchStore) -> Json:
    """Read a form with a purpose and a file, and publish the file."""
    left = MOST_FILE_BYTES + _PIECE

    async def receive() -> Message:
        nonlocal left
        message = await request.receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise ApiError(413, f"the file has over {MOST_FILE_BYTES} bytes: split it", code="body_too_large")
        return message

    name = new_id("files")
    path = store.path("files", name)
    try:
        async with asyncio.timeout(_UPLOAD_S), Request(request.scope, receive).form(max_files=1, max_fields=8) as form:
            purpose, file = form.get("purpose"), form.get("file")
            if purpose != "batch":
                sent = f"{purpose[:64]!r}" if isinstance(purpose, str) else "missing"
                raise bad_request(f"purpose is {sent}: this server takes batch", "purpose")
            if not isinstance(file, UploadFile):
                raise bad_request("file is missing: send the file as a part of a multipart form", "file")
            with path.open("xb") as target:
                while piece := await file.read(_PIECE):
                    await asyncio.to_thread(target.write, piece)
            filename = (file.filename or name)[:255]
        return await asyncio.to_thread(partial(store.add_file, name, filename, "batch", _owner(request) or ""))
    except TimeoutError:
        path.unlink(missing_ok=True)
        raise ApiError(408, f"the file did not arrive within {_UPLOAD_S:g} s: split it") from None
    except ClientDisconnect:
        raise ClientGone from None
    except UnicodeError:  # of a form with a charset for which bytes are wrong
        raise bad_request("the form is not in the charset of its content-type: send UTF-8", None) from None
    except (HTTPException, ApiError):  # of a form that is none
        raise
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _batch_of(fields: dict[str, Any], owner: str) -> Json:
    """The object of a new batch. Raises ApiError for a wrong request."""
    for name in fields:
        if name not in _FIELDS:
            raise bad_request(f"no field {name[:64]}: known are {', '.join(_FIELDS)}", name[:64])
    source, endpoint, metadata = fields.get("input_file_id"), fields.get("endpoint"), fields.get("metadata")
    if not isinstance(source, str):
        raise bad_request("input_file_id is missing: upload a file first", "input_file_id")
    if endpoint not in URLS:
        raise bad_request(f"endpoint is {str(endpoint)[:64]!r}: give one of {', '.join(URLS)}", "endpoint")
    if fields.get("completion_window", "24h") != "24h":
        raise bad_request("completion_window must be 24h", "completion_window")
    if metadata is not None and not (
        isinstance(metadata, dict)
        and len(metadata) <= 16
        and all(isinstance(value, str) and len(name) + len(value) <= 576 for name, value in metadata.items())
    ):
        raise bad_request("metadata: give up to 16 short texts by name", "metadata")
    now = int(time.time())
    stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": new_id("batches"),
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": source,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        **dict.fromkeys(f"{stage}_at" for stage in stages),
        "expires_at": now + _WINDOW_S,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
        "owner": owner,
    }
