"""Notice services that are played, and a source of each."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from harness.notices.aws import AwsSource
from harness.notices.azure import AzureSource
from harness.notices.gcp import MAINTENANCE_EVENT, PREEMPTED, GcpSource
from harness.notices.kubernetes import ACCOUNT, KubernetesSource

SOON_S = 1_900_000_000.0
VALUES = {"kill": PREEMPTED, "soft": MAINTENANCE_EVENT, "maintenance": MAINTENANCE_EVENT}


def source_of(cloud, endpoint, kind="kill", **options):
    match cloud:
        case "aws":
            return AwsSource(endpoint, **({"maintenance_every_s": 0, "pace_s": 0.02} | options))
        case "gcp":
            return GcpSource(endpoint, VALUES[kind], **({"hang_s": 0.05, "pace_s": 0.02} | options))
        case "azure":
            return AzureSource(endpoint, **({"first_timeout_s": 2.0, "pace_s": 0.02} | options))
    raise AssertionError(cloud)


POD = {
    "metadata": {"name": "trainer-0", "uid": "u-1"},
    "spec": {"nodeName": "gpu-1", "terminationGracePeriodSeconds": 30},
}
TAINT = {
    "key": "aws-node-termination-handler/spot-itn",
    "effect": "NoSchedule",
    "value": "x",
    "timeAdded": "2026-11-21T08:00:00Z",
}


class ApiServer:
    """As much of a Kubernetes API server as a pod that asks about itself sees."""

    def __init__(self, root):
        self.pod, self.node, self.refused = json.loads(json.dumps(POD)), {"spec": {}}, set()
        self.asked = []
        account = root / ACCOUNT
        account.mkdir(parents=True)
        (account / "token").write_text("sa-token\n")
        (account / "namespace").write_text("team-a")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.path)
                known = {
                    "/api/v1/namespaces/team-a/pods/trainer-0": outer.pod,
                    "/api/v1/nodes/gpu-1": outer.node,
                }
                ours = self.headers["Authorization"] == "Bearer sa-token"
                status = (
                    401
                    if not ours
                    else 403
                    if self.path in outer.refused
                    else 200
                    if self.path in known
                    else 404
                )
                body = json.dumps(known.get(self.path, {})).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.source = KubernetesSource(
            f"http://127.0.0.1:{self.server.server_address[1]}", "trainer-0", account
        )

    def close(self):
        self.server.shutdown()
        self.server.server_close()
