"""The device's half: a ClientApp that hands Flower's messages to a device, and only its upload and figures back."""

import logging
from collections.abc import Callable, Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from glocal.core.errors import InputError
from glocal.core.trees import Params
from glocal.deploy.flower.contract import Answer, DataError, Device, Order
from glocal.deploy.flower.records import answering, asked, refusing
from glocal.deploy.flower.secure_client import is_masked, masked_reply
from glocal.wire import UploadError

OpenDevice = Callable[[Mapping[str, object]], Device]
Task = Callable[[Device, Params, Order], Answer]
_LOG = logging.getLogger("glocal")


def client_app(open_device: OpenDevice) -> ClientApp:
    """A ClientApp over the device that the node's configuration names. Nothing is kept in Flower's own state."""
    app = ClientApp()

    def handler(task: Task) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                shared, order = asked(message.content)
                content = answering(task(open_device(context.node_config), shared, order))
            except (InputError, UploadError) as error:
                content = refusing(_sayable(error, context))
            except Exception as error:
                raise RuntimeError(_sayable(error, context)) from None  # Flower sends the words of whatever is raised
            return Message(content, reply_to=message)

        return handle

    app.query()(handler(lambda device, shared, order: Answer(None, 0, device.greet(order))))
    plainly = handler(_in_the_clear)

    def train(message: Message, context: Context) -> Message:
        if not is_masked(message):
            return plainly(message, context)
        try:
            return _masked(message, context, open_device(context.node_config))
        except Exception as error:
            raise RuntimeError(_sayable(error, context)) from None

    app.train()(train)
    app.train("settle")(handler(lambda device, shared, order: device.settle(shared, order)))
    app.evaluate()(handler(lambda device, shared, order: device.test(shared, order)))
    return app


def _sayable(error: Exception, context: Context) -> str:
    """What the server is told: of an error that may quote an example its kind alone; the rest stays in the device's own log.

    Files are named as seen from the device's folder: where that is, and under whose name, is not the server's business.
    """
    if isinstance(error, InputError | UploadError) and not isinstance(error, DataError):
        return str(error).replace(f"{context.node_config.get('folder')}/", "")
    _LOG.error("what the server is not told", exc_info=error)
    what = "its model or data cannot be used" if isinstance(error, DataError) else f"it failed ({type(error).__name__})"
    return f"{what}; the device's own log says why"


def _in_the_clear(device: Device, shared: Params, order: Order) -> Answer:
    if device.secure:
        raise InputError("this device sends its uploads masked only, and was asked for a plain one; set secure on the server too")
    return device.train(shared, order)


def _masked(message: Message, context: Context, device: Device) -> Message:
    if not device.secure:
        raise InputError("this device was asked for a masked upload, and its deploy.toml does not say secure; copy the server's")
    return masked_reply(message, context, device.shared_names, device.train)
