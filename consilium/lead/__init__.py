"""A lead's federation from Python: what the commands `coordinator run`, `watch`, `silos`, `survey` and `export` do.

lead        `consilium.connect`, and the lead who is connected: hospitals, runs, surveys, evaluations
connection  the connection that they share
run         a run: following it, also in a notebook, its numbers, its model, its card
listing     lists that a terminal and a notebook show as tables
"""

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC, as the commands do
silence_grpc_logs()
