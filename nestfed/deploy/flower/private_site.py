"""The only use of Flower's private interfaces at a site: a SuperNode that sleeps less, and the tasks it has for a worker.

(The coordinator's are in `private.py`.)

A SuperNode with `--isolation process` starts no processes. It offers every message as a task, which a worker takes, reads,
answers and finishes through an interface on the site's own machine. `unusable` says whether these interfaces are those of
the installed Flower; if not, nothing here may be used, and Flower starts a process for every message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestfed.core import NestfedError
from nestfed.deploy.pace import Pace

if TYPE_CHECKING:
    from flwr.app import Context, Message

VERSION = "1.41."
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
BACKOFF = 0.02
"""Seconds until the first new attempt at a part of a message that has not arrived yet; Flower's own is 1 s."""
LONGEST_BACKOFF = 1.0
UNSTORED = 50
"""Attempts at a message whose task was created just before it."""

Answer = Callable[["Message", "Context", bytes], "Message"]
"""Answers a message, given the bundle of code and files that the coordinator delivered."""


def unusable() -> str:
    """Return why these interfaces cannot be used, or nothing."""
    found = version("flwr")
    if not found.startswith(VERSION):
        return f"Flower is version {found}, and its private interfaces are only known for {VERSION}x"
    try:
        from flwr.supercore.retry.http_retry import _RETRYABLE_STATUS_CODES  # noqa: F401
        from flwr.supernode import start_client_internal as loop
        from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode  # noqa: F401
        from flwr.supernode.runtime.run_clientapp import push_message, push_task_output  # noqa: F401
    except ImportError as error:
        return f"the installed Flower {found} is not the known one: {error.msg}"
    if missing := [name for name in ("time", "pull_objects") if not hasattr(loop, name)]:
        return f"the installed Flower {found} is not the known one: its main loop does not use {missing[0]!r}"
    return ""


# ---------------------------------------------------------------------------------------------------------
# The SuperNode


@dataclass(frozen=True)
class Runtime:
    """Where a SuperNode offers its tasks."""

    address: str
    root: str = ""
    """The certificate of the authority that signed the interface's own; empty = no TLS, as it is on this machine."""
    secret_file: str = ""
    """Who knows its content may take tasks; empty = not set."""


def runtime_of(options: Sequence[str]) -> Runtime | None:
    """Return where a SuperNode with these options offers its tasks, or None if they choose an isolation themselves."""
    from flwr.supercore.address import resolve_bind_address
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    parser = _parse_args_run_supernode()
    parser.set_defaults(isolation="")
    found = parser.parse_args(list(options))
    if found.isolation:
        return None
    host = f"[{found.host}]" if ":" in found.host else found.host
    root = str(Path(found.ssl_ca_certfile).expanduser()) if found.ssl_ca_certfile else ""
    return Runtime(resolve_bind_address(f"{host}:{found.port}"), root, found.superexec_auth_secret_file or "")


class _Clock:
    """The module `time` for the SuperNode's loop, with shorter waits.

    The loop sleeps 3 s if the SuperLink has no message, and 0.5 s while the worker has one.
    """

    def __init__(self) -> None:
        self.message, self.reply = Pace(), Pace(BACKOFF, 0.5)

    def sleep(self, seconds: float) -> None:
        """Wait for a message or a reply."""
        waits, other = (self.reply, self.message) if seconds < 1 else (self.message, self.reply)
        other.restart()
        waits.sleep()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def quicken() -> None:
    """Make the SuperNode of this process poll at a `Pace`."""
    from flwr.supernode import start_client_internal as loop

    retry_if_locked()
    names: dict[str, Any] = vars(loop)
    pull = partial(names["pull_objects"], initial_backoff=BACKOFF, backoff_cap=LONGEST_BACKOFF)
    names.update(time=_Clock(), pull_objects=pull)


def retry_if_locked() -> None:
    """Let this process repeat calls of the SuperLink that fail with error 500, as Flower does with 502 to 504.

    A SuperLink answers so while its database is locked, which a large message can cause. A SuperNode would end.
    """
    from flwr.supercore.retry import http_retry

    names: dict[str, Any] = vars(http_retry)
    names["_RETRYABLE_STATUS_CODES"] = frozenset({*names["_RETRYABLE_STATUS_CODES"], 500})


# ---------------------------------------------------------------------------------------------------------
# The worker


class Tasks:
    """The tasks of a SuperNode, taken one after another. `secret`: the content of the runtime's secret file."""

    def __init__(self, address: str, root: bytes | None, secret: bytes) -> None:
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        self.address, self.root = address, root
        self.queue = self._client(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE}))

    def _client(self, authority: Any) -> Any:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        return RuntimeHttpClient.from_server_address(
            self.address, self.root is None, self.root, [RuntimeVersionHttpInterceptor("flwr-clientapp"), authority]
        )

    def work(self, answer: Answer) -> bool:
        """Take a task and answer its message; return whether there was one."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.heartbeat import HeartbeatSender
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor

        task = self.queue.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if not task.token:
            return False
        client = self._client(RuntimeTokenHttpInterceptor(task.token))
        beats = HeartbeatSender(partial(_beat, client))
        beats.start()
        try:
            _answered(client, answer)
        finally:
            if beats.is_running:
                beats.stop()
            client.close()
        return True


def _beat(client: Any) -> bool:
    """Tell the SuperNode that somebody works on the task; without it, the task fails after a minute."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    try:
        return bool(client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
    except httpx.HTTPError:
        return False


def _answered(client: Any, answer: Answer) -> None:
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode, SubStatus
    from flwr.common.serde import context_from_proto
    from flwr.proto.runtime_pb2 import PullTaskInputRequest
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

    found = client.PullTaskInput(PullTaskInputRequest())
    context = context_from_proto(found.context)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = found.task_id, found.run.run_id, context.node_id
    message = _message(client, context)
    failure: Exception | None = None
    try:
        reply = answer(message, context, found.fab.content)
    except Exception as error:  # without a reply, the SuperNode would wait until the task fails
        failure = error
        reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, type(error).__name__), reply_to=message)
    push_message(client, reply, context)
    push_task_output(client, None, SubStatus.FAILED if failure else SubStatus.COMPLETED, "")
    if failure is not None:
        raise failure


def _message(client: Any, context: Context) -> Message:
    """Pull the message of a task; its parts may still be on their way."""
    from flwr.app import Message
    from flwr.proto.node_pb2 import Node
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest
    from flwr.supercore.inflatable.inflatable_protobuf_utils import (
        make_confirm_message_received_fn_protobuf,
        make_pull_object_fn_protobuf,
    )
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

    node = Node(node_id=context.node_id)
    for _ in range(UNSTORED):
        found = client.PullMessages(PullAppMessagesRequest())
        if found.messages_list:
            break
        time.sleep(BACKOFF)  # the SuperNode creates a task just before it stores the message
    else:
        raise NestfedError("The SuperNode has a task without a message.")
    tree = found.message_object_trees[0]
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(client.PullObject, node, context.run_id),
        make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, context.run_id),
        return_type=Message,
        max_tries_per_object=None,
        initial_backoff=BACKOFF,
        backoff_cap=LONGEST_BACKOFF,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id  # the message does not contain its own id
    return message
