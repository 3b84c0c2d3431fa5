"""The device's half: a ClientApp that hands Flower's messages to a device, and only its upload and figures back."""

import logging
from collections.abc import Callable, Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from glocal.core.errors import InputError
from glocal.core.trees import Params
from glocal.deploy.flower.protocol import Client, ClientResult, DataError, Instructions
from glocal.deploy.flower.records import read_instructions, refusal_to_record, result_to_record
from glocal.deploy.flower.secagg_client import is_masked, masked_reply
from glocal.wire import UploadError

OpenClient = Callable[[Mapping[str, object]], Client]
ClientTask = Callable[[Client, Params, Instructions], ClientResult]
_LOG = logging.getLogger("glocal")


def client_app(open_client: OpenClient) -> ClientApp:
    """A ClientApp over the device that the node's configuration names. Nothing is kept in Flower's own state."""
    app = ClientApp()

    def handler(task: ClientTask) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                shared, order = read_instructions(message.content)
                content = result_to_record(task(open_client(context.node_config), shared, order))
            except (InputError, UploadError) as error:
                content = refusal_to_record(_public_message(error, context))
            except Exception as error:
                raise RuntimeError(
                    _public_message(error, context)
                ) from None  # Flower sends the words of whatever is raised
            return Message(content, reply_to=message)

        return handle

    app.query()(
        handler(lambda client, shared, order: ClientResult(None, 0, client.handshake(order)))
    )
    plainly = handler(_train_unmasked)

    def train(message: Message, context: Context) -> Message:
        if not is_masked(message):
            return plainly(message, context)
        try:
            return _train_masked(message, context, open_client(context.node_config))
        except Exception as error:
            raise RuntimeError(_public_message(error, context)) from None

    app.train()(train)
    app.train("adapt")(handler(lambda client, shared, order: client.adapt(shared, order)))
    app.evaluate()(handler(lambda client, shared, order: client.evaluate(shared, order)))
    return app


def _public_message(error: Exception, context: Context) -> str:
    """What the server is told: of an error that may quote an example its kind alone; the rest stays in the device's own log.

    Files are named as seen from the device's folder: where that is, and under whose name, is not the server's business.
    """
    if isinstance(error, InputError | UploadError) and not isinstance(error, DataError):
        return str(error).replace(f"{context.node_config.get('folder')}/", "")
    _LOG.error("what the server is not told", exc_info=error)
    what = (
        "its model or data cannot be used"
        if isinstance(error, DataError)
        else f"it failed ({type(error).__name__})"
    )
    return f"{what}; the device's own log says why"


def _train_unmasked(client: Client, shared: Params, order: Instructions) -> ClientResult:
    if client.secure_aggregation:
        raise InputError(
            "this device sends its uploads masked only, and was asked for a plain one; set secure on the server too"
        )
    return client.train(shared, order)


def _train_masked(message: Message, context: Context, client: Client) -> Message:
    if not client.secure_aggregation:
        raise InputError(
            "this device was asked for a masked upload, and its deploy.toml does not say secure; copy the server's"
        )
    return masked_reply(message, context, client.shared_names, client.train)
