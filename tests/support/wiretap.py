"""A proxy on loopback that ends TLS with the federation's own certificate, keeps all that passes, and can cut the line."""

import select
import socket
import ssl
import threading
from contextlib import suppress


class Wiretap:
    """Between devices and a server: what devices sent (`up`) and were sent (`down`), in the clear."""

    def __init__(self, target, certificates):
        self.target, self.up, self.down, self.cut = target, bytearray(), bytearray(), False
        self.lock, self.ends, self.threads = threading.Lock(), [], []
        self.inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.inside.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        self.outside = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                plain, _ = self.door.accept()
            except OSError:
                return
            if self.cut:
                plain.close()
            else:
                self.threads.append(
                    threading.Thread(target=self._serve, args=(plain,), daemon=True)
                )
                self.threads[-1].start()

    def _serve(self, plain):
        near = far = plain
        try:
            near = self.inside.wrap_socket(plain, server_side=True)
            far = self.outside.wrap_socket(
                socket.create_connection(("127.0.0.1", self.target)), server_hostname="127.0.0.1"
            )
        except OSError:
            near.close()
            return
        with self.lock:
            self.ends += [near, far]
        with suppress(OSError, ValueError):
            self._relay({near: (far, self.up), far: (near, self.down)})
        near.close()
        far.close()

    def _relay(self, ways):
        """Both ways in one thread: a TLS connection must not be read and written at the same time."""
        while not self.cut:
            ready = [end for end in ways if end.pending()] or select.select([*ways], [], [], 1.0)[0]
            for end in ready:
                sink, kept = ways[end]
                end.settimeout(0.05)  # what is there may be no data, but a word of TLS's own
                try:
                    data = end.recv(65536)
                except TimeoutError:
                    continue
                if not data:
                    return
                with self.lock:
                    kept += data
                sink.settimeout(60)
                sink.sendall(data)

    def cut_off(self):
        """From now on every connection is accepted and closed."""
        self.cut = True
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.door.close()
        self.cut_off()
        for thread in self.threads:
            thread.join(5)
