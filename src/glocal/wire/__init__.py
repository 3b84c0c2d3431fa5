"""What a client and the server send each other: only shared trees, counted to the byte."""

from glocal.wire.gate import admit, pack, unpack
from glocal.wire.ledger import Ledger, Traffic
from glocal.wire.upload import Upload, UploadError

__all__ = ["Ledger", "Traffic", "Upload", "UploadError", "admit", "pack", "unpack"]
