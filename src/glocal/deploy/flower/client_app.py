"""The client's side of Flower: a ClientApp that passes messages to a client and returns results."""

import logging
from collections.abc import Callable, Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from glocal.core.errors import InputError
from glocal.deploy.flower.protocol import Client, ClientResult, DataError, Instructions
from glocal.deploy.flower.records import read_request, refusal_to_record, result_to_record
from glocal.deploy.flower.secagg_client import is_masked, masked_reply
from glocal.wire import WireError

OpenClient = Callable[[Mapping[str, object]], Client]
ClientTask = Callable[[Client, bytes, Instructions], ClientResult]
MessageHandler = Callable[[Message, Context], Message]
_LOG = logging.getLogger("glocal")


def client_app(open_client: OpenClient) -> ClientApp:
    """A ClientApp for the client that the node's configuration names; it uses no Flower state."""
    app = ClientApp()
    train_unmasked = _message_handler(_train_unmasked, open_client)

    def train(message: Message, context: Context) -> Message:
        if not is_masked(message):
            return train_unmasked(message, context)
        try:
            return _train_masked(message, context, open_client(context.node_config))
        except Exception as error:
            raise RuntimeError(_public_message(error, context)) from None

    app.query()(_message_handler(_handshake, open_client))
    app.train()(train)
    app.train("adapt")(_message_handler(_adapt, open_client))
    app.evaluate()(_message_handler(_evaluate, open_client))
    return app


def _message_handler(task: ClientTask, open_client: OpenClient) -> MessageHandler:
    """A Flower handler that performs one task of the client that the node names."""

    def handle(message: Message, context: Context) -> Message:
        try:
            received, instructions = read_request(message.content)
            result = task(open_client(context.node_config), received, instructions)
            content = result_to_record(result)
        except (InputError, WireError) as error:
            content = refusal_to_record(_public_message(error, context))
        except Exception as error:
            # Flower sends the text of any exception to the server
            raise RuntimeError(_public_message(error, context)) from None
        return Message(content, reply_to=message)

    return handle


def _public_message(error: Exception, context: Context) -> str:
    """What the server may read of an error; the full error stays in the client's own log.

    An error that may quote an example is reduced to its kind. Files are named relative to the
    client's folder, so that neither its path nor a user name leaves the client.
    """
    if isinstance(error, InputError | WireError) and not isinstance(error, DataError):
        return str(error).replace(f"{context.node_config.get('folder')}/", "")
    _LOG.error("the full error; the server gets only its type", exc_info=error)
    if isinstance(error, DataError):
        summary = "its model or data cannot be used"
    else:
        summary = f"it failed ({type(error).__name__})"
    return f"{summary}; see the client's own log"


def _handshake(client: Client, _: bytes, instructions: Instructions) -> ClientResult:
    return ClientResult(None, 0, client.handshake(instructions))


def _adapt(client: Client, message: bytes, instructions: Instructions) -> ClientResult:
    return client.adapt(message, instructions)


def _evaluate(client: Client, message: bytes, instructions: Instructions) -> ClientResult:
    return client.evaluate(message, instructions)


def _train_unmasked(client: Client, message: bytes, instructions: Instructions) -> ClientResult:
    if client.secure_aggregation:
        raise InputError(
            "this client sends masked uploads only, and the server requested a plain one; "
            "set secure_aggregation on the server too"
        )
    return client.train(message, instructions)


def _train_masked(message: Message, context: Context, client: Client) -> Message:
    if not client.secure_aggregation:
        raise InputError(
            "the server requested a masked upload, and this client's deploy.toml does not set "
            "secure_aggregation; copy the server's"
        )
    return masked_reply(message, context, client.train)
