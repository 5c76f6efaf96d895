"""Serves made-up pages of clouds' price services on loopback."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from harness.clouds.live_prices import MarketUrls

DAY_S = 86_400.0
NOW = 1_800_000_000.0


@contextmanager
def serving(fake):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content, *more = fake.answer(self.command, self.path, self.headers, body)
            self.send_response(status)
            for name, value in more:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_DELETE = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def at(url):
    return MarketUrls(
        url + "/advisor.json", url + "/retail", url + "/graph?api-version=2022-10-01", url + "/skus"
    )
