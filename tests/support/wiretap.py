"""A proxy on loopback that ends TLS, records all bytes, and can cut the connections."""

import select
import socket
import ssl
import threading
from contextlib import suppress


class Wiretap:
    """Between clients and server: the bytes from (`up`) and to the clients (`down`), decrypted."""

    def __init__(self, target, certificates):
        self.target, self.up, self.down, self.cut = target, bytearray(), bytearray(), False
        self.lock, self.ends, self.threads = threading.Lock(), [], []
        self.inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.inside.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        self.outside = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                plain, _ = self.socket.accept()
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

    def _relay(self, directions):
        """Both directions in one thread: a TLS connection must not be read and written at once."""
        while not self.cut:
            ready = [end for end in directions if end.pending()]
            for end in ready or select.select([*directions], [], [], 1.0)[0]:
                sink, record = directions[end]
                end.settimeout(0.05)  # it may be a message of TLS itself, without data
                try:
                    data = end.recv(65536)
                except TimeoutError:
                    continue
                if not data:
                    return
                with self.lock:
                    record += data
                sink.settimeout(60)
                sink.sendall(data)

    def cut_off(self):
        """From now on every connection is accepted and closed."""
        self.cut = True
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.socket.close()
        self.cut_off()
        for thread in self.threads:
            thread.join(5)
