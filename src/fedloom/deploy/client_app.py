"""What Flower starts at a node for each message: it passes the message to the node's process, and returns its answer.

Flower starts a new process for every message. The node's data and net are in a long-lived process, so this one imports
as little as possible.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedloom.deploy.waits import end_with_parent
from fedloom.deploy.wire import RECORD, SOCKET, ask

app = ClientApp()


@app.query()  # type: ignore[untyped-decorator]
def relay(message: Message, context: Context) -> Message:
    """The node's answer to one message."""
    end_with_parent()
    asked = message.content.pop(RECORD)[RECORD].data  # not kept here while the node works
    answer = ask(str(context.node_config[SOCKET]), asked)
    array = Array(dtype="uint8", shape=(len(answer),), stype=RECORD, data=answer)
    return Message(RecordDict({RECORD: ArrayRecord({RECORD: array})}), reply_to=message)
