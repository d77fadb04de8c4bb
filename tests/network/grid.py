"""Flower in one process: the real apps and real messages, taken apart and put together as between machines."""

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedselect.network.flower.apps import client_app, server_app

RUN = 7  # Flower's number for the run


def over_the_wire(message: Message) -> Message:
    """A message as the other side gets it."""
    contents = {number: part.deflate() for number, part in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


class LocalGrid(Grid):
    """Nodes by number, each with its node configuration; what Flower's HTTP grid does, without the network."""

    def __init__(self, nodes: dict[int, dict], run_config: dict) -> None:
        self.nodes, self.run_config = nodes, run_config
        self.replies: dict[str, Message] = {}
        self.bytes = 0
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = RUN, 1, 1

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        sent = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            node = message.metadata.dst_node_id
            arrived = over_the_wire(message)
            context = Context(RUN, node, self.nodes[node], RecordDict(), self.run_config)
            try:
                reply = client_app(arrived, context)
            except Exception as e:  # as Flower's own process does
                reply = Message(Error(code=2, reason=str(e)), reply_to=arrived)
            self.replies[message.metadata.message_id] = over_the_wire(reply)
            sent.append(message.metadata.message_id)
        return sent

    def pull_messages(self, message_ids):
        return [self.replies.pop(i) for i in message_ids if i in self.replies]

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


def run_server(grid: LocalGrid) -> None:
    server_app(grid, Context(RUN, 1, {}, RecordDict(), grid.run_config))
