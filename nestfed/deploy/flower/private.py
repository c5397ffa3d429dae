"""The only use of Flower's private interfaces at the coordinator: pull replies one by one, and never more bytes than were asked for.

Flower's own `pull_messages` loads a reply of any size before its caller can look at it, and one reply that cannot be
decoded loses all others. With another version of Flower than `VERSION`, replies are still pulled one by one, but a large
one is loaded before it is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.metadata import version
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from nestfed.deploy.flower.private_site import BACKOFF, LONGEST_BACKOFF, VERSION, retry_if_locked
from nestfed.deploy.wire import RejectedError

LOG = logging.getLogger(__name__)
TYPES = ("Message", "RecordDict", "ConfigRecord")
"""The parts of a reply; others, such as arrays of repeated chunks, can be larger than their bytes."""
MOST_LISTED = 2**24
"""The most bytes of the list of new replies."""

Pulled = tuple[str, "Message | RejectedError"]
"""The id of the message that is answered, and the reply or the reason to drop it."""


def pull(grid: Grid, most: Mapping[str, int]) -> Iterator[Pulled]:
    """Yield the new replies to the messages with these ids, of at most so many bytes each."""
    if _bounded(grid):
        yield from _pull_bounded(grid, most)
        return
    for message in most:
        try:
            for reply in grid.pull_messages([message]):
                yield message, reply
        except Exception as error:  # a hostile reply can raise anything
            LOG.debug("a reply could not be read", exc_info=True)
            yield message, RejectedError(f"it sent a message that cannot be read ({type(error).__name__}).")


def _bounded(grid: Grid) -> bool:
    if not version("flwr").startswith(VERSION):
        return False
    from flwr.superlink.grid.http_grid import HttpGrid

    if isinstance(grid, HttpGrid):
        retry_if_locked()
        return True
    return False


def _pull_bounded(grid: Any, most: Mapping[str, int]) -> Iterator[Pulled]:
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

    request = PullAppMessagesRequest(message_ids=list(most))
    listed = _call(grid, "/v1/runtime/pull-messages", "PullMessages", request, PullAppMessagesResponse, MOST_LISTED)
    for proto, tree in zip(listed.messages_list, listed.message_object_trees, strict=True):
        asked, mine = proto.metadata.reply_to_message_id, proto.metadata.message_id
        if asked not in most:
            continue
        try:
            found: Message | RejectedError = _reply(grid, mine, tree, most[asked])
        except RejectedError as error:
            found = error
        except httpx.HTTPError:  # the SuperLink's, not the site's
            raise
        except Exception as error:  # a hostile reply can raise anything
            LOG.debug("a reply could not be read", exc_info=True)
            found = RejectedError(f"it sent a message that cannot be read ({type(error).__name__}).")
        run = grid.run.run_id
        grid._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=grid.node, run_id=run, message_object_id=mine)
        )
        yield asked, found


def _reply(grid: Any, mine: str, tree: Any, most: int) -> Message:
    """Pull the parts of a reply, as many bytes as allowed, and put them together."""
    from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_head_values_from_object_content as head_of,
    )
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree, no_object_id_recompute
    from flwr.supercore.inflatable.inflatable_utils import (
        ObjectUnavailableError,
        inflate_object_from_contents,
        pull_objects,
    )

    left = [most]

    def part(identity: str) -> bytes:
        request = PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=identity)
        found = _call(grid, "/v1/runtime/pull-object", "PullObject", request, PullObjectResponse, left[0])
        if not found.object_found:
            raise RejectedError("its reply is not complete.")
        if not found.object_available:
            raise ObjectUnavailableError(identity)
        left[0] -= len(found.object_content)
        return bytes(found.object_content)

    identities = [some.object_id for some in iterate_object_tree(tree)]
    if len(identities) > len(TYPES):
        raise RejectedError("it sent other records than requested.")
    contents = pull_objects(
        identities, part, max_concurrent_pulls=1, max_time=60.0, initial_backoff=BACKOFF, backoff_cap=LONGEST_BACKOFF
    )
    if any(head_of(content)[0] not in TYPES for content in contents.values()):
        raise RejectedError("it sent other records than requested.")
    with no_object_id_recompute():
        message = inflate_object_from_contents(mine, contents)
    if not isinstance(message, Message):
        raise RejectedError("it sent other records than requested.")
    message.metadata.__dict__["_message_id"] = mine
    return message


def _call(grid: Any, path: str, name: str, request: Any, kind: Any, most: int) -> Any:
    """Call the SuperLink and read at most so many bytes of its answer, and a little for the frame around them."""
    from flwr.supercore.protobuf.client import ProtobufRequestContext
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    client = grid._runtime_client
    headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE, "accept-encoding": "identity"}

    def send() -> Any:
        made = client._client.build_request(
            "POST", f"{client._base_url}{path}", content=request.SerializeToString(deterministic=True), headers=headers
        )
        context = ProtobufRequestContext(rpc_method=f"/flwr.proto.Runtime/{name}", message=request, request=made)
        response = client._send(context, stream=True)
        response.raise_for_status()
        made.extensions["timeout"]["read"] = client._client.timeout.read  # Flower waits for a stream without end
        return response

    with closing(client._retry_invoker.invoke(send) if client._retry_invoker is not None else send()) as response:
        found = bytearray()
        for chunk in response.iter_raw():
            found += chunk
            if len(found) > most + 4096:
                raise RejectedError(f"it sent more bytes than the {most:,} that are allowed.")
    answer = kind()
    answer.ParseFromString(bytes(found))
    return answer
