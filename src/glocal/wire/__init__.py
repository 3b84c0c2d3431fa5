"""What crosses between a device and the server: only shared trees, counted to the byte."""

from glocal.wire.ledger import Ledger, Traffic
from glocal.wire.schema import admit, pack, unpack
from glocal.wire.upload import Upload, UploadError

__all__ = ["Ledger", "Traffic", "Upload", "UploadError", "admit", "pack", "unpack"]
